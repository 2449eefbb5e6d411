"""Rows, figures and a table from the passes of `engine.py`. Measures nothing."""

from collections.abc import Iterator, Mapping, Sequence

from common import Figure, Spread
from engine_passes import Counted, Repetitions, over_best, ratios
from engine_systems import ADAPTIVE, PEER, PLAIN, Contestant
from roofline import WatchedPlain
from systems import Pass

LONG, SHORT = "reki", "goodreads-items"
MIN_OVER_PLAIN = 0.98
MIN_OVER_BEST_FIXED = 0.98
MIN_PLAIN_OVER_PEER = {16: 1.3}  # on a CPU, by batch size
MIN_RELAXED = {
    "cpu": {(LONG, 1): 4.0, (SHORT, 1): 2.5, (LONG, 16): 1.5, (SHORT, 16): 1.2},
    "cuda": {
        (LONG, 1): 5.0,
        (LONG, 32): 3.0,
        (LONG, 64): 2.0,
        (LONG, 256): 1.5,
        (SHORT, 1): 3.0,
        (SHORT, 32): 2.0,
        (SHORT, 64): 1.5,
        (SHORT, 256): 1.0,
    },
}
MIN_GREEDY = {"cpu": {(LONG, 1): 3.0, (SHORT, 1): 2.0}, "cuda": {}}
MIN_GREEDY_GAIN = 0.6  # on a GPU, as a share of the relaxed rule's gain
MIN_ROOFLINE_SHARE = 0.75
ROOFLINE_BATCHES = (1, 64, 256)


def row_of(contestant: Contestant, passes: Mapping[tuple, Repetitions], counts: Mapping[tuple, Counted]) -> dict:
    """The row of one contestant; steps and texts are the same in every repetition.

    Parameters
    ----------
    counts : by key, the counted steps of the systems of our engine.
    """
    own, runner = passes[contestant.key], contestant.runner
    joined = [Pass.joined(parts) for parts in own]
    first, plain = joined[0], Pass.joined(passes[PLAIN, None][0])
    both = list(zip(first.texts, plain.texts, strict=False))
    speed = Spread.of([each.tokens_per_s for each in joined])
    over_plain = ratios(own, passes[PLAIN, None])
    return {
        "system": contestant.system,
        "budget": contestant.budget,
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
        "max_draft_tokens": contestant.settled and contestant.settled.max_draft_tokens,
        "min_acceptance": contestant.settled and contestant.settled.min_acceptance,
        "ratio_to_plain": Spread.of(over_plain),
        "ratio_to_transformers": Spread.of(ratios(own, passes[PEER, None])) if (PEER, None) in passes else None,
        "counted_to_plain": counts[contestant.key].over(counts[PLAIN, None]) if contestant.key in counts else None,
        "roofline_share": Spread.of(runner.shares[1:]).median if isinstance(runner, WatchedPlain) else None,
    } | _over_fixed(contestant, passes, counts)


def _over_fixed(contestant: Contestant, passes: Mapping[tuple, Repetitions], counts: Mapping[tuple, Counted]) -> dict:
    """Columns that compare an adaptive budget with its system's best fixed one: by the clock, and by counted steps."""
    fixed = [budget for system, budget in passes if system == contestant.system and isinstance(budget, int)]
    columns = dict.fromkeys(("best_fixed", "ratio_to_best_fixed", "counted_best_fixed", "counted_to_best_fixed"))
    if contestant.budget != ADAPTIVE or not fixed:
        return columns
    best, ratio = over_best(passes[contestant.key], {budget: passes[contestant.system, budget] for budget in fixed})
    by_count = max(fixed, key=lambda budget: counts[contestant.system, budget].tokens_per_s)
    return {
        "best_fixed": best,
        "ratio_to_best_fixed": ratio,
        "counted_best_fixed": by_count,
        "counted_to_best_fixed": counts[contestant.key].over(counts[contestant.system, by_count]),
    }


def repeats_of_plain(rows: Sequence[dict]) -> list[dict]:
    """Clock ratios to plain decoding of systems that drafted nothing: as they repeat it, the ratios show the noise."""
    return [
        {name: row[name] for name in ("task", "batch", "system", "ratio_to_plain")}
        for row in rows
        if row["max_draft_tokens"] == 0
    ]


