"""Publishes and delivers runs, and makes their pools current, so that readers and the next night switch together."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from laserbatch.jobs.console import say
from laserbatch.jobs.events import emit
from laserbatch.jobs.extensions import extension
from laserbatch.jobs.failures import line_of
from laserbatch.jobs.formatting import counted
from laserbatch.jobs.gates import blocking, gate_sentence, has_option, judge
from laserbatch.jobs.report.page import write_report
from laserbatch.jobs.settings import GateSettings
from laserbatch.pipeline.errors import ConfigError, LaserbatchError, NotDelivered, NotReached, RunHeld, WorkspaceError
from laserbatch.pipeline.storage.delivery import PLACES, Destination, deliveries, record_delivery, remember_place
from laserbatch.pipeline.storage.figures import GateFigures
from laserbatch.pipeline.storage.lake import DELTA, LakeTables, is_lake
from laserbatch.pipeline.storage.manifest import RunManifest
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.uris import filesystem_of
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.store import PoolStore

logger = logging.getLogger("laserbatch")

# "if-newer" publishes a run unless a run of a later date is published, or this run was rolled back.
PublishPolicy = Literal["if-newer", "always", "never"]


def finalize_run(run: RunFolder, manifest: RunManifest, measured: Sequence[GateFigures], limits: GateSettings) -> None:
    """Judge a completely written run, draw its report, and finish or hold it. Raises RunHeld."""
    manifest.judgement.gates = judge(measured, limits)
    held_by = blocking(manifest.judgement.gates)
    manifest.status, manifest.failure = "held" if held_by else "success", None
    manifest.save()
    draw_report(run, manifest)
    emit(manifest.status.replace("success", "finished"), run_id=run.run_id)
    run.finish(is_held=bool(held_by))
    if held_by:
        or_else = ", or change the gates' options and give the same command again, which writes no text again"
        raise RunHeld(
            f"run {run.run_id} is done but not published: {'; '.join(map(gate_sentence, held_by))}. Look at "
            f"{run.report_path}; then publish it anyway with {command_to_publish(run)}"
            f"{or_else if any(map(has_option, held_by)) else ''}"
        )


@contextmanager
def ends_no_night(what_fails: str) -> Iterator[None]:
    """Log an error of the block instead of raising it: the run is published already, so its night succeeded."""
    try:
        yield
    except (LaserbatchError, OSError) as error:
        logger.warning("%s: %s", what_fails, line_of(error))
    except Exception as error:  # out of memory, or our own fault, whose traceback is shown
        logger.exception("%s: %s", what_fails, line_of(error, names_values=False))


def command_to_publish(run: RunFolder) -> str:
    """The command that publishes a run, for messages; it names the workspace, which may be an extension's."""
    return f"`laserbatch runs publish {run.run_id} --workspace {run.workspace}`"


def draw_report(run: RunFolder, manifest: RunManifest) -> None:
    """Write or replace the page of a run."""
    write = write_report if manifest.origin.extension is None else extension(manifest.origin.extension).write_report
    write(manifest, run.report_path)


def publish_run(workspace: Workspace, run: RunFolder, policy: PublishPolicy = "if-newer") -> None:
    """Publish a finished run by a policy, or print why not. May be called again."""
    published = None
    try:
        published = workspace.publication.run()
    except WorkspaceError as error:
        say(f"{error} Run {run.run_id} replaces it")
    if policy == "never" or (published is not None and published.run_id == run.run_id):
        return
    how = f"{command_to_publish(run)} publishes it"
    if policy == "if-newer" and published is not None and published.date > run.date:
        say(f"run {run.run_id} is not published: run {published.run_id}, of a later date, stays published; {how}")
    elif policy == "if-newer" and run.run_id in workspace.publication.rolled_back():
        say(f"not published: run {run.run_id} was rolled back; {how}")
    else:
        force_publish(workspace, run.run_id)
        is_other = published is not None and published.settings_hash != run.settings_hash
        if published is not None and is_other and published.run_id not in run.ancestor_run_ids:  # not merely edited
            say(f"readers see run {run.run_id} now, and no longer {published.run_id}, which has other settings")
        emit("published", run_id=run.run_id)


