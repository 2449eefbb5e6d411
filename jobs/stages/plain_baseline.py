"""Decodes a night's prompts, all or a sample, plainly as a baseline to compare with."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.jobs.console import say
from laserbatch.jobs.stages.generate import GenerationStage
from laserbatch.jobs.stages.night import Night
from laserbatch.jobs.stages.night_plans import NightPlanner
from laserbatch.jobs.stages.shards import hand_out, stats_of
from laserbatch.jobs.stages.workers import NightWorkers
from laserbatch.pipeline.budget.choice import PLAIN
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.planning.plan import Shard, SidePlan, load_plan, write_shard_plan
from laserbatch.pipeline.planning.planner import Sharding, WriteRules
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.figures import ShardRecord, SideFigures
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.retrieval_pools.step_cost import StepCost


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
        hand_out(workers.worker_pool(spec), pending, {side: {} for side in rows}, "generate audited", no_draft_budgets)


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
        return no_draft_budgets(measure)

    @property
    def _pool_dirs(self) -> dict[Side, Path]:
        return {}

    def _side_figures(self, plan: SidePlan, written: list[tuple[Shard, ShardRecord]]) -> dict[str, Any]:
        return {"stats_of_tonight": stats_of(record for shard, record in written if shard.is_isolated)}


def no_draft_budgets(measure: Callable[[], StepCost]) -> dict[Side, Budget]:
    """The budgets of plain decoding, which need no measured step cost."""
    return dict.fromkeys(SIDES, PLAIN)
