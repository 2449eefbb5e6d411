"""`laserbatch status --watch`: look at a workspace again and again, until the night that runs there has ended."""

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from rich.live import Live

from laserbatch.jobs.console import ExitCode, stdout, summary, summary_table, visible
from laserbatch.jobs.failures import exit_code_of
from laserbatch.jobs.formatting import count, decimal, format_counts, rate, seconds

REFRESH_S, LINE_EVERY_S = 2.0, 60.0
GOING = ("unknown", "running")  # states in which a night may make progress
State = dict[str, Any]  # of a workspace, as `workspace_state` returns it


def follow(look: Callable[[], State], rows_of: Callable[[State], dict[str, str]], as_json: bool) -> int:
    """Show the state of a workspace until no night runs there; return the exit code of the night.

    A terminal shows the rows of the state, other output gets lines, and with `as_json` the last state alone.
    """
    state: State = {}
    try:
        with Live(console=stdout, auto_refresh=False) if stdout.is_terminal and not as_json else nullcontext() as live:
            printed_s = float("-inf")
            for state in _states(look):
                if live is not None:
                    live.update(summary_table(rows_of(state)), refresh=True)
                elif not as_json and state["state"] in GOING and time.monotonic() - printed_s >= LINE_EVERY_S:
                    printed_s = time.monotonic()
                    _print_line(state)
    except KeyboardInterrupt as error:
        return exit_code_of(error)
    if as_json:
        summary(state, as_json)
    else:
        _print_line(state)
    if state["state"] == "died":
        return ExitCode.UNEXPECTED
    return 0 if state["run"] is None else state["run"]["exit_code"] or 0


def _states(look: Callable[[], State]) -> Iterator[State]:
    """States of the workspace in which a night runs, the given one or one within it; the last is after its end."""
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
    stdout.print(visible(f"{when} {_line(state)}"), markup=False, soft_wrap=True)


def _line(state: State) -> str:
    run = state["run"]
    if run is None:
        return f"{state['state']}, no run yet"
    if state["state"] not in GOING:
        return f"run {run['run_id']}: {_end(state)}"
    stage, going, writing = run["stage"], run["progress"], run["writing"]
    parts = [f"run {run['run_id']}", stage or ("finished" if run["is_finished"] else "no stage yet")]
    if writing:
        reasons = format_counts(writing["quarantine_reasons"])
        quarantined = f"{count(writing['num_quarantined'])} in quarantine{reasons and ': ' + reasons}"
        parts += [done_text(writing), speed_text(writing), quarantined, f"time left: {left_text(writing)}"]
    elif stage and going and going["updated_at"] >= run["stage_since"]:
        parts.append(progress_text(going))
    parts.append(run["cost"] is not None and f"cost so far: {cost_text(run)}")
    if state["state"] == "unknown":
        parts.append(f"not known whether it lives, last event {run['last_event']}")
    return "; ".join(filter(None, parts))


def _end(state: State) -> str:
    run = state["run"]
    if state["state"] == "died":
        return "the last attempt died"
    if run["exit_code"]:
        return f"ended with exit code {run['exit_code']}: {run['failure'] or 'see ' + run['events']}"
    return "ended well" if run["is_finished"] else "nothing runs"


def progress_text(going: dict[str, Any]) -> str:
    """How far a count is: `encode users: 30 of 400`."""
    return f"{going['of']}: {count(going['done'])}" + ("" if going["total"] is None else f" of {count(going['total'])}")


def done_text(writing: dict[str, Any]) -> str:
    """How far the shards of a stage are written."""
    rows = f"{count(writing['num_rows_done'])} of {count(writing['num_rows'])} rows"
    return f"{rows}, {count(writing['num_shards_done'])} of {count(writing['num_shards'])} shards"


def speed_text(writing: dict[str, Any]) -> str:
    """Tokens a second and accepted tokens a step; empty before the first shard is finished."""
    if writing["tokens_per_s"] is None:
        return ""
    accepted = writing["acceptance_length"]
    steps = "" if accepted is None else f", {decimal(accepted)} accepted tokens a step"
    return f"{rate(writing['tokens_per_s'])} tokens/s{steps}"


def cost_text(run: dict[str, Any]) -> str:
    """The money that a server's answers cost so far; empty without a price."""
    return "" if run["cost"] is None else f"{run['cost']:.4g}"


def left_text(writing: dict[str, Any]) -> str:
    """The guess of the time left, and what it was guessed from."""
    if writing["left_s"] is None:
        return "not known before a shard is finished"
    left_s = writing["left_s"]
    left = "under a minute" if left_s < 60 else f"about {count(left_s / 60)} min" if left_s < 3600 else seconds(left_s)
    source = "expected tokens" if writing["left_by"] == "tokens" else "rows, since no earlier text tells their length"
    return f"{left}, guessed from {source}"
