"""What a worker does before it loads a model: sees that the run's folder is the same, and loads code, quickly."""

import gc
import importlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from types import ModuleType

from laserbatch.pipeline.distributed.spec import WorkerSpec
from laserbatch.pipeline.errors import WorkspaceError

TOKEN_FILE = ".workers"  # in the run's folder, for workers to see that it is the same one
VISIBILITY_TIMEOUT_S = 30.0  # a shared folder may show a new file this late
# Whose private names are used to start faster, as these versions have them; others start slower.
TRIED = {"ray": "2.60", "torch": "2.13", "transformers": "5.23"}
# What transformers loads though no engine asks for it, a third of what workers load: packages that happen to be there,
# and torch's compiler, of which it wants decorators alone.
UNUSED = ("torchao", "scipy")
DECORATORS = ("torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op")


def require_same_folder(spec: WorkerSpec) -> None:
    """Raises WorkspaceError: the run's folder is not here what it is where the run was started."""
    deadline_s = time.monotonic() + VISIBILITY_TIMEOUT_S
    path = spec.run_dir / TOKEN_FILE
    while not (path.exists() and path.read_text(encoding="utf-8") == spec.token):
        if time.monotonic() > deadline_s:
            raise WorkspaceError(
                f"a worker on {socket.gethostname()} does not see the run's folder {spec.run_dir}: every machine of "
                "the cluster needs the workspace at the same path, on storage that all of them share"
            )
        time.sleep(0.2)


def is_tried(*names: str) -> bool:
    """Whether the installed libraries are those of `TRIED`, but for fixes."""
    return all(f"{version(name)}.".startswith(f"{TRIED[name]}.") for name in names)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Have what is loaded in the block do without `UNUSED`, torch's compiler and its parts for many processes.

    Nor does the collector look at it: nothing of it is garbage. Who asks for the compiler later gets it.
    """
    if not is_tried("torch", "transformers"):
        yield
        return
    import torch

    found = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    hidden = {name: None for name in UNUSED} | {name: _Late(name) for name in DECORATORS}
    hidden = {name: module for name, module in hidden.items() if name not in sys.modules}
    sys.modules.update(hidden)
    gc.disable()
    try:
        yield
    finally:
        torch.distributed.is_available = found
        for name, module in hidden.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        gc.freeze()
        gc.enable()


class _Late(ModuleType):
    """A module that is loaded when one of its functions is called, unless that decorates another: this stays itself."""

    __path__ = ()

    def __getattr__(self, name: str) -> Callable:
        if name.startswith("__"):
            raise AttributeError(name)

        def late(*arguments, **options):
            if arguments and (arguments[0] is None or callable(arguments[0])):
                return arguments[0] or (lambda decorated: decorated)
            if sys.modules.get(self.__name__) is self:
                for module in DECORATORS:
                    del sys.modules[module]
            return getattr(importlib.import_module(self.__name__), name)(*arguments, **options)

        return late