COLUMNS = {
    "task": "{task}", "batch": "{batch}", "system": "{system}", "budget": "{shown_budget}",
    "tokens/s": "{tokens_per_s:.0f}", "per step": "{tokens_per_step:.2f}", "drafted": "{drafted_per_step:.1f}",
    "retrieval": "{retrieval_share:.1%}", "length": "{mean_length:.0f}", "counted": "{counted}",
    "over plain": "{ratio_to_plain}",
}  # fmt: skip


def described(row: dict) -> dict:
    """A row with the additional values that COLUMNS show."""
    counted = row["counted_to_plain"]
    return row | {"shown_budget": _shown_budget(row), "counted": "" if counted is None else f"{counted.value:.2f}"}


def _shown_budget(row: dict) -> str:
    if row["budget"] == ADAPTIVE:
        return f"{row['max_draft_tokens']}/{row['min_acceptance']:g}"
    return "" if row["budget"] is None else str(row["budget"])


def figures_of(rows: Sequence[dict], device: str) -> list[Figure]:
    """The figures of all measured tasks and batch sizes.

    Parameters
    ----------
    rows : the rows of `engine.py`.
    device : "cpu" or "cuda".
    """
    places = sorted({(row["task"], row["batch"]) for row in rows})
    return [figure for place in places for figure in _figures_at(place, _at(rows, place), device)]


def _at(rows: Sequence[dict], place: tuple[str, int]) -> dict[tuple[str, str | int | None], dict]:
    return {(row["system"], row["budget"]): row for row in rows if (row["task"], row["batch"]) == place}


def _figures_at(place: tuple[str, int], rows: dict, device: str) -> Iterator[Figure]:
    task, batch = place
    where = f"{task}, batch {batch}"
    for name, wanted in (("laser", MIN_RELAXED), ("resd", MIN_GREEDY)):
        row = rows.get((name, ADAPTIVE))
        if row and place in wanted[device]:
            ratio = row["ratio_to_plain"].median
            figure = f"{where}: {name}, adaptive, over plain, tokens per second"
            yield Figure.at_least(figure, ratio, wanted[device][place])
    relaxed, greedy = rows.get(("laser", ADAPTIVE)), rows.get(("resd", ADAPTIVE))
    if device == "cuda" and relaxed and greedy and relaxed["ratio_to_plain"].median > 1:
        gain = (greedy["ratio_to_plain"].median - 1) / (relaxed["ratio_to_plain"].median - 1)
        yield Figure.at_least(f"{where}: the gain of lossless drafts over that of relaxed ones", gain, MIN_GREEDY_GAIN)
    adaptive = [row for (_, budget), row in rows.items() if budget == ADAPTIVE]
    for row in adaptive:
        if row["ratio_to_best_fixed"] is not None:
            figure = f"{where}: {row['system']}, adaptive over K={row['best_fixed']}, the best fixed, tokens per second"
            yield Figure.at_least(figure, row["ratio_to_best_fixed"].median, MIN_OVER_BEST_FIXED)
            figure = f"{where}: {row['system']}, adaptive over K={row['counted_best_fixed']}, by counted steps"
            yield Figure.at_least(figure, row["counted_to_best_fixed"].value, MIN_OVER_BEST_FIXED)
    drafting = [row for row in adaptive if row["max_draft_tokens"]]  # a system that drafts nothing decodes plainly
    if drafting:
        slowest = min(drafting, key=lambda row: row["ratio_to_plain"].median)
        figure = f"{where}: the slowest system that drafts ({slowest['system']}) over plain, tokens per second"
        yield Figure.at_least(figure, slowest["ratio_to_plain"].median, MIN_OVER_PLAIN)
    plain = rows[PLAIN, None]
    if device == "cpu" and batch in MIN_PLAIN_OVER_PEER and (PEER, None) in rows:
        figure = f"{where}: plain over transformers-generate, tokens per second"
        yield Figure.at_least(figure, plain["ratio_to_transformers"].median, MIN_PLAIN_OVER_PEER[batch])
    if device == "cuda" and task == LONG and batch in ROOFLINE_BATCHES:
        figure = f"{where}: plain, share of the roofline"
        yield Figure.at_least(figure, plain["roofline_share"], MIN_ROOFLINE_SHARE)
