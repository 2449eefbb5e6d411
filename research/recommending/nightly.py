"""The nightly lists: the best items of each user by a recommender over codes, in runs separate from those of texts.

Runs are in the workspace `recommendations/` within the night's workspace. A user with an unchanged history keeps the
list, unless one of its items left the catalogue, or new items came and it is the list's day of the week. A user without
a history gets the most popular items. Workers (`list_worker.py`) make the other lists in shards.
"""

import datetime
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.jobs.console import progress, say
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages.attempt import build_on, new_manifest, newest_attempt, recorded, stage
from laserbatch.jobs.stages.inputs import sound_tables
from laserbatch.jobs.stages.metrics import night_metrics
from laserbatch.jobs.stages.night import earlier_runs
from laserbatch.jobs.stages.publishing import (
    deliver,
    delivery_uri,
    ends_no_night,
    finalize_run,
    publish_run,
    remove_delivered,
    repair_pointer,
)
from laserbatch.jobs.stages.shards import Finished, gather, hand_out, stats_of
from laserbatch.jobs.stages.workers import NightWorkers
from laserbatch.pipeline.distributed.actors import ShardAbandoned, WorkerPool
from laserbatch.pipeline.distributed.cluster import end_leftovers
from laserbatch.pipeline.distributed.tasks import TOKEN_FILE
from laserbatch.pipeline.planning.plan import CARRIED_SHARD, Shard, SidePlan, load_plan, open_plan, write_shard_plan
from laserbatch.pipeline.storage.atomic import remove_folder
from laserbatch.pipeline.storage.figures import (
    BudgetFigures,
    BudgetForecast,
    GateFigures,
    SampleSpan,
    SampleText,
    SideFigures,
)
from laserbatch.pipeline.storage.manifest import RunManifest
from laserbatch.pipeline.storage.parquet import write_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.check import check_tables
from laserbatch.research.recommending.list_worker import TRIED_SHARES, fastest
from laserbatch.research.recommending.listed import Lists, known_models
from laserbatch.research.recommending.lists import (
    CATALOGUE_PATH,
    LISTS_NAME,
    flat_lists,
    has_new_items,
    read_catalogue,
    write_catalogue,
)
from laserbatch.research.recommending.planned import carried_lists, due_lists, listed_drafts, stale_lists, without_had
from laserbatch.research.recommending.settings import ListSpec, RecommendingSettings

NAME = "recommending"  # name of the extension
RECOMMENDATIONS = "recommendations"  # its workspace, a folder in the night's workspace
METRICS_PREFIX = "laserbatch_lists"
SHARDS = 64  # approximate number of shards of a night
SHARD_BATCHES, MAX_BATCHES = 8, 128  # minimum and maximum number of batches of a shard
NUM_SAMPLES = 3
MIN_TRIED = 10  # with fewer shards, drafts would not save the time of a trial


def recommend(settings: Settings, date: datetime.date, force: bool = False) -> RunManifest:
    """Make and publish the lists of a date; a finished run stays as it is, unless `force` asks for another edition.

    Raises ConfigError, ModelError or TableError if settings, models or tables are unusable, WorkspaceError if an
    unfinished run was started from other inputs, RunHeld if a gate blocks the publication.
    """
    with night_metrics(settings, METRICS_PREFIX, RECOMMENDATIONS) as metrics:
        target, catalogue_codes = known_models(settings.extension("recommending"))
        check = partial(check_tables, settings.tables.required_path, None, settings.gates.max_failed_share)
        inputs, tables = sound_tables(settings, date, check)
        lists = Lists(settings, tables, target, catalogue_codes)
        workspace = Workspace.open(Workspace.open(settings.workspace).root / RECOMMENDATIONS)
        with workspace.lock():
            repair_pointer(workspace)
            end_leftovers(workspace.root)
            metrics.manifest = manifest = _opened(workspace, lists, date, inputs, force)
            run = workspace.run(manifest.run_id)
            if run.is_finished:
                say(f"run {run.run_id} is finished already; --force makes every list again")
            else:
                with recorded(manifest):
                    if run.is_held:
                        say(f"run {run.run_id} is done already; its gates are judged again")
                        finalize_run(run, manifest, manifest.judgement.gates, settings.gates)
                    else:
                        _write(workspace, run, manifest, lists)
            _publish(workspace, run, settings)
    return manifest


