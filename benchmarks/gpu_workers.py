"""Worker processes of `gpu_vllm.py`: each holds one engine and answers lines of JSON. Knows no engine."""

import json
import os
import queue
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from common import REPOSITORY
from gpu_run import kill_group, tail_of
from peers_worker import MARK


class WorkerError(Exception):
    """A worker ended, or did not answer in time."""


class Worker:
    """A process that answers each line of JSON with another; the rest of its output goes to a log file."""

    def __init__(self, name: str, command: list[str], out: Path, environment: dict[str, str]) -> None:
        self.name, self.log, self.begun_s = name, out / f"{name}.log", time.monotonic()
        self._answers: queue.Queue[tuple[float, str]] = queue.Queue()
        self.answered_s = self.begun_s  # when the last answer came
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                command, env=os.environ | environment, cwd=REPOSITORY, text=True, start_new_session=True, stderr=log,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            if line.startswith(MARK):
                self._answers.put((time.monotonic(), line.removeprefix(MARK)))

    def ask(self, limit_s: float, **question: Any) -> dict:
        """Send a question and wait for the answer."""
        if self._process.stdin is None or self._process.poll() is not None:
            raise WorkerError(f"ended with {self._process.poll()}")
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerError(f"ended: {error}") from None
        return self.answer(limit_s)

    def answer(self, limit_s: float) -> dict:
        """Wait for the next answer. Raises WorkerError with the end of the log if none comes."""
        end_s = time.monotonic() + limit_s
        while True:
            has_ended = self._process.poll() is not None
            try:
                self.answered_s, line = self._answers.get(timeout=0.5)
                return json.loads(line)
            except queue.Empty:
                if has_ended or time.monotonic() > end_s:
                    reason = f"ended with {self._process.poll()}" if has_ended else f"no answer in {limit_s:.0f} s"
                    raise WorkerError(f"{reason}: {tail_of(self.log, 0)}") from None

    def close(self) -> None:
        """Kill the worker and the processes that it started."""
        kill_group(self._process)


def device_memory_mb(which: str = "used") -> float:
    """The memory in MiB that all processes use on the device, or the device's "total"; 0 without a device."""
    command = ["nvidia-smi", f"--query-gpu=memory.{which}", "--format=csv,noheader,nounits"]
    try:
        return float(subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return 0.0
