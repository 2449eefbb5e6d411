"""The nightly lists: each user's best items by a recommender over codes, in runs of their own beside those of texts.

A run is a folder as any other, in the workspace `recommendations/` within the workspace. Who has the same history keeps
the list, unless one of its items has left the catalogue; who has none gets what most others have. The others are given
to workers in shards; `pipeline/distributed/list_worker.py` is one.
"""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.jobs.console import progress, say
from laserbatch.jobs.events import emit
from laserbatch.jobs.failures import end_at_sigterm
from laserbatch.jobs.gates import gate_sentence, holding, judge
from laserbatch.jobs.recording import recorded, stage
from laserbatch.jobs.report.lists import write_lists_report
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages.inputs import changed_inputs, sound_tables
from laserbatch.jobs.stages.listed import Lists, known_models
from laserbatch.jobs.stages.night import describe_machine
from laserbatch.jobs.stages.publishing import deliver, delivery_uri, let_readers_see, mend_pointer, remove_delivered
from laserbatch.jobs.stages.workers import NightWorkers
from laserbatch.pipeline.distributed.actors import Crew, ShardAbandoned, run_shards
from laserbatch.pipeline.distributed.cluster import end_leftovers
from laserbatch.pipeline.distributed.loading import TOKEN_FILE
from laserbatch.pipeline.distributed.spec import ListSpec
from laserbatch.pipeline.errors import ConfigError, RunHeld, WorkspaceError
from laserbatch.pipeline.planning.plan import (
    CARRIED_SHARD,
    KEPT_SHARD,
    Shard,
    SidePlan,
    load_plan,
    open_plan,
    write_shard_plan,
)
from laserbatch.pipeline.recommending.lists import CATALOGUE_PATH, flat_lists, read_catalogue, write_catalogue
from laserbatch.pipeline.recommending.planned import kept_lists, listed_drafts, stale_lists
from laserbatch.pipeline.recommending.trial import TRIED_SHARES, fastest
from laserbatch.pipeline.storage.atomic import remove_folder
from laserbatch.pipeline.storage.manifest import (
    BudgetFigures,
    BudgetForecast,
    GateFigures,
    RunManifest,
    SampleSpan,
    SampleText,
    ShardRecord,
    SideFigures,
    WorkerFigures,
    make_run_id,
)
from laserbatch.pipeline.storage.parquet import write_parquet
from laserbatch.pipeline.storage.quarantine import count_reasons
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.pipeline.storage.workspace import RECOMMENDATIONS, Workspace
from laserbatch.pipeline.tables.check import check_tables

SHARDS = 64  # about, of a night; of these batches each at least, and at most
SHARD_BATCHES, MOST_BATCHES = 8, 128
NUM_SAMPLES = 3
LEAST_TRIED = 10  # shards of a night, below which what drafts gain would not repay trying them


def recommend(settings: Settings, date: datetime.date, force: bool = False) -> RunManifest:
    """The lists of a date, published; a finished run is left as it is, unless `force` asks for another edition.

    Raises ConfigError, ModelError, TableError for what cannot be recommended from, WorkspaceError where an unfinished
    run was started from other inputs, RunHeld where a gate keeps it back.
    """
    if settings.recommending.model is None:
        raise ConfigError("recommending.model names no recommender; `laserbatch recommender train` makes one")
    if settings.tables.path is None:
        raise ConfigError("no input tables: set tables.path in the configuration; `laserbatch init TABLES` writes one")
    target, catalogue_codes = known_models(settings.recommending)
    check = partial(check_tables, settings.tables.path, None, settings.gates.max_failed_share)
    inputs, tables = sound_tables(settings, date, check)
    lists = Lists(settings, tables, target, catalogue_codes)
    workspace = Workspace.open(Workspace.open(settings.workspace).root / RECOMMENDATIONS)
    with workspace.lock():
        mend_pointer(workspace)
        end_leftovers(workspace.root)
        manifest = _opened(workspace, settings, lists, date, inputs, force)
        run = workspace.run(manifest.run_id)
        if run.is_finished:
            say(f"run {run.run_id} is finished already; --force makes every list again")
        else:
            with recorded(manifest):
                _write(workspace, run, manifest, lists)
        _publish(workspace, run, settings)
    return manifest


