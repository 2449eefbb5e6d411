"""`laserbatch status`: what a workspace is doing, or did last. It reads files and neither takes nor waits for a lock.

With `--watch` it refreshes until the night that runs there has ended.
"""

import datetime
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import typer
from rich.live import Live

from laserbatch.jobs.console import ExitCode, stdout, summary, summary_table, visible
from laserbatch.jobs.events import last_attempt
from laserbatch.jobs.failures import exit_code_of
from laserbatch.jobs.formatting import count, counted, decimal, format_counts, rate, seconds, significant
from laserbatch.jobs.settings import CONFIG, JSON, WORKSPACE, open_workspace
from laserbatch.jobs.writing import cost_so_far, current_stage, writing_state
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.delivery import deliveries
from laserbatch.pipeline.storage.lock import probe_lock
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.workspace import Workspace

REFRESH_S, LINE_EVERY_S = 2.0, 60.0
LEFT_OUT = ("workspace", "lock", "begun", "events", "published", "delivered")  # rows that single lines leave out
GOING = ("unknown", "running")  # states in which a night may make progress
State = dict[str, Any]  # state of a workspace, described in `workspace_state`
_HOLDER = re.compile(r"pid (\d+) on (.+)")
_STATES = {
    "died": "the last attempt died; the same command continues after what is finished",
    "unknown": "unknown: a process on another host took the lock, and this host cannot see whether it is alive. See "
    "the time of the last event",
}


def status(
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    watch: bool = typer.Option(
        False,
        "--watch",
        help="Refresh until the night ends, then exit with its exit code. A log gets one line a minute.",
    ),
    as_json: bool = JSON,
) -> None:
    """Show which run is under way, how far it is, how long it will take, and what is published.

    Example: `laserbatch status --config laserbatch.yaml --watch`
    """
    opened = open_workspace(config, workspace)

    def look() -> State:
        return workspace_state(opened, datetime.datetime.now(datetime.UTC))

    if watch:
        raise typer.Exit(follow(look, as_json))
    state = look()
    if not as_json:
        within = state["within"]
        state = summary_rows(state) | {name: summary_rows(other) for name, other in within.items()}
    summary(state, as_json)


def workspace_state(workspace: Workspace, now: datetime.datetime) -> State:
    """The state of a workspace at the time `now`; times are ISO 8601 (UTC), ages in seconds.

    `state` is "running", "idle", "died" (the last attempt ended without recording its end) or "unknown" (a process of
    another host took the lock, and this host cannot see whether it still holds it). `lock` is None if nobody holds the
    lock, otherwise it has the `holder`, `since` when, and whether that `is_certain`. `run` is the run that is under way
    or was last, None before the first. If it is running, or may be, its `progress` has the current count, last updated
    at `updated_at`, and `writing` the figures of the shards of its stage. Its `cost` is the money that a server's
    answers cost so far, None without a server or prices. Its `exit_code` is that of the last attempt, None if the
    attempt still runs or died. `delivered`, if any, lists each place with the run sent there last, by any command.
    `within` has the same state of each extension's workspace, by its folder.
    """
    return _state(workspace, now) | {
        "within": {extension.root.name: _state(extension, now) for extension in workspace.within()}
    }


def _state(workspace: Workspace, now: datetime.datetime) -> State:
    lock = _lock(workspace)
    run = max(workspace.runs(), key=_worked_on_ns, default=None)
    events = [] if run is None or run.is_finished else last_attempt(run.events_path)
    without_lock = "died" if events and events[-1]["event"] != "failure" else "idle"
    with_lock = "running" if lock is not None and lock["is_certain"] else "unknown"
    return {
        "workspace": str(workspace.root),
        "state": without_lock if lock is None else with_lock,
        "lock": lock,
        "run": None if run is None else _run_state(run, now, is_running=lock is not None),
        "published": _published(workspace, now),
    } | ({"delivered": delivered} if (delivered := _delivered(workspace)) else {})


def _lock(workspace: Workspace) -> dict[str, Any] | None:
    """The holder of the lock, since when it is held, and whether that is certain; None if the lock is free.

    The kernel tells whether the lock is held, the lock file tells by whom. If the file system has no locks, a holder on
    this host is looked up by its process id. A lock that is free here may still be held on the host that the file
    names: some file systems (FUSE, SMB, NFS with local locks) keep locks on each host separately.
    """
    path = workspace.root / "LOCK"
    try:
        content, since = path.read_text(errors="replace").strip("\0 \n"), path.stat().st_mtime
    except OSError:
        return None
    match, probed = _HOLDER.fullmatch(content), probe_lock(path)
    if probed == "held":
        holder = content if match is not None else "a process that did not record its name"
        return {"holder": holder, "since": _iso(since), "is_certain": True}
    if match is None:
        return None
    is_of_here = match[2] == socket.gethostname()
    if is_of_here and probed == "free":
        return None
    try:
        if is_of_here:
            os.kill(int(match[1]), 0)  # a signal that does nothing
    except ProcessLookupError:
        return None
    except PermissionError:  # a process of another user lives
        pass
    return {"holder": content, "since": _iso(since), "is_certain": is_of_here}


