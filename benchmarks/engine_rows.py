"""What the passes of `engine.py` say, as rows and as a table for a terminal. Measures nothing."""

from common import Spread
from engine_systems import ADAPTIVE, PEER, PLAIN, Contestant
from night_systems import Pass


def row_of(one: Contestant, passes: dict[tuple, list[Pass]]) -> dict:
    """What the passes of one contestant say; steps and texts are the same in every repetition."""
    own = passes[one.key]
    first, plain_texts = own[0], passes[PLAIN, None][0].texts
    speed = Spread.of([each.tokens_per_s for each in own])
    fixed = {
        budget: ratios(own, passes[system, budget])
        for system, budget in passes
        if system == one.system and isinstance(budget, int)
    }
    best = min(fixed, key=lambda budget: fixed[budget].median) if fixed and one.budget == ADAPTIVE else None
    return {
        "system": one.system,
        "budget": one.budget,
        "tokens_per_s": speed.median,
        "tokens_per_s_min": speed.min,
        "tokens_per_s_max": speed.max,
        "tokens_per_step": first.tokens_per_step,
        "drafted_per_step": first.num_drafted / first.num_steps,
        "accepted_per_step": first.num_accepted / first.num_steps,
        "retrieval_share": Spread.of([each.drafting_s / each.wall_s for each in own]).median,
        "mean_length": first.num_tokens / len(first.texts),
        "num_texts": len(first.texts),
        "num_texts_as_plain": sum(text == other for text, other in zip(first.texts, plain_texts, strict=True)),
        "num_repetitions": len(own),
        "max_draft_tokens": one.settled and one.settled.max_draft_tokens,
        "min_acceptance": one.settled and one.settled.min_acceptance,
        "ratio_to_plain": ratios(own, passes[PLAIN, None]),
        "ratio_to_transformers": ratios(own, passes[PEER, None]) if (PEER, None) in passes else None,
        "best_fixed": best,
        "ratio_to_best_fixed": fixed.get(best),
        "roofline_share": Spread.of(one.runner.shares[1:]).median if one.system == PLAIN else None,
    }


def ratios(passes: list[Pass], peers: list[Pass]) -> Spread:
    """Tokens per second over another's, within each repetition."""
    return Spread.of([one.tokens_per_s / peer.tokens_per_s for one, peer in zip(passes, peers, strict=True)])


def describe_rows(rows: list[dict]) -> str:
    """The rows as a table for a terminal."""
    head = (
        f"{'task':17}{'batch':>6}  {'system':27}{'budget':>9}{'tokens/s':>10}{'per step':>10}{'drafted':>9}"
        f"{'retrieval':>10}{'length':>8}  over plain"
    )
    lines = [
        f"{row['task']:17}{row['batch']:6}  {row['system']:27}{_shown_budget(row):>9}{row['tokens_per_s']:10.0f}"
        f"{row['tokens_per_step']:10.2f}{row['drafted_per_step']:9.1f}{row['retrieval_share']:10.1%}"
        f"{row['mean_length']:8.0f}  {row['ratio_to_plain']}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def _shown_budget(row: dict) -> str:
    if row["budget"] == ADAPTIVE:
        return f"{row['max_draft_tokens']}/{row['min_acceptance']:g}"
    return "" if row["budget"] is None else str(row["budget"])
