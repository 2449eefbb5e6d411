"""What readers see, and what the next night drafts from, switched together."""

from laserbatch.jobs.console import say
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.store import PoolStore


def let_readers_see(workspace: Workspace, run_id: str) -> None:
    """Publish a finished run, and have the next night draft from its pools where they are there and whole."""
    use_pools_of(workspace, run_id)
    workspace.publish(run_id)


def use_pools_of(workspace: Workspace, run_id: str) -> None:
    """Have the next night draft from the pools of a run; where they are gone or damaged it is said, and none change."""
    try:
        PoolStore(workspace.pools_folder).use(run_id)
    except PoolError as error:
        say(f"the pools stay as they are: {error} `laserbatch pools rebuild --run {run_id}` builds them again")
