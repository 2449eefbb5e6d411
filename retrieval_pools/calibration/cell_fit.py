"""Curves of conditional acceptance by a node's features, fitted to replayed nodes; and what they say of others.

Cells with little data lean on coarser ones: on those without depth, these on those without match length, these on the
source, and the source on the count itself. A cell first raises the coarser one's odds by a factor. Knows neither pools
nor texts.
"""

import numpy as np

from laserbatch.retrieval_pools.calibration.curve_fit import IDENTITY, KnotCounts, log_factors, on_curves, raised
from laserbatch.retrieval_pools.calibration.reliability import DIGITS
from laserbatch.retrieval_pools.calibration.replay import Nodes
from laserbatch.retrieval_pools.drafting.calibration_table import (
    DEPTH_BINS,
    LARGEST_BINNED,
    LARGEST_SEEN,
    LENGTH_BINS,
    NUM_KNOTS,
    SEEN_BINS,
    TABLE_SHAPE,
)
from laserbatch.retrieval_pools.index.calibration_record import CalibrationCell

# Nodes that a coarser cell's curve counts for, its odds raised, at each knot of a finer one. Of 32, 128 and 512 this
# had the most accepted of texts not fitted to, long ones and short ones.
PRIOR_NODES = 128.0
# How surely a cell is thought to have the odds of the coarser one before any node of it was seen: the inverse variance
# of the logarithm of the factor. A factor takes less data than a curve. Of 5 and 20 it made no difference.
PRIOR_PRECISION = 5.0
# A run drafts the likely paths, and a node on those is accepted more often than one of the same features on others; the
# others still say what there is to know of cells that the run seldom reaches.
BEYOND_WEIGHT = 0.1


def fit_cells(
    nodes: Nodes, prior_nodes: float = PRIOR_NODES, beyond_weight: float = BEYOND_WEIGHT
) -> tuple[CalibrationCell, ...]:
    """Curves of conditional acceptance, from coarse cells to fine ones; only nodes whose parent is accepted count.

    Parameters
    ----------
    prior_nodes : how many nodes at each knot a coarser curve counts for.
    beyond_weight : what a node counts for that a run would not have drafted.
    """
    cells: list[CalibrationCell] = []
    for counts, curves in _levels(nodes, prior_nodes, beyond_weight):
        cells += _cells(counts, curves, prior_nodes)
    return tuple(cells)


def fit_table(nodes: Nodes, prior_nodes: float = PRIOR_NODES, beyond_weight: float = BEYOND_WEIGHT) -> np.ndarray:
    """The table of the cells of `fit_cells`, without them: float32 `calibration_table.TABLE_SHAPE`."""
    (source, _), *_, (_, finest) = _levels(nodes, prior_nodes, beyond_weight)
    is_known = (source.num_tried > 0)[:, None, None, None, None]
    return np.where(is_known, np.round(finest, DIGITS), IDENTITY).astype(np.float32)


def _levels(nodes: Nodes, prior_nodes: float, beyond_weight: float) -> list[tuple[KnotCounts, np.ndarray]]:
    """Counts and curves of the cells, from coarse to fine; each level leans on the one before, its odds raised."""
    nodes = nodes.where(nodes.is_parent_accepted)
    counts_for = np.where(nodes.is_verified, 1.0, beyond_weight)
    x, finest_cell = nodes.relative_count.astype(np.float64), _cell_of(nodes)
    finest = KnotCounts.of(x, nodes.is_accepted, counts_for, finest_cell, TABLE_SHAPE[:-1])
    source = finest.summed((1, 2, 3))
    curves = source.curves(IDENTITY, prior_nodes)
    levels = [(source, curves)]
    for counts in (finest.summed((2, 3)), finest.summed((3,)), finest):
        shape = counts.num_tried.shape
        cell = finest_cell // (finest.num_tried.size // counts.num_tried.size)
        estimates = on_curves(curves.reshape(-1, NUM_KNOTS), cell // shape[-1], x)
        factors = log_factors(
            estimates, nodes.is_accepted, counts_for, cell, np.zeros(counts.num_tried.size), PRIOR_PRECISION
        )
        curves = counts.curves(raised(curves[..., None, :], factors.reshape(shape)), prior_nodes)
        levels.append((counts, curves))
    return levels


def cell_estimates(table: np.ndarray, nodes: Nodes) -> np.ndarray:
    """What a table says of nodes: float64[n]."""
    curves = table.reshape(-1, NUM_KNOTS).astype(np.float64)
    return on_curves(curves, _cell_of(nodes), nodes.relative_count.astype(np.float64))


def _cell_of(nodes: Nodes) -> np.ndarray:
    bins = (
        SEEN_BINS[np.minimum(nodes.num_seen, LARGEST_SEEN)],
        LENGTH_BINS[np.minimum(nodes.match_length, LARGEST_BINNED)],
        DEPTH_BINS[np.minimum(nodes.depth, LARGEST_BINNED)],
    )
    return np.ravel_multi_index((nodes.source, *bins), TABLE_SHAPE[:-1])


def _cells(counts: KnotCounts, curves: np.ndarray, prior_nodes: float) -> list[CalibrationCell]:
    errors = counts.standard_errors(curves, prior_nodes)
    found = []
    for place in zip(*(axis.tolist() for axis in np.nonzero(counts.num_tried)), strict=True):
        source, seen_bin, length_bin, depth_bin = (*place, None, None, None)[:4]
        found.append(
            CalibrationCell(
                source=source,
                seen_bin=seen_bin,
                length_bin=length_bin,
                depth_bin=depth_bin,
                num_tried=int(counts.num_tried[place]),
                num_accepted=int(counts.num_accepted[place]),
                values=tuple(np.round(curves[place], DIGITS).tolist()),
                standard_errors=tuple(np.round(errors[place], DIGITS).tolist()),
            )
        )
    return found
