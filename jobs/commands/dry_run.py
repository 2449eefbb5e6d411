"""`laserbatch nightly --dry-run`: what a night would do, planned as it would be, beside the workspace."""

import datetime
from collections import Counter
from pathlib import Path
from typing import Any

from laserbatch.jobs.console import say
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages.attempt import newest_attempt
from laserbatch.jobs.stages.budgets import last_speed
from laserbatch.jobs.stages.generate import plan_night
from laserbatch.jobs.stages.inputs import checked_inputs
from laserbatch.jobs.stages.night import Night, new_night
from laserbatch.jobs.stages.variants import means
from laserbatch.pipeline.knowledge.prompts import changed_parts
from laserbatch.pipeline.knowledge.records import PreviousKnowledge
from laserbatch.pipeline.planning.plan import Shard, SidePlan
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.scratch import ScratchFolder
from laserbatch.pipeline.storage.workspace import Workspace

NEW, FORCED = "new", "forced"  # reasons to write about an entity that are no part of a fingerprint


def planned_night(settings: Settings, date: datetime.date, force: bool, redo: bool) -> dict[str, Any]:
    """What `run_night` would do with the same arguments; nothing of the workspace is written, nor its lock taken.

    Of a side: counts of entities, those to be written by reason (parts of the fingerprint that changed, joined by "+"),
    shards, predicted tokens by the mean of the texts that it builds on, and hours by the last measured tokens a second.
    None stands where nothing is known to predict from. Raises as `open_night` does.
    """
    inputs, tables = checked_inputs(settings, date)
    with ScratchFolder("dry-run") as scratch:
        root = settings.workspace
        is_there = root.is_file() or (root.is_dir() and any(root.iterdir()))
        workspace = Workspace.open(root, create=False) if is_there else Workspace(Path(scratch) / "workspace")
        attempt = newest_attempt(workspace, date, settings.identity(), inputs, force, redo)
        if attempt.is_done:
            state = "held back by its gates" if attempt.run.is_held else "finished already"
            return {"run_id": attempt.run.run_id, "state": state, "changed_since": list(attempt.changed)}
        if attempt.manifest is None:
            night = new_night(settings, workspace, date, attempt.edition)
            night.manifest.force = force
        else:
            night = Night(settings, workspace, date, attempt.run, attempt.manifest)
        night.tables = tables
        folder = RunFolder(Path(scratch) / "run")
        plans = plan_night(night, folder)
        sides = {f"{side}s": _planned_side(night, plans[side], folder) for side in SIDES}
    hours = [side["predicted_hours"] for side in sides.values() if side["num_to_write"]]
    total = sum(hours) if None not in hours else None
    price = settings.cluster.price_per_hour
    if None in [side["predicted_tokens"] for side in sides.values() if side["num_to_write"]]:
        say("tokens are not predicted: no night before this one has texts whose length would say")
    if total is None:
        say("hours are not predicted: no night before this one says how fast texts are written here")
    if price is None:
        say("money is not predicted: cluster.price_per_hour is not set")
    return {
        "run_id": night.run.run_id,
        "state": "would begin" if attempt.manifest is None else "would go on",
        "built_on": night.manifest.previous_run_id,
        "drafted_from": night.manifest.pools.version,
        **sides,
        "predicted_hours": total,
        "predicted_cost": None if price is None or total is None else total * price,
    }


def _planned_side(night: Night, plan: SidePlan, scratch: RunFolder) -> dict[str, Any]:
    side = plan.side
    records = night.run.finished_shards(side)
    done = {record.info.planned_sha256 for record in records.values() if record.info is not None}
    pending = [shard for shard in plan.shards if shard.sha256 not in done]
    num_rows = sum(shard.num_rows for shard in pending)
    mean_tokens = None if night.previous is None else means(night.previous, side, ["num_tokens"])[0]
    tokens = None if mean_tokens is None else round(num_rows * mean_tokens)
    tokens_per_s = last_speed(night, [side])
    return {
        "num_entities": plan.num_entities,
        "num_carried_over": plan.num_carried_over,
        "num_refused": plan.num_refused,
        **({"postponed": plan.postponed} if plan.postponed else {}),
        "num_to_write": num_rows,
        "num_shards": len(pending),
        "num_shards_done": len(plan.shards) - len(pending),
        "reasons": _reasons(night, side, pending, scratch),
        "predicted_tokens": tokens,
        "predicted_hours": None if tokens is None or not tokens_per_s else tokens / tokens_per_s / 3600,
    }


def _reasons(night: Night, side: Side, shards: list[Shard], scratch: RunFolder) -> dict[str, int]:
    """Number of entities to be written by reason, the most frequent first."""
    known = PreviousKnowledge(None if night.previous is None else night.previous.knowledge_folder(side))
    reasons: Counter[str] = Counter()
    for shard in shards:
        rows = read_parquet(scratch.root / shard.path, ["entity_id", "fingerprint"])
        before = known.fingerprints(known.rows_of(rows["entity_id"])).to_pylist()
        for old, new in zip(before, rows["fingerprint"].to_pylist(), strict=True):
            reasons[NEW if old is None else "+".join(changed_parts(old, new)) or FORCED] += 1
    return dict(reasons.most_common())
