"""Ray clusters: the room on their nodes, the GPU of each worker, and why a cluster cannot be joined."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import NamedTuple
from unittest import mock

import pytest
import ray

from laserbatch.pipeline.distributed import cluster
from laserbatch.pipeline.distributed.cluster import (
    Node,
    WorkerLayout,
    end_leftovers,
    ray_cluster,
    require_own_gpu,
    worker_layout,
)
from laserbatch.pipeline.distributed.settings import ClusterSettings, usable_cores
from laserbatch.pipeline.errors import ClusterFailed, ConfigError


def test_a_process_counts_the_cores_that_it_may_keep_busy(monkeypatch):
    affinity = os.sched_getaffinity(0)
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1000")
    assert usable_cores() <= len(affinity)  # fewer in a container with a quota
    os.sched_setaffinity(0, {min(affinity)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, affinity)
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")
    assert usable_cores() == 1


@pytest.mark.parametrize(
    ("settings", "nodes", "expected"),
    [
        ({}, [Node(2)], WorkerLayout(2, 1, 0, "cpu")),
        ({}, [Node(64)], WorkerLayout(8, 8, 0, "cpu")),
        ({}, [Node(16)] * 9, WorkerLayout(72, 2, 0, "cpu")),  # 18 threads, an eighth of all, fit on no node
        ({}, [Node(0), Node(16), Node(3)], WorkerLayout(9, 2, 0, "cpu")),
        ({"num_workers": 1}, [Node(2)], WorkerLayout(1, 2, 0, "cpu")),
        ({"num_workers": 3}, [Node(16)] * 2, WorkerLayout(3, 8, 0, "cpu")),
        ({}, [Node(16, 4)], WorkerLayout(4, 4, 1, "cuda")),
        ({}, [Node(8), Node(16, 2), Node(8, 2)], WorkerLayout(4, 4, 1, "cuda")),
        ({}, [Node(2, 4)], WorkerLayout(2, 1, 1, "cuda")),  # more GPUs than CPUs to drive them
        ({"num_workers": 2}, [Node(16, 4)], WorkerLayout(2, 8, 1, "cuda")),
        ({"num_workers": 6}, [Node(16, 2), Node(16, 2)], WorkerLayout(6, 5, 1, "cuda", workers_a_gpu=2)),
    ],
)
def test_workers_fit_the_nodes_that_there_are(settings, nodes, expected):
    assert worker_layout(ClusterSettings(**settings), nodes) == expected


def test_two_workers_may_share_a_gpu():
    nodes = [Node(16, 2), Node(2, 2)]  # more GPUs than CPUs of workers
    shared = worker_layout(ClusterSettings(), nodes, workers_a_gpu=2)
    assert shared == WorkerLayout(6, 1, 1, "cuda", workers_a_gpu=2)
    assert (shared.gpu_share, shared.num_gpus_in_all) == (0.5, 3)
    assert worker_layout(ClusterSettings(), [Node(16)], workers_a_gpu=2) == WorkerLayout(8, 2, 0, "cpu")
    assert worker_layout(ClusterSettings(num_workers=1), nodes, workers_a_gpu=2).workers_a_gpu == 1


def test_a_worker_may_have_several_gpus_of_one_node():
    nodes = [Node(16, 4), Node(16, 3)]
    assert worker_layout(ClusterSettings(), nodes, gpus_a_worker=2) == WorkerLayout(3, 8, 2, "cuda")
    assert worker_layout(ClusterSettings(), nodes, gpus_a_worker=0) == WorkerLayout(1, 1, 0, "cpu")  # a server writes
    with pytest.raises(ConfigError, match=r"room for 0 workers of 16 CPUs and 8 GPUs each.*Use larger nodes"):
        worker_layout(ClusterSettings(), nodes, gpus_a_worker=8)


@pytest.mark.parametrize(
    ("settings", "nodes", "message"),
    [
        (
            {"num_workers": 9},
            [Node(16, 2)],
            "room for 8 workers of 1 CPUs and a GPU that up to 4 share each; .*a node of 16 CPUs and 2 G",
        ),
        ({"num_workers": 40}, [Node(16), Node(16)], "32 workers of 1 CPUs each; .*2 nodes of 16 CPUs.*num_workers"),
    ],
)
def test_workers_that_no_node_has_room_for_are_refused(settings, nodes, message):
    with pytest.raises(ConfigError, match=message):
        worker_layout(ClusterSettings(**settings), nodes)


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_a_temporary_folder_too_long_for_sockets_is_not_rays(name, monkeypatch, tmp_path):
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(ray, "init", lambda **options: begun.append(options["_temp_dir"]))
    monkeypatch.setattr(cluster, "cluster_nodes", lambda: [Node(2)])
    begun = []
    for folder in ("/" + 37 * "a", "/" + 19 * "ä"):
        monkeypatch.setenv(name, folder)
        with ray_cluster(ClusterSettings()):
            pass
        monkeypatch.setenv(name, folder + "a")
        with ray_cluster(ClusterSettings()):
            if len(os.fsencode(folder)) == 38:
                assert Path(begun[-1]).is_dir() and len(begun[-1]) <= 38
    assert begun[0] is None and begun[1] and not Path(begun[1]).exists()  # deleted together with Ray's folder
    assert begun[2] and begun[3]  # 39 bytes, but 20 letters
    monkeypatch.setattr(cluster, "SHORT_FOLDERS", (str(tmp_path / "nowhere"),))
    with pytest.raises(ConfigError, match="set RAY_TMPDIR to a shorter folder"), ray_cluster(ClusterSettings()):
        pass


def test_the_short_folder_of_a_killed_night_goes_with_the_next_run(monkeypatch, tmp_path):
    """It goes whatever the next night's temporary folder is; the folder of a live night stays."""
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(cluster, "cluster_nodes", lambda: [Node(2)])
    monkeypatch.setattr(cluster, "SHORT_FOLDERS", (str(tmp_path),))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    left = tmp_path / "laserbatch-ray-left"
    (left / "session").mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", "/" + 50 * "a")
    living = cluster._short_folder()
    for folder in (left, living.path):
        os.utime(folder, (0, 0))
    monkeypatch.setenv("TMPDIR", "/tmp")
    with ray_cluster(ClusterSettings()):
        assert not left.exists() and living.path.is_dir()
    living.remove()


