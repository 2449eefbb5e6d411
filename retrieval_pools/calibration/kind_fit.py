"""What kinds of tokens are worth: by how much the acceptance of each differs from what the cells say of it.

First one number for each, by which its odds are raised or lowered: little data says as much. Then a curve, where there
is more. Knows neither pools nor texts.
"""

import numpy as np

from laserbatch.retrieval_pools.calibration.curve_fit import IDENTITY, KnotCounts, log_factors, raised
from laserbatch.retrieval_pools.calibration.reliability import DIGITS
from laserbatch.retrieval_pools.drafting.calibration_table import KINDS_SHAPE, NUM_BEFORE, NUM_KINDS
from laserbatch.retrieval_pools.index.calibration_record import KindCurve

# How surely a kind is thought to be as those that it leans on before any node of it was seen: the inverse variance of
# the logarithm of its odds, what about 6 nodes say. Of 1, 2 and 5 this had the most accepted of long texts not fitted
# to; with few texts to fit to, estimates held about as well as with 5.
PRIOR_PRECISION = 1.0
# Nodes that the odds of a kind count for at each knot of its curve. Of 128 and 512 this had as much accepted of texts
# not fitted to.
PRIOR_NODES = 512.0


def fit_kinds(
    estimates: np.ndarray,
    is_accepted: np.ndarray,
    weights: np.ndarray,
    source: np.ndarray,
    kind: np.ndarray,
    prior_precision: float = PRIOR_PRECISION,
) -> tuple[KindCurve, ...]:
    """A curve for each source and kind of token over what the cells say of nodes whose parent was accepted.

    It leans on the estimates' odds times a factor: that of a source on that of all sources, and this on that of all
    kinds that only the token before tells apart.

    Parameters
    ----------
    estimates : float64[n] in 0 to 1, of cells that were not fitted to the node.
    is_accepted : bool[n].
    weights : float64[n], how much a node counts.
    source, kind : int[n].
    """
    cell = source.astype(np.int64) * NUM_KINDS + kind

    def factors(group: np.ndarray, centres: np.ndarray) -> np.ndarray:
        return log_factors(estimates, is_accepted, weights, group, centres, prior_precision)

    of_any_before = factors(kind // NUM_BEFORE, np.zeros(NUM_KINDS // NUM_BEFORE))
    of_any_source = factors(kind, np.repeat(of_any_before, NUM_BEFORE))
    of_each = factors(cell, np.tile(of_any_source, KINDS_SHAPE[0])).reshape(KINDS_SHAPE[:-1])
    counts = KnotCounts.of(estimates, is_accepted, weights, cell, KINDS_SHAPE[:-1])
    curves = counts.curves(raised(IDENTITY, of_each), PRIOR_NODES)
    num_tried = np.bincount(cell, minlength=of_each.size).reshape(of_each.shape)
    num_accepted = np.bincount(cell, is_accepted, minlength=of_each.size).reshape(of_each.shape)
    return tuple(
        KindCurve(
            source=source,
            kind=kind,
            num_tried=int(num_tried[source, kind]),
            num_accepted=int(num_accepted[source, kind]),
            values=tuple(np.round(curves[source, kind], DIGITS).tolist()),
        )
        for source, kind in np.argwhere(num_tried).tolist()
    )
