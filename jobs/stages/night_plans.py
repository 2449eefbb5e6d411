"""Plans a night: which entities get new texts, in which shards, and which records are carried over.

`pipeline/planning` makes the decisions; this module gives it the rules of the configuration and of earlier nights.
"""

import logging
from functools import partial
from typing import ClassVar

from laserbatch.jobs.console import progress
from laserbatch.jobs.formatting import counted
from laserbatch.jobs.stages.inputs import changed_inputs
from laserbatch.jobs.stages.night import Night, means
from laserbatch.jobs.stages.shards import Finished
from laserbatch.pipeline.decoding.endpoint_settings import BATCH_SHARD_ROWS
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.knowledge.questions import SideQuestions
from laserbatch.pipeline.knowledge.records import PreviousKnowledge
from laserbatch.pipeline.planning import planner
from laserbatch.pipeline.planning.plan import SidePlan, drop_plan, load_plan, open_plan
from laserbatch.pipeline.planning.postpone import Refresh, unusable_texts
from laserbatch.pipeline.planning.refresh import BUDGET, RefreshSettings
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.run_folder import POSTPONED, RunFolder

logger = logging.getLogger("laserbatch.planning")


def plan_night(night: Night, folder: RunFolder) -> dict[Side, SidePlan]:
    """Plan both sides of a night in `folder`, which need not be the run's."""
    return NightPlanner(night, folder, night.settings.decoding).plans()[0]


def predicted_cost(night: Night, side: Side, num_rows: int, num_tokens: int | None) -> float | None:
    """The predicted cost of a side's texts, if prompts are as long as in the night before and none is cached.

    None without prices, without a night before, or if `num_tokens` is None.
    """
    server = night.settings.decoding.endpoint
    prices = None if server is None else server.price_per_million_tokens
    if prices is None or night.previous is None or num_tokens is None:
        return None
    (num_prompt,) = means(night.previous, side, ["num_prompt_tokens"])
    return None if num_prompt is None else prices.cost(round(num_rows * num_prompt), num_tokens)


class NightPlanner:
    """Plans the texts of a night, on both sides, in a run folder.

    Attributes
    ----------
    carry_overs : by side, the records that a newly made plan carries over; they are not written yet.
    """

    is_limited: ClassVar[bool] = True  # whether refresh.max_tokens limits the plans

    def __init__(self, night: Night, folder: RunFolder, decoding: DecodingSettings) -> None:
        self.night, self.folder, self.decoding = night, folder, decoding
        self.carry_overs: dict[Side, planner.CarryOver] = {}

    @property
    def previous_folder(self) -> RunFolder | None:
        """The run folder whose records are carried over."""
        return self.night.previous

    def previous(self, side: Side) -> PreviousKnowledge:
        folder = self.previous_folder
        scratch = self.night.tables.scratch.folder
        return PreviousKnowledge(None if folder is None else folder.knowledge_folder(side), scratch)

    def plans(self) -> tuple[dict[Side, SidePlan], dict[Side, Finished]]:
        (users, done_users), (items, done_items) = self.plan("user"), self.plan("item")
        budget = self.night.settings.refresh.max_tokens if self.is_limited else None
        is_left = budget is not None and users.num_tokens + items.num_tokens < budget
        if is_left and BUDGET in users.postponed:  # items left a part of their share: plan users again with it
            drop_plan(self.folder.root, "user")
            users, done_users = self.plan("user")
        return {"user": users, "item": items}, {"user": done_users, "item": done_items}

    def plan(self, side: Side) -> tuple[SidePlan, Finished]:
        return open_plan(self.folder, side, partial(self._make_plan, side))

    def will_probably_write(self) -> bool:
        """Whether a plan is missing, and the night is forced or has no run before with equal inputs and settings.

        Workers then start while the plans are made.
        """
        night, previous = self.night, self.night.previous
        if all(load_plan(self.folder.root, side) for side in SIDES):
            return False
        if previous is None or night.manifest.origin.force or previous.settings_hash != night.run.settings_hash:
            return True
        before = unless_damaged(previous.load_manifest)
        return before is None or bool(changed_inputs(before.origin.inputs, night.manifest.origin.inputs))

    def _make_plan(self, side: Side) -> SidePlan:
        if self.previous_folder is not None:
            self.previous_folder.require_unchanged_texts(side)
        night, previous = self.night, self.previous(side)
        template, most = night.template(side), night.settings.knowledge.max_prompt_tokens
        shared = planner.shared_fingerprint(template, most, self.decoding, night.settings.model_dir)
        self._warn_of_lost_texts(side)
        with progress(f"plan {side}s", night.tables.entities(side).num_rows) as bar:
            questions = SideQuestions(night.tables, side, template, shared)
            decision = planner.decide_side(questions, previous, self._rules(side), bar.advance)
            parts = decision, questions, previous, self._sharding(side)
            plan, self.carry_overs[side] = planner.write_side_plan(*parts, self.folder)
        return plan

    def _warn_of_lost_texts(self, side: Side) -> None:
        """Warn of lost files of texts, since their entities look like new ones and are written again at a cost."""
        for path, num_rows in self.previous_folder.shards(side).lost() if self.previous_folder is not None else ():
            why = f"its {counted(num_rows, side)} have no earlier text any more and count as new"
            advice = "To keep their texts, stop this night and restore the file from a copy."
            logger.warning("%s is missing: %s. %s", path, why, advice)

    def _rules(self, side: Side) -> planner.WriteRules:
        before = self.night.previous
        quarantine = None if before is None else unless_damaged(partial(before.finished_quarantine, side))
        unusable = unusable_texts(quarantine, self.night.date)
        return planner.WriteRules(self.night.manifest.origin.force, refresh=self._refresh(side), unusable=unusable)

    def _refresh(self, side: Side) -> Refresh | None:
        """The rules by which changed prompts are postponed; None: every changed prompt gets a new text."""
        night, settings, before = self.night, self.night.settings.refresh, self.night.previous
        if settings == RefreshSettings() and not self._has_max_cost:
            return None
        if (budget := settings.max_tokens) is not None:
            other = load_plan(self.folder.root, "item" if side == "user" else "user")
            sizes = {name: night.tables.entities(name).num_rows for name in SIDES}
            budget = budget * sizes[side] / sum(sizes.values()) if other is None else budget - other.num_tokens
        postponed = None if before is None else unless_damaged(partial(before.finished_postponed, side))
        postponed = POSTPONED.empty_table() if postponed is None else postponed
        return Refresh(settings, night.date, budget, self.decoding.max_new_tokens, postponed)

    def _sharding(self, side: Side) -> planner.Sharding:
        size, server = self.night.settings.night.shard_size, self.decoding.endpoint
        if size is None and server is not None and server.mode == "batch":
            size = BATCH_SHARD_ROWS
        return planner.Sharding(self.decoding.batch_size, size, self.night.routes(side), is_by_score=self._has_max_cost)

    @property
    def _has_max_cost(self) -> bool:
        """Whether a limit of cost may end the night early, so that the most valuable texts are written first."""
        return self.decoding.endpoint is not None and self.decoding.endpoint.max_cost is not None
