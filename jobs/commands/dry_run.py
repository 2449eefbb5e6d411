"""`laserbatch nightly --dry-run`: the plan of a night, made outside the workspace."""

import datetime
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from laserbatch.jobs.console import say
from laserbatch.jobs.formatting import significant
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages.attempt import newest_attempt
from laserbatch.jobs.stages.budgets import last_speed
from laserbatch.jobs.stages.inputs import checked_inputs
from laserbatch.jobs.stages.night import Night, leave_lost_pools, means, new_night, say_other_prompts
from laserbatch.jobs.stages.night_plans import plan_night, predicted_cost
from laserbatch.pipeline.knowledge.prompts import changed_parts, count_refused
from laserbatch.pipeline.knowledge.questions import SHOWN_SCHEMA, SideQuestions, shown_of_row
from laserbatch.pipeline.knowledge.records import PreviousKnowledge
from laserbatch.pipeline.planning import column_changes
from laserbatch.pipeline.planning.plan import Shard, SidePlan
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.parquet import read_parquet, read_rows
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.scratch import ScratchFolder
from laserbatch.pipeline.storage.workspace import Workspace

MAX_RENDERED = 256  # prompts of a side that are rendered to estimate how many are refused
NEW, FORCED = "new", "forced"  # reasons to write a text that are not parts of a fingerprint


def planned_night(settings: Settings, date: datetime.date, force: bool, redo: bool) -> dict[str, Any]:
    """Predict the work of `run_night` with the same arguments, without writing to the workspace or locking it.

    Each side has counts of entities, of texts to write by reason (the parts of the fingerprint that changed, joined by
    "+") and of shards, `refused_prompts` (how many of these texts go to quarantine because their prompt is too long,
    estimated from a sample), the columns that changed for over half of the entities with a text, tokens predicted from
    the mean length of the last texts, and hours predicted from the last measured tokens per second. A value without a
    basis is None. Raises the errors of `open_night`.
    """
    inputs, tables = checked_inputs(settings, date)
    with ScratchFolder("dry-run") as scratch:
        root = settings.workspace
        exists = root.is_file() or (root.is_dir() and any(root.iterdir()))
        workspace = Workspace.open(root, create=False) if exists else Workspace(Path(scratch) / "workspace")
        attempt = newest_attempt(workspace, date, settings.identity(), inputs, force, redo)
        if attempt.is_done:
            state = "held back by its gates" if attempt.run.is_held else "finished already"
            return {"run_id": attempt.run.run_id, "state": state, "changed_since": list(attempt.changed)}
        if attempt.manifest is None:
            night = new_night(settings, workspace, date, attempt.edition)
            night.manifest.origin.force = force
        else:
            night = Night(settings, workspace, date, attempt.run, attempt.manifest)
            leave_lost_pools(night)
        night.tables = tables
        folder = RunFolder(Path(scratch) / "run")
        plans = plan_night(night, folder)
        sides = {f"{side}s": _planned_side(night, plans[side], folder) for side in SIDES}
        _say_why(night, sides)
    hours = [side["predicted_hours"] for side in sides.values() if side["num_to_write"]]
    total = sum(hours) if None not in hours else None
    if None in [side["predicted_tokens"] for side in sides.values() if side["num_to_write"]]:
        say("tokens are not predicted: no earlier night has texts to take their length from")
    if total is None:
        say("hours are not predicted: no earlier night has measured how fast texts are written here")
    state = {
        "run_id": night.run.run_id,
        "state": "would begin" if attempt.manifest is None else "would go on",
        "built_on": night.manifest.origin.previous_run_id,
        "drafted_from": night.manifest.generation.pools.version,
    }
    return state | sides | {"predicted_hours": total, "predicted_cost": _night_cost(settings, sides, total)}


