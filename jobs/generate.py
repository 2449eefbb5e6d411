"""`laserbatch generate`: knowledge for every entity of a date, drafted from the published pools.

Owns the stage's order: plan both sides, hand the unfinished shards to the workers, gather counts into the manifest.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import typer

from laserbatch.jobs.budgets import night_budgets
from laserbatch.jobs.console import progress, say, summary
from laserbatch.jobs.drift import note_step_costs
from laserbatch.jobs.night import Night, open_night, parse_date
from laserbatch.jobs.sample_model import NEEDS_A_MODEL, needs_a_model
from laserbatch.jobs.samples import report_samples
from laserbatch.jobs.settings import CONFIG, WORKSPACE, load_settings
from laserbatch.jobs.side_warnings import side_warnings
from laserbatch.pipeline.decoding.budget import PLAIN, Budget
from laserbatch.pipeline.decoding.model.generation_rules import unused_settings
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.distributed.actors import ShardAbandoned, run_shards
from laserbatch.pipeline.distributed.cluster import ray_cluster
from laserbatch.pipeline.distributed.worker import Scout, WorkerSpec
from laserbatch.pipeline.errors import RunFailed, WorkspaceError
from laserbatch.pipeline.knowledge.entities import Entity, iter_entities
from laserbatch.pipeline.planning.plan import (
    KEPT_SHARD,
    Shard,
    SidePlan,
    drop_plan,
    load_plan,
    open_plan,
    read_shard,
)
from laserbatch.pipeline.planning.planner import FIRST_TEXTS, plan_side
from laserbatch.pipeline.planning.previous import PreviousKnowledge
from laserbatch.pipeline.planning.prompting import prompt_renderer
from laserbatch.pipeline.planning.routing import entity_router, no_route
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.completeness import require_every_entity
from laserbatch.pipeline.storage.manifest import ShardFigures, SideFigures, WorkerFigures
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.quarantine import QuarantineRow, count_reasons
from laserbatch.pipeline.storage.run_folder import RunFolder, ShardRecord
from laserbatch.pipeline.storage.stats import DecodingStats, LengthHistogram
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.retrieval_pools.drafting.tree import compiled_query
from laserbatch.retrieval_pools.index.pool import EMPTY_POOL
from laserbatch.retrieval_pools.routing.router import Route, Router

MOST_UNUSABLE = 0.5  # of the first texts; where more fail, model and template do not fit each other


def generate(
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    date: str = typer.Option(..., help="The night: what was known at the end of this day is used."),
    force: bool = typer.Option(False, help="Generate unchanged entities too."),
    ray_address: str | None = typer.Option(None, help="Use this Ray cluster; without it a local one is started."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Generate the knowledge of a date; nothing is published.

    Example: `laserbatch generate --config laserbatch.yaml --date 2025-03-01`
    """
    settings = load_settings(config, {"workspace": workspace, "cluster.ray_address": ray_address})
    night_date = parse_date(date)
    with Workspace.open(settings.workspace).lock():
        night = open_night(settings, night_date, force)
        if night.run.is_finished:
            say(f"run {night.run.run_id} is finished already and stays as it is; --force generates everything again")
        else:
            generate_knowledge(night)
    summary({"run_id": night.run.run_id, "folder": night.run.root, **night_counts(night)}, as_json)


def generate_knowledge(night: Night) -> None:
    """The night's texts, into its run folder. Does nothing when they are all there.

    Raises
    ------
    RunFailed
        More rows are in quarantine than the settings allow; the manifest holds what was done.
    """
    with night.stage("generate"):
        night.manifest.sides = _generate(night, night.run, night.settings.decoding, with_pools=True)
    for side, figures in night.manifest.sides.items():
        _require_few_failures(night, side, figures)


def _require_few_failures(night: Night, side: Side, figures: SideFigures) -> None:
    allowed = night.settings.night.max_failed_share
    if figures.num_quarantined <= allowed * figures.num_entities:
        return
    raise RunFailed(
        f"{figures.num_quarantined} of {figures.num_entities} {side}s failed: {_told(figures.quarantine_reasons)}. "
        f"night.max_failed_share allows {allowed:.0%}. Every row and its reason: {night.run.quarantine_path(side)}"
    )


