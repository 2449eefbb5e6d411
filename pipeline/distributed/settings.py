"""The settings of the cluster, and the number of workers and cores of a machine."""

from pydantic import Field

from laserbatch.pipeline.validation import Strict


class ClusterSettings(Strict):
    """The cluster on which texts are written. No option here changes a text."""

    ray_address: str | None = Field(
        default=None,
        description="The night uses the Ray cluster at this address. auto: the cluster that RAY_ADDRESS names or that"
        " runs on this machine. null: the night starts a local Ray.",
    )
    num_workers: int | None = Field(
        default=None, ge=1,
        description="This many workers write texts; if there are fewer GPUs, several share one. null: two for each GPU "
        "whose free memory holds both, otherwise one; without GPUs about eight on the largest node, at most one per "
        "core, and equally large ones on the others.",
    )  # fmt: skip
    start_timeout_s: float = Field(
        default=600.0, gt=0, le=604_800,
        description="Ray has this many seconds to start, and the cluster the same to place the first worker. Raise it"
        " if an autoscaler starts GPU nodes.",
    )  # fmt: skip
    price_per_hour: float | None = Field(
        default=None, ge=0,
        description="The whole cluster costs this much per hour, in any currency; plans and reports then show the cost "
        "of a night. null: they show no cost.",
    )  # fmt: skip


def workers_of_node(num_workers: int, num_threads: int) -> int:
    """The largest number of a run's workers on this machine: as many as its cores have room for."""
    return min(num_workers, max(1, usable_cores() // num_threads))


def usable_cores() -> int:
    """The number of cores for this process, by its affinity, its container's quota and LOKY_MAX_CPU_COUNT."""
    from joblib import cpu_count  # takes a while to import

    return cpu_count()
