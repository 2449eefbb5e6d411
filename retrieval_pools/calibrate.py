"""Calibrating a pool: texts that it does not hold are replayed, and acceptance is fitted to what became of the drafts.

For each source, match length and depth the fit is a nondecreasing, piecewise linear curve of the relative count. Cells
with little data lean on coarser ones: source, match length and depth on source and match length, those on the source,
and the source on the count itself. Knows neither tables nor runs; the caller holds the texts back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from sklearn.isotonic import isotonic_regression

from retrieval_pools.calibration import (
    NUM_KNOTS,
    Calibration,
    CalibrationCell,
    Reliability,
    ReliabilityBin,
    table_of,
)
from retrieval_pools.calibration_table import (
    COUNT_KNOTS,
    DEPTH_BINS,
    LARGEST_BINNED,
    LENGTH_BINS,
    TABLE_SHAPE,
)
from retrieval_pools.drafting.state import MAX_NODES
from retrieval_pools.pool import Pool
from retrieval_pools.replay import DraftOptions, Nodes, ReplayText, replay, replay_nodes

# Nodes that a coarser cell's curve counts for, at each knot of a finer one. Of 2, 8, 32, 128 and 512 this had the least
# log loss on texts not fitted to, or all but the least, for short and for long texts, 25 to 500 of them.
PRIOR_NODES = 32.0
LEAST_ACCEPTANCE, MOST_ACCEPTANCE = 1e-4, 0.9999  # nothing is impossible, nothing certain: paths keep an order
# A run drafts the likely paths, and a node on those is accepted more often than one of the same features on others; the
# others still say what there is to know of cells that the run seldom reaches.
BEYOND_WEIGHT = 0.1
MAX_TOKENS = 50_000  # replayed, so that the time it takes does not grow with the pool
POOL_ESCAPES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # tried where none is configured
MIN_TEXTS = 50  # a pool of fewer texts is not calibrated
TEXTS_PER_HELD_BACK = 5  # at most one text of so many is held back
NUM_BINS = 20
DIGITS = 5  # of what the manifest keeps


def num_held_back(num_texts: int, num_wanted: int) -> int:
    """How many of a pool's texts to hold back: those wanted, a fifth at most, and none of a small pool."""
    return min(num_wanted, num_texts // TEXTS_PER_HELD_BACK) if num_texts >= MIN_TEXTS else 0


def spread_positions(num_texts: int, num_chosen: int, seed: int = 0) -> np.ndarray:
    """Positions of texts to replay, spread evenly over all: int64[min(num_texts, num_chosen)], rising.

    Parameters
    ----------
    seed : moves all of them.
    """
    num_chosen = min(num_texts, num_chosen)
    offset = np.random.default_rng(seed).random()
    return np.floor((np.arange(num_chosen) + offset) * (num_texts / max(1, num_chosen))).astype(np.int64)


def calibrate(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions | None = None) -> Calibration:
    """Replay texts and fit. The same inputs give the same result.

    Parameters
    ----------
    pool : what is drafted from; it must not hold the texts. Curves that it has already are not used.
    texts : at least two. Curves fitted to the first, third, ... are checked on the others; what is kept is fitted to
        all. Of long texts some are left out: about MAX_TOKENS are replayed.
    options : how the run drafts. The fit looks at larger trees, of less likely paths too, at the positions where such
        a run drafts: behind a tree that was too small a text is easier to foresee than behind a wrong token.

    Raises
    ------
    ValueError
        There are fewer than two texts.
    """
    if len(texts) < 2:
        raise ValueError(f"{len(texts)} texts to calibrate with; one half is fitted to and the other checked: give two")
    options = DraftOptions() if options is None else options
    texts = _of_bounded_length(texts)
    widest = replace(options, max_nodes=MAX_NODES, min_probability=0.0)
    fitted, checked = texts[0::2], texts[1::2]
    pool = _with_best_escape(pool.with_calibration(None), fitted, options)
    roughly = pool.with_acceptance_table(table_of(fit_cells(replay_nodes(pool, fitted, widest, options))))
    first = replay_nodes(roughly, fitted, widest, options)  # the trees that a calibrated pool drafts
    half_fitted = pool.with_acceptance_table(table_of(fit_cells(first)))
    second = replay_nodes(half_fitted, checked, widest, options)
    cells = fit_cells(Nodes.joined([first, second]))
    return Calibration(
        pool_escape=pool.settings.pool_escape,
        num_texts=len(texts),
        num_tokens=sum(len(text.text_ids) for text in texts),
        num_nodes=sum(cell.num_tried for cell in cells if cell.length_bin is None),
        cells=cells,
        reliability=reliability(half_fitted, checked, options),
        uncalibrated=reliability(pool, checked, options),
    )


def _with_best_escape(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions) -> Pool:
    """The pool with the configured escape, or else with that of POOL_ESCAPES whose full trees are accepted most.

    Texts that resemble each other, as one model's do, want a low one, texts of many hands a high one.
    """
    if pool.settings.pool_escape is not None:
        return pool
    full = replace(options, min_probability=0.0)
    texts = _of_bounded_length(texts, MAX_TOKENS // len(POOL_ESCAPES))
    tried = [pool.with_settings(pool_escape=escape) for escape in POOL_ESCAPES]
    return max(tried, key=lambda one: replay(one, texts, full).mean_accepted)  # of equals the lowest


def _of_bounded_length(texts: Sequence[ReplayText], max_tokens: int = MAX_TOKENS) -> Sequence[ReplayText]:
    """As many of the texts, spread evenly, as have about so many tokens in all; two at least, if there are."""
    num_tokens = sum(len(text.text_ids) for text in texts)
    num_kept = max(2, int(len(texts) * min(1.0, max_tokens / max(1, num_tokens))))
    return [texts[position] for position in spread_positions(len(texts), num_kept)]


def reliability(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions) -> Reliability:
    """Estimated and realised acceptance of drafts along texts that neither the pool nor its curves have seen."""
    nodes = replay_nodes(pool, texts, options)
    bins = reliability_bins(np.exp(nodes.log_acceptance.astype(np.float64)), nodes.is_accepted)
    error = sum(abs(one.mean_estimate - one.share_accepted) * one.num_nodes for one in bins) / max(1, len(nodes))
    return Reliability(
        num_texts=len(texts),
        num_nodes=len(nodes),
        max_nodes=options.max_nodes,
        min_probability=options.min_probability,
        expected_calibration_error=round(error, DIGITS),
        bins=bins,
    )


def reliability_bins(estimates: np.ndarray, is_accepted: np.ndarray) -> tuple[ReliabilityBin, ...]:
    """Estimates in bins of equal width over [0, 1], float64[n], with what became of them, bool[n]."""
    bin_of = np.minimum((estimates * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    counts = np.bincount(bin_of, minlength=NUM_BINS)
    sums = np.bincount(bin_of, estimates, NUM_BINS)
    accepted = np.bincount(bin_of, is_accepted, NUM_BINS)
    return tuple(
        ReliabilityBin(
            mean_estimate=round(float(sums[k] / counts[k]), DIGITS),
            share_accepted=round(float(accepted[k] / counts[k]), DIGITS),
            num_nodes=int(counts[k]),
        )
        for k in np.flatnonzero(counts)
    )


def fit_cells(
    nodes: Nodes, prior_nodes: float = PRIOR_NODES, beyond_weight: float = BEYOND_WEIGHT
) -> tuple[CalibrationCell, ...]:
    """Curves of conditional acceptance, from coarse cells to fine ones; only nodes whose parent is accepted count.

    Parameters
    ----------
    prior_nodes : how many nodes at each knot a coarser curve counts for.
    beyond_weight : what a node counts for that a run would not have drafted.
    """
    counts = _counts(nodes.where(nodes.is_parent_accepted), beyond_weight)
    by_source, by_length = counts.summed((1, 2)), counts.summed((2,))
    identity = np.broadcast_to(COUNT_KNOTS.astype(np.float64), by_source.weight.shape)
    of_source = _curves(by_source, identity, prior_nodes)
    of_length = _curves(by_length, np.broadcast_to(of_source[:, None], by_length.weight.shape), prior_nodes)
    of_depth = _curves(counts, np.broadcast_to(of_length[:, :, None], counts.weight.shape), prior_nodes)
    return (
        *_cells(by_source, of_source, prior_nodes),
        *_cells(by_length, of_length, prior_nodes),
        *_cells(counts, of_depth, prior_nodes),
    )


@dataclass(frozen=True)
class _Counts:
    """What least squares needs of the nodes of each cell; the last axis are knots.

    A node between two knots belongs to each by its nearness b: `weight` is the sum of b_k b_k at a knot, `coupling` of
    b_k b_{k+1}, `outcome` of b_k over accepted nodes, `nearness` of b_k. `num_tried` and `num_accepted` are counts.
    """

    weight: np.ndarray
    coupling: np.ndarray
    outcome: np.ndarray
    nearness: np.ndarray
    num_tried: np.ndarray
    num_accepted: np.ndarray

    def summed(self, axes: tuple[int, ...]) -> "_Counts":
        """The counts of coarser cells."""
        return _Counts(**{name: values.sum(axes) for name, values in vars(self).items()})


def _counts(nodes: Nodes, beyond_weight: float) -> _Counts:
    knots = COUNT_KNOTS.astype(np.float64)
    share = nodes.relative_count.astype(np.float64)
    below = np.clip(np.searchsorted(knots, share, side="right") - 1, 0, NUM_KNOTS - 2)
    upper = np.clip((share - knots[below]) / (knots[below + 1] - knots[below]), 0.0, 1.0)
    lower = 1.0 - upper
    counts_for = np.where(nodes.is_verified, 1.0, beyond_weight)
    length_bins = LENGTH_BINS[np.minimum(nodes.match_length, LARGEST_BINNED)]
    depth_bins = DEPTH_BINS[np.minimum(nodes.depth, LARGEST_BINNED)]
    cell = np.ravel_multi_index((nodes.source, length_bins, depth_bins), TABLE_SHAPE[:-1])
    at = cell * NUM_KNOTS + below

    def summed(index: np.ndarray, values: np.ndarray) -> np.ndarray:
        return np.bincount(index, values * counts_for, np.prod(TABLE_SHAPE)).reshape(TABLE_SHAPE)

    def of_cell(values: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(cell, values, np.prod(TABLE_SHAPE[:-1])).reshape(TABLE_SHAPE[:-1])

    accepted = nodes.is_accepted.astype(np.float64)
    return _Counts(
        weight=summed(at, lower * lower) + summed(at + 1, upper * upper),
        coupling=summed(at, lower * upper),
        outcome=summed(at, lower * accepted) + summed(at + 1, upper * accepted),
        nearness=summed(at, lower) + summed(at + 1, upper),
        num_tried=of_cell(),
        num_accepted=of_cell(accepted),
    )


def _curves(counts: _Counts, coarser: np.ndarray, prior_nodes: float) -> np.ndarray:
    """Least squares through the nodes, each knot held to the coarser curve; then made nondecreasing."""
    knots = np.arange(NUM_KNOTS)
    matrix = np.zeros((*counts.weight.shape, NUM_KNOTS))
    matrix[..., knots, knots] = counts.weight + prior_nodes
    matrix[..., knots[:-1], knots[1:]] = matrix[..., knots[1:], knots[:-1]] = counts.coupling[..., :-1]
    free = np.linalg.solve(matrix, (counts.outcome + prior_nodes * coarser)[..., None])[..., 0]
    curves = coarser.copy()
    for cell in zip(*np.nonzero(counts.num_tried), strict=True):
        rising = isotonic_regression(free[cell], sample_weight=counts.weight[cell] + prior_nodes)
        curves[cell] = np.clip(rising, LEAST_ACCEPTANCE, MOST_ACCEPTANCE)
    return curves


def _cells(counts: _Counts, curves: np.ndarray, prior_nodes: float) -> list[CalibrationCell]:
    errors = np.sqrt(curves * (1.0 - curves) / (counts.nearness + prior_nodes + 1.0))
    found = []
    for place in zip(*(axis.tolist() for axis in np.nonzero(counts.num_tried)), strict=True):
        source, length_bin, depth_bin = (*place, None, None)[:3]
        found.append(
            CalibrationCell(
                source=source,
                length_bin=length_bin,
                depth_bin=depth_bin,
                num_tried=int(counts.num_tried[place]),
                num_accepted=int(counts.num_accepted[place]),
                values=tuple(np.round(curves[place], DIGITS).tolist()),
                standard_errors=tuple(np.round(errors[place], DIGITS).tolist()),
            )
        )
    return found