def force_publish(workspace: Workspace, run_id: str) -> None:
    """Publish a finished run, even one that a gate holds; the next night drafts from its pools if they are whole.

    Raises WorkspaceError if a file of the run is missing.
    """
    run = workspace.run(run_id)
    run.require_whole()
    if run.is_held:
        manifest = run.load_manifest()
        manifest.status = "success"
        manifest.save()
        draw_report(run, manifest)
        run.finish()
    use_pools_of(workspace, run_id)
    workspace.publication.publish(run_id)


def repair_pointer(workspace: Workspace) -> None:
    """Restore the pointer to the run that was published last, if the pointer is lost or damaged, or its run is gone."""
    if run_id := workspace.publication.repair():
        say(f"published.json was missing, invalid or named a removed run; it is restored to the last one, {run_id}")


def use_pools_of(workspace: Workspace, run_id: str) -> None:
    """Let the next night draft from the pools of a run; if they are missing or damaged, only print that.

    The current pools then stay, unless their run was rolled back: then no pools are current.
    """
    if workspace.is_within:
        return
    store = PoolStore(workspace.pools_folder)
    try:
        store.use(run_id)
    except PoolError as error:
        if store.use_none_of(workspace.publication.not_built_on()):
            say(f"no pools are current, because the current ones belong to a run that was rolled back: {error}")
        else:
            say(f"the current pools do not change: {error}")


def delivery_uri(workspace: Workspace, deliver_to: str | None) -> str | None:
    """The URI to which a workspace's runs are delivered: for an extension, a folder below `deliver_to`."""
    return f"{deliver_to.rstrip('/')}/{workspace.root.name}" if deliver_to and workspace.is_within else deliver_to


def destination_of(workspace: Path, uri: str) -> Destination | LakeTables:
    """The destination at a URI. Raises the errors of the `at` methods, and ConfigError if it overlaps the workspace."""
    destination = LakeTables.at(uri) if is_lake(uri) else Destination.at(uri)
    place, root = uri.removeprefix(DELTA), workspace.resolve()
    if place.startswith("file://"):
        folder = Path(filesystem_of(place)[1] or "/").resolve()
        if folder.is_relative_to(root) or root.is_relative_to(folder / "runs"):
            raise ConfigError(f"deliver_to: {uri} is inside the workspace {root}, or contains it; give another place")
    return destination


def require_place(workspace: Workspace, uri: str) -> None:
    """Raise LaserbatchError if runs cannot be delivered to a URI; a lake is only read."""
    destination = destination_of(workspace.root, uri)
    _run_there(workspace, destination)
    if isinstance(destination, Destination):
        destination.require_writable()


def deliver(workspace: Workspace, uri: str | None, force: bool = False) -> None:
    """Copy the published run to a URI for its readers; without a published run, do nothing.

    Without a URI nothing is delivered; with `force`, other places that earlier got another run are named. Lake tables
    take only features, so nothing of an extension. Without `force`, a run of a later date at the URI stays, unless it
    was rolled back here. Raises NotDelivered if the run cannot be copied there, or another WorkspaceError if it must
    not be.
    """
    run_id = workspace.publication.run_id()
    if run_id is None:
        return
    for place, last in deliveries(workspace.root).items() if force else ():
        if last["run_id"] != run_id and place != (uri or "").rstrip("/"):
            say(
                f"WARNING: run {run_id} is not delivered to {place}, which has {last['run_id'] or 'no run'}, "
                f"because deliver_to is {uri or 'not set'}: give this command that place's configuration with --config"
            )
    if uri is None:
        return
    try:
        run, destination = workspace.chosen_run(None), destination_of(workspace.root, uri)
        if isinstance(destination, LakeTables) and workspace.is_within:
            say(f"run {run_id} of {workspace.root.name} is not delivered: {uri} takes only features")
            return
        delivered = _run_there(workspace, destination)
        if not force and delivered[:10] > run.date and delivered not in workspace.publication.rolled_back():
            say(
                f"not delivered: {uri} has run {delivered}, of a later date; {command_to_publish(run)} delivers it, "
                "with the night's --config"
            )
            return
        run.require_whole()
        remember_place(workspace.root, uri)
        sent = destination.deliver(run)
    except LaserbatchError as error:
        kind = NotDelivered if isinstance(error, NotDelivered | NotReached) else WorkspaceError
        raise kind(
            f"run {run_id} is published here, but not delivered to {uri}. To deliver it, give the night's command "
            f"again, or {command_to_publish(workspace.run(run_id))} with the night's --config. {error}"
        ) from None
    record_delivery(workspace.root, uri, run_id)
    transferred = f"{counted(sent.num_files, 'file')} ({sent.num_bytes / 1e6:,.1f} MB) sent"
    say(f"run {run_id} is delivered to {uri}: {transferred if sent.num_files else 'every file was there already'}")
    emit("delivered", run_id=run_id, to=uri, num_files=sent.num_files, num_bytes=sent.num_bytes)


