"""Curves through what became of drafted nodes: least squares on knots, held to a coarser curve, never falling.

Knows what a cell is by its number alone.
"""

from dataclasses import dataclass

import numpy as np

from laserbatch.retrieval_pools.drafting.calibration_table import COUNT_KNOTS, NUM_KNOTS

LEAST_ACCEPTANCE, MOST_ACCEPTANCE = 1e-4, 0.9999  # nothing is impossible, nothing certain: paths keep an order
NUM_NEWTON_STEPS = 12
LONGEST_STEP = 1.0  # of Newton's method: beyond, where all was accepted that was thought impossible, it overshoots
SHORTEST_STEP = 1e-6  # the next one would be its square
LEAST_ODDS = 1e-6
IDENTITY = COUNT_KNOTS.astype(np.float64)
_MANTISSA_BITS = 51  # of a float64, but the first
_FIRST_KNOT = IDENTITY.view(np.int64)[0] >> _MANTISSA_BITS


@dataclass(frozen=True)
class KnotCounts:
    """What least squares needs of the nodes of each cell; the last axis of the first four are knots.

    A node between two knots belongs to each by its nearness b: `weight` is the sum of b_k b_k at a knot, `coupling` of
    b_k b_{k+1}, `outcome` of b_k over accepted nodes, `nearness` of b_k. `num_tried` and `num_accepted` are counts.
    """

    weight: np.ndarray
    coupling: np.ndarray
    outcome: np.ndarray
    nearness: np.ndarray
    num_tried: np.ndarray
    num_accepted: np.ndarray

    @classmethod
    def of(
        cls,
        estimates: np.ndarray,
        is_accepted: np.ndarray,
        counts_for: np.ndarray,
        cell: np.ndarray,
        shape: tuple[int, ...],
    ) -> "KnotCounts":
        """Counts of nodes.

        Parameters
        ----------
        estimates : float64[n], what the curves are over.
        is_accepted : bool[n].
        counts_for : float64[n], how much each node counts.
        cell : int64[n], the cell of each.
        shape : of the cells; they are numbered as its places are.
        """
        num_cells = int(np.prod(shape))
        below = _knot_below(estimates)
        upper = np.clip((estimates - IDENTITY[below]) / (IDENTITY[below + 1] - IDENTITY[below]), 0.0, 1.0)
        lower = 1.0 - upper
        at = cell * NUM_KNOTS + below
        accepted = is_accepted.astype(np.float64)

        def summed(index: np.ndarray, values: np.ndarray) -> np.ndarray:
            return np.bincount(index, values * counts_for, num_cells * NUM_KNOTS).reshape(*shape, NUM_KNOTS)

        return cls(
            weight=summed(at, lower * lower) + summed(at + 1, upper * upper),
            coupling=summed(at, lower * upper),
            outcome=summed(at, lower * accepted) + summed(at + 1, upper * accepted),
            nearness=summed(at, lower) + summed(at + 1, upper),
            num_tried=np.bincount(cell, minlength=num_cells).reshape(shape),
            num_accepted=np.bincount(cell, accepted, num_cells).reshape(shape),
        )

    def summed(self, axes: tuple[int, ...]) -> "KnotCounts":
        """The counts of coarser cells."""
        return KnotCounts(**{name: values.sum(axes) for name, values in vars(self).items()})

    def curves(self, coarser: np.ndarray, prior_nodes: float) -> np.ndarray:
        """Least squares through the nodes, each knot held to the coarser curve; then made nondecreasing.

        Parameters
        ----------
        coarser : float64[..., num knots], or what broadcasts to it: what holds for a cell without nodes.
        prior_nodes : how many nodes at each knot that counts for.

        Returns
        -------
        float64[..., num knots]
        """
        coarser = np.broadcast_to(coarser, self.weight.shape)
        curves, cells = coarser.copy(), np.nonzero(self.num_tried)
        knots = np.arange(NUM_KNOTS)
        matrix = np.zeros((len(cells[0]), NUM_KNOTS, NUM_KNOTS))
        matrix[:, knots, knots] = self.weight[cells] + prior_nodes
        matrix[:, knots[:-1], knots[1:]] = matrix[:, knots[1:], knots[:-1]] = self.coupling[cells][:, :-1]
        free = np.linalg.solve(matrix, (self.outcome[cells] + prior_nodes * coarser[cells])[..., None])[..., 0]
        curves[cells] = np.clip(
            nondecreasing(free, self.weight[cells] + prior_nodes), LEAST_ACCEPTANCE, MOST_ACCEPTANCE
        )
        return curves

    def standard_errors(self, curves: np.ndarray, prior_nodes: float) -> np.ndarray:
        """Deviations of a beta distribution of the counts near each knot."""
        return np.sqrt(curves * (1.0 - curves) / (self.nearness + prior_nodes + 1.0))


