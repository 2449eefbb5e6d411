"""How full the batches of a night are: the share of step slots in which a text is written, by simulation.

    python benchmarks/tail.py --quick --json tail.json

Lengths are drawn from a lognormal of mean 113 tokens, cut at 256; in some rows, one answer in a hundred has 1,000
tokens. The lengths of the previous and the new text differ by a lognormal factor. Shards are cut like a night's, and a
free worker takes the next one. Texts begin in the order of the plan, or with the longest previous text first, like in
`ShardWorker`. For comparison, a single batch of all workers writes all texts as one shard, in the order of the plan.
"""

import heapq
from collections.abc import Sequence
from statistics import median

import numpy as np
from common import SEED, Figure, benchmark_parser, finish, scale_of, table

from laserbatch.pipeline.planning.planner import default_shard_size

MAX_TOKENS, LONG_TOKENS, LONG_SHARE = 256, 1000, 0.01
NIGHTS = {  # texts, batch size, workers
    "20,000 texts, 4 CPU workers": (20_000, 16, 4),
    "1,000 texts, 2 CPU workers": (1_000, 16, 2),
    "20,000 texts, 8 GPUs": (20_000, 256, 8),
    "1,000,000 texts, 16 GPUs": (1_000_000, 256, 16),
}
NOISES = {"as before": 0.0, "within a third": 0.3, "within a factor of two": 0.6}


def steps_of(lengths: Sequence[int], batch_size: int) -> int:
    """The number of steps to write texts of these lengths in order, one token per step, in a batch that is refilled."""
    free, last = [0] * min(batch_size, len(lengths)), 0
    for length in lengths:
        end = heapq.heappop(free) + length
        heapq.heappush(free, end)
        last = max(last, end)
    return last


def full_share(shards: Sequence[np.ndarray], batch_size: int, num_workers: int) -> float:
    """The share of all workers' step slots that hold a text, until the last worker ends."""
    free, last = [0] * num_workers, 0
    for shard in shards:
        end = heapq.heappop(free) + steps_of(shard.tolist(), batch_size)
        heapq.heappush(free, end)
        last = max(last, end)
    return sum(int(shard.sum()) for shard in shards) / (last * batch_size * num_workers)


def row_of(night: str, noise: str, has_long: bool, known_share: float) -> dict:
    """The row of a night: full shares in both orders, and for one batch."""
    num_texts, batch_size, num_workers = NIGHTS[night]
    rng = np.random.default_rng(SEED)
    before = np.clip(rng.lognormal(np.log(100), 0.5, num_texts), 5, MAX_TOKENS)
    if has_long:
        before[rng.random(num_texts) < LONG_SHARE] = LONG_TOKENS
    factor = np.exp(NOISES[noise] * rng.standard_normal(num_texts))
    most = LONG_TOKENS if has_long else MAX_TOKENS
    lengths = np.clip(before * factor, 5, most).astype(int)
    expected = np.where(rng.random(num_texts) < known_share, before, before.mean())
    cuts = range(size := default_shard_size(num_texts, batch_size), num_texts, size)
    shards = list(zip(np.split(lengths, cuts), np.split(expected, cuts), strict=True))
    in_order = [own[np.argsort(-guess, kind="stable")] for own, guess in shards]
    return {
        "night": night,
        "lengths": noise,
        "has_long": "1 in 100 is long" if has_long else "",
        "known_share": known_share,
        "plan_order": full_share([own for own, _ in shards], batch_size, num_workers),
        "longest_first": full_share(in_order, batch_size, num_workers),
        "one_batch": full_share([lengths], batch_size * num_workers, 1),
    }


def main() -> None:
    """Simulate, print, and write the JSON."""
    arguments = benchmark_parser(__doc__).parse_args()
    nights = [night for night in NIGHTS if NIGHTS[night][0] <= scale_of(arguments, 10**7, 20_000, 1_000)]
    cases = [(noise, has_long, 1.0) for has_long in (False, True) for noise in NOISES] + [
        ("within a third", False, 0.5)
    ]
    rows = [row_of(night, *case) for night in nights for case in cases]
    figures = [
        Figure.at_least(
            "median gain of longest first where lengths are within a third",
            median(row["longest_first"] / row["plan_order"] for row in rows if row["lengths"] == "within a third"),
            1.03,
        )
    ]
    if nights != list(NIGHTS)[1:2]:
        ours = [row["longest_first"] for row in rows if row["night"] == nights[0] and row["lengths"] != "as before"]
        figures.append(Figure.at_least(f"least share of slots full, {nights[0]}", min(ours), 0.92))
    columns = {
        "night": "{night}", "new lengths": "{lengths} {has_long}", "previous known": "{known_share:.0%}",
        "plan's order": "{plan_order:.3f}", "longest first": "{longest_first:.3f}", "one batch": "{one_batch:.3f}",
    }  # fmt: skip
    finish(arguments.json, figures, [table(rows, columns)], {"rows": rows})


if __name__ == "__main__":
    main()