def _opened(
    workspace: Workspace, lists: Lists, date: datetime.date, inputs: Mapping[str, Any], force: bool
) -> RunManifest:
    """The manifest of the newest run of the date, or of a new edition if that run is finished and `force` is set."""
    settings = lists.settings
    identity = {
        "tables": settings.tables.model_dump(mode="json", exclude={"path"}),
        **settings.extension("recommending").model_dump(include={"num_items", "list_again"}),
        "model": lists.target.model_id,
    }
    attempt = newest_attempt(workspace, date, identity, inputs, force)
    if attempt.manifest is not None:
        if not attempt.is_done:
            say(f"continuing run {attempt.run.run_id}")
        return attempt.manifest
    recorded = settings.model_dump(mode="json", include={"tables": True, "extensions": {NAME}})
    recorded["recommender"] = lists.target.card.model_dump(mode="json")
    manifest = new_manifest(workspace, date, recorded, identity, attempt.edition)
    build_on(manifest, next(reversed(earlier_runs(workspace, manifest.run_id)), None))
    manifest.origin.force, manifest.origin.inputs, manifest.origin.extension = force, dict(inputs), NAME
    manifest.save()
    return manifest


def _write(workspace: Workspace, run: RunFolder, manifest: RunManifest, lists: Lists) -> None:
    previous, schema = lists.schema.empty_table(), lists.schema
    if manifest.origin.previous_run_id is not None:
        batches = list(workspace.run(manifest.origin.previous_run_id).iter_knowledge("user", schema.names))
        if batches:  # empty if the run was removed since
            previous = pa.Table.from_batches(batches).cast(schema)
    with stage(manifest, "plan"):
        (run.root / TOKEN_FILE).unlink(missing_ok=True)  # left by a killed attempt
        catalogue = run.root / CATALOGUE_PATH
        if catalogue.exists():  # kept, since newer texts could change the codes of new items
            lists.catalogue = read_catalogue(catalogue, lists.target.card.sizes)
        else:
            write_catalogue(lists.catalogue, catalogue)
        plan, finished = open_plan(run, "user", lambda: _plan(run, manifest, lists, previous))
    with stage(manifest, "recommend"):
        pending, abandoned = [shard for shard in plan.shards if shard.name not in finished], []
        if pending:
            abandoned = _hand_out(workspace, run, manifest, lists, pending, finished)
    with stage(manifest, "gather"):
        plan = load_plan(run.root, "user") or plan  # with split shards
        user_ids = pa.chunked_array([lists.user_ids])
        reasons, num_stale = gather(
            run, "user", user_ids, finished, abandoned,
            partial(_stale, previous, lists),
        )  # fmt: skip
        write_parquet(flat_lists(run, schema), run.root / LISTS_NAME)
        manifest.generation.sides = {"user": _figures(run, manifest, lists, plan, finished, reasons, num_stale)}
    finalize_run(run, manifest, _measured(manifest, previous.num_rows), lists.settings.gates)


def _stale(previous: pa.Table, lists: Lists, failed: pa.ChunkedArray) -> pa.Table:
    stale = stale_lists(previous, failed.combine_chunks(), lists.catalogue)
    if lists.options.list_again:
        return stale
    return without_had(stale, lists.user_ids, lists.histories, lists.catalogue)


