"""The stages that write texts: plan both sides, give unfinished shards to workers, gather the results.

A baseline to compare with is written in the same way: the night's prompts, all or a sample, decoded plainly.
"""

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.jobs.console import say
from laserbatch.jobs.events import emit
from laserbatch.jobs.formatting import format_counts
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages.budgets import night_budgets
from laserbatch.jobs.stages.inputs import NEEDS_A_MODEL, needs_a_model
from laserbatch.jobs.stages.night import Night, means
from laserbatch.jobs.stages.night_plans import NightPlanner
from laserbatch.jobs.stages.shards import Finished, emit_begin, gather, hand_out, stats_of
from laserbatch.jobs.stages.spans import report_samples
from laserbatch.jobs.stages.workers import NightWorkers
from laserbatch.pipeline.budget.choice import PLAIN
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.distributed.actors import ShardAbandoned
from laserbatch.pipeline.distributed.spec import TextSpec
from laserbatch.pipeline.distributed.tasks import TOKEN_FILE
from laserbatch.pipeline.engine_choice import small_batch
from laserbatch.pipeline.errors import RunFailed
from laserbatch.pipeline.planning.plan import CARRIED_SHARD, Shard, SidePlan, load_plan, write_shard_plan
from laserbatch.pipeline.planning.planner import FIRST_TEXTS, Sharding, WriteRules
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.figures import ShardRecord, SideFigures
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.quarantine import count_reasons
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.retrieval_pools.step_cost import StepCost

NO_DRAFTS: dict[Side, Budget] = dict.fromkeys(SIDES, PLAIN)  # the budgets of plain decoding
MAX_SHARE_UNUSABLE = 0.5  # the night stops if more of the first texts fail: the model does not fit the template


def generate_knowledge(night: Night, workers: NightWorkers) -> dict[Side, SideFigures]:
    """Write the night's missing texts into its run folder; return the figures of both sides.

    Raises RunFailed if most of the first texts cannot be used.
    """
    return GenerationStage(NightPlanner(night, night.run, night.settings.decoding)).run(workers)