def _told(reasons: dict[str, int]) -> str:
    return ", ".join(f"{reason} ({count})" for reason, count in reasons.items())


def _require_usable_texts(night: Night, plan: SidePlan, finished: Mapping[str, ShardRecord]) -> None:
    """Stop a night of which most texts cannot be kept, when it has written the first ones."""
    done = [finished[shard.name] for shard in plan.shards if shard.name in finished]
    num_failed = sum(record.num_quarantined for record in done)
    num_rows = sum(record.num_rows for record in done) + num_failed
    most = max(MOST_UNUSABLE, night.settings.night.max_failed_share)
    if num_rows < FIRST_TEXTS or num_failed <= most * num_rows:
        return
    night.run.merge_quarantine(plan.side, done, [], night.tables.entities(plan.side)[f"{plan.side}_id"].type)
    reasons = count_reasons(night.run.read_quarantine(plan.side, ["reason"]))
    advice = (
        f"Look at one with `laserbatch try`, and change decoding.model or knowledge.{plan.side}_template; after a "
        "change inside their files `laserbatch nightly --force` begins anew"
    )
    if needs_a_model(night.settings, night.settings.tables.path):
        advice = NEEDS_A_MODEL[0].upper() + NEEDS_A_MODEL[1:]
    raise RunFailed(
        f"{num_failed} of the first {num_rows} {plan.side}s failed, so the others are not written: {_told(reasons)}. "
        f"{advice}. Every row, its text and its reason: {night.run.quarantine_path(plan.side)}"
    )


def generate_plain(night: Night) -> None:
    """The same prompts decoded plainly, into the run's `plain` folder, to compare with.

    Texts that plain decoding gave on an earlier night are carried over like any others. Entities that the night wrote
    about come in shards of their own: their time is compared with the night's, since others have shorter prompts.
    """
    plain = night.settings.decoding.model_copy(update={"verifier": "greedy", "drafters": (), "max_draft_tokens": 0})
    with night.stage("generate plain"):
        night.manifest.plain = _generate(night, night.run.plain, plain, with_pools=False)


def _generate(night: Night, folder: RunFolder, decoding: DecodingSettings, with_pools: bool) -> dict[Side, SideFigures]:
    plans: dict[Side, SidePlan] = {}
    finished: dict[Side, dict[str, ShardRecord]] = {}
    for side in SIDES:
        plans[side], finished[side] = _plan(night, folder, side, decoding, with_pools)
    pending = [shard for plan in plans.values() for shard in plan.shards if shard.name not in finished[shard.side]]
    pending.sort(key=lambda shard: shard.name)  # so that both sides' first texts are judged before the others
    abandoned: list[ShardAbandoned] = []
    if with_pools:
        for plan in plans.values():
            _require_usable_texts(night, plan, finished[plan.side])
    if pending:
        label = "generate" if with_pools else "generate plain"
        spec = _worker_spec(night, folder, decoding, with_pools)
        num_rows = sum(shard.num_rows for shard in pending)
        if decoding.drafters:
            _compile_queries(night)
        if with_pools and (unused := unused_settings(night.settings.model_dir)) is not None:
            say(unused)
        say(f"{label}: {num_rows} texts in {len(pending)} shards; starting workers")
        with ray_cluster(night.settings.cluster) as layout, progress(label, num_rows) as bar:
            choose = partial(night_budgets, night, pending) if with_pools else _plainly
            attempts = night.settings.cluster.max_shard_attempts
            for outcome in run_shards(pending, spec, layout, attempts, choose_budgets=choose):
                if isinstance(outcome, ShardAbandoned):
                    abandoned.append(outcome)
                    bar.advance(outcome.shard.num_rows)
                    continue
                shard, record = outcome
                finished[shard.side][shard.name] = record
                bar.advance(shard.num_rows, _pace(record))
                if with_pools:
                    _require_usable_texts(night, plans[shard.side], finished[shard.side])
        num_workers = min(layout.num_workers, len(pending))
        night.manifest.workers = WorkerFigures(num_workers, layout.num_threads, layout.device)
        note_step_costs(
            night.workspace.step_costs_folder, [record for side in SIDES for record in finished[side].values()]
        )
    plans = {side: load_plan(folder.root, side) or plans[side] for side in SIDES}  # with halves of split shards
    return {side: _gather(night, folder, plans[side], finished[side], abandoned, with_pools) for side in SIDES}