def log_factors(
    estimates: np.ndarray,
    is_accepted: np.ndarray,
    counts_for: np.ndarray,
    cell: np.ndarray,
    centres: np.ndarray,
    prior_precision: float,
) -> np.ndarray:
    """The factor of each cell's odds that makes estimates of its nodes right: its most probable logarithm.

    Parameters
    ----------
    estimates : float64[n] in 0 to 1.
    is_accepted : bool[n].
    counts_for : float64[n], how much each node counts.
    cell : int64[n], the cell of each.
    centres : float64[num cells], what the logarithms are thought to be before any node was seen.
    prior_precision : how surely: the inverse variance.

    Returns
    -------
    float64[num cells], by Newton's method.
    """
    odds = estimates / np.maximum(1 - estimates, LEAST_ODDS)
    offsets = centres.copy()
    for _ in range(NUM_NEWTON_STEPS):
        raised = odds * np.exp(offsets)[cell]
        expected = raised / (1 + raised)
        slope = np.bincount(cell, counts_for * (is_accepted - expected), len(offsets))
        curvature = np.bincount(cell, counts_for * expected * (1 - expected), len(offsets))
        step = (slope - prior_precision * (offsets - centres)) / (curvature + prior_precision)
        offsets += np.clip(step, -LONGEST_STEP, LONGEST_STEP)
        if np.abs(step).max() < SHORTEST_STEP:
            break
    return offsets


def raised(curves: np.ndarray, log_factors: np.ndarray) -> np.ndarray:
    """Curves, float64[..., num knots], whose odds are raised by a factor each."""
    factors = np.exp(log_factors)[..., None]
    return curves * factors / (1 - curves + curves * factors)


def on_curves(curves: np.ndarray, which: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Values of float64[m, num knots] at float64[n], each of the curve that int64[n] names: float64[n].

    As `calibration_table` reads one.
    """
    below = _knot_below(x)
    low, high = curves[which, below], curves[which, below + 1]
    part = np.minimum((x - IDENTITY[below]) / (IDENTITY[below + 1] - IDENTITY[below]), 1.0)
    return np.where(x < IDENTITY[0], curves[which, 0] * (x / IDENTITY[0]), low + part * (high - low))


def _knot_below(x: np.ndarray) -> np.ndarray:
    """Number of the last knot that is not above each of float64[n], one behind which there is another: int64[n].

    A knot's mantissa has one bit at most: the upper bits of a number say where it stands among them.
    """
    return np.clip((x.view(np.int64) >> _MANTISSA_BITS) - _FIRST_KNOT, 0, NUM_KNOTS - 2)


def nondecreasing(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Isotonic regression of each row: float64[n, m], the nearest that never falls, by weighted least squares.

    By its max-min formula: at k, over all i up to k the largest of the least mean of i to j, over all j from k on.

    Parameters
    ----------
    values, weights : float64[n, m]; weights above 0.
    """
    if len(values) == 0 or (np.diff(values, axis=1) >= 0).all():
        return values
    nothing = np.zeros((len(values), 1))
    sums = np.concatenate((nothing, np.cumsum(values * weights, axis=1)), axis=1)
    totals = np.concatenate((nothing, np.cumsum(weights, axis=1)), axis=1)
    places = np.arange(values.shape[1])
    is_range = places[:, None] <= places  # [i, j]
    spans = np.where(is_range, totals[:, None, 1:] - totals[:, :-1, None], 1.0)
    means = np.where(is_range, (sums[:, None, 1:] - sums[:, :-1, None]) / spans, np.inf)
    least = np.minimum.accumulate(means[..., ::-1], axis=-1)[..., ::-1]
    return np.where(is_range, least, -np.inf).max(axis=1)
