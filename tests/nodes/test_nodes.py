"""A night on a cluster of four nodes. The driver's node has no worker, and two of the others are lost on the way."""

import time
from threading import Thread

import pytest
from night_world import FIRST_DATE, make_world, run_here, write_config, write_here
from ray.cluster_utils import Cluster

from laserbatch.jobs.stages import build_pools
from laserbatch.pipeline.distributed import encoding
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.workspace import Workspace


@pytest.fixture
def nodes(monkeypatch):
    """A cluster whose head has no room for workers, and its three other nodes with room for one worker each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 100 * 2**20})
    others = [cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20) for _ in range(3)]
    yield cluster, others
    cluster.shutdown()


@pytest.mark.ray
@pytest.mark.slow
def test_a_night_that_loses_nodes_writes_what_a_night_of_one_node_writes(nodes, tmp_path, capfd, monkeypatch):
    cluster, others = nodes
    make_world(tmp_path, num_users=8, num_items=24)
    runs, pools = {}, {}
    for name in ("alone", "lossy"):
        config = write_config(
            tmp_path,
            f"{name}.yaml",
            workspace=name,
            night={"num_audited": 0, "shard_size": 4, "train_ctr": True},
            cluster={"num_workers": 2},
        )
        arguments = ("nightly", "--date", FIRST_DATE, "--config", str(config))
        if name == "alone":
            with monkeypatch.context() as patched:
                write_here(patched)
                done = run_here(capfd, *arguments)
        else:
            monkeypatch.setattr(encoding, "MIN_TEXTS", 2)
            monkeypatch.setattr(encoding, "MIN_PART", 2)
            monkeypatch.setattr(encoding, "PARTS_A_WORKER", 4)
            monkeypatch.setattr(build_pools, "MIN_TEXTS_OF_TASK", 0)
            folder = tmp_path / name
            Thread(target=lose, args=(cluster, others, folder, "knowledge/item/*.parquet", 2), daemon=True).start()
            Thread(target=lose, args=(cluster, others, folder, "features/.vectors/*/*.arrow", 1), daemon=True).start()
            done = run_here(capfd, *arguments, "--ray-address", cluster.address)
        assert done.returncode == 0, done.stderr
        assert ("the CTR comparison runs as a task of the cluster" in done.stderr) == (name == "lossy")
        workspace = Workspace.open(tmp_path / name, create=False)
        (runs[name],) = workspace.runs()
        arrays = sorted(workspace.pools_folder.rglob("*.npy"))
        pools[name] = {path.relative_to(workspace.pools_folder).parts[1:]: path.read_bytes() for path in arrays}
    assert len(others) == 1
    assert pools["alone"] == pools["lossy"] and {place[0] for place in pools["alone"]} == {*SIDES}
    compared = [run.load_manifest().judgement.ctr for run in runs.values()]
    assert compared[0] == compared[1] and "7 positives among 7 rows" in compared[0].skipped  # so it read all
    for side in SIDES:
        tables = [read_parquet(run.knowledge_folder(side)).sort_by("entity_id") for run in runs.values()]
        assert all(tables[0][name].equals(tables[1][name]) for name in ("entity_id", "text", "token_ids"))
        features = [[path.read_bytes() for path in run.features_path(side).iterdir()] for run in runs.values()]
        assert features[0] == features[1]


def lose(cluster, others, folder, pattern, num):
    """Remove a node as soon as runs have `num` files that match `pattern`."""
    while len(list(folder.glob(f"runs/*/{pattern}"))) < num:
        time.sleep(0.05)
    cluster.remove_node(others.pop(), allow_graceful=False)
