"""Joining or starting a Ray cluster, and laying out workers on its nodes."""

import ctypes
import logging
import math
import os
import secrets
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from laserbatch.pipeline.distributed.settings import ClusterSettings, usable_cores
from laserbatch.pipeline.errors import ClusterFailed, ConfigError
from laserbatch.pipeline.gpus import min_free_bytes, num_gpus
from laserbatch.pipeline.storage.scratch import RAY_PREFIX, ScratchFolder, remove_dead_scratch

MARK = "LASERBATCH_WORKSPACE"  # variable in the environment of all Ray processes that a night has started
MAX_TEMP_BYTES = 38  # length of Ray's temporary folder: the paths of sockets are 69 bytes longer, and have at most 107
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # where Ray's own files go if TMPDIR is too long for sockets
WORKERS_A_NODE = 8  # default of the largest node without GPUs; workers have the same number of cores on the others
MAX_WORKERS_A_GPU = 4
MAX_SHARE = 0.45  # share of a GPU's free memory that each of two workers may need
ASK_TIMEOUT_S = 60.0  # for the free memory of the GPUs of all nodes
ANSWER_TIMEOUT_S = 10.0  # for the head of a cluster to accept a connection


@dataclass(frozen=True)
class Node:
    num_cpus: int
    num_gpus: int = 0

    def __str__(self) -> str:
        return f"{self.num_cpus} CPUs" + (f" and {self.num_gpus} GPUs" if self.num_gpus else "")


@dataclass(frozen=True)
class WorkerLayout:
    """The number of workers and the resources of each."""

    num_workers: int
    num_threads: int
    num_gpus: int  # per worker; 0 without GPUs
    device: str
    workers_a_gpu: int = 1  # largest number of workers that share a GPU

    @property
    def gpu_share(self) -> float:
        """GPUs of each worker, a fraction if workers share one."""
        return self.num_gpus / self.workers_a_gpu

    @property
    def num_gpus_in_all(self) -> int:
        return math.ceil(self.num_workers * self.gpu_share)

    @property
    def need(self) -> str:
        """The resources that each worker needs, in words."""
        shared = f" and a GPU that up to {self.workers_a_gpu} share" if self.workers_a_gpu > 1 else ""
        return str(Node(self.num_threads, 0 if shared else self.num_gpus)) + shared


