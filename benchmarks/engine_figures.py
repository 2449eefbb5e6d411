"""What was asked of the engine on each device, and what rows of `engine.py` say of it. Measures nothing."""

from collections.abc import Iterator, Sequence

from common import Figure
from engine_systems import ADAPTIVE, PEER, PLAIN

LONG, SHORT = "reki", "goodreads-items"
LEAST_OF_PLAIN = 0.98
LEAST_OF_BEST_FIXED = 0.98
LEAST_PLAIN_OVER_PEER = {16: 1.3}  # on a CPU, by batch size
LEAST_RELAXED = {
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
LEAST_GREEDY = {"cpu": {(LONG, 1): 3.0, (SHORT, 1): 2.0}, "cuda": {}}
LEAST_GREEDY_GAIN = 0.6  # of the relaxed one's, on a GPU
LEAST_OVER_VLLM = {"laser": 1.3, "resd": 1.1}
LEAST_OF_ROOFLINE = 0.75
ROOFLINE_BATCHES = (1, 64, 256)


def figures_of(rows: Sequence[dict], device: str) -> list[Figure]:
    """Figures of all tasks and batch sizes that were measured.

    Parameters
    ----------
    rows : of `engine.py`.
    device : "cpu" or "cuda".
    """
    places = sorted({(row["task"], row["batch"]) for row in rows})
    return [figure for place in places for figure in _figures_at(place, _at(rows, place), device)]


def _at(rows: Sequence[dict], place: tuple[str, int]) -> dict[tuple[str, str | int | None], dict]:
    return {(row["system"], row["budget"]): row for row in rows if (row["task"], row["batch"]) == place}


def _figures_at(place: tuple[str, int], rows: dict, device: str) -> Iterator[Figure]:
    task, batch = place
    where = f"{task}, batch {batch}"
    for name, wanted in (("laser", LEAST_RELAXED), ("resd", LEAST_GREEDY)):
        row = rows.get((name, ADAPTIVE))
        if row and place in wanted[device]:
            ratio = row["ratio_to_plain"].median
            figure = f"{where}: {name}, adaptive, over plain, tokens per second"
            yield Figure.at_least(figure, ratio, wanted[device][place])
    relaxed, greedy = rows.get(("laser", ADAPTIVE)), rows.get(("resd", ADAPTIVE))
    if device == "cuda" and relaxed and greedy and relaxed["ratio_to_plain"].median > 1:
        gain = (greedy["ratio_to_plain"].median - 1) / (relaxed["ratio_to_plain"].median - 1)
        yield Figure.at_least(
            f"{where}: the gain of lossless drafts over that of relaxed ones", gain, LEAST_GREEDY_GAIN
        )
    for peer in (row for (system, _), row in rows.items() if system.startswith("vllm") and task == LONG):
        for name, wanted in LEAST_OVER_VLLM.items():
            ratio = rows[name, ADAPTIVE]["ratio_to_plain"].median / peer["ratio_to_plain"].median
            yield Figure.at_least(f"{where}: {name}, adaptive, over {peer['system']}, tokens per second", ratio, wanted)
    adaptive = [row for (_, budget), row in rows.items() if budget == ADAPTIVE]
    for row in adaptive:
        if row["ratio_to_best_fixed"] is not None:
            figure = f"{where}: {row['system']}, adaptive over K={row['best_fixed']}, the best fixed, tokens per second"
            yield Figure.at_least(figure, row["ratio_to_best_fixed"].median, LEAST_OF_BEST_FIXED)
            figure = f"{where}: {row['system']}, adaptive over K={row['counted_best_fixed']}, by counted steps"
            yield Figure.at_least(figure, row["counted_to_best_fixed"].value, LEAST_OF_BEST_FIXED)
    drafting = [row for row in adaptive if row["max_draft_tokens"]]  # what drafts nothing is plain decoding
    if drafting:
        slowest = min(drafting, key=lambda row: row["ratio_to_plain"].median)
        figure = f"{where}: the slowest system that drafts ({slowest['system']}) over plain, tokens per second"
        yield Figure.at_least(figure, slowest["ratio_to_plain"].median, LEAST_OF_PLAIN)
    plain = rows[PLAIN, None]
    if device == "cpu" and batch in LEAST_PLAIN_OVER_PEER and (PEER, None) in rows:
        figure = f"{where}: plain over transformers-generate, tokens per second"
        yield Figure.at_least(figure, plain["ratio_to_transformers"].median, LEAST_PLAIN_OVER_PEER[batch])
    if device == "cuda" and task == LONG and batch in ROOFLINE_BATCHES:
        figure = f"{where}: plain, share of the roofline"
        yield Figure.at_least(figure, plain["roofline_share"], LEAST_OF_ROOFLINE)
