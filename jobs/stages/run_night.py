"""A night's stages in order, and what is published when. A night that was killed goes on where it stopped."""

import datetime
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from laserbatch.jobs.console import progress, say
from laserbatch.jobs.events import event_log
from laserbatch.jobs.gates import measure
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages.attempt import recorded
from laserbatch.jobs.stages.audit import audit_texts, generate_audited
from laserbatch.jobs.stages.build_pools import collect_pools, prepare_pools
from laserbatch.jobs.stages.compare_ctr import compare_night
from laserbatch.jobs.stages.generate import generate_knowledge, generate_plain
from laserbatch.jobs.stages.metrics import night_metrics
from laserbatch.jobs.stages.night import Night, open_night, pools_in_use
from laserbatch.jobs.stages.publishing import (
    Publishing,
    deliver,
    draw_report,
    end_judged,
    ends_no_night,
    mend_pointer,
    publish_run,
)
from laserbatch.jobs.stages.train_drafter import train_if_due
from laserbatch.jobs.stages.workers import NightWorkers
from laserbatch.pipeline.decoding.model.folder import load_tokenizer
from laserbatch.pipeline.distributed.cluster import end_leftovers
from laserbatch.pipeline.encoding.features import EarlierFeatures, write_features
from laserbatch.pipeline.encoding.identity import encoder_identity
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.errors import RunFailed, WorkspaceError
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.manifest import FeatureFigures, PreviousNight
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.retrieval_pools.settings import KEEP_VERSIONS

if TYPE_CHECKING:
    from laserbatch.pipeline.encoding.encoder import TextEncoder


def run_night(
    settings: Settings,
    date: datetime.date,
    force: bool = False,
    redo: bool = False,
    publishing: Publishing = "forwards",
    after: RunFolder | None = None,
) -> Night:
    """All stages of a night, under the workspace's lock. A finished night is left as it is, but published.

    `force`, `redo` and `after` are those of `open_night`. Raises RunFailed where most of the first texts cannot be
    kept, RunHeld where the night is done and a gate keeps it from being published: by the same command its gates are
    then judged again, and nothing else is done.
    """
    with night_metrics(settings) as metrics, (workspace := Workspace.open(settings.workspace)).lock():
        mend_pointer(workspace)
        if num_ended := end_leftovers(workspace.root):
            say(f"ended {num_ended} processes of Ray that an earlier night of this workspace had left")
        night = open_night(settings, date, force, redo, after)
        metrics.manifest = night.manifest
        if night.run.is_finished:
            say(f"run {night.run.run_id} is finished already; --force generates everything again")
            if night.changed_inputs:
                names = " and ".join(night.changed_inputs)
                say(f"{names} of that date changed since: --redo writes what this changes, in a run of its own")
            publish(night, publishing)
            with event_log(night.run.events_path):
                train_if_due(night, was_finished=True)
        else:
            with recorded(night.manifest):
                _do_stages(night, publishing)
                train_if_due(night, was_finished=False)
        return night


def _do_stages(night: Night, publishing: Publishing) -> None:
    settings = night.settings
    if night.run.is_held:
        say(f"run {night.run.run_id} is done already; its gates are judged again")
        close(night)
        publish(night, publishing)
        return
    with NightWorkers(settings.cluster, night.workspace.root) as workers:
        try:
            generate_knowledge(night, workers)
        except RunFailed as error:
            _close_failed(night, str(error))
            raise
        if settings.night.compare_with_plain:
            generate_plain(night, workers)
        generate_audited(night, workers)
    encode_beside_pools(night)
    audit_texts(night, partial(load_encoder, settings.encoding))
    with night.stage("ctr"):
        night.manifest.ctr = compare_night(night)
    with night.stage("gates"):
        night.manifest.gates = measure(night.manifest, night.run, night.previous)
    close(night)
    publish(night, publishing)


def encode_beside_pools(night: Night) -> None:
    """Encode a night's texts while its pools are built of them in a thread; neither needs the other.

    The stage "pools" is what these take longer, beside the fit of their routers, which comes first.
    """
    encoding = night.settings.encoding
    with night.stage("pools"):
        build = prepare_pools(night, make_current=False)
    if any(figures.num_generated for figures in night.manifest.sides.values()):
        _import_first(night)
    with _aside(build) as built:
        with night.stage("encode"):
            fields = {side: night.template(side).encode for side in SIDES}
            night.manifest.features = encode_run(night.run.root, encoding, night.previous, fields=fields)
            if night.settings.night.compare_with_plain:
                encode_run(night.run.plain.root, encoding, codes_of=night.run, fields=fields)
        with night.stage("pools"):
            night.manifest.pools_built = built.result()


@contextmanager
def _aside(function: Callable[[], Any]) -> Iterator[Future]:
    """Have a function called in a thread, which the block's errors wait for; not so who ends the process."""
    result = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # of a thread: whoever asks for the result meets it
            result.set_exception(error)

    Thread(target=call, daemon=True).start()
    try:
        yield result
    except KeyboardInterrupt:
        raise  # what is half built is nobody's, and swept up by the next night
    except BaseException:
        wait([result])
        raise


