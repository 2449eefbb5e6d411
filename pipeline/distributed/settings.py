"""How many workers, on what, holding how many threads."""

import os

from pydantic import Field

from laserbatch.pipeline.validation import Strict


class ClusterSettings(Strict):
    """Where shards are generated. Nothing here changes a text."""

    ray_address: str | None = Field(
        None,
        description="An existing cluster's; auto: what RAY_ADDRESS names or runs here. null: a local Ray of its own.",
    )
    num_workers: int | None = Field(None, ge=1, description="Actors; null: one per GPU, or one per core group on CPU.")
    threads_per_worker: int | None = Field(None, ge=1, description="Of one worker; null: an eighth of a node's cores.")
    max_shard_attempts: int = Field(
        2, ge=1, description="A shard whose worker was lost this often is halved; a row alone goes to quarantine."
    )
    start_timeout_s: float = Field(
        600.0, gt=0, allow_inf_nan=False,
        description="Seconds that Ray may take to start, and a cluster to give the first worker a place; an autoscaler "
        "that starts GPU nodes may need more.",
    )  # fmt: skip
    price_per_hour: float | None = Field(
        None, ge=0, description="Of the whole cluster, in any currency: plans and reports then tell what a night costs."
    )


def workers_of_node(num_workers: int, num_threads: int) -> int:
    """How many of a run's workers work on this machine, at most: as many as its cores have room for."""
    return min(num_workers, max(1, usable_cores() // num_threads))


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
