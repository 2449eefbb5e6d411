"""What readers see, and what the next night drafts from, switched together."""

from laserbatch.jobs.console import say
from laserbatch.jobs.report.page import write_report
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.store import PoolStore


def let_readers_see(workspace: Workspace, run_id: str) -> None:
    """Publish a finished run, and have the next night draft from its pools where they are there and whole.

    A run that gates hold back is published all the same: somebody has asked for it by name.
    """
    run = workspace.run(run_id)
    if run.is_held:
        manifest = run.load_manifest()
        manifest.status = "success"
        manifest.save()
        write_report(manifest, run.report_path)
        run.finish()
    use_pools_of(workspace, run_id)
    workspace.publish(run_id)


def use_pools_of(workspace: Workspace, run_id: str) -> None:
    """Have the next night draft from the pools of a run; where they are gone or damaged it is said, and none change."""
    try:
        PoolStore(workspace.pools_folder).use(run_id)
    except PoolError as error:
        say(f"the pools stay as they are: {error} `laserbatch pools rebuild --run {run_id}` builds them again")
