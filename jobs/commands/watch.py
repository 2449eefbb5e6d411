"""`laserbatch status --watch`: look at a workspace again and again, until the night that runs there has ended."""

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from rich.live import Live

from laserbatch.jobs.console import ExitCode, stdout, summary, summary_table, visible
from laserbatch.jobs.failures import exit_code_of

REFRESH_S, LINE_EVERY_S = 2.0, 60.0
LEFT_OUT = ("workspace", "lock", "begun", "events", "published", "delivered")  # rows that lines do without
GOING = ("unknown", "running")  # states in which a night may make progress
State = dict[str, Any]  # of a workspace, as `workspace_state` returns it


def follow(look: Callable[[], State], rows_of: Callable[[State], dict[str, str]], as_json: bool) -> int:
    """Show the state of a workspace until no night runs there; return the exit code of the night.

    A terminal shows the rows of the state, other output gets them in lines, and with `as_json` the last state alone.
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
                    _print_line(rows_of(state))
    except KeyboardInterrupt as error:
        return exit_code_of(error)
    if as_json:
        summary(state, as_json)
    else:
        _print_line(rows_of(state))
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


def _print_line(rows: dict[str, str]) -> None:
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    line = "; ".join(f"{name}: {row}" for name, row in rows.items() if name not in LEFT_OUT)
    stdout.print(visible(f"{when} {line}"), markup=False, soft_wrap=True)