def _opened(
    workspace: Workspace, settings: Settings, lists: Lists, date: datetime.date, inputs: Mapping[str, Any], force: bool
) -> RunManifest:
    """The manifest of the newest run of the date, or of another edition where that is finished and `force` asks."""
    identity = {
        "tables": settings.tables.model_dump(mode="json", exclude={"path"}),
        "num_items": settings.recommending.num_items,
        "model": lists.target.model_id,
    }
    edition = 1
    while workspace.run(make_run_id(date, identity, edition + 1)).manifest_path.exists():
        edition += 1
    run = workspace.run(make_run_id(date, identity, edition))
    if force and (run.is_finished or run.is_held):
        edition += 1
        run = workspace.run(make_run_id(date, identity, edition))
    if run.manifest_path.exists():
        manifest = RunManifest.load(run.manifest_path)
        if not run.is_finished and (changed := changed_inputs(manifest.inputs, inputs)):
            raise WorkspaceError(
                f"run {run.run_id} was started from other inputs ({', '.join(changed)} changed since); restore them to "
                f"finish it, or delete {run.root} to start it anew"
            )
        return manifest
    told = settings.model_dump(mode="json", include={"tables", "recommending"})
    told["recommender"] = lists.target.card.model_dump(mode="json")
    manifest = RunManifest.create(
        run.manifest_path, date, told, version("laserbatch"), describe_machine(), edition, identity
    )
    earlier = [other for other in workspace.dated_runs() if other.date <= run.date and other.run_id != run.run_id]
    manifest.previous_run_id = earlier[-1].run_id if earlier else None
    manifest.force, manifest.inputs = force, dict(inputs)
    manifest.save()
    return manifest


def _write(workspace: Workspace, run: RunFolder, manifest: RunManifest, lists: Lists) -> None:
    """Make the lists that are not there yet, check that nobody is missing, and finish the run."""
    previous, schema = lists.schema.empty_table(), lists.schema
    if manifest.previous_run_id is not None:
        batches = list(workspace.run(manifest.previous_run_id).iter_knowledge("user", schema.names))
        if batches:  # none where it was removed since
            previous = pa.Table.from_batches(batches).cast(schema)
    with stage(manifest, "plan"):
        (run.root / TOKEN_FILE).unlink(missing_ok=True)  # of an attempt that was killed
        catalogue = run.root / CATALOGUE_PATH
        if catalogue.exists():  # texts, whose vectors new items' codes go by, may have been written since
            lists.catalogue = read_catalogue(catalogue, lists.target.card.sizes)
        else:
            write_catalogue(lists.catalogue, catalogue)
        plan, finished = open_plan(run, "user", lambda: _plan(run, manifest, lists, previous))
    with stage(manifest, "recommend"):
        pending, abandoned = [shard for shard in plan.shards if shard.name not in finished], []
        if pending:
            abandoned = _hand_out(workspace, run, manifest, lists, pending, finished)
    with stage(manifest, "gather"):
        plan = load_plan(run.root, "user") or plan  # with halves of shards
        more = [row for lost in abandoned for row in lost.rows(run.root)]
        run.merge_quarantine("user", finished.values(), more, lists.user_ids.type)
        failed = run.read_quarantine("user", ["entity_id"])["entity_id"].combine_chunks()
        stale = stale_lists(previous, failed.cast(lists.user_ids.type), lists.catalogue)
        if stale.num_rows:
            run.write_shard("user", KEPT_SHARD, stale)
        run.require_every_entity("user", pa.chunked_array([lists.user_ids]))
        write_parquet(flat_lists(run, schema), run.lists_path)
        manifest.sides = {"user": _figures(run, manifest, lists, plan, finished, stale.num_rows)}
    _close(run, manifest, lists.settings, previous.num_rows)


