"""From what is known of a node to the probability that it is accepted; `calibration_table` says the same slowly."""

import numpy as np

from retrieval_pools.calibration_table import COUNT_KNOTS, DEPTH_BINS, LARGEST_BINNED, LENGTH_BINS, LOWEST_EXPONENT
from retrieval_pools.drafting.state import part

# Knots are the floats whose mantissa has one bit at most: the upper bits of a float32 are the number of its knot.
_MANTISSA_BITS = 22
_FIRST_KNOT = (127 + LOWEST_EXPONENT) << 1
_LOWEST = float(COUNT_KNOTS[0])


@part
def most_acceptance(bounds, relative_count):
    """What no cell of the table gives more than; see `calibration_table.upper_bounds`."""
    x = np.float32(relative_count)
    if x >= 1:
        return bounds[bounds.shape[0] - 1]
    return bounds[0] if x < _LOWEST else bounds[(x.view(np.int32) >> _MANTISSA_BITS) - _FIRST_KNOT + 1]


@part
def conditional_acceptance(table, source, match_length, depth, relative_count):
    """Probability that a node is accepted when its parent is."""
    values = table[source, LENGTH_BINS[min(match_length, LARGEST_BINNED)], DEPTH_BINS[min(depth, LARGEST_BINNED)]]
    x = np.float32(relative_count)
    if x >= 1:
        return np.float64(values[values.shape[0] - 1])
    if x < _LOWEST:
        return np.float64(values[0]) * (np.float64(x) / _LOWEST)
    bits = x.view(np.int32)
    k = (bits >> _MANTISSA_BITS) - _FIRST_KNOT
    beyond = (bits & ((1 << _MANTISSA_BITS) - 1)) / float(1 << _MANTISSA_BITS)
    low, high = np.float64(values[k]), np.float64(values[k + 1])
    return low + beyond * (high - low)
