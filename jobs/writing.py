"""Reads an attempt's stage, shards and cost from its events: counts, speed, an estimate of the time left.

`laserbatch status` and the night's metrics take their figures from here.
"""

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from laserbatch.jobs.formatting import ratio
from laserbatch.pipeline.decoding.endpoint_settings import TokenPrices
from laserbatch.pipeline.engines.spending import Spending
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.figures import ShardRecord, SideFigures
from laserbatch.pipeline.storage.side_shards import SideShards
from laserbatch.pipeline.storage.stats import DecodingStats

Event = dict[str, Any]
Counts = Mapping[str, Any]
COUNTED = ("shards", "rows", "quarantined", "tokens", "accepted", "steps", "seconds")
NOTHING: Counts = dict.fromkeys(COUNTED, 0) | {"reasons": {}}


def current_stage(events: Sequence[Event]) -> Event | None:
    """The event of the stage that began last; None before the first."""
    return next((event for event in reversed(events) if event["event"] == "stage_begin"), None)


def cost_so_far(events: Sequence[Event], run_dir: Path) -> float | None:
    """The cost of a server's answers, over all attempts at a run; None without a server or prices.

    Raises WorkspaceError if the run's file of spending is damaged.
    """
    prices = next((event["prices"] for event in events if event["event"] == "endpoint"), None)
    return None if prices is None else Spending.of(run_dir).cost(TokenPrices(**prices))


def shard_counts(record: ShardRecord, shards: SideShards) -> dict[str, Any]:
    """The counts of a shard in the event `shard_done`.

    `seconds` is the time of the worker that wrote it; `reasons` has the number of quarantined rows by reason.
    """
    info = record.written_by
    counts = {
        "tokens": info.stats.num_tokens,
        "accepted": info.stats.num_accepted,
        "steps": info.stats.num_steps,
        "seconds": info.stats.wall_s,
        "workers": info.num_workers,
    }
    return counts | {"quarantined": record.num_quarantined, "reasons": shards.quarantine_reasons(record)}


def finished_counts(records: Iterable[ShardRecord], shards: SideShards) -> Counts:
    """The summed counts, with the keys of `NOTHING`, of finished shards that a model wrote."""
    written = (record for record in records if record.info is not None)
    counts = (shard_counts(record, shards) | {"rows": record.num_rows + record.num_quarantined} for record in written)
    return reduce(_added, counts, NOTHING)


def _added(total: Counts, shard: Counts) -> Counts:
    """Add a shard's counts; workers write in parallel, so its seconds are divided by the number of workers."""
    counts = {"shards": 1, **shard, "seconds": shard.get("seconds", 0) / shard.get("workers", 1)}
    reasons = Counter(total.get("reasons")) + Counter(shard.get("reasons"))
    return {name: total[name] + counts.get(name, 0) for name in COUNTED} | {"reasons": reasons}


def _last_shards(events: Sequence[Event]) -> tuple[Event | None, list[Event]]:
    """The last event `shards_begin`, None if there is none, and the events of shards that ended since."""
    begun, outcomes = None, []
    for event in events:
        if event["event"] == "shards_begin":
            begun, outcomes = event, []
        elif event["event"] in ("shard_done", "shard_abandoned"):
            outcomes.append(event)
    return begun, outcomes


def _done_by_side(begun: Event, outcomes: Sequence[Event]) -> dict[Side, Counts]:
    """The counts of each side's finished shards, over all attempts. A quarantined row counts as done."""
    done = {side: planned["done"] for side, planned in begun["sides"].items()}
    for shard in outcomes:
        done[shard["side"]] = _added(done[shard["side"]], shard)
    return done


def _plans(events: Sequence[Event], begun: Event) -> dict[Side, Event]:
    return {event["side"]: event for event in events if event["event"] == "planned" and event["of"] == begun["of"]}


def _quarantined(plan: Event, done: Counts) -> Counter[str]:
    """Rows of a side in quarantine by reason: rows that its plan left there, and rows of finished shards."""
    return Counter(plan.get("reasons")) + Counter(done.get("reasons"))


def writing_state(events: Sequence[Event], now: datetime.datetime) -> dict[str, Any] | None:
    """The figures of the shards that were handed out last, as `status` shows them; None if there are none.

    `left_s` is an estimate from the missing "tokens" if their expected number is known, otherwise from the missing
    "rows"; `left_by` says which. `quarantine_reasons` counts quarantined rows, also those that the plan left there.
    """
    begun, outcomes = _last_shards(events)
    if begun is None:
        return None
    by_side = _done_by_side(begun, outcomes)
    done = reduce(_added, by_side.values(), NOTHING)
    plans = _plans(events, begun)
    reasons = sum((_quarantined(plans.get(side, {}), counts) for side, counts in by_side.items()), Counter())
    num_shards, num_rows = (sum(side[name] for side in begun["sides"].values()) for name in ("shards", "rows"))
    # A shard that lost its workers is halved, so more shards may be done than were handed out.
    state = {
        "of": begun["of"],
        "num_shards": max(done["shards"], num_shards),
        "num_shards_done": done["shards"],
        "num_rows": num_rows,
        "num_rows_done": done["rows"],
        "num_quarantined": reasons.total(),
        "quarantine_reasons": dict(reasons.most_common()),
        "tokens_per_s": ratio(done["tokens"], done["seconds"]),
        "acceptance_length": ratio(done["accepted"], done["steps"]),
    }
    rows_left = {side: begun["sides"][side]["rows"] - counts["rows"] for side, counts in by_side.items()}
    expected = {side: begun["expected_tokens"].get(side) for side, num_left in rows_left.items() if num_left}
    left, left_by = sum(rows_left.values()), "rows"
    if done["tokens"] and None not in expected.values():
        left, left_by = sum(rows_left[side] * tokens for side, tokens in expected.items()), "tokens"
    left_s = ratio(left, ratio(done[left_by], done["seconds"])) if left else 0.0
    if left_s is not None:
        last = outcomes[-1] if outcomes else begun
        # The last shards do not keep all workers busy.
        left_s *= max(1.0, last.get("workers", 1) / max(1, num_shards - done["shards"]))
        left_s = max(0.0, left_s - (now - datetime.datetime.fromisoformat(last["time"])).total_seconds())
    return state | {"left_s": left_s, "left_by": None if left_s is None else left_by}


def sides_so_far(events: Sequence[Event]) -> dict[Side, SideFigures]:
    """The figures of the sides that a running stage writes; sides without a recorded plan are left out."""
    begun, outcomes = _last_shards(events)
    if begun is None:
        return {}
    done = _done_by_side(begun, outcomes)
    return {side: _figures(plan, done[side]) for side, plan in _plans(events, begun).items()}


def _figures(plan: Event, done: Counts) -> SideFigures:
    reasons = _quarantined(plan, done)
    return SideFigures(
        num_entities=plan["entities"],
        num_generated=done["rows"] - done["quarantined"],
        num_carried_over=plan["carried_over"],
        num_quarantined=reasons.total(),
        num_stale=0,
        quarantine_reasons=dict(reasons.most_common()),
        routes={},
        shards=[],
        stats=DecodingStats(0, done["tokens"], done["steps"], 0, done["accepted"], wall_s=done["seconds"]),
    )
