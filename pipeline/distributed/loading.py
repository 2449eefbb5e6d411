"""What a worker does before it loads a model: sees that the run's folder is the same, and loads code, quickly."""

import gc
import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from laserbatch.pipeline.distributed.spec import WorkerSpec
from laserbatch.pipeline.errors import WorkspaceError

TOKEN_FILE = ".workers"  # in the run's folder, for workers to see that it is the same one
MOST_UNSEEN_S = 30.0  # of a new file: a shared folder shows it late
# Packages that transformers loads wherever they are installed, for what no engine does: 1.3 of 8 processor seconds.
UNUSED = ("torchao", "scipy")


def require_same_folder(spec: WorkerSpec) -> None:
    """Raises WorkspaceError: the run's folder is not here what it is where the run was started."""
    deadline_s = time.monotonic() + MOST_UNSEEN_S
    path = spec.run_dir / TOKEN_FILE
    while not (path.exists() and path.read_text(encoding="utf-8") == spec.token):
        if time.monotonic() > deadline_s:
            raise WorkspaceError(
                f"a worker on {socket.gethostname()} does not see the run's folder {spec.run_dir}: every machine of "
                "the cluster needs the workspace at the same path, on storage that all of them share"
            )
        time.sleep(0.2)


@contextmanager
def quick_imports(model_dir: Path) -> Iterator[None]:
    """Have what is imported in the block do without `UNUSED`, and without the collector: nothing of it is garbage.

    Nothing is hidden from a quantised model, whose weights a package of its own may unpack.
    """
    hidden = [] if _is_quantised(model_dir) else [name for name in UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))
    gc.disable()
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
        gc.freeze()
        gc.enable()


def _is_quantised(model_dir: Path) -> bool:
    try:
        return "quantization_config" in json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # who loads the model says what is wrong with it
