"""The stage that writes texts: plan both sides, hand unfinished shards to the workers, gather what came of them."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.jobs.console import progress, say
from laserbatch.jobs.events import emit
from laserbatch.jobs.failures import end_at_sigterm
from laserbatch.jobs.stages.budgets import night_budgets
from laserbatch.jobs.stages.inputs import NEEDS_A_MODEL, changed_inputs, needs_a_model
from laserbatch.jobs.stages.night import Night
from laserbatch.jobs.stages.shards import Finished, gather, hand_out, stats_of
from laserbatch.jobs.stages.spans import report_samples
from laserbatch.jobs.stages.workers import NightWorkers
from laserbatch.pipeline.budget.choice import PLAIN
from laserbatch.pipeline.decoding.model.folder import load_tokenizer
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.distributed.actors import ShardAbandoned
from laserbatch.pipeline.distributed.loading import TOKEN_FILE
from laserbatch.pipeline.distributed.spec import TextSpec
from laserbatch.pipeline.errors import RunFailed
from laserbatch.pipeline.knowledge.records import PreviousKnowledge
from laserbatch.pipeline.planning.plan import (
    Shard,
    SidePlan,
    drop_plan,
    load_plan,
    open_plan,
    write_shard_plan,
)
from laserbatch.pipeline.planning.planner import FIRST_TEXTS, Keep, plan_side, shared_fingerprint
from laserbatch.pipeline.planning.postpone import Refresh, unusable_texts
from laserbatch.pipeline.planning.refresh import BUDGET
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.manifest import ShardRecord, SideFigures
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.quarantine import count_reasons
from laserbatch.pipeline.storage.run_folder import POSTPONED, RunFolder

MAX_SHARE_UNUSABLE = 0.5  # the night stops if more of the first texts fail: the model does not fit the template


def generate_knowledge(night: Night, workers: NightWorkers) -> None:
    """The night's texts, into its run folder. Does nothing when they are all there.

    Raises RunFailed where most of the first texts cannot be kept.
    """
    with night.stage("generate"):
        night.manifest.sides = _Pass(night, night.run, night.decoding, workers).run()


def plan_night(night: Night, folder: RunFolder) -> dict[Side, SidePlan]:
    """The plans of a night, made in a folder that need not be the run's."""
    return _Pass(night, folder, night.decoding)._plans()[0]


def plan_one(night: Night, folder: RunFolder, side: Side) -> tuple[SidePlan, TextSpec]:
    """The plan of a side, made in a folder that need not be the run's, and what a worker needs to write it there."""
    planned = _Pass(night, folder, night.decoding)
    return planned._plan(side)[0], planned._worker_spec()


def generate_plain(night: Night, workers: NightWorkers) -> None:
    """The same prompts decoded plainly, into the run's `plain` folder, to compare with.

    Texts that plain decoding gave on an earlier night are carried over like any others. Entities that the night wrote
    about come in shards of their own: their time is compared with the night's, since others have shorter prompts.
    """
    with night.stage("generate plain"):
        night.manifest.plain = _Pass(night, night.run.plain, _plain(night), workers, is_plain=True).run()


def generate_sample_plainly(
    night: Night, workers: NightWorkers, folder: RunFolder, rows: Mapping[Side, pa.Table]
) -> None:
    """Rows of the night's own plan decoded plainly into another folder, a shard a side; one that is done stays."""
    pending = []
    for side, table in rows.items():
        shard = write_shard_plan(side, "00000", table, folder.root, is_apart=False)
        done = folder.finished_shards(side).get(shard.name)
        if done is None or done.info.planned_sha256 != shard.sha256:
            pending.append(shard)
    if pending:
        say(f"generate plain: {sum(shard.num_rows for shard in pending)} sampled texts, to compare with tonight's")
        crew = workers.crew(_Pass(night, folder, _plain(night), workers, is_plain=True)._worker_spec())
        hand_out(crew, pending, {side: {} for side in rows}, "generate audited", _plainly)


def _plain(night: Night) -> DecodingSettings:
    return night.settings.decoding.model_copy(update={"verifier": "greedy", "drafters": (), "max_draft_tokens": 0})


