"""Plan a side and write its carried-over records in one call."""

from pathlib import Path

import pyarrow as pa

from laserbatch.pipeline.knowledge.questions import SideQuestions
from laserbatch.pipeline.knowledge.records import PreviousKnowledge
from laserbatch.pipeline.knowledge.templates import PromptTemplate
from laserbatch.pipeline.planning.plan import SidePlan
from laserbatch.pipeline.planning.planner import Sharding, WriteRules, decide_side, write_side_plan
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.tables.read import Tables
from laserbatch.retrieval_pools.routing.router import Routes


def plan_side(
    tables: Tables, side: Side, template: PromptTemplate, shared: str, run_dir: Path, previous: Path | None = None,
    force: bool = False, batch_size: int = 4, shard_size: int | None = 4, routes: Routes | None = None,
    isolate_ids: pa.Array | None = None,
) -> SidePlan:  # fmt: skip
    questions, known = SideQuestions(tables, side, template, shared), PreviousKnowledge(previous)
    decision = decide_side(questions, known, WriteRules(force))
    sharding = Sharding(batch_size, shard_size, routes, isolate_ids)
    plan, carry_over = write_side_plan(decision, questions, known, sharding, RunFolder(run_dir))
    carry_over.write()
    return plan