def _worked_on_ns(run: RunFolder) -> int:
    """When a night last worked on a run; `forget` and copying change the times of files of finished runs."""
    paths = [path for path in (run.events_path, run.manifest_path) if path.exists()]
    with suppress(OSError):
        return run.finished_ns if run.is_finished else max(path.stat().st_mtime_ns for path in paths or [run.root])
    return 0


def _run_state(run: RunFolder, now: datetime.datetime, is_running: bool) -> dict[str, Any]:
    events = last_attempt(run.events_path)
    last: dict[str, dict[str, Any]] = {event["event"]: event for event in events}
    begun, failed = last.get("run_begin"), last.get("failure")
    state: dict[str, Any] = {
        "run_id": run.run_id,
        "date": run.date,
        "is_finished": run.is_finished,
        "is_held": run.is_held,
        "since": begun and begun["time"],
    }
    state["last_event"] = events[-1]["time"] if events else None
    state["failure"] = failed.get("error") if failed and not run.is_finished else None
    stage = current_stage(events)
    state["exit_code"] = failed.get("exit_code") if failed else 0 if run.is_finished else None
    shown = None if run.is_finished else stage
    state |= {"stage": shown and shown["stage"], "stage_since": shown and shown["time"]}
    state["progress"] = state["writing"] = None
    counts = [event for event in events if event["event"] == "progress"]
    is_going = is_running or not (run.is_finished or failed)  # running, or died
    if is_going and counts:
        state["progress"] = _progress(counts, now)
    if is_going and stage:
        state["writing"] = writing_state(events[events.index(stage) :], now)
    if not is_running:  # no remaining time for a night that does not run
        for figures in filter(None, (state["progress"], state["writing"])):
            figures |= {"left_s": None} | ({"rate": None} if "rate" in figures else {"left_by": None})
    state["cost"] = cost_so_far(events, run.root)
    state["num_workers_lost"] = sum(event["event"] == "worker_lost" for event in events)
    state["seconds"] = {event["stage"]: event["seconds"] for event in events if event["event"] == "stage_end"}
    state["report"] = str(run.report_path) if run.report_path.exists() else None
    state["events"] = str(run.events_path)
    return state


def _progress(counts: list[dict[str, Any]], now: datetime.datetime) -> dict[str, Any]:
    """The progress of the count that began last, and the time left at its pace so far."""
    last = counts[-1]
    begun = next(event for event in counts if event["of"] == last["of"])
    elapsed_s = (now - datetime.datetime.fromisoformat(begun["time"])).total_seconds()
    done, whole = last["done"], last["total"]
    pace = done / elapsed_s if done and elapsed_s > 0 else None
    left_s = (whole - done) / pace if pace and whole is not None else None
    return {"of": last["of"], "done": done, "total": whole, "rate": pace, "left_s": left_s, "updated_at": last["time"]}


def _published(workspace: Workspace, now: datetime.datetime) -> dict[str, Any] | None:
    try:
        run = workspace.publication.run()
    except WorkspaceError as error:
        return {"error": str(error)}
    if run is None:
        return None
    since = (workspace.root / "published.json").stat().st_mtime
    return {"run_id": run.run_id, "date": run.date, "at": _iso(since), "age_s": now.timestamp() - since}


def _delivered(workspace: Workspace) -> list[dict[str, Any]]:
    try:
        return [{"to": uri} | last for uri, last in deliveries(workspace.root).items()]
    except WorkspaceError as error:
        return [{"error": str(error)}]


def _iso(seconds_since_1970: float) -> str:
    return datetime.datetime.fromtimestamp(seconds_since_1970, datetime.UTC).isoformat(timespec="seconds")