@dataclass(frozen=True)
class _Pass:
    """One decoding of both sides: the night's own, or the plain one that it is compared with."""

    night: Night
    folder: RunFolder
    decoding: DecodingSettings
    workers: NightWorkers | None = None  # who only plans needs none
    is_plain: bool = False

    def run(self) -> dict[Side, SideFigures]:
        """Do what is not done yet."""
        (self.folder.root / TOKEN_FILE).unlink(missing_ok=True)  # of an attempt that was killed
        if self._will_probably_write():
            self.workers.start(self._worker_spec())
        plans, finished = self._plans()
        self.night.tables.let_go()
        for side in SIDES:
            if plans[side].postponed and not self.is_plain:
                say(f"{side}s skipped tonight, without a new text: {format_counts(plans[side].postponed)}")
            if plans[side].num_refused and not self.is_plain:
                say(f"{side}s that stay in quarantine, because their prompts did not change: {plans[side].num_refused}")
            if not self.is_plain:
                require_usable_texts(self.night, plans[side], finished[side])
        pending = [shard for plan in plans.values() for shard in plan.shards if shard.name not in finished[shard.side]]
        pending.sort(key=lambda shard: shard.name)  # so that both sides' first texts are judged before the others
        abandoned = []
        with ThreadPoolExecutor(1) as aside:
            kept = {side: aside.submit(keep.write) for side, keep in self._kept.items()}
            if pending:
                settings = self.night.settings
                folders = settings.model_dir, settings.decoding.adapter
                load = partial(aside.submit, load_tokenizer, *folders)  # seconds, for later stages
                abandoned = self._write(pending, plans, finished, kept.values(), load)
            for side, written in kept.items():
                finished[side] |= written.result()
        end_at_sigterm()
        plans = {side: load_plan(self.folder.root, side) or plans[side] for side in SIDES}  # with halves of shards
        return {side: self._gather(plans[side], finished[side], abandoned) for side in SIDES}

    def _will_probably_write(self) -> bool:
        """Whether there is no plan yet, and inputs or settings differ from those of the run before.

        Workers then start while plans are made.
        """
        night, previous = self.night, self.night.previous
        if all(load_plan(self.folder.root, side) for side in SIDES):
            return False
        if previous is None or night.manifest.force or previous.settings_hash != night.run.settings_hash:
            return True
        before = unless_damaged(previous.load_manifest)
        return before is None or bool(changed_inputs(before.inputs, night.manifest.inputs))

    def _plans(self) -> tuple[dict[Side, SidePlan], dict[Side, Finished]]:
        """What is to be done of both sides, and their shards that are done."""
        made = {side: self._plan(side) for side in SIDES}
        users, items = (plan for plan, _ in made.values())
        is_left = self._budget is not None and users.num_tokens + items.num_tokens < self._budget
        if is_left and BUDGET in users.postponed:  # users have what items leave of their share
            drop_plan(self.folder.root, "user")
            made["user"] = self._plan("user")
        return {side: plan for side, (plan, _) in made.items()}, {side: done for side, (_, done) in made.items()}

    @cached_property
    def _kept(self) -> dict[Side, Keep]:
        """What keeps its text by the plans that were made, to be written while workers write the others."""
        return {}

    @cached_property
    def _budget(self) -> float | None:
        """Tokens of both sides tonight; None: no limit."""
        return None if self.is_plain else self.night.settings.refresh.max_tokens

    def _plan(self, side: Side) -> tuple[SidePlan, Finished]:
        """What is to be done of a side, and the shards of it that are done."""
        night, settings, tables = self.night, self.night.settings, self.night.tables
        template = night.template(side)

        def make_plan() -> SidePlan:
            unasked = None
            if self.is_plain:  # nobody has a plain text who has no other
                unasked = night.run.read_postponed(side)
                unasked = unasked.filter(pc.invert(unasked["has_text"]))
            with progress(f"plan {side}s", tables.entities(side).num_rows) as bar:
                return plan_side(
                    tables,
                    side,
                    template,
                    shared_fingerprint(
                        template, settings.knowledge.max_prompt_tokens, self.decoding, settings.model_dir
                    ),
                    previous=self._previous(side),
                    batch_size=self.decoding.batch_size,
                    run_dir=self.folder.root,
                    routes=None if self.is_plain else night.routes(side),
                    force=night.manifest.force,
                    shard_size=settings.night.shard_size,
                    on_entities=bar.advance,
                    apart=_written_tonight(night, side) if self.is_plain else None,
                    refresh=None if self.is_plain else self._refresh(side),
                    unasked=unasked,
                    unusable=None if self.is_plain else unusable_texts(night.previous, side, night.date),
                    keep=partial(self._kept.__setitem__, side),
                )

        return open_plan(self.folder, side, make_plan)

    def _refresh(self, side: Side) -> Refresh | None:
        """What decides whose change waits; None where none does."""
        night, settings = self.night, self.night.settings.refresh
        if settings.is_off:
            return None
        waiting = night.run if night.previous is None else night.previous
        budget = self._budget
        if budget is not None:
            other = load_plan(self.folder.root, "item" if side == "user" else "user")
            sizes = {one: night.tables.entities(one).num_rows for one in SIDES}
            budget = budget * sizes[side] / sum(sizes.values()) if other is None else budget - other.num_tokens
        postponed = unless_damaged(partial(waiting.read_postponed, side), POSTPONED.empty_table())
        return Refresh(settings, night.date, budget, self.decoding.max_new_tokens, postponed)

    def _previous(self, side: Side) -> PreviousKnowledge:
        previous = self.night.previous
        if previous is not None and self.is_plain:
            previous = previous.plain
        return PreviousKnowledge(None if previous is None else previous.knowledge_folder(side))

    def _write(
        self,
        pending: list[Shard],
        plans: dict[Side, SidePlan],
        finished: dict[Side, Finished],
        aside: Iterable[Future],
        on_first_text: Callable[[], object],
    ) -> list[ShardAbandoned]:
        """Have the workers write shards, which are added to the finished ones; returns those that were given up.

        What is written aside and fails, on a full disk, ends it at the next shard. `on_first_text` begins what would
        take the processor from workers that load their model.
        """
        night, label = self.night, "generate plain" if self.is_plain else "generate"

        def tell_first_text() -> None:
            emit("first_text", of=label)
            on_first_text()

        def check(shard: Shard) -> None:
            for written in filter(Future.done, aside):
                written.result()
            if not self.is_plain:
                require_usable_texts(night, plans[shard.side], finished[shard.side])

        crew = self.workers.crew(self._worker_spec())
        choose = _plainly if self.is_plain else partial(night_budgets, night, pending)
        abandoned = hand_out(crew, pending, finished, label, choose, check, tell_first_text)
        night.manifest.workers = self.workers.figures(crew, len(pending))
        return abandoned

    def _worker_spec(self) -> TextSpec:
        night, settings, decoding = self.night, self.night.settings, self.decoding
        version = None if self.is_plain else night.manifest.pools.version
        pool_dirs = {} if self.is_plain else night.pool_folders()
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
            pool_dirs=pool_dirs,
            pool_versions={side: version for side in pool_dirs},
        )

    def _gather(self, plan: SidePlan, finished: Finished, abandoned: Iterable[ShardAbandoned]) -> SideFigures:
        night, folder, side = self.night, self.folder, plan.side
        entity_ids = night.tables.entities(side)[f"{side}_id"]
        reasons, num_kept = gather(folder, side, entity_ids, finished, abandoned, partial(self._stale, side))
        written = [(shard, finished[shard.name]) for shard in plan.shards if shard.name in finished]
        for _, record in written[:1]:
            night.manifest.model = record.info.model
        return SideFigures(
            num_entities=plan.num_entities,
            num_generated=sum(record.num_rows for _, record in written),
            num_carried_over=plan.num_carried_over,
            num_quarantined=sum(reasons.values()),
            num_kept=num_kept,
            quarantine_reasons=reasons,
            routes=plan.routes,
            shards=[record for _, record in written],
            stats=stats_of(record for _, record in written),
            budget=None if self.is_plain else night.manifest.budgets.get(side),
            samples=[] if self.is_plain else report_samples(night, folder, side, plan),
            num_waiting=plan.num_waiting,
            num_unasked=plan.num_unasked,
            postponed=plan.postponed,
            stats_of_tonight=stats_of(one for shard, one in written if shard.is_apart) if self.is_plain else None,
        )

    def _stale(self, side: Side, quarantined: pa.ChunkedArray) -> pa.RecordBatchReader | None:
        """The earlier texts of entities in quarantine, marked as stale; None where there is none."""
        previous = self._previous(side)
        rows = previous.rows_of(quarantined)
        rows = np.sort(rows[rows >= 0])
        return previous.records(rows, quarantined.type, is_stale=True) if len(rows) else None


