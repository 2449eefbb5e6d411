"""What turns a draft node's features into the probability that it is accepted, and how that is read.

A table says how often a node is accepted when its parent is, knowing nothing of its token; a curve for each source and
kind of token says what that is worth for it; and the product along a path is taken for what a last curve says of it.
`drafting/estimate.py` reads all in compiled code, `reference.py` by the functions below. Knows neither how they are
fitted nor where they are kept.
"""

import numpy as np

from laserbatch.retrieval_pools.sources import NUM_SOURCES

SEEN_EDGES = (1, 2, 4, 8, 16, 64, 256)  # first number of times that a context was seen of each bin
LENGTH_EDGES = (1, 2, 3, 4, 5, 7, 10, 17)  # first match length of each bin
DEPTH_EDGES = (1, 2, 3, 5, 9)  # first depth of each bin; the root's children are at depth 1
LOWEST_EXPONENT = -11  # of the lowest knot: less likely tokens are never drafted
COUNT_KNOTS = np.array(
    [mantissa * 2.0**exponent for exponent in range(LOWEST_EXPONENT, 0) for mantissa in (1.0, 1.5)] + [1.0], np.float32
)
NUM_KNOTS = len(COUNT_KNOTS)
TABLE_SHAPE = (NUM_SOURCES, len(SEEN_EDGES), len(LENGTH_EDGES), len(DEPTH_EDGES), NUM_KNOTS)
# The kind of a token: whether it stands in the prompt, whether in the output, how frequent it is in the pool, by the
# least share of the pool's positions, as a power of two, of each bin but the first, and how frequent the token before
# it is ("the" is followed otherwise than a name), in fewer bins.
FREQUENCY_EXPONENTS = (-16, -14, -12, -10, -9, -8, -7, -6)
NUM_FREQUENCIES = len(FREQUENCY_EXPONENTS) + 1
BEFORE_BINS = np.array([0, 0, 0, 1, 2, 2, 3, 4, 5], np.uint8)  # by the bin of its frequency
NUM_BEFORE = int(BEFORE_BINS[-1]) + 1
IN_PROMPT, IN_OUTPUT = 1, 2  # bits
NUM_KINDS = (IN_PROMPT + IN_OUTPUT + 1) * NUM_FREQUENCIES * NUM_BEFORE
KINDS_SHAPE = (NUM_SOURCES, NUM_KINDS, NUM_KNOTS)
PATHS_SHAPE = (2, NUM_KNOTS)  # of a sequence without an earlier text, and with one
LARGEST_BINNED, LARGEST_SEEN = 64, SEEN_EDGES[-1]


def _bins(edges: tuple[int, ...], largest: int) -> np.ndarray:
    """uint8[largest + 1]: bin of each value; what is below the first edge is in the first bin."""
    values = np.arange(largest + 1)
    return np.maximum(np.searchsorted(edges, values, side="right") - 1, 0).astype(np.uint8)


SEEN_BINS = _bins(SEEN_EDGES, LARGEST_SEEN)
LENGTH_BINS, DEPTH_BINS = _bins(LENGTH_EDGES, LARGEST_BINNED), _bins(DEPTH_EDGES, LARGEST_BINNED)


def seen_bin(num_seen: int) -> int:
    """Bin of how often a context was seen."""
    return int(SEEN_BINS[min(num_seen, LARGEST_SEEN)])


def length_bin(match_length: int) -> int:
    """Bin of a match length."""
    return int(LENGTH_BINS[min(match_length, LARGEST_BINNED)])


def depth_bin(depth: int) -> int:
    """Bin of a node's depth, 1 for children of the root."""
    return int(DEPTH_BINS[min(depth, LARGEST_BINNED)])


def token_kind(stands_in: int, num_occurrences: int, num_before: int, num_positions: int) -> int:
    """The kind of a token.

    Parameters
    ----------
    stands_in : IN_PROMPT and IN_OUTPUT, or one of them, or 0.
    num_occurrences : of the token in the pool.
    num_before : of the token before it; where a text begins, of the ends of texts.
    num_positions : of the pool: its tokens and the ends of its texts.
    """
    frequency, before = (
        sum((num << -exponent) >= max(num_positions, 1) for exponent in FREQUENCY_EXPONENTS)
        for num in (num_occurrences, num_before)
    )
    return (stands_in * NUM_FREQUENCIES + frequency) * NUM_BEFORE + int(BEFORE_BINS[before])