def _plan(run: RunFolder, manifest: RunManifest, lists: Lists, previous: pa.Table) -> SidePlan:
    """Write the lists that need no model, and shards of the other users, ordered by the length of their histories."""
    user_ids, options = lists.user_ids, lists.options
    with progress("plan lists", len(user_ids)) as bar:
        lengths = np.array([len(history) for history in lists.histories], np.int64)
        carried_over = np.full(len(user_ids), -1)
        if not manifest.origin.force:
            carried_over = carried_lists(previous, user_ids, lists.fingerprints, lists.catalogue)
            has_grown = partial(has_new_items, lists.catalogue, run.root.parent)
            is_due = due_lists(previous, manifest.date, has_grown)
            users = np.flatnonzero((carried_over >= 0) & (lengths > 0))
            carried_over[users[is_due[carried_over[users]]]] = -1
        popular = np.flatnonzero((carried_over < 0) & (lengths == 0))
        carried = pa.concat_tables(
            [previous.take(pa.array(carried_over[carried_over >= 0])), lists.popular_lists(popular, manifest.run_id)]
        )
        run.shards("user").write(CARRIED_SHARD, carried)
        users = np.flatnonzero((carried_over < 0) & (lengths > 0))
        users = users[np.argsort(lengths[users], kind="stable")]
        last = np.array([lists.histories[user][-1] for user in users.tolist()], np.int64)
        most = options.num_drafted
        if most is None:
            most = round(max(TRIED_SHARES) * options.num_items)
        most = 0 if options.draft_model is not None else most  # a draft model needs no listed items
        chosen = user_ids.take(pa.array(users))
        planned = {
            "entity_id": chosen,
            "history": pa.array([lists.histories[user] for user in users.tolist()], pa.list_(pa.int32())),
            "drafts": listed_drafts(previous, chosen, last, lists.catalogue, most),
            "fingerprint": lists.fingerprints.take(pa.array(users)),
            "group": lists.catalogue.item_ids.take(pa.array(last)).cast(pa.string()),  # by last item
        }
        rows = pa.table(planned)
        num_batches = np.clip(rows.num_rows // (SHARDS * options.batch_size), SHARD_BATCHES, MAX_BATCHES)
        size = int(num_batches) * options.batch_size
        parts = [rows.slice(start, size) for start in range(0, rows.num_rows, size)]
        shards = tuple(
            write_shard_plan("user", f"{number:05d}", part, run.root, False) for number, part in enumerate(parts)
        )
        bar.advance(len(user_ids))
    routes = {"history": int((lengths > 0).sum()), "popular": int((lengths == 0).sum())}
    return SidePlan("user", len(user_ids), carried.num_rows, 0, routes, shards)


def _hand_out(
    workspace: Workspace, run: RunFolder, manifest: RunManifest, lists: Lists, pending: Sequence[Shard],
    finished: Finished,
) -> list[ShardAbandoned]:  # fmt: skip
    """Hand shards to the workers and add their records to `finished`; return the abandoned shards."""
    options = lists.options
    places = {name: path.resolve() for name in ("model", "draft_model") if (path := getattr(options, name)) is not None}
    spec = ListSpec(
        run_id=run.run_id, run_dir=run.root.resolve(), model_dir=places["model"],
        options=options.model_copy(update=places),
    )  # fmt: skip

    with NightWorkers(lists.settings.cluster, workspace.root) as workers:
        worker_pool = workers.worker_pool(spec)
        num_drafted = _drafted(manifest, options, worker_pool, pending)
        abandoned = hand_out(worker_pool, pending, {"user": finished}, "recommend", lambda _: {"user": num_drafted})
        manifest.generation.workers = workers.figures(worker_pool, len(pending))
    return abandoned


def _drafted(
    manifest: RunManifest, options: RecommendingSettings, worker_pool: WorkerPool, shards: Sequence[Shard]
) -> int:
    """The draft budget of the manifest; if it has none, the configured budget, or else the fastest in a trial."""
    if "user" not in manifest.generation.budgets:
        num_drafted, reason, gain = options.num_drafted, "set by extensions.recommending.num_drafted", None
        if num_drafted is None and options.draft_model is None and manifest.origin.previous_run_id is None:
            num_drafted, reason = 0, "there are no lists of an earlier night"
        elif num_drafted is None and len(shards) < MIN_TRIED:
            num_drafted, reason = 0, "too few users to repay a trial"
        elif num_drafted is None:
            num_drafted, gain = fastest(worker_pool.call_one("measured", "tried_drafts", shards))
            reason = "the fastest number that was tried" if num_drafted else "no draft was faster"
        forecast = BudgetForecast(reason, batch_size=options.batch_size, speed_up=gain)
        manifest.generation.budgets = {"user": BudgetFigures(num_drafted, 0.0, forecast)}
        manifest.save()
        best = "" if gain is None else f": the best was {gain:.2f} times as fast as plain beams"
        say(f"drafted paths for each user: {num_drafted or 'none'} ({reason}{best})")
    return manifest.generation.budgets["user"].max_draft_tokens


def _figures(
    run: RunFolder, manifest: RunManifest, lists: Lists, plan: SidePlan, finished: Finished, reasons: dict[str, int],
    num_stale: int,
) -> SideFigures:  # fmt: skip
    written = [finished[shard.name] for shard in plan.shards if shard.name in finished]
    num_written = sum(record.num_rows for record in written)
    num_items = lists.options.num_items
    by_plan, num_shorter = -num_written, 0  # lists of users without a history are new too
    for batch in run.iter_knowledge("user", ["run_id", "items"]):
        by_plan += pc.sum(pc.equal(batch["run_id"], manifest.run_id)).as_py() or 0
        num_shorter += pc.sum(pc.less(pc.list_value_length(batch["items"]), num_items)).as_py() or 0
    if num_shorter:
        say(f"{num_shorter} users have lists of fewer than {num_items} items (num_items), as they had all other items")
    manifest.judgement.extension_figures = {"num_shorter": num_shorter}
    manifest.generation.model = next((record.written_by.model for record in written), manifest.generation.model)
    return SideFigures(
        num_entities=plan.num_entities, num_generated=by_plan + num_written,
        num_carried_over=plan.num_carried_over - by_plan, num_quarantined=sum(reasons.values()), num_stale=num_stale,
        quarantine_reasons=reasons, routes=plan.routes, shards=written, stats=stats_of(written),
        budget=manifest.generation.budgets.get("user"), samples=_samples(run, lists),
    )  # fmt: skip


def _samples(run: RunFolder, lists: Lists) -> list[SampleText]:
    columns = (lists.tables.items[name].to_pylist() for name in ("item_id", "title"))
    titles = dict(zip(*columns, strict=True))
    samples = []
    for batch in run.iter_knowledge("user", ["entity_id", "items", "route"]):
        batch = batch.filter(pc.equal(batch["route"], "history"))
        for row in batch.slice(0, NUM_SAMPLES - len(samples)).to_pylist():
            user = pc.index(lists.user_ids, pa.scalar(row["entity_id"], lists.user_ids.type)).as_py()
            shown = lists.catalogue.item_ids.take(pa.array(lists.histories[user])).to_pylist()
            history = "\n".join(str(titles.get(item)) for item in shown)
            text = ", ".join(str(titles.get(item)) for item in row["items"])
            samples.append(SampleText(row["entity_id"], None, history, text, [SampleSpan(text, "target")], None))
        if len(samples) == NUM_SAMPLES:
            break
    return samples


def _measured(manifest: RunManifest, num_before: int) -> list[GateFigures]:
    """The values that gates judge; `num_before` is the number of lists of the run before."""
    figures = manifest.generation.sides["user"]
    coverage = (figures.num_entities - figures.num_quarantined) / num_before if num_before else None
    failed = figures.num_quarantined / max(1, figures.num_entities)
    note = "" if num_before else "no run before"
    return [GateFigures("quarantine", "user", failed), GateFigures("coverage", "user", coverage, reason=note)]


def _publish(workspace: Workspace, run: RunFolder, settings: Settings) -> None:
    uri = delivery_uri(workspace, settings.deliver_to)
    publish_run(workspace, run)
    deliver(workspace, uri)
    published = workspace.publication.run_id()
    old = [run for run in workspace.finished_runs() if run.run_id != published][
        : -settings.extension("recommending").keep_runs
    ]
    with ends_no_night("old lists were not removed; the next night tries again"):
        remove_delivered(workspace, uri, [run.run_id for run in old])
        for old_run in old:
            remove_folder(old_run.root)