def _plainly(scout: Scout) -> dict[Side, Budget]:
    return dict.fromkeys(SIDES, PLAIN)


def _pace(record: ShardRecord) -> str:
    pace = record.info.stats.tokens_per_step
    return "" if pace is None else f"{pace:.1f} tokens/step"


def _plan(
    night: Night, folder: RunFolder, side: Side, decoding: DecodingSettings, with_pools: bool
) -> tuple[SidePlan, dict[str, ShardRecord]]:
    """What is to be done of a side, and the shards of it that are done."""
    settings, entities = night.settings, night.tables.entities(side)

    def make_plan() -> SidePlan:
        with progress(f"plan {side}s", entities.num_rows) as bar:
            return plan_side(
                side,
                iter_entities(night.tables, side),
                entities.schema.field(f"{side}_id").type,
                render=prompt_renderer(side, settings.knowledge, decoding, settings.model_dir),
                previous=_previous_knowledge(night, side, with_pools),
                batch_size=decoding.batch_size,
                run_dir=folder.root,
                route=router(night, side) if with_pools else no_route,
                force=night.manifest.force,
                shard_size=settings.night.shard_size,
                on_entity=bar.advance,
                apart=() if with_pools else _written_tonight(night, side),
            )

    return open_plan(folder, side, make_plan)


def _written_tonight(night: Night, side: Side) -> frozenset[object]:
    """Ids of the entities that the night itself generates."""
    plan = load_plan(night.run.root, side)
    paths = [] if plan is None else [night.run.root / shard.path for shard in plan.shards]
    return frozenset(key for path in paths for key in read_parquet(path, ["entity_id"])["entity_id"].to_pylist())


def _previous_knowledge(night: Night, side: Side, with_pools: bool) -> PreviousKnowledge:
    previous = night.previous if with_pools or night.previous is None else night.previous.plain
    return PreviousKnowledge(None if previous is None else previous.knowledge_folder(side))


def router(night: Night, side: Side) -> Callable[[Entity], Route]:
    """A function from an entity to the pool group it drafts from; no group before the first pools are built."""
    version = night.manifest.pools.version
    if version is None:
        return no_route
    fitted = Router.load(night.pools.folder(version) / "router" / side, night.settings.routing)
    return entity_router(fitted, night.tables, side, night.date)


def _compile_queries(night: Night) -> None:
    """Once here, so that workers find them in numba's cache instead of each compiling them."""
    version = night.manifest.pools.version
    pools = [] if version is None else [night.pools.open(version, side) for side in SIDES]
    for variant in {pool.variant for pool in (EMPTY_POOL, *pools) if pool is not None}:  # a side may have no pool yet
        compiled_query(variant)


def _worker_spec(night: Night, folder: RunFolder, decoding: DecodingSettings, with_pools: bool) -> WorkerSpec:
    settings = night.settings
    version = night.manifest.pools.version if with_pools else None
    pool_dirs = {} if version is None else {side: night.pools.folder(version) / side for side in SIDES}
    pool_dirs = {side: path for side, path in pool_dirs.items() if path.is_dir()}
    if decoding.adapter is not None:
        decoding = decoding.model_copy(update={"adapter": str(Path(decoding.adapter).resolve())})
    return WorkerSpec(
        run_id=night.run.run_id,
        run_dir=folder.root.resolve(),
        model_dir=settings.model_dir.resolve(),
        decoding=decoding,
        device="auto",
        num_threads=1,
        num_workers=1,
        templates={side: settings.knowledge.template_of(side) for side in SIDES},
        template_dir=settings.knowledge.template_dir,
        step_cost_dir=night.workspace.step_costs_folder.resolve(),
        pool_dirs={side: path.resolve() for side, path in pool_dirs.items()},
        pool_versions={side: version for side in pool_dirs},
    )