def _run_there(workspace: Workspace, destination: Destination | LakeTables) -> str:
    """The run that readers at a place see, or "". Raises WorkspaceError if it is a run of another workspace.

    Such a run may have the same id, since an id depends only on the date and the settings.
    """
    run_id, uri = str(destination.published().get("run_id", "")), destination.uri
    if not run_id:
        return ""
    last, run = deliveries(workspace.root).get(uri.rstrip("/")), workspace.run(run_id)
    if not run.root.is_dir():
        is_ours = last is not None and last["run_id"] == run_id
    else:
        is_ours = destination.has(run) if isinstance(destination, Destination) else last is not None
    if not is_ours:
        raise WorkspaceError(
            f"{uri} has run {run_id}, which is not of this workspace, and two workspaces must not deliver to one "
            "place. Give another place, or delete its contents if that workspace no longer exists, or if this "
            "workspace was restored from an older copy"
        )
    return run_id


def remove_delivered(workspace: Workspace, uri: str | None, run_ids: Sequence[str]) -> None:
    """Delete those runs at a URI that were deleted here."""
    if uri is not None and run_ids:
        _run_there(workspace, destination := destination_of(workspace.root, uri))
        for run_id in destination.remove(run_ids):
            say(f"removed from {uri}: {run_id}")


def forget_delivered(workspace: Workspace, uri: str | None) -> dict[str, str]:
    """After rows were removed here, copy every delivered run to a URI again, and delete runs that are not here.

    Returns by run what was done: "sent again", "as it was" or "removed". Raises WorkspaceError if runs were delivered
    to a lake that now shows none, since an unreadable table looks like a missing one.
    """
    if uri is None:
        return {}
    destination = destination_of(workspace.root, uri)
    here = {run.run_id: run for run in workspace.runs() if run.is_finished}
    _run_there(workspace, destination)
    delivered = destination.runs()
    if is_lake(uri) and not delivered:
        last = deliveries(workspace.root).get(uri.rstrip("/"), {}).get("run_id")
        if last in here:
            raise WorkspaceError(
                f"{uri}: found no table with rows, but {last} was delivered there. Make the tables readable here "
                f"and give the command again; if they were deleted, remove the place from {workspace.root / PLACES}"
            )
    kept = [run_id for run_id in delivered if run_id in here]
    for run_id in kept:
        here[run_id].require_whole()  # a file that is missing here would be removed there
    done = {run_id: "sent again" if destination.copy(here[run_id]).num_files else "as it was" for run_id in kept}
    deliver(workspace, uri)
    removed = destination.remove([run_id for run_id in delivered if run_id not in here])
    done |= dict.fromkeys(removed, "removed")
    if is_lake(uri) and delivered:
        say(
            f"WARNING: earlier versions of the tables at {uri} still hold removed rows. Remove these versions: in "
            "Delta Lake with VACUUM, in Iceberg with expire_snapshots and remove_orphan_files"
        )
    return done
