"""Two faults under a real Ray: a row that hangs the model, and a worker on another node without the workspace.

    python tests/soak/poison.py --json poison.json

It takes about seven minutes, mostly the deadlines of a night. The row must end alone in quarantine, and its neighbours
must have the texts that they have without it. A run with the worker must end within a minute.
"""

import argparse
import json
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import ray
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))
from test_actors import COST, planned, started_pool, texts

from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.distributed import actors
from laserbatch.pipeline.distributed.cluster import ray_cluster
from laserbatch.pipeline.distributed.settings import ClusterSettings
from laserbatch.pipeline.distributed.worker import ShardWorker
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.planning.plan import read_shard
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.retrieval_pools.step_cost import StepCost

Real = actors._Worker
BUDGET = {"item": Budget(2, 0.1)}


@contextmanager
def workers(kind: type):
    """Replace the class of the workers' actors."""
    actors._Worker, before = kind, actors._Worker
    try:
        yield
    finally:
        actors._Worker = before


def hung_row(world: Path, folder: Path) -> dict:
    """Run shards of four rows, one row of which hangs each of its steps; returns the result and the time it took."""
    calm_shards, calm = planned(world, folder / "calm")
    alone = ShardWorker(calm)
    for shard in calm_shards:
        alone.run(shard, BUDGET["item"])
    shards, spec = planned(world, folder / "hung")
    poison = read_shard(spec.run_dir / shards[1].path)[2]
    prompt = alone.rendered("item", poison).token_ids

    class Hanging(Real):
        def load(self) -> None:
            super().load()
            engine, submit_step = self._worker.engine, self._worker.engine.submit_step

            def submitted(stream):
                if any(np.array_equal(sequence.request.prompt_ids, prompt) for sequence in stream.scheduler.live):
                    time.sleep(1e6)
                return submit_step(stream)

            engine.submit_step = submitted

    begun_s = time.monotonic()
    with (
        workers(Hanging),
        ray_cluster(ClusterSettings(num_workers=2)) as layout,
        started_pool(spec, layout) as worker_pool,
    ):
        outcomes = list(actors.run_shards(shards, worker_pool, lambda measure: BUDGET))
        num_lost = worker_pool.num_lost
    given_up = [outcome for outcome in outcomes if isinstance(outcome, actors.ShardAbandoned)]
    rows = [row.entity_id for lost in given_up for row in read_shard(spec.run_dir / lost.shard.path)]
    expected = texts(calm.run_dir)
    del expected[poison.entity_id]
    return {
        "rows": sum(shard.num_rows for shard in shards),
        "rows_of_its_shard": shards[1].num_rows,
        "seconds": round(time.monotonic() - begun_s),
        "workers_lost": num_lost,
        "it_is_alone": rows == [poison.entity_id],
        "reason": given_up[0].reason,
        "neighbours_are_identical": texts(spec.run_dir) == expected,
    }


def unseen_workspace(world: Path, folder: Path) -> dict:
    """Run on two nodes, one of which lacks the run's folder; returns the error and the time it took."""
    shards, spec = planned(world, folder)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    here = ray.get_runtime_context().get_node_id()

    class Elsewhere(Real):
        def load(self) -> None:
            if ray.get_runtime_context().get_node_id() != here:
                self._spec = replace(self._spec, run_dir=Path("/not-mounted"))
            super().load()

        def cached_step_cost(self) -> StepCost:
            return COST

        def run(self, *arguments) -> None:
            time.sleep(1e6)  # so that only the other worker can end the run

    error_text, begun_s = None, time.monotonic()
    try:
        with workers(Elsewhere), started_pool(spec, cluster_layout()) as worker_pool:
            list(actors.run_shards(shards, worker_pool, lambda measure: {"item": Budget(2, 0.1)}))
    except WorkspaceError as error:
        error_text = str(error)
    seconds = round(time.monotonic() - begun_s)
    ray.shutdown()
    cluster.shutdown()
    return {"nodes": 2, "seconds": seconds, "said": error_text}


def cluster_layout():
    """The layout of two workers of a local Ray, one thread each."""
    with ray_cluster(ClusterSettings(num_workers=2)) as layout:
        return layout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="poison-") as name:
        folder = Path(name)
        write_sample_world(folder / "world", num_users=4, num_items=24)
        outcomes = {"unseen_workspace": unseen_workspace(folder / "world", folder / "unseen")}
        outcomes["hung_row"] = hung_row(folder / "world", folder)
    if options.json:
        options.json.write_text(json.dumps(outcomes, indent=1) + "\n")
    print(json.dumps(outcomes, indent=1))
    row, unseen = outcomes["hung_row"], outcomes["unseen_workspace"]
    is_seen = unseen["seconds"] < 60 and "does not see " in (unseen["said"] or "")
    sys.exit(not (row["it_is_alone"] and row["neighbours_are_identical"] and is_seen))


if __name__ == "__main__":
    main()