def require_usable_texts(night: Night, plan: SidePlan, finished: Mapping[str, ShardRecord]) -> None:
    """Stop a night of which most texts cannot be kept, when it has written the first ones."""
    done = [finished[shard.name] for shard in plan.shards if shard.name in finished]
    num_failed = sum(record.num_quarantined for record in done)
    num_rows = sum(record.num_rows for record in done) + num_failed
    most = max(MAX_SHARE_UNUSABLE, night.settings.gates.max_failed_share)
    if num_rows < FIRST_TEXTS or num_failed <= most * num_rows:
        return
    night.run.merge_quarantine(plan.side, done, [], night.tables.entities(plan.side)[f"{plan.side}_id"].type)
    reasons = count_reasons(night.run.read_quarantine(plan.side, ["reason"]))
    advice = (
        f"Look at one with `laserbatch try`, and change decoding.model or knowledge.{plan.side}_template; after a "
        "change inside their files `laserbatch nightly --force` begins anew"
    )
    if needs_a_model(night.settings):
        advice = NEEDS_A_MODEL[0].upper() + NEEDS_A_MODEL[1:]
    raise RunFailed(
        f"{num_failed} of the first {num_rows} {plan.side}s failed, so the others are not written: "
        f"{format_counts(reasons)}. {advice}. "
        f"Every row, its text and its reason: {night.run.quarantine_path(plan.side)}"
    )


def format_counts(reasons: dict[str, int]) -> str:
    return ", ".join(f"{reason} ({count})" for reason, count in reasons.items())


def _plainly(_) -> dict[Side, Budget]:
    return dict.fromkeys(SIDES, PLAIN)


def _written_tonight(night: Night, side: Side) -> pa.Array | None:
    """Ids of the entities that the night itself generates; None where there are none."""
    plan = load_plan(night.run.root, side)
    parts = [read_parquet(night.run.root / shard.path, ["entity_id"]) for shard in (plan.shards if plan else ())]
    return pa.concat_tables(parts)["entity_id"].combine_chunks() if parts else None
