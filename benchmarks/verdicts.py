"""Coverage of the CTR comparison's intervals, and how often it calls equal texts "equivalent"; simulated.

No model is trained. The simulation draws from variances that were measured in the demo's world (three models, ten
seeds, 8,361 test rows of 400 users): of a pair's difference over seeds, of the part that changes with the sampled
users, and of the part that all seeds share. With "seeds alone" the test users count as the whole population.
"""

from dataclasses import dataclass

import numpy as np
from common import SEED, Figure, benchmark_parser, finish, scale_of

from laserbatch.ctr.equivalence import PairedAuc, compare_paired

NUM_USERS, NUM_ROWS, MARGIN = 400, 8361, 0.005
SEEDS = (3, 4, 5, 6)


@dataclass(frozen=True)
class Spread:
    """Variances of one model's paired difference of AUC."""

    seeds: float  # over seeds, on the same test rows
    interaction: float  # the part of `seeds` that depends on the test users
    users: float  # due to the test users, equal for all seeds


MEASURED = {
    "DIN": Spread(0.00806**2, 9.3e-6, 4.4e-7),
    "DCNv2": Spread(0.0066**2, 7.3e-6, 1.0e-7),
    "LightGBM": Spread(0.0024**2, 1.9e-6, 3.4e-7),
}


def draw(num_seeds: int, with_users: bool, draws: np.random.Generator) -> dict[str, PairedAuc]:
    """The paired AUCs of one simulated comparison of equal texts, by model."""
    pairs = {}
    for model, spread in MEASURED.items():
        of_seeds = draws.normal(0, np.sqrt(spread.seeds - spread.interaction), num_seeds)
        shared = draws.normal(0, np.sqrt(spread.users / NUM_USERS), NUM_USERS)
        own = draws.normal(0, np.sqrt(spread.interaction / NUM_USERS), (num_seeds, NUM_USERS))
        influence = (shared + own) * with_users
        pairs[model] = PairedAuc(of_seeds + influence.sum(axis=1), influence - influence.mean(axis=1, keepdims=True))
    return pairs


def simulated(num_seeds: int, with_users: bool, num: int) -> dict:
    """Shares of simulations whose overall interval holds the true difference, and whose verdict is "equivalent"."""
    draws, covered, equivalent = np.random.default_rng([SEED, num_seeds, with_users]), 0, 0
    for _ in range(num):
        comparison = compare_paired(draw(num_seeds, with_users, draws), NUM_ROWS, MARGIN)["all"]
        covered += comparison.low <= 0 and comparison.high >= 0
        equivalent += comparison.verdict == "equivalent"
    return {
        "seeds": num_seeds,
        "test_rows": "users are sampled" if with_users else "seeds alone",
        "simulations": num,
        "coverage": covered / num,
        "equal_called_equivalent": equivalent / num,
    }


def main() -> None:
    """Print and write the table."""
    arguments = benchmark_parser(__doc__).parse_args()
    num = scale_of(arguments, full=4000, quick=400, smoke=40)
    rows = [simulated(seeds, users, num) for users in (True, False) for seeds in SEEDS]
    figures = [
        Figure.at_least("least coverage", min(row["coverage"] for row in rows), 0.93),
        Figure.at_most("most coverage", max(row["coverage"] for row in rows), 0.97),
        Figure.at_least("equal texts called so, 4 seeds, users sampled", rows[1]["equal_called_equivalent"], 0.8),
    ]
    lines = ["\t".join(str(value) for value in row.values()) for row in rows]
    finish(arguments.json, figures, ["\n".join(lines)], {"margin": MARGIN, "rows": rows})


if __name__ == "__main__":
    main()