def _night_cost(settings: Settings, sides: dict[str, dict[str, Any]], hours: float | None) -> float | None:
    """The predicted cost of the night, of the cluster by hours and of a server by tokens; None without a basis."""
    price, server = settings.cluster.price_per_hour, settings.decoding.endpoint
    cost = None if price is None or hours is None else hours * price
    if server is None or server.price_per_million_tokens is None:
        missing = "decoding.endpoint.price_per_million_tokens" if server else "cluster.price_per_hour"
        if price is None:
            say(f"money is not predicted: {missing} is not set")
        return cost
    of_sides = [side["predicted_cost"] for side in sides.values() if side["num_to_write"]]
    if None in of_sides:
        return None
    cost = sum(of_sides) + (cost or 0.0)
    if server.max_cost is not None and cost > server.max_cost:
        limit = f"decoding.endpoint.max_cost {server.max_cost:g}"
        say(f"WARNING: the night would cost {significant(cost)}, more than {limit}")
    return cost


def _planned_side(night: Night, plan: SidePlan, scratch: RunFolder) -> dict[str, Any]:
    side = plan.side
    records = night.run.shards(side).finished()
    done = {record.info.planned_sha256 for record in records.values() if record.info is not None}
    pending = [shard for shard in plan.shards if shard.sha256 not in done]
    num_rows = sum(shard.num_rows for shard in pending)
    refused = _refused_prompts(night, side, pending, num_rows, scratch)
    num_sent = num_rows - sum(refused.values())
    mean_tokens = None if night.previous is None else means(night.previous, side, ["num_tokens"])[0]
    tokens = None if mean_tokens is None else round(num_sent * mean_tokens)
    tokens_per_s = last_speed(night, [side])
    cost = {"predicted_cost": predicted_cost(night, side, num_sent, tokens)} if night.settings.decoding.endpoint else {}
    planned: dict[str, Any] = {"num_entities": plan.num_entities, "num_carried_over": plan.num_carried_over}
    planned["num_quarantined"] = plan.num_unpromptable
    planned |= {"postponed": plan.postponed} if plan.postponed else {}
    planned |= {"num_to_write": num_rows, "num_shards": len(pending)}
    planned |= {"refused_prompts": refused} if refused else {}
    planned |= {"num_shards_done": len(plan.shards) - len(pending)} | _reasons(night, plan, pending, scratch)
    hours = None if tokens is None or not tokens_per_s else tokens / tokens_per_s / 3600
    return planned | {"predicted_tokens": tokens, "predicted_hours": hours} | cost


def _refused_prompts(
    night: Night, side: Side, shards: list[Shard], num_rows: int, scratch: RunFolder
) -> dict[str, int]:
    """The number of prompts that are refused when they are rendered, by reason, estimated from a sample of shards."""
    places = np.unique(np.linspace(0, num_rows - 1, min(num_rows, MAX_RENDERED)).astype(np.int64))
    first, reasons = 0, Counter[str]()
    for shard in shards:
        rows = places[(places >= first) & (places < first + shard.num_rows)] - first
        first += shard.num_rows
        if len(rows):
            sample = read_rows(scratch.root / shard.path, rows, SHOWN_SCHEMA.names).to_pylist()
            reasons += count_refused(partial(night.render, side), map(shown_of_row, sample))
    refused = {reason: round(num * num_rows / len(places)) for reason, num in reasons.items()}
    about = "about " * (len(places) < num_rows)
    for reason, num in refused.items():
        limit = f"knowledge.max_prompt_tokens is {night.settings.knowledge.max_prompt_tokens}"
        say(f"WARNING: {side}s: {about}{num:,} of {num_rows:,} prompts would go to quarantine ({reason}; {limit})")
    return refused