def summary_rows(state: State) -> dict[str, str]:
    lock, run, published = state["lock"], state["run"], state["published"]
    rows = {"workspace": state["workspace"], "state": _STATES.get(state["state"], state["state"])}
    rows["lock"] = lock and f"{lock['holder']}, since {lock['since']}"
    if run is None:
        rows["run"] = "none yet"
    else:
        going, is_finished = run["progress"], run["is_finished"]
        how = "finished" if is_finished else "held by its gates" if run["is_held"] else "not finished"
        rows["run"] = f"{run['run_id']} ({how})"
        rows |= {"begun": run["since"], "stage": run["stage"]}
        if going:
            whole = "" if going["total"] is None else f" of {count(going['total'])}"
            rows["done"] = f"{going['of']}: {count(going['done'])}{whole}"
            left = "" if going["left_s"] is None else f", {seconds(going['left_s'])} left"
            rows["rate"] = f"{rate(going['rate'])}/s{left}" if going["rate"] and not is_finished else ""
        if writing := run["writing"]:
            done = f"{count(writing['num_rows_done'])} of {counted(writing['num_rows'], 'row')}"
            rows["done"] = f"{done}, {count(writing['num_shards_done'])} of {counted(writing['num_shards'], 'shard')}"
            rows |= {"rate": _speed(writing), "left": lock and _time_left(writing)}
            rows["quarantined"] = format_counts(writing["quarantine_reasons"])
        rows["cost"] = "" if run["cost"] is None else significant(run["cost"])
        rows["workers lost"] = run["num_workers_lost"] and count(run["num_workers_lost"])
        rows["exit code"] = run["exit_code"] and str(run["exit_code"])
        rows |= {"failure": run["failure"], "last event": run["last_event"], "events": run["events"]}
    rows["published"] = "nothing yet"
    if published is not None:
        rows["published"] = published.get("error") or f"{published['run_id']}, {seconds(published['age_s'])} ago"
    places = []
    for place in state.get("delivered", ()):
        since = f", sent at {place['at']}" if place.get("at") else ""
        places.append(place.get("error") or f"{place['to']}: {place['run_id'] or 'no whole run yet'}{since}")
    rows["delivered"] = "; ".join(places)
    return {name: row for name, row in rows.items() if row}


def _speed(writing: dict[str, Any]) -> str:
    """Tokens per second and accepted tokens per step; empty before the first shard is finished."""
    if writing["tokens_per_s"] is None:
        return ""
    accepted = writing["acceptance_length"]
    steps = "" if accepted is None else f", {decimal(accepted)} accepted tokens per step"
    return f"{rate(writing['tokens_per_s'])} tokens/s{steps}"


def _time_left(writing: dict[str, Any]) -> str:
    """The estimated time left, and what it was estimated from."""
    if writing["left_s"] is None:
        return "unknown until a shard is finished"
    left_s = writing["left_s"]
    left = "under a minute" if left_s < 60 else f"about {count(left_s / 60)} min" if left_s < 3600 else seconds(left_s)
    source = "expected tokens" if writing["left_by"] == "tokens" else "rows, because no earlier text shows their length"
    return f"{left}, estimated from {source}"


def follow(look: Callable[[], State], as_json: bool) -> int:
    """Show the state of a workspace until no night runs there; return the exit code of the night.

    A terminal shows the rows of the state, other output gets a line a minute; `as_json` prints only the last state.
    """
    state: State = {}
    try:
        with Live(console=stdout, auto_refresh=False) if stdout.is_terminal and not as_json else nullcontext() as live:
            printed_s = float("-inf")
            for state in _states(look):
                if live is not None:
                    live.update(summary_table(summary_rows(state)), refresh=True)
                elif not as_json and state["state"] in GOING and time.monotonic() - printed_s >= LINE_EVERY_S:
                    printed_s = time.monotonic()
                    _print_line(state)
    except KeyboardInterrupt as error:
        return exit_code_of(error)
    summary(state, as_json) if as_json else _print_line(state)
    if state["state"] == "died":
        return ExitCode.UNEXPECTED
    return 0 if state["run"] is None else state["run"]["exit_code"] or 0


def _states(look: Callable[[], State]) -> Iterator[State]:
    """Yield states of the workspace in which a night runs, the given one or an extension's, until the night ends."""
    root = None
    while True:
        state = look()
        parts = [state, *state["within"].values()]
        going = [part for part in parts if part["state"] in GOING]
        going.sort(key=lambda part: GOING.index(part["state"]))
        last = [part for part in parts if part["workspace"] == root] or [state]
        followed = (going or last)[-1]
        root = followed["workspace"]
        yield followed
        if not going:
            return
        time.sleep(REFRESH_S)


def _print_line(state: State) -> None:
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    line = "; ".join(f"{name}: {row}" for name, row in summary_rows(state).items() if name not in LEFT_OUT)
    stdout.print(visible(f"{when} {line}"), markup=False, soft_wrap=True)