# Ray does not check the GPUs that it is told to have, so the GPUs that it grants can be tested without any.
# It starts as many processes at once as there are cores.
TWO_GPUS_IN_A_LONG_TMPDIR = """
import json, os, ray, sys, time
from pathlib import Path
from laserbatch.pipeline.distributed import cluster
from laserbatch.pipeline.distributed.settings import ClusterSettings, usable_cores

class Worker:
    def gpu(self):
        return ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES")

cluster.usable_cores, cluster.num_gpus = lambda: 1, lambda: 2
with cluster.ray_cluster(ClusterSettings(), Path(sys.argv[1]), worker_bytes=lambda: 1 << 30) as layout:
    actors = [ray.remote(Worker).options(num_cpus=0.25, num_gpus=share).remote() for share in (1, 0.5, 0.5)]
    seen = ray.get([actor.gpu.remote() for actor in actors])
    node = ray._private.worker._global_node
    raylet = node.all_processes["raylet"][0].process.pid
    print(json.dumps([layout.workers_a_gpu, seen, raylet, node.get_session_dir_path()]), flush=True)
    time.sleep(600)
"""


class NightOnGpus(NamedTuple):
    """A driver with a local Ray, and the GPUs, process and folder that it reported."""

    driver: subprocess.Popen
    workspace: Path
    workers_a_gpu: int
    seen: list  # for each worker: the GPUs that Ray granted it, and the GPUs visible to it
    raylet: int  # process id
    session: str  # folder of Ray's own files