def worker_layout(
    settings: ClusterSettings, nodes: Sequence[Node], gpus_a_worker: int = 1, workers_a_gpu: int = 1
) -> WorkerLayout:
    """Lay out one worker for each `gpus_a_worker` GPUs, or without GPUs for each group of cores, and set its threads.

    A worker runs on one node, so its threads follow from the cores of each node, not from their sum. Without a model of
    their own (`gpus_a_worker` 0) one worker is enough: it waits for a server, and alone keeps to the server's limits.

    `workers_a_gpu` : number of workers that share a GPU if the settings do not give the number of workers. If they give
        more workers than there are GPUs, as many share a GPU as needed.

    Raises ConfigError if the nodes have no room for the workers of the settings.
    """
    if not gpus_a_worker:
        return WorkerLayout(1, 1, 0, "cpu")
    on_gpu = any(node.num_gpus for node in nodes)
    most_threads = max([1, *(node.num_cpus for node in nodes)])
    num_workers, num_alone = settings.num_workers, sum(node.num_gpus // gpus_a_worker for node in nodes)
    if num_workers is not None:
        workers_a_gpu = min(MAX_WORKERS_A_GPU, math.ceil(num_workers / max(1, num_alone)))
    if gpus_a_worker > 1 or not on_gpu:
        workers_a_gpu = 1

    def num_places(num_threads: int) -> int:
        places = ((node.num_cpus // num_threads, node.num_gpus // gpus_a_worker * workers_a_gpu) for node in nodes)
        return sum(min(place) if on_gpu else place[0] for place in places)

    if num_workers is None and not on_gpu:
        num_threads = max(1, most_threads // WORKERS_A_NODE)
    else:
        min_places = num_workers or num_alone * workers_a_gpu
        num_threads = max((n for n in range(1, most_threads + 1) if num_places(n) >= min_places), default=1)
    places = num_places(num_threads)
    layout = WorkerLayout(
        num_workers or places, num_threads, gpus_a_worker if on_gpu else 0, "cuda" if on_gpu else "cpu", workers_a_gpu
    )
    if places < max(1, layout.num_workers):
        larger = "Use larger nodes, or fewer GPUs for each worker (docs/vllm.md)"
        advice = "Lower cluster.num_workers, or leave it out" if places else larger
        raise ConfigError(
            f"the cluster has room for {places} workers of {layout.need} each; expected room for "
            f"{layout.num_workers or 1}: it has {format_nodes(nodes)}. {advice}"
        )
    return layout


def workers_a_gpu(needed_bytes: int | None, free_bytes: int | None) -> int:
    """The number of workers that share a GPU: two if both fit, so that one computes while the other's host works.

    On an H200 two workers wrote a night with drafts in 0.80 times the time of one (docs/gpu.md).
    """
    return 2 if needed_bytes and free_bytes and needed_bytes <= MAX_SHARE * free_bytes else 1


def cluster_free_bytes() -> int | None:
    """Free bytes of the fullest GPU of the cluster; None if a node does not report them."""
    ask = ray.remote(num_cpus=0, max_retries=0)(min_free_bytes)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    calls = [ask.options(scheduling_strategy=strategy).remote() for strategy in strategies]
    try:
        answers = ray.get(calls, timeout=ASK_TIMEOUT_S)
    except RayError:
        return None
    free = [num_bytes for num_bytes in answers if num_bytes is not None]
    return min(free) if free and len(free) == len(answers) else None


def format_nodes(nodes: Sequence[Node]) -> str:
    """The nodes in words; equal nodes are counted."""
    alike = Counter(map(str, nodes))
    return ", ".join(f"{count} nodes of {kind}" if count > 1 else f"a node of {kind}" for kind, count in alike.items())


def cluster_nodes() -> list[Node]:
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(int(resources.get("CPU", 0)), int(resources.get("GPU", 0))) for resources in alive]


def require_own_gpu(granted: list, visible: str | None) -> None:
    """Raise ConfigError unless CUDA_VISIBLE_DEVICES names only a worker's own GPUs: none is shared by accident."""
    if (visible or "").split(",") != [str(gpu) for gpu in granted]:
        raise ConfigError(
            f"Ray granted a worker GPU {', '.join(map(str, granted)) or 'none'}, but CUDA_VISIBLE_DEVICES shows it "
            f"{visible or 'all'}, so that workers would share GPUs; unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
        )


@contextmanager
def ray_cluster(
    settings: ClusterSettings, workspace: Path | None = None, gpus_a_worker: int = 1,
    worker_bytes: Callable[[], int | None] = lambda: None,
) -> Iterator[WorkerLayout]:  # fmt: skip
    """Join the cluster at `ray_address`, or start a local one, whatever else runs here, and stop it afterwards.

    `workspace` : processes of a local cluster are marked with it, so that `end_leftovers` finds those of killed nights.
    `worker_bytes` : returns the GPU memory that a worker needs; None: a worker needs a GPU of its own.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    started, short_folder = not ray.is_initialized(), None
    if started and settings.ray_address is None:
        here = Node(usable_cores(), num_gpus())
        worker_layout(settings, [here], gpus_a_worker)  # raises ConfigError before Ray starts if there is no room
        remove_dead_scratch(SHORT_FOLDERS, RAY_PREFIX)  # folders that killed nights left
        short_folder = _short_folder()
        try:
            _ensure_token()
            with _marked(workspace), _sigterm_kept():
                ray.init(  # shards travel as files; only names and counts pass through Ray's object store
                    _temp_dir=None if short_folder is None else str(short_folder.path), address="local",
                    num_cpus=here.num_cpus, num_gpus=here.num_gpus, include_dashboard=False, log_to_driver=False,
                    logging_level=logging.ERROR, object_store_memory=100 * 2**20,
                )  # fmt: skip
        except Exception as error:  # Ray has no class for it
            _leave()
            if short_folder is not None:
                short_folder.remove()
            raise ClusterFailed(
                f"Ray does not start on this machine, which may be too busy or have too little memory: "
                f"{_root_reason(error)} Give the same command again; `laserbatch doctor` checks whether Ray starts"
            ) from error
    elif started and settings.ray_address is not None:
        _require_answer(settings.ray_address)
        try:
            with _sigterm_kept():
                ray.init(address=settings.ray_address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, ImportError, RayError) as error:
            reason = f"the Ray cluster at {settings.ray_address!r} cannot be joined: {_root_reason(error)}"
            if "RAY_AUTH_MODE" not in os.environ:
                reason += "; if it asks for a token (~/.ray/auth_token), set RAY_AUTH_MODE=token in the environment"
            raise ConfigError(reason) from error
    try:
        nodes, num_sharing = cluster_nodes(), 1
        if settings.num_workers is None and gpus_a_worker == 1 and any(node.num_gpus for node in nodes):
            num_sharing = workers_a_gpu(worker_bytes(), cluster_free_bytes())
        yield worker_layout(settings, nodes, gpus_a_worker, num_sharing)
    finally:
        if started:
            _leave()
        if short_folder is not None:
            short_folder.remove()


def _require_answer(address: str) -> None:
    """Raise ClusterFailed if nobody answers at HOST:PORT, where Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "://" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_TIMEOUT_S).close()
        except (OSError, OverflowError) as error:
            raise ClusterFailed(
                f"nothing answers at the address of the Ray cluster, {address} ({error}). Check the address and that "
                "the cluster runs, then give the same command again"
            ) from error


def _ensure_token() -> None:
    """Set Ray's token if Ray cannot write one to the home folder, such as in a container with a read-only root."""
    home = Path(expanduser("~"))  # "~" of a user without a home folder
    folder = next((path for path in (home / ".ray", home) if path.is_dir()), home)
    if not os.access(folder, os.W_OK) and not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & {
        *os.environ
    }:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _leave() -> None:
    with _sigterm_kept():
        ray.shutdown()


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, which Ray replaces when it starts and when it stops.

    Nights start Ray in a thread, where Python cannot set handlers, so this uses the system call.
    """
    libc, action = ctypes.CDLL(None), ctypes.create_string_buffer(256)  # a `struct sigaction`, which is smaller
    libc.sigaction(signal.SIGTERM, None, action)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGTERM, action, None)


def _short_folder() -> ScratchFolder | None:
    """A new folder for Ray's own files if the usual one is too long for the paths of its sockets, otherwise None.

    Batch systems set such a TMPDIR. Raises ConfigError if no short folder is writable either.
    """
    usual = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    if len(os.fsencode(usual)) <= MAX_TEMP_BYTES:
        return None
    for folder in SHORT_FOLDERS:
        with suppress(OSError):
            return ScratchFolder("ray", folder, RAY_PREFIX)
    raise ConfigError(
        f"the temporary folder {usual} has more than the {MAX_TEMP_BYTES} bytes that leave room for the paths of Ray's "
        f"sockets, and {' and '.join(SHORT_FOLDERS)} are not writable; set RAY_TMPDIR to a shorter folder"
    )


def end_leftovers(workspace: Path) -> int:
    """Kill the Ray processes that killed nights of a workspace left on this machine; returns their number.

    The workspace's lock must be held: then no process with the workspace's mark belongs to a living night.
    """
    mark, num_ended = f"{MARK}={_mark_of(workspace)}".encode(), 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it is another user's, or has ended
            process = os.pidfd_open(int(path.parent.name))  # not its id, which another process may get meanwhile
            try:
                if mark in path.read_bytes().split(b"\0"):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    num_ended += 1
            finally:
                os.close(process)
    return num_ended


@contextmanager
def _marked(workspace: Path | None) -> Iterator[None]:
    """Mark the processes that the block starts with the workspace, by an environment variable."""
    if workspace is not None:
        os.environ[MARK] = _mark_of(workspace)
    try:
        yield
    finally:
        os.environ.pop(MARK, None)


def _mark_of(workspace: Path) -> str:
    """Identify the folder itself, since its path may mean another one in a container."""
    stat = workspace.stat()
    return f"{stat.st_dev}-{stat.st_ino} {workspace.resolve()}"


def _root_reason(error: BaseException) -> str:
    """The innermost reason of an error that Ray wraps in others or reports as a traceback."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = str(error).strip()
    return message.splitlines()[-1] if "Traceback" in message else " ".join(message.split())