def _gather(
    night: Night,
    folder: RunFolder,
    plan: SidePlan,
    finished: dict[str, ShardRecord],
    abandoned: Iterable[ShardAbandoned],
    with_pools: bool,
) -> SideFigures:
    """Close a side: its quarantine in one file, old texts of who is in it kept, and nobody missing."""
    side = plan.side
    entity_ids = night.tables.entities(side)[f"{side}_id"]
    lost_rows = [row for lost in abandoned if lost.shard.side == side for row in _abandoned_rows(lost, folder)]
    folder.merge_quarantine(side, finished.values(), lost_rows, entity_ids.type)
    quarantine = folder.read_quarantine(side, ["entity_id", "reason"])
    num_kept = 0
    if quarantine.num_rows:
        num_kept = _keep_stale(folder, side, _previous_knowledge(night, side, with_pools), quarantine["entity_id"])
    try:
        require_every_entity(folder, side, entity_ids)
    except WorkspaceError:
        drop_plan(folder.root, side)
        raise
    written = [(shard, finished[shard.name]) for shard in plan.shards if shard.name in finished]
    for _, record in written[:1]:
        night.manifest.model = record.info.model
    return SideFigures(
        num_entities=plan.num_entities,
        num_generated=sum(record.num_rows for _, record in written),
        num_carried_over=plan.num_carried_over,
        num_quarantined=quarantine.num_rows,
        num_kept=num_kept,
        quarantine_reasons=count_reasons(quarantine),
        routes=plan.routes,
        shards=[_shard_figures(shard, record) for shard, record in written],
        stats=_stats(record for _, record in written),
        budget=night.manifest.budgets.get(side) if with_pools else None,
        samples=report_samples(night, folder, side, plan) if with_pools else [],
        stats_of_tonight=None if with_pools else _stats(record for shard, record in written if shard.is_apart),
    )


def _keep_stale(folder: RunFolder, side: Side, previous: PreviousKnowledge, quarantined: pa.ChunkedArray) -> int:
    """Entities in quarantine keep the text that they had, marked as stale; returns how many had one."""
    rows = previous.rows_of(quarantined)
    if rows:
        folder.write_shard(side, KEPT_SHARD, previous.records(rows, quarantined.type, is_stale=True))
    return len(rows)


def _stats(records: Iterable[ShardRecord]) -> DecodingStats:
    # Workers run side by side: of the night's time a shard takes its own divided by their number.
    infos = (record.info for record in records)
    return DecodingStats.total(replace(info.stats, wall_s=info.stats.wall_s / info.num_workers) for info in infos)


def _abandoned_rows(lost: ShardAbandoned, folder: RunFolder) -> Iterable[QuarantineRow]:
    for row in read_shard(folder.root / lost.shard.path):
        yield QuarantineRow.of(row.entity_id, lost.shard.side, lost.reason, row.fingerprint)


def _shard_figures(shard: Shard, record: ShardRecord) -> ShardFigures:
    stats = replace(record.info.stats, lengths=LengthHistogram())  # a manifest holds no line a text
    name = f"{shard.side}-{shard.name}"
    return ShardFigures(name, shard.group, record.file, record.num_rows, record.sha256, stats.wall_s, stats)


def night_counts(night: Night) -> dict[str, Any]:
    """What generation did, a line a side."""
    return {
        f"{side}s": {
            "num_entities": figures.num_entities,
            "num_generated": figures.num_generated,
            "num_carried_over": figures.num_carried_over,
            "num_quarantined": figures.num_quarantined,
            "num_tokens": figures.stats.num_tokens,
            "tokens_per_step": figures.stats.tokens_per_step,
            "tokens_per_s": figures.stats.tokens_per_s,
        }
        | ({"warning": "; ".join(warnings)} if (warnings := side_warnings(asdict(figures))) else {})
        for side, figures in night.manifest.sides.items()
    }