def token_frequencies(num_occurrences: np.ndarray, num_positions: int) -> np.ndarray:
    """uint8[n]: how frequent tokens are, of n tokens, as in `token_kind`."""
    least = [-(-max(num_positions, 1) // 2**-exponent) for exponent in FREQUENCY_EXPONENTS]
    return np.searchsorted(least, num_occurrences, side="right").astype(np.uint8)


def identity_table() -> np.ndarray:
    """float32 `TABLE_SHAPE`: relative counts are believed as they are."""
    return np.broadcast_to(COUNT_KNOTS, TABLE_SHAPE).copy()


def identity_paths() -> np.ndarray:
    """float32 `PATHS_SHAPE`: products are believed as they are."""
    return np.broadcast_to(COUNT_KNOTS, PATHS_SHAPE).copy()


def identity_kinds() -> np.ndarray:
    """float32 `KINDS_SHAPE`: the kind of a token is no matter."""
    return np.broadcast_to(COUNT_KNOTS, KINDS_SHAPE).copy()


IDENTITY_TABLE, IDENTITY_PATHS, IDENTITY_KINDS = identity_table(), identity_paths(), identity_kinds()
IDENTITY_TABLE.flags.writeable = IDENTITY_PATHS.flags.writeable = IDENTITY_KINDS.flags.writeable = False


def upper_bounds(table: np.ndarray, kind_curves: np.ndarray) -> np.ndarray:
    """float32[num knots]: what no cell and kind give more than to relative counts up to each knot."""
    highest = np.maximum.accumulate(table.reshape(-1, NUM_KNOTS).max(axis=0))
    most = kind_curves.reshape(-1, NUM_KNOTS).max(axis=0)
    return np.array([np.nextafter(np.float32(kind_acceptance(most, one)), np.float32(2)) for one in highest])


def conditional_acceptance(
    table: np.ndarray, source: int, num_seen: int, match_length: int, depth: int, relative_count: float
) -> float:
    """Probability that a node is accepted when its parent is."""
    return _on_knots(table[source, seen_bin(num_seen), length_bin(match_length), depth_bin(depth)], relative_count)


def kind_acceptance(kind_curve: np.ndarray, acceptance: float) -> float:
    """What the conditional acceptance of a token is worth, whose source and kind have this curve."""
    return _on_knots(kind_curve, acceptance)


def path_acceptance(path_curve: np.ndarray, product: float) -> float:
    """Probability that a whole path is accepted whose nodes' conditional acceptances have this product.

    Curves never fall, so that what is drafted first does not depend on them.
    """
    return _on_knots(path_curve, product)


def least_product(path_curve: np.ndarray, probability: float) -> float:
    """The least product that a curve makes at least this probability of; infinite where there is none."""
    values, knots = path_curve.astype(np.float64), COUNT_KNOTS.astype(np.float64)
    k = int(np.searchsorted(values, probability))
    if k == NUM_KNOTS:
        return float("inf")
    if k == 0:
        return float(probability / values[0] * knots[0])
    part = (probability - values[k - 1]) / (values[k] - values[k - 1])
    return float(knots[k - 1] + part * (knots[k] - knots[k - 1]))


def _on_knots(curve: np.ndarray, x: float) -> float:
    """A curve, given at COUNT_KNOTS: linear between them, to the origin below them."""
    values = curve.astype(np.float64)
    x = np.float64(np.float32(x))
    if x >= 1:
        return float(values[-1])
    if x < COUNT_KNOTS[0]:
        return float(values[0] * (x / COUNT_KNOTS[0]))
    k = int(np.searchsorted(COUNT_KNOTS, x, side="right")) - 1
    part = (x - COUNT_KNOTS[k]) / (np.float64(COUNT_KNOTS[k + 1]) - COUNT_KNOTS[k])
    return float(values[k] + part * (values[k + 1] - values[k]))
