"""What the passes of `engine.py` say, as rows and as a table for a terminal. Measures nothing."""

from collections.abc import Mapping, Sequence

from common import Spread
from engine_counted import Counted
from engine_passes import Repetitions, over_best, ratios
from engine_systems import ADAPTIVE, PEER, PLAIN, Contestant
from night_systems import Pass


def row_of(one: Contestant, passes: Mapping[tuple, Repetitions], counts: Mapping[tuple, Counted]) -> dict:
    """What the passes of one contestant say; steps and texts are the same in every repetition.

    Parameters
    ----------
    counts : by key, of the systems of our engine.
    """
    own = passes[one.key]
    joined = [Pass.joined(parts) for parts in own]
    first, plain = joined[0], Pass.joined(passes[PLAIN, None][0])
    both = list(zip(first.texts, plain.texts, strict=False))
    speed = Spread.of([each.tokens_per_s for each in joined])
    over_plain = ratios(own, passes[PLAIN, None])
    return {
        "system": one.system,
        "budget": one.budget,
        "tokens_per_s": speed.median,
        "tokens_per_s_min": speed.min,
        "tokens_per_s_max": speed.max,
        "tokens_per_step": first.tokens_per_step,
        "drafted_per_step": first.num_drafted / first.num_steps,
        "accepted_per_step": first.num_accepted / first.num_steps,
        "retrieval_share": Spread.of([each.drafting_s / each.wall_s for each in joined]).median,
        "mean_length": first.num_tokens / len(first.texts),
        "num_texts": len(first.texts),
        "num_repetitions": len(own),
        "num_texts_beside_plain": len(both),
        "num_repetitions_beside_plain": len(over_plain),
        "num_texts_as_plain": sum(text == other for text, other in both),
        "max_draft_tokens": one.settled and one.settled.max_draft_tokens,
        "min_acceptance": one.settled and one.settled.min_acceptance,
        "ratio_to_plain": Spread.of(over_plain),
        "ratio_to_transformers": Spread.of(ratios(own, passes[PEER, None])) if (PEER, None) in passes else None,
        "counted_to_plain": counts[one.key].over(counts[PLAIN, None]) if one.key in counts else None,
        "roofline_share": Spread.of(one.runner.shares[1:]).median if one.system == PLAIN else None,
    } | _over_fixed(one, passes, counts)


def _over_fixed(one: Contestant, passes: Mapping[tuple, Repetitions], counts: Mapping[tuple, Counted]) -> dict:
    """An adaptive budget beside the best fixed one of its system: as measured, and by counted steps."""
    fixed = [budget for system, budget in passes if system == one.system and isinstance(budget, int)]
    found = dict.fromkeys(("best_fixed", "ratio_to_best_fixed", "counted_best_fixed", "counted_to_best_fixed"))
    if one.budget != ADAPTIVE or not fixed:
        return found
    best, ratio = over_best(passes[one.key], {budget: passes[one.system, budget] for budget in fixed})
    by_count = max(fixed, key=lambda budget: counts[one.system, budget].tokens_per_s)
    return {
        "best_fixed": best,
        "ratio_to_best_fixed": ratio,
        "counted_best_fixed": by_count,
        "counted_to_best_fixed": counts[one.key].over(counts[one.system, by_count]),
    }


def repeats_of_plain(rows: Sequence[dict]) -> list[dict]:
    """By the clock, systems that drafted nothing over plain decoding, which they repeat: what such a ratio is worth."""
    return [
        {name: row[name] for name in ("task", "batch", "system", "ratio_to_plain")}
        for row in rows
        if row["max_draft_tokens"] == 0
    ]


def describe_rows(rows: list[dict]) -> str:
    """The rows as a table for a terminal."""
    head = (
        f"{'task':17}{'batch':>6}  {'system':27}{'budget':>9}{'tokens/s':>10}{'per step':>10}{'drafted':>9}"
        f"{'retrieval':>10}{'length':>8}{'counted':>9}  over plain"
    )
    lines = [
        f"{row['task']:17}{row['batch']:6}  {row['system']:27}{_shown_budget(row):>9}{row['tokens_per_s']:10.0f}"
        f"{row['tokens_per_step']:10.2f}{row['drafted_per_step']:9.1f}{row['retrieval_share']:10.1%}"
        f"{row['mean_length']:8.0f}{_shown_count(row):>9}  {row['ratio_to_plain']}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def _shown_count(row: dict) -> str:
    return "" if row["counted_to_plain"] is None else f"{row['counted_to_plain'].value:.2f}"


def _shown_budget(row: dict) -> str:
    if row["budget"] == ADAPTIVE:
        return f"{row['max_draft_tokens']}/{row['min_acceptance']:g}"
    return "" if row["budget"] is None else str(row["budget"])
