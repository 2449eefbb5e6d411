"""The table that turns a draft node's features into the probability that it is accepted: its axes, and how it is read.

`drafting/estimate.py` reads it in compiled code, `reference.py` by the function below. Knows neither how a table is
fitted nor where it is kept.
"""

import numpy as np

from retrieval_pools.sources import NUM_SOURCES

LENGTH_EDGES = (1, 2, 3, 4, 5, 7, 10, 17)  # first match length of each bin
DEPTH_EDGES = (1, 2, 3, 5, 9)  # first depth of each bin; the root's children are at depth 1
LOWEST_EXPONENT = -11  # of the lowest knot: less likely tokens are never drafted
COUNT_KNOTS = np.array(
    [mantissa * 2.0**exponent for exponent in range(LOWEST_EXPONENT, 0) for mantissa in (1.0, 1.5)] + [1.0], np.float32
)
TABLE_SHAPE = (NUM_SOURCES, len(LENGTH_EDGES), len(DEPTH_EDGES), len(COUNT_KNOTS))
LARGEST_BINNED = 64


def _bins(edges: tuple[int, ...]) -> np.ndarray:
    """uint8[LARGEST_BINNED + 1]: bin of each value; what is below the first edge is in the first bin."""
    values = np.arange(LARGEST_BINNED + 1)
    return np.maximum(np.searchsorted(edges, values, side="right") - 1, 0).astype(np.uint8)


LENGTH_BINS, DEPTH_BINS = _bins(LENGTH_EDGES), _bins(DEPTH_EDGES)


def length_bin(match_length: int) -> int:
    """Bin of a match length."""
    return int(LENGTH_BINS[min(match_length, LARGEST_BINNED)])


def depth_bin(depth: int) -> int:
    """Bin of a node's depth, 1 for children of the root."""
    return int(DEPTH_BINS[min(depth, LARGEST_BINNED)])


def identity_table() -> np.ndarray:
    """float32 `TABLE_SHAPE`: relative counts are believed as they are."""
    return np.broadcast_to(COUNT_KNOTS, TABLE_SHAPE).copy()


IDENTITY_TABLE = identity_table()
IDENTITY_TABLE.flags.writeable = False


def upper_bounds(table: np.ndarray) -> np.ndarray:
    """float32[num knots]: what no cell gives more than to relative counts up to each knot."""
    return np.maximum.accumulate(table.reshape(-1, len(COUNT_KNOTS)).max(axis=0))


def conditional_acceptance(
    table: np.ndarray, source: int, match_length: int, depth: int, relative_count: float
) -> float:
    """Probability that a node is accepted when its parent is: linear between the knots, to the origin below them."""
    values = table[source, length_bin(match_length), depth_bin(depth)].astype(np.float64)
    x = np.float64(np.float32(relative_count))
    if x >= 1:
        return float(values[-1])
    if x < COUNT_KNOTS[0]:
        return float(values[0] * (x / COUNT_KNOTS[0]))
    k = int(np.searchsorted(COUNT_KNOTS, x, side="right")) - 1
    part = (x - COUNT_KNOTS[k]) / (np.float64(COUNT_KNOTS[k + 1]) - COUNT_KNOTS[k])
    return float(values[k] + part * (values[k + 1] - values[k]))
