"""Old pool versions removed, and said so: by `laserbatch pools gc`, and at the end of every night."""

from collections.abc import Collection

from laserbatch.jobs.console import say
from laserbatch.retrieval_pools.index.store import Collected, PoolStore


def collect_pools(store: PoolStore, keep: int, in_use: Collection[str], dry_run: bool = False) -> Collected:
    """Remove what `PoolStore.collect` may, under the workspace's lock.

    Parameters
    ----------
    keep : newest versions that stay.
    in_use : versions that unfinished runs draft from.
    dry_run : only say what would go.
    """
    collected = store.collect(keep, in_use, dry_run)
    megabytes = f"{collected.num_bytes / 1e6:,.1f} MB"
    if collected.versions or collected.num_leftovers:
        parts = [f"pools {', '.join(collected.versions)}"] if collected.versions else []
        parts += [f"{collected.num_leftovers} leftovers of dead builders"] if collected.num_leftovers else []
        say(f"{'would remove' if dry_run else 'removed'} {' and '.join(parts)} ({megabytes})")
    return collected
