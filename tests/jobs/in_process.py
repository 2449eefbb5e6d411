"""Nights that write texts in this process, since each of Ray's workers would first import Python and torch."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

Put = Callable[[object, str, object], None]  # `setattr`, or a replacement that is undone at a test's end


def write_here(put: Put = setattr) -> None:
    """Have texts written in this process instead of by Ray's workers."""
    from laserbatch.jobs.stages import shards
    from laserbatch.pipeline.distributed.worker import ShardWorker

    def run_shards(pending, worker_pool, choose_budgets, on_first_text=None):
        worker = ShardWorker(replace(worker_pool.spec, device="cpu"))
        budgets = choose_budgets(worker)
        for shard in pending:
            yield shard, worker.run(shard, budget=budgets.get(shard.side))

    put(shards, "run_shards", run_shards)
    without_ray(put)


def without_ray(put: Put) -> None:
    """Start no workers for a night; its worker pool only holds the specification."""
    from laserbatch.jobs.stages.workers import NightWorkers
    from laserbatch.pipeline.distributed.cluster import WorkerLayout

    layout = WorkerLayout(1, 1, 0, "cpu")
    put(NightWorkers, "start", lambda self, spec: None)
    put(NightWorkers, "worker_pool", lambda self, spec: SimpleNamespace(spec=spec, layout=layout))