@pytest.fixture(scope="module")
def night_on_gpus(tmp_path_factory):
    """A Ray of two GPUs in a long TMPDIR, started once for the three tests below; the last of them kills it."""
    folder = tmp_path_factory.mktemp("long") / "a_rather_long_folder_name_of_a_batch_system" / "1355700" / "batch.t0016"
    workspace = folder / "workspace"
    workspace.mkdir(parents=True)
    inherited = {
        name: value for name, value in os.environ.items() if name != "RAY_TMPDIR" and "CUDA_VISIBLE_DEVICES" not in name
    }
    nvidia_smi = folder / "nvidia-smi"
    nvidia_smi.write_text("#!/bin/sh\necho '81559, Disabled'\n")
    nvidia_smi.chmod(0o755)
    environment = inherited | {
        "TMPDIR": str(folder),
        "CUDA_VISIBLE_DEVICES": "2,5",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    command = [sys.executable, "-c", TWO_GPUS_IN_A_LONG_TMPDIR, str(workspace)]
    driver = subprocess.Popen(command, env=environment, stdout=PIPE, stderr=PIPE, text=True)
    try:
        line = driver.stdout.readline()
        assert line, driver.communicate()[1]
        night = NightOnGpus(driver, workspace, *json.loads(line))
        yield night
        shutil.rmtree(Path(night.session).parent, ignore_errors=True)  # the killed driver cannot remove it
    finally:
        driver.kill()
        driver.communicate()
        end_leftovers(workspace)


@pytest.mark.ray
def test_ray_starts_where_a_batch_system_has_a_long_tmpdir(night_on_gpus):
    assert night_on_gpus.workers_a_gpu == 2 and len(night_on_gpus.seen) == 3


TOKEN = """Failed to connect to GCS. Last connection error: Traceback (most recent call last):
  File "node.py", line 996, in _init_gcs_client
ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken: Authentication token is missing or incorrect. Note: ...
"""
VERSION = (
    "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\nThis process was started with:\n    Ray: 2.60.0"
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(TOKEN), "joined: ray.exceptions.AuthenticationError: .*token is missing.*RAY_AUTH_MODE=token"),
        (RuntimeError(VERSION), "joined: Version mismatch: .* Ray: 2.9.0 This process"),
        (ImportError("install ray[client]"), "joined: install"),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_told_of_with_rays_own_reason(monkeypatch, error, reason):
    def init(**_):
        raise ConnectionError("Failed to connect to Ray cluster at head:6379") from error

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"the Ray cluster at '{address}' cannot be {reason}"):  # noqa: SIM117
            with ray_cluster(ClusterSettings(ray_address=address)):
                pass
    with (
        pytest.raises(ClusterFailed, match=f"nothing answers .*, {address} .*refused"),
        ray_cluster(ClusterSettings(ray_address=address)),
    ):
        pass


@pytest.mark.parametrize(("home", "is_set"), [("/proc/none", True), (None, False)])
def test_ray_gets_a_token_where_it_cannot_write_one(monkeypatch, tmp_path, home, is_set):
    monkeypatch.setattr(ray, "init", mock.Mock(side_effect=OSError("not started")))
    monkeypatch.setattr(os, "environ", {"HOME": home or str(tmp_path)})
    with suppress(ClusterFailed), ray_cluster(ClusterSettings()):
        pass
    assert ("RAY_AUTH_TOKEN" in os.environ) is is_set


def test_a_local_ray_that_does_not_start_is_a_failure_with_rays_own_reason(monkeypatch, tmp_path):
    def init(**_):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ClusterFailed, match=r"not start on this machine.*: The current node timed out.*same command"):  # noqa: SIM117
        with ray_cluster(ClusterSettings(num_workers=1), tmp_path):
            pass


@pytest.mark.parametrize(
    ("granted", "visible"), [([0], None), ([1], "0,1"), (["2"], "2,3"), ([1], "0"), ([], "0"), (["GPU-a"], "GPU-b")]
)
def test_worker_that_sees_other_gpus_than_its_own_is_refused(granted, visible):
    with pytest.raises(ConfigError, match="RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
        require_own_gpu(granted, visible)


@pytest.mark.parametrize(("granted", "visible"), [([0], "0"), (["3"], "3"), (["GPU-a"], "GPU-a")])
def test_worker_that_sees_its_own_gpu_alone_goes_on(granted, visible):
    require_own_gpu(granted, visible)


@pytest.mark.ray
def test_a_worker_sees_the_gpu_that_it_was_given_a_share_of_alone(night_on_gpus):
    (_, alone), (_, first), (_, second) = night_on_gpus.seen
    assert first == second and {alone, first} == {"2", "5"}
    for granted, visible in night_on_gpus.seen:
        require_own_gpu(granted, visible)


@pytest.mark.ray
def test_what_a_killed_night_left_of_its_ray_is_ended_and_nobody_elses(night_on_gpus, tmp_path):
    """Driver and raylet are killed at once, so nothing ends Ray's other processes.

    A process marked like Ray's takes the place of another night, since a second Ray would show no more.
    """
    driver, own = night_on_gpus.driver, night_on_gpus.workspace
    with cluster._marked(tmp_path):
        foreign = subprocess.Popen(["sleep", "600"])
    try:
        assert len(marked(own)) >= 2 and len(marked(tmp_path)) == 1
        os.kill(night_on_gpus.raylet, signal.SIGKILL)
        driver.kill()
        driver.wait()
        num_left = len(marked(own))
        assert end_leftovers(own) <= num_left
        wait_until(lambda: not marked(own))
        assert end_leftovers(own) == 0 and len(marked(tmp_path)) == 1 and foreign.poll() is None
    finally:
        foreign.kill()


def marked(workspace):
    """The live processes that have the mark of a workspace."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            processes += [path] if f" {workspace}\0".encode() in path.read_bytes() else []
    return processes


def wait_until(happened, most_s=30.0):
    deadline_s = time.monotonic() + most_s
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