def _plan(run: RunFolder, manifest: RunManifest, lists: Lists, previous: pa.Table) -> SidePlan:
    """Write what needs no model, and the shards of what does; users side by side have histories of like length."""
    user_ids, options = lists.user_ids, lists.settings.recommending
    with progress("plan lists", len(user_ids)) as bar:
        lengths = np.array([len(one) for one in lists.histories], np.int64)
        kept = np.full(len(user_ids), -1)
        if not manifest.force:
            kept = kept_lists(previous, user_ids, lists.fingerprints, lists.catalogue)
        popular = np.flatnonzero((kept < 0) & (lengths == 0))
        carried = pa.concat_tables(
            [previous.take(pa.array(kept[kept >= 0])), lists.popular_lists(popular, manifest.run_id)]
        )
        run.write_shard("user", CARRIED_SHARD, carried)
        users = np.flatnonzero((kept < 0) & (lengths > 0))
        users = users[np.argsort(lengths[users], kind="stable")]
        last = np.array([lists.histories[user][-1] for user in users.tolist()], np.int64)
        most = options.num_drafted
        if most is None:
            most = round(max(TRIED_SHARES) * options.num_items)
        most = 0 if options.draft_model is not None else most  # which drafts by itself
        chosen = user_ids.take(pa.array(users))
        rows = pa.table(
            {
                "entity_id": chosen,
                "history": pa.array([lists.histories[user] for user in users.tolist()], pa.list_(pa.int32())),
                "drafts": listed_drafts(previous, chosen, last, lists.catalogue, most),
                "fingerprint": lists.fingerprints.take(pa.array(users)),
                "group": lists.catalogue.item_ids.take(pa.array(last)).cast(pa.string()),  # whose users' lists draft
            }
        )
        num_batches = np.clip(rows.num_rows // (SHARDS * options.batch_size), SHARD_BATCHES, MOST_BATCHES)
        size = int(num_batches) * options.batch_size
        parts = [rows.slice(start, size) for start in range(0, rows.num_rows, size)]
        shards = tuple(write_shard_plan("user", number, part, run.root, False) for number, part in enumerate(parts))
        bar.advance(len(user_ids))
    routes = {"history": int((lengths > 0).sum()), "popular": int((lengths == 0).sum())}
    return SidePlan("user", len(user_ids), carried.num_rows, 0, routes, shards)


def _hand_out(
    workspace: Workspace, run: RunFolder, manifest: RunManifest, lists: Lists, pending: Sequence[Shard],
    finished: dict[str, ShardRecord],
) -> list[ShardAbandoned]:  # fmt: skip
    """Have workers make the lists of shards, which are added to the finished ones; returns those that were given up."""
    settings, abandoned, num_done = lists.settings, [], 0
    draft_model = settings.recommending.draft_model
    spec = ListSpec(
        run_id=run.run_id,
        run_dir=run.root.resolve(),
        model_dir=settings.recommending.model.resolve(),
        options=settings.recommending.model_copy(
            update={"draft_model": None if draft_model is None else draft_model.resolve()}
        ),
    )
    num_users = sum(shard.num_rows for shard in pending)
    say(f"recommend: {num_users} lists in {len(pending)} shards; starting workers")
    with NightWorkers(settings.cluster, workspace.root) as workers, progress("recommend", num_users) as bar:
        crew = workers.crew(spec)
        end_at_sigterm()
        num_drafted = _drafted(manifest, settings, crew, pending)
        for outcome in run_shards(pending, crew, lambda _: {"user": num_drafted}):
            end_at_sigterm()
            if isinstance(outcome, ShardAbandoned):
                abandoned.append(outcome)
                emit("shard_abandoned", side="user", shard=outcome.shard.name, reason=outcome.reason)
                continue
            shard, record = outcome
            finished[shard.name] = record
            num_done += shard.num_rows
            emit("shard_done", side="user", shard=shard.name, rows=shard.num_rows, done=num_done, total=num_users,
                 quarantined=record.num_quarantined)  # fmt: skip
            bar.advance(shard.num_rows)
        workers_used = min(crew.layout.num_workers, len(pending))
        manifest.workers = WorkerFigures(
            workers_used, crew.layout.num_threads, crew.layout.device, settings.cluster.price_per_hour
        )
    end_at_sigterm()
    return abandoned


def _drafted(manifest: RunManifest, settings: Settings, crew: Crew, shards: Sequence[Shard]) -> int:
    """How much is drafted: that of the manifest, else as configured, else what was fastest when it was tried."""
    if "user" not in manifest.budgets:
        wanted, reason, gain = settings.recommending.num_drafted, "as recommending.num_drafted says", None
        if wanted is None and len(shards) < LEAST_TRIED:
            wanted, reason = 0, "too few users to repay a trial"
        elif wanted is None:
            wanted, gain = fastest(crew.ask_one("tried_drafts", shards))
            reason = "the fastest of those tried" if wanted else "no draft was faster"
        forecast = BudgetForecast(reason, batch_size=settings.recommending.batch_size, speed_up=gain)
        manifest.budgets = {"user": BudgetFigures(wanted, 0.0, forecast)}
        manifest.save()
        told = "" if gain is None else f": the best was {gain:.2f} times plain beams"
        say(f"drafted for a user: {wanted or 'nothing'} ({reason}{told})")
    return manifest.budgets["user"].max_draft_tokens


def _figures(
    run: RunFolder, manifest: RunManifest, lists: Lists, plan: SidePlan, finished: Mapping[str, ShardRecord],
    num_kept: int,
) -> SideFigures:  # fmt: skip
    written = [record for name, record in finished.items() if name not in (CARRIED_SHARD, KEPT_SHARD)]
    by_plan = sum(
        pc.sum(pc.equal(batch["run_id"], manifest.run_id)).as_py() or 0
        for batch in run.iter_knowledge("user", ["run_id"])
    ) - sum(record.num_rows for record in written)  # of users without a history
    quarantine = run.read_quarantine("user", ["reason"])
    manifest.model = next((record.info.model for record in written), manifest.model)
    return SideFigures(
        num_entities=plan.num_entities,
        num_generated=by_plan + sum(record.num_rows for record in written),
        num_carried_over=plan.num_carried_over - by_plan,
        num_quarantined=quarantine.num_rows,
        num_kept=num_kept,
        quarantine_reasons=count_reasons(quarantine),
        routes=plan.routes,
        shards=written,
        stats=DecodingStats.total(
            replace(one.info.stats, wall_s=one.info.stats.wall_s / one.info.num_workers) for one in written
        ),
        budget=manifest.budgets.get("user"),
        samples=_samples(run, lists),
    )


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


def _close(run: RunFolder, manifest: RunManifest, settings: Settings, num_before: int) -> None:
    """Judge and finish the run. Raises RunHeld."""
    figures = manifest.sides["user"]
    coverage = (figures.num_entities - figures.num_quarantined) / num_before if num_before else None
    failed = figures.num_quarantined / max(1, figures.num_entities)
    told = "" if num_before else "no run before"
    measured = GateFigures("quarantine", "user", failed), GateFigures("coverage", "user", coverage, told=told)
    manifest.gates = judge(measured, settings.gates)
    held_by = holding(manifest.gates)
    manifest.status = "held" if held_by else "success"
    manifest.save()
    write_lists_report(manifest, run.report_path)
    emit("held" if held_by else "finished", run_id=run.run_id)
    run.finish(is_held=bool(held_by))
    if held_by:
        told = "; ".join(map(gate_sentence, held_by))
        raise RunHeld(
            f"run {run.run_id} is done but not published: {told}. Look at {run.report_path}; then publish it all the "
            f"same with `laserbatch runs publish {run.run_id} --workspace {run.root.parent.parent}`, or change the "
            "limit and give the same command again"
        )


def _publish(workspace: Workspace, run: RunFolder, settings: Settings) -> None:
    """Let readers see a finished run, here and where it is delivered to, and remove runs that are too old."""
    published, uri = workspace.published(), delivery_uri(workspace, settings.deliver_to)
    if published is not None and published.date > run.date:
        say(f"not published: readers go on seeing the lists of {published.run_id}, of a later date")
    elif run.run_id in workspace.withdrawn():
        say(f"not published: run {run.run_id} was taken back; `laserbatch runs publish` changes that")
    elif published is None or published.run_id != run.run_id:
        let_readers_see(workspace, run.run_id)
    deliver(workspace, uri)
    kept = workspace.pointed_to()
    old = [one for one in workspace.dated_runs() if one.run_id != kept][: -settings.recommending.keep_runs]
    remove_delivered(uri, [one.run_id for one in old])
    for one in old:
        remove_folder(one.root)