class GenerationStage:
    """Generates the texts that a planner plans, for both sides, into the planner's run folder."""

    label: ClassVar[str] = "generate"
    is_checked: ClassVar[bool] = True  # too many unusable texts stop the night

    def __init__(self, planner: NightPlanner) -> None:
        self.planner = planner
        self.night, self.folder, self.decoding = planner.night, planner.folder, planner.decoding

    def run(self, workers: NightWorkers) -> dict[Side, SideFigures]:
        """Plan and write what is not finished yet; return the figures of both sides."""
        (self.folder.root / TOKEN_FILE).unlink(missing_ok=True)  # left by an attempt that was killed
        if self.planner.will_probably_write():
            workers.start(self.worker_spec())
        plans, finished = self.planner.plans()
        self.night.tables.scratch.release()
        for side in SIDES:
            self._emit_plan(plans[side], finished[side])
            self._require_usable(plans[side], finished[side])
        pending = [shard for plan in plans.values() for shard in plan.shards if shard.name not in finished[shard.side]]
        pending.sort(key=lambda shard: shard.name)  # so that both sides' first texts are judged before the others
        abandoned = []
        with ThreadPoolExecutor(1) as background:
            carried: list[tuple[Side, Future[Finished]]] = [
                (side, background.submit(carry.write)) for side, carry in self.planner.carry_overs.items()
            ]
            if not pending:
                emit_begin(self.label, self.folder, pending, finished)
            else:
                load = partial(background.submit, lambda: self.night.tokenizer)  # slow; for later stages
                abandoned = self._write(workers, pending, plans, finished, [written for _, written in carried], load)
            for side, written in carried:
                finished[side] |= written.result()
        plans = {side: load_plan(self.folder.root, side) or plans[side] for side in SIDES}  # with split shards
        return {side: self._gather(plans[side], finished[side], abandoned) for side in SIDES}

    def _emit_plan(self, plan: SidePlan, finished: Finished) -> None:
        if carry := self.planner.carry_overs.get(plan.side):
            reasons = Counter(row.reason for row in carry.quarantined)
        else:  # an earlier attempt wrote them
            reasons = self.folder.shards(plan.side).quarantine_reasons(finished[CARRIED_SHARD])
        counts = {"entities": plan.num_entities, "carried_over": plan.num_carried_over}
        emit("planned", of=self.label, side=plan.side, **counts, reasons=reasons)
        if self.is_checked and plan.postponed:
            say(f"{plan.side}s postponed tonight, without a new text: {format_counts(plan.postponed)}")
        if self.is_checked and reasons:
            say(f"{plan.side}s in quarantine that were not tried tonight: {format_counts(reasons)}")

    def _expected_tokens(self, plan: SidePlan) -> float | None:
        """The expected number of tokens per planned text; None without an estimate and without earlier texts."""
        num_rows = sum(shard.num_rows for shard in plan.shards)
        if plan.num_tokens and num_rows:
            return plan.num_tokens / num_rows
        folder = self.planner.previous_folder
        return folder and unless_damaged(partial(means, folder, plan.side, ["num_tokens"]), [None])[0]

    def _require_usable(self, plan: SidePlan, finished: Finished) -> None:
        if self.is_checked:
            require_usable_texts(self.night, plan, finished)

    def _choose_budgets(self, pending: list[Shard], measure: Callable[[], StepCost]) -> dict[Side, Budget]:
        return night_budgets(self.night, pending, measure)

    def _write(
        self,
        workers: NightWorkers,
        pending: list[Shard],
        plans: dict[Side, SidePlan],
        finished: dict[Side, Finished],
        background: Iterable[Future],
        on_first_text: Callable[[], object],
    ) -> list[ShardAbandoned]:
        """Hand shards to the workers and add their records to `finished`; return the abandoned shards.

        If a background write fails, as on a full disk, the work ends at the next shard. `on_first_text` starts work
        that would compete with workers while they load their model.
        """

        def notify_first_text() -> None:
            emit("first_text", of=self.label)
            on_first_text()

        def check(shard: Shard) -> None:
            for written in filter(Future.done, background):
                written.result()
            self._require_usable(plans[shard.side], finished[shard.side])

        worker_pool = workers.worker_pool(self.worker_spec())
        if worker_pool.layout.device == "cuda" and (problem := small_batch(self.decoding.batch_size)):
            say(problem)
        choose = partial(self._choose_budgets, pending)
        expected: dict[Side, float | None] = {side: self._expected_tokens(plan) for side, plan in plans.items()}
        corpus = nullcontext()
        if self.decoding.endpoint is not None:  # the server may draft from earlier texts
            from laserbatch.jobs.stages.external_corpus import external_corpus

            corpus = external_corpus(self.night, {shard.side for shard in pending})
        with corpus:
            abandoned = hand_out(worker_pool, pending, finished, self.label, choose, check, notify_first_text, expected)
        self.night.manifest.generation.workers = workers.figures(worker_pool, len(pending))
        return abandoned

    @property
    def _pool_dirs(self) -> dict[Side, Path]:
        """The folder of the pool that each side drafts from; a side without a pool is left out."""
        if (version := self.night.manifest.generation.pools.version) is None:
            return {}
        folder = self.night.pools.folder(version)
        return {side: (folder / side).resolve() for side in SIDES if (folder / side).is_dir()}

    def worker_spec(self) -> TextSpec:
        night, settings, decoding = self.night, self.night.settings, self.decoding
        if decoding.adapter is not None:
            decoding = decoding.model_copy(update={"adapter": str(Path(decoding.adapter).resolve())})
        return TextSpec(
            run_id=night.run.run_id,
            run_dir=self.folder.root.resolve(),
            model_dir=settings.model_dir.resolve(),
            decoding=decoding,
            templates={side: night.template(side) for side in SIDES},
            max_prompt_tokens=settings.knowledge.max_prompt_tokens,
            date=night.date,
            step_cost_dir=night.workspace.step_costs_folder.resolve(),
            pool_dirs=self._pool_dirs,
            pool_version=night.manifest.generation.pools.version,
        )

    def _gather(self, plan: SidePlan, finished: Finished, abandoned: Iterable[ShardAbandoned]) -> SideFigures:
        night, folder, side = self.night, self.folder, plan.side
        entity_ids = night.tables.entities(side)[f"{side}_id"]
        reasons, num_stale = gather(folder, side, entity_ids, finished, abandoned, partial(self._stale, side))
        written = [(shard, finished[shard.name]) for shard in plan.shards if shard.name in finished]
        for _, record in written[:1]:
            night.manifest.generation.model = record.written_by.model
        return SideFigures(
            num_entities=plan.num_entities,
            num_generated=sum(record.num_rows for _, record in written),
            num_carried_over=plan.num_carried_over,
            num_quarantined=sum(reasons.values()),
            num_stale=num_stale,
            quarantine_reasons=reasons,
            routes=plan.routes,
            shards=[record for _, record in written],
            stats=stats_of(record for _, record in written),
            num_waiting=plan.num_waiting,
            num_without_text=plan.num_without_text,
            postponed=plan.postponed,
            **self._side_figures(plan, written),
        )

    def _side_figures(self, plan: SidePlan, written: list[tuple[Shard, ShardRecord]]) -> dict[str, Any]:
        """Fields of `SideFigures` that a plain baseline does not share."""
        budget = self.night.manifest.generation.budgets.get(plan.side)
        return {"budget": budget, "samples": report_samples(self.night, self.folder, plan.side, plan)}

    def _stale(self, side: Side, quarantined: pa.ChunkedArray) -> pa.RecordBatchReader | None:
        """The earlier texts of entities in quarantine, marked as stale; None if there is no such text."""
        previous = self.planner.previous(side)
        rows = previous.rows_of(quarantined)
        rows = np.sort(rows[rows >= 0])
        return previous.records(rows, quarantined.type, is_stale=True) if len(rows) else None


