"""Tasks on machines of the Ray cluster, the files that a machine must see, and ending a process whose GPU is lost."""

import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from laserbatch import pipeline, retrieval_pools
from laserbatch.pipeline.distributed.cluster import WorkerLayout, cluster_nodes
from laserbatch.pipeline.distributed.spec import WorkerSpec
from laserbatch.pipeline.errors import ClusterFailed, ConfigError

logger = logging.getLogger(__name__)

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")
TOKEN_FILE = ".workers"  # in the run's folder; it contains the token of the specification
POLL_S = 5.0
NO_NODES_S = 600.0  # longest time without a node with CPUs; an autoscaler may start one
VISIBILITY_TIMEOUT_S = 30.0  # a shared folder may show a new file with this delay


def start_task(layout: WorkerLayout, num_gpus: int, function: FunctionType, *arguments: Any) -> ray.ObjectRef:
    """Start a task with a worker's cores; `result_of` waits for it."""
    task = ray.remote(num_cpus=layout.num_threads, num_gpus=num_gpus)(run_task)
    return task.options(name=function.__name__).remote(software(), function, *arguments)


def run_task(expected: dict[str, str], function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on a machine of the cluster, unless `require_same_software` raises."""
    require_same_software(expected)
    return function(*arguments)


def wait_for(task: ray.ObjectRef) -> None:
    """Wait until a task has ended, with or without an error. Raises ClusterFailed if no node for it comes back."""
    last_s = time.monotonic()
    while not ray.wait([task], timeout=POLL_S)[0]:
        if any(node.num_cpus for node in cluster_nodes()):
            last_s = time.monotonic()
        elif time.monotonic() - last_s > NO_NODES_S:
            raise ClusterFailed(f"the cluster has had no node with CPUs for {NO_NODES_S:g} seconds")


def result_of(reference: ray.ObjectRef) -> Any:
    """The result of a task. Raises the error of its function, or ClusterFailed if its process died on every attempt."""
    wait_for(reference)
    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise error.cause from None
    except RayError as error:
        raise ClusterFailed(f"the processes of a task died one after another: {message_of(error)}") from None


def message_of(error: RayError) -> str:
    """Ray's message about a process that died, in one line, without general advice."""
    return " ".join(str(error).partition("Some common causes")[0].split())


def require_same_folder(spec: WorkerSpec) -> None:
    """Raise ConfigError if this machine does not see the same folder of the run as the driver."""
    path = spec.run_dir / TOKEN_FILE
    _wait({spec.run_dir: lambda: path.exists() and path.read_text(encoding="utf-8") == spec.token})


@cache
def software() -> dict[str, str]:
    """The versions of the packages that texts and vectors depend on; of laserbatch a digest of its source files."""
    folders = [Path(package.__path__[0]) for package in (pipeline, retrieval_pools)]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    code = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]
    versions = {name: version(name).partition("+")[0] for name in LIBRARIES}  # the head may have a build without CUDA
    return {"laserbatch": f"{version('laserbatch')}, code {code}"} | versions


def require_same_software(expected: dict[str, str]) -> None:
    """Raise ConfigError if this machine has another laserbatch or other libraries than the driver's `software`."""
    if differing := [
        f"{name} {software()[name]}, not {there}" for name, there in expected.items() if software()[name] != there
    ]:
        raise ConfigError(
            f"{socket.gethostname()} has {'; '.join(differing)} as the night's own process, so that it could write "
            "other texts. Install the same versions on every machine of the cluster (compare PYTHONPATH and images), "
            "then give the same command again"
        )


def require_visible(paths: Iterable[Path]) -> None:
    """Wait for files on storage that shows new files late. Raises ConfigError if this machine does not see one."""
    _wait({path: path.exists for path in paths})


def _wait(is_there_by_path: dict[Path, Callable[[], bool]]) -> None:
    deadline_s = time.monotonic() + VISIBILITY_TIMEOUT_S
    for path, is_there in is_there_by_path.items():
        while not is_there():
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"{socket.gethostname()} does not see {path} as the night wrote it: every machine of the cluster "
                    "needs the workspace at the same path, on storage that all of them share"
                )
            time.sleep(0.2)


@contextmanager
def ends_process_if_device_is_lost() -> Iterator[None]:
    """End this process after a CUDA error that every later call would repeat; other errors are raised as they are.

    Ray starts another process, and the work of this one is done again.
    """
    try:
        yield
    except Exception as error:
        from laserbatch.pipeline.decoding.device_memory import is_device_lost  # torch is loaded by now

        if not is_device_lost(error):
            raise
        logger.exception("the CUDA device is lost: this worker ends")
        os._exit(1)
