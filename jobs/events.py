"""The events of a run, one line each in `events.jsonl`, to watch a night or to look into it later.

Events hold names, counts and times (UTC), never a text or a library's message about one. A log that cannot be written
does not stop a night.
"""

import datetime
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger("laserbatch.events")
logger.setLevel(logging.INFO)
logger.propagate = False  # events go to a file, not to the terminal
WARNED = logging.getLogger("laserbatch")


def emit(event: str, **facts: Any) -> None:
    """Add an event to the log of the run that is under way; without such a run, do nothing."""
    logger.info(event, extra={"event": event, "facts": facts})


@contextmanager
def event_log(path: Path) -> Iterator[None]:
    """Append all emitted events and logged warnings to a file, after those of earlier attempts.

    A warning is logged as the event "warning", unless its record names another: `extra={"event": ..., "facts": {...}}`.
    """
    handler = _Appender(path)
    for source in (logger, WARNED):
        source.addHandler(handler)
    try:
        yield
    finally:
        for source in (logger, WARNED):
            source.removeHandler(handler)
        handler.close()


@contextmanager
def lines_said() -> Iterator[list[str]]:
    """Collect the lines that `console.say` prints in the block, so that another process can print them again."""
    lines = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "said":
                lines.append(vars(record)["facts"]["line"])

    listener = Listener()
    logger.addHandler(listener)
    try:
        yield lines
    finally:
        logger.removeHandler(listener)


class _Appender(logging.Handler):
    """Appends each event to the file in one write; first ends a line that a killed attempt left incomplete."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self._descriptor = None
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                os.write(self._descriptor, b"\n")

    def emit(self, record: logging.LogRecord) -> None:
        if self._descriptor is None or (record.levelno < logging.WARNING and record.name != logger.name):
            return
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        event = getattr(record, "event", "warning")
        facts = getattr(record, "facts", None) or {"line": record.getMessage()}
        line = json.dumps({"time": when, "event": event} | facts, ensure_ascii=False, default=str) + "\n"
        with suppress(OSError):
            os.write(self._descriptor, line.encode(errors="replace"))

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        super().close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a file, oldest first, without incomplete lines of killed runs; empty if the file is missing."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    events = []
    for line in lines:
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "event" in event:
                events.append(event)
    return events


def last_attempt(path: Path) -> list[dict[str, Any]]:
    """The events of a run's last attempt, read from the run's log."""
    events = read_events(path)
    begins = [number for number, event in enumerate(events) if event["event"] == "run_begin"]
    return events[begins[-1] :] if begins else events