def _import_first(night: Night) -> None:
    """Import what texts are both encoded and replayed with: of two threads at it one may be given half a package."""
    import sklearn.cluster
    import sklearn.linear_model
    import sklearn.metrics  # noqa: F401

    load_tokenizer(night.settings.model_dir, night.settings.decoding.adapter)


def encode_run(
    run_dir: Path,
    settings: EncodingSettings | None = None,
    previous: RunFolder | None = None,
    codes_of: RunFolder | None = None,
    fields: Mapping[Side, Collection[str]] | None = None,
) -> dict[Side, FeatureFigures]:
    """Encode `knowledge/<side>/*.parquet` of a run into `features/<side>.parquet` and its centroids, atomically.

    Doing it again writes the same bytes; a side without a text has a file without a row. Raises ModelError where the
    encoder is missing or not the expected one, WorkspaceError where the run has no texts at all.

    Parameters
    ----------
    run_dir : folder of a run, or its `plain` folder.
    previous : a finished run whose codebook, and vectors of texts that were carried over from it, are taken over where
        the encoder is the same.
    codes_of : the run whose plain texts these are: they get the codes of its codebook.
    fields : of each side the parts of its answers that vectors are of; None: of whole texts.
    """
    settings = settings or EncodingSettings()
    folder = RunFolder(Path(run_dir))
    sides = [side for side in SIDES if any(folder.knowledge_folder(side).glob("*.parquet"))]
    if not sides:
        raise WorkspaceError(f"{run_dir} holds no texts to encode")
    encoder_id = encoder_identity(settings)

    encoder = cache(partial(load_encoder, settings))
    figures: dict[Side, FeatureFigures] = {}
    for side in sides:
        num_rows = sum(batch.num_rows for batch in folder.iter_knowledge(side, ["entity_id"]))
        with progress(f"encode {side} texts", num_rows) as bar:
            earlier = _earlier(previous, side, encoder_id, settings.max_text_tokens)
            write = partial(write_features, folder, side, encoder, encoder_id, settings, codes_of=codes_of)
            write = partial(write, on_batch=bar.advance, fields=(fields or {}).get(side, ()))
            try:
                figures[side] = write(earlier)
            except WorkspaceError as error:
                if earlier is None:
                    raise
                say(f"{side} texts are all encoded again: {error}")
                figures[side] = write()
            bar.advance(num_rows - figures[side].num_encoded)
        if num_truncated := figures[side].num_truncated:
            say(f"{num_truncated} {side} texts are longer than the encoder takes and lost their end")
    return figures


def load_encoder(settings: EncodingSettings) -> "TextEncoder":
    """The encoder, which only a text asks for that was not encoded before."""
    from laserbatch.pipeline.encoding.encoder import TextEncoder  # torch and the model take seconds to load

    return TextEncoder.load(settings)


def _earlier(previous: RunFolder | None, side: Side, encoder_id: str, max_text_tokens: int) -> EarlierFeatures | None:
    """Features of a finished run; None when its encoder was another or cut texts elsewhere, or nothing is known."""
    if previous is None or not previous.centroids_path(side).exists() or not previous.features_path(side).exists():
        return None
    manifest = unless_damaged(previous.load_manifest)
    if manifest is None:
        return None
    before = manifest.features.get(side)
    cut_at = manifest.settings.get("encoding", {}).get("max_text_tokens", max_text_tokens)
    if before is None or before.encoder != encoder_id or cut_at != max_text_tokens:
        return None
    return EarlierFeatures(previous, before)


def _close_failed(night: Night, reason: str) -> None:
    """Keep what there is to look at; nothing is published, and the next attempt goes on from the finished shards."""
    night.manifest.status, night.manifest.failure = "failed", reason
    night.manifest.save()
    draw_report(night.run, night.manifest)
    say(f"report of the failed night: {night.run.report_path}")


def close(night: Night) -> None:
    """Finish the run with its report, or hold it back, so that nothing builds on it. Raises RunHeld."""
    manifest = night.manifest
    if night.previous is not None and (earlier := unless_damaged(night.previous.load_manifest)) is not None:
        sides = {side: figures.stats for side, figures in earlier.sides.items()}
        manifest.previous_night = PreviousNight(earlier.run_id, sides)
    end_judged(night.run, manifest, manifest.gates, night.settings.gates)


def publish(night: Night, publishing: Publishing = "forwards") -> None:
    """Let readers see a finished run, and the next night draft from its pools.

    May be called again: whatever a killed night has left of it is done.
    """
    run, workspace = night.run, night.workspace
    publish_run(workspace, run, publishing)
    with ends_no_night("old pools were not removed, the next night tries again"):
        in_use = pools_in_use(workspace) | {run.run_id}  # the next night of a backfill drafts from this one's
        collect_pools(night.pools, KEEP_VERSIONS, in_use)
    if publishing != "never":
        deliver(workspace, night.settings.deliver_to, is_asked=publishing == "always")