def _reasons(night: Night, plan: SidePlan, shards: list[Shard], scratch: RunFolder) -> dict[str, Any]:
    """The number of texts to write by reason, the most frequent first, and `changed_columns` if most texts have any."""
    side = plan.side
    prior = PreviousKnowledge(None if night.previous is None else night.previous.knowledge_folder(side))
    reasons: Counter[str] = Counter()
    changed: dict[str, list[object]] = {"attributes": [], "history": []}
    for shard in shards:
        rows = read_parquet(scratch.root / shard.path, ["entity_id", "fingerprint"])
        before = prior.fingerprints(prior.rows_of(rows["entity_id"])).to_pylist()
        for key, old, new in zip(rows["entity_id"].to_pylist(), before, rows["fingerprint"].to_pylist(), strict=True):
            parts = () if old is None else changed_parts(old, new)
            reasons[NEW if old is None else "+".join(parts) or FORCED] += 1
            for part in changed.keys() & parts:
                changed[part].append(key)
    num_before = plan.num_carried_over + plan.num_waiting + reasons.total() - reasons[NEW]
    columns_by_side = {}
    for part, keys in changed.items():
        if 2 * len(keys) > num_before:
            columns_by_side |= _most_changed(night, side, part, pa.array(keys), num_before, prior, scratch)
    return {"reasons": dict(reasons.most_common()), **({"changed_columns": columns_by_side} if columns_by_side else {})}


def _most_changed(
    night: Night, side: Side, part: str, keys: pa.Array, num_before: int, prior: PreviousKnowledge, scratch: RunFolder
) -> dict[str, str]:
    """The columns that changed for over half of the `num_before` entities with a text, and how they changed.

    `keys` are the entities whose `part` of the fingerprint, attributes or history, changed; a sample is compared.
    """
    sample = keys.take(
        pa.array(np.unique(np.linspace(0, len(keys) - 1, min(len(keys), column_changes.MAX_COMPARED)).astype(int)))
    )
    records = prior.values(prior.rows_of(pa.chunked_array([sample])), ["entity_id", "fingerprint", "run_id"])
    ids = records["entity_id"].cast(pa.string()).to_pylist()
    written = dict(zip(ids, records["fingerprint"].to_pylist(), strict=True))
    before: dict[str, dict] = {}
    for run_id in records["run_id"].unique().to_pylist():
        shown = column_changes.shown_in_plan(night.workspace.run(run_id).root, side, ids)
        before |= {key: row for key, row in shown.items() if row["fingerprint"] == written[key]}
    tonight = column_changes.shown_in_plan(scratch.root, side, before)
    pairs = [(before[key][part], tonight[key][part]) for key in before if key in tonight]
    if not pairs:
        say(f"{side}s: how their {part} changed is unknown: the runs that wrote their texts, or their plans, are gone")
        return {}
    template = night.template(side)
    if part == "history" and template.history is not None:
        texts_of = SideQuestions(night.tables, side, template, "").item_texts
        changes = column_changes.changed_in_histories(pairs, template.history.separator, texts_of)
        changes = {
            f"items.{name}" if name != column_changes.ITEM_ATTRIBUTES else name: change
            for name, change in changes.items()
        }
    else:
        read = partial(column_changes.attributes_of, columns=template.attributes)
        changes = column_changes.changed_columns([(read(then), read(now)) for then, now in pairs])
    share, about = len(keys) / len(pairs), "about " * (len(pairs) < len(keys))
    return {
        name: f"{what} ({about}{round(num * share):,} of {num_before:,} {side}s)"
        for name, (what, num) in changes.items()
        if 2 * num * share > num_before
    }


def _say_why(night: Night, sides: dict[str, dict[str, Any]]) -> None:
    """Print the changes that make a night rewrite the texts of most entities."""
    say_other_prompts(night)
    for side, prompt in night.manifest.origin.prompts.items():
        changes = sides[f"{side}s"].get("changed_columns", {})
        for name, what in changes.items():
            say(f"WARNING: {side}s: {name} {what}")
        if any(what.startswith("is gone") for what in changes.values()):
            say(f"if a column of {side}s is missing by mistake, restore it before you run the night")
        if any(not what.startswith(("is gone", "are gone", "are in")) for what in changes.values()):
            how = f"list it under `exclude` of the template ({prompt.template}; docs/own-prompts.md)"
            say(f"if changes of a column need no new texts, leave it out of prompts: {how}")
