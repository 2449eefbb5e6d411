"""Checks that a worker or a task sees the files of its run, which all machines of a cluster must share."""

import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from laserbatch.pipeline.distributed.spec import WorkerSpec
from laserbatch.pipeline.errors import ConfigError

TOKEN_FILE = ".workers"  # in the run's folder; its text is the token of the specification
VISIBILITY_TIMEOUT_S = 30.0  # a shared folder may show a new file this late


def require_same_folder(spec: WorkerSpec) -> None:
    """Raises ConfigError: this machine does not see the folder of the run that the driver sees."""
    path = spec.run_dir / TOKEN_FILE
    _wait({spec.run_dir: lambda: path.exists() and path.read_text(encoding="utf-8") == spec.token})


def require_visible(paths: Iterable[Path]) -> None:
    """Wait for files on storage that shows new ones late. Raises ConfigError: this machine does not see one."""
    _wait({path: path.exists for path in paths})


def _wait(is_there_by_path: dict[Path, Callable[[], bool]]) -> None:
    deadline_s = time.monotonic() + VISIBILITY_TIMEOUT_S
    for path, is_there in is_there_by_path.items():
        while not is_there():
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"{socket.gethostname()} does not see {path} as the night does: every machine of the cluster needs "
                    "the workspace at the same path, on storage that all of them share"
                )
            time.sleep(0.2)
