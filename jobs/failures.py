"""Reports an error to a user: one line, an exit code, and where to look."""

import errno
import os
import signal
import traceback
from pathlib import Path
from typing import Any

from laserbatch.jobs.console import ExitCode
from laserbatch.pipeline import errors

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NO_FILES = {errno.EMFILE, errno.ENFILE}
CODES = {  # the first kind that fits decides
    KeyboardInterrupt: ExitCode.INTERRUPTED,
    errors.WorkspaceBusy: ExitCode.BUSY,
    errors.EndpointGone | errors.ClusterFailed | errors.NotDelivered | errors.NotReached: ExitCode.UNAVAILABLE,
    errors.RunFailed: ExitCode.RUN_FAILED,
    errors.LaserbatchError: ExitCode.BAD_INPUT,
}
GOES_ON = "the same command continues a run or a training; any other command starts again"


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM, for example from a scheduler whose time limit is reached."""


def end_at_sigterm() -> None:
    """Make SIGTERM raise `Terminated`, so that workers are stopped and the reason is printed."""
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: object) -> None:
    global _is_terminated
    _is_terminated = True
    raise Terminated


_is_terminated = False  # needed since a waiting Ray call raises a plain KeyboardInterrupt after the signal


def _ended_by_sigterm(error: BaseException) -> bool:
    return isinstance(error, Terminated) or (_is_terminated and isinstance(error, KeyboardInterrupt))


def exit_code_of(error: BaseException) -> int:
    if isinstance(error, OSError):
        is_known = error.filename is not None or error.errno in NO_ROOM | NO_FILES
        return ExitCode.BAD_INPUT if is_known else ExitCode.UNEXPECTED
    if _ended_by_sigterm(error):
        return ExitCode.TERMINATED
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), ExitCode.UNEXPECTED)


def line_of(error: BaseException, names_values: bool = True) -> str:
    """An error's message for a user; without `names_values`, an unexpected error's own message is left out."""
    if isinstance(error, KeyboardInterrupt):
        return f"{'ended by SIGTERM' if _ended_by_sigterm(error) else 'interrupted'}; {GOES_ON}"
    code = exit_code_of(error)
    if code is ExitCode.UNEXPECTED:
        where = traceback.extract_tb(error.__traceback__)[-1:]
        places = "".join(f" ({Path(place.filename).name}, line {place.lineno})" for place in where)
        first = f": {(str(error).strip().splitlines() or [''])[0]}" if names_values else ""
        return f"unexpected {type(error).__name__}{first}{places}; `laserbatch -v ...` shows the traceback"
    if not isinstance(error, OSError):
        return str(error)
    reason = os.strerror(error.errno) if error.errno else str(error)
    advice = "Check the path, and that it may be written"
    if error.errno in NO_ROOM:
        advice = "Make room, then give the same command again"
    elif error.errno in NO_FILES:
        advice = "Raise the limit of open files (`ulimit -n 4096`), then give the same command again"
    return f"{error.filename or 'a file'}: {reason}. {advice}"


def failure_object(error: BaseException, names_values: bool = True) -> dict[str, Any]:
    """Describe an error for programs: `error`, `kind`, `exit_code`, and, if it ended a run, the run's id and paths.

    `line_of` describes `names_values`.
    """
    facts = {"error": line_of(error, names_values), "kind": type(error).__name__, "exit_code": int(exit_code_of(error))}
    return facts | vars(error).get("recorded_in", {})
