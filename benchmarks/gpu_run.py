"""Shared code of the phases of `gpu_first.py`: one deadline, the rows, and processes with a time limit."""

import argparse
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from common import REPOSITORY
from gpu_rows import Rows

RESERVE_S = 5.0  # to print the table
MIN_PHASE_S = 8.0


class Deadline:
    """The deadline of the whole run."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = clock() + seconds

    def left(self) -> float:
        """Seconds until the table must be printed."""
        return self._end_s - self._clock() - RESERVE_S

    def limit(self, wanted_s: float) -> float:
        """The seconds that a phase may take; 0 if too few are left to begin it."""
        left_s = self.left()
        return min(wanted_s, left_s) if left_s >= MIN_PHASE_S else 0.0


class Run:
    """One run: its deadline, its rows and the processes that it starts."""

    def __init__(self, options: argparse.Namespace, deadline: Deadline) -> None:
        self.options, self.deadline = options, deadline
        self.rows = Rows(options.out / "rows.jsonl")
        self.log_path = options.out / "processes.log"
        self.variables: dict[str, str] = {}  # environment of later processes
        self.attention: str | None = None  # value for decoding.attention, if tests find the kernel wrong
        self.begun: list[str] = []  # items that the last measuring process began

    def start(self, words: Sequence[str], log: Path, variables: dict[str, str] | None = None) -> subprocess.Popen:
        """Start a process in a new process group, with its output in a file."""
        paths = (str(REPOSITORY / "benchmarks"), str(REPOSITORY), os.environ.get("PYTHONPATH"))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
        with open(log, "ab") as file:
            file.write(f"\n=== {' '.join(words)[:300]} {variables or ''}\n".encode())
            file.flush()
            return subprocess.Popen(
                list(words),
                cwd=REPOSITORY,
                env=environment | self.variables | (variables or {}),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def log_size(self) -> int:
        """The size of the log in bytes."""
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(f"[{self.deadline.left():5.0f} s left] {text}", flush=True)

    def fail(self, phase: str, item: str, reason: str, **values) -> None:
        """Write a row that says what was not done and why."""
        self.rows.add(phase, item, failed=reason, **values)
        self.say(f"{item}: {reason}"[:400])


def kill_group(process: subprocess.Popen) -> None:
    """Kill a process and all processes of its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(process: subprocess.Popen, limit_s: float) -> int | None:
    """Wait for a process and kill its group; return its exit status, or None if it exceeded the limit."""
    try:
        return process.wait(max(0.1, limit_s))
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill_group(process)


def tail_of(path: Path, start: int, length: int = 1500) -> str:
    """The last `length` characters that were appended to a log after byte `start`."""
    with open(path, "rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")[-length:]