def max_share_failed(settings: Settings) -> float:
    """The share of a side's first texts that may be rejected; the night stops if more are."""
    return max(MAX_SHARE_UNUSABLE, settings.gates.max_failed_share)


def require_usable_texts(night: Night, plan: SidePlan, finished: Mapping[str, ShardRecord]) -> None:
    """Stop a night if most of its first texts cannot be used. Raises RunFailed."""
    done = [finished[shard.name] for shard in plan.shards if shard.name in finished]
    num_failed = sum(record.num_quarantined for record in done)
    num_rows = sum(record.num_rows for record in done) + num_failed
    if num_rows < FIRST_TEXTS or num_failed <= max_share_failed(night.settings) * num_rows:
        return
    night.run.merge_quarantine(plan.side, done, [], night.tables.entities(plan.side)[f"{plan.side}_id"].type)
    failed = night.run.read_quarantine(plan.side, ["entity_id", "reason"])
    reasons = count_reasons(failed)
    example = failed["entity_id"][failed["reason"].index(next(iter(reasons))).as_py()].as_py()
    change = f"{night.settings.decoding.model_key} or knowledge.{plan.side}_template; if you change only their files"
    advice = f"Look at one with `laserbatch try --{plan.side} {shlex.quote(str(example))}`, and change {change}, "
    advice += "start a new run with `laserbatch nightly --force`"
    if needs_a_model(night.settings):
        advice = NEEDS_A_MODEL[0].upper() + NEEDS_A_MODEL[1:]
    raise RunFailed(
        f"{num_failed} of the first {num_rows} {plan.side}s failed, so the others are not written: "
        f"{format_counts(reasons)}. {advice}. "
        f"The failed rows, with text and reason, are in {night.run.quarantine_path(plan.side)}"
    )


def generate_plain(night: Night, workers: NightWorkers) -> dict[Side, SideFigures]:
    """Decode the night's prompts plainly into the run's `plain` folder, as a baseline.

    Plain texts of an earlier night are carried over like any others. Entities that the night wrote about are put in
    separate shards, whose time is compared with the night's: the other entities have shorter prompts.
    """
    return PlainBaselineStage(PlainPlanner(night, night.run.plain, _plain_decoding(night))).run(workers)


def generate_plain_sample(
    night: Night, workers: NightWorkers, folder: RunFolder, rows: Mapping[Side, pa.Table]
) -> None:
    """Write plain texts for rows of the night's plan into another folder, one shard per side; finished shards stay."""
    pending = []
    for side, table in rows.items():
        shard = write_shard_plan(side, "00000", table, folder.root, is_isolated=False)
        done = folder.shards(side).finished().get(shard.name)
        if done is None or done.written_by.planned_sha256 != shard.sha256:
            pending.append(shard)
    if pending:
        say(f"generate plain: {sum(shard.num_rows for shard in pending)} sampled texts to compare with tonight's texts")
        spec = PlainBaselineStage(PlainPlanner(night, folder, _plain_decoding(night))).worker_spec()
        finished: dict[Side, Finished] = {side: {} for side in rows}
        hand_out(workers.worker_pool(spec), pending, finished, "generate audited", lambda _: NO_DRAFTS)


def _plain_decoding(night: Night) -> DecodingSettings:
    return night.settings.decoding.model_copy(update={"verifier": "greedy", "drafters": (), "max_draft_tokens": 0})


class PlainPlanner(NightPlanner):
    """Plans a plain text for each of the night's texts, without refresh limits; carries over earlier plain texts."""

    is_limited = False

    @property
    def previous_folder(self) -> RunFolder | None:
        previous = self.night.previous
        return None if previous is None else previous.plain

    def _rules(self, side: Side) -> WriteRules:
        postponed = self.night.run.read_postponed(side)
        without_text = postponed.filter(pc.invert(postponed["has_text"]))  # nothing to compare with
        return WriteRules(self.night.manifest.origin.force, excluded=without_text)

    def _sharding(self, side: Side) -> Sharding:
        plan, root = load_plan(self.night.run.root, side), self.night.run.root
        parts = [read_parquet(root / shard.path, ["entity_id"]) for shard in (plan.shards if plan else ())]
        isolate_ids = pa.concat_tables(parts)["entity_id"].combine_chunks() if parts else None
        return Sharding(self.decoding.batch_size, self.night.settings.night.shard_size, isolate_ids=isolate_ids)


class PlainBaselineStage(GenerationStage):
    """Decodes the night's prompts plainly: without pools, drafts or the check of the first texts."""

    label, is_checked = "generate plain", False

    def _choose_budgets(self, pending: list[Shard], measure: Callable[[], StepCost]) -> dict[Side, Budget]:
        return NO_DRAFTS

    @property
    def _pool_dirs(self) -> dict[Side, Path]:
        return {}

    def _side_figures(self, plan: SidePlan, written: list[tuple[Shard, ShardRecord]]) -> dict[str, Any]:
        return {"stats_of_tonight": stats_of(record for shard, record in written if shard.is_isolated)}
