"""How well estimates hold along texts that nothing was fitted to, and how well they could hold with so few of them.

Knows nothing of how estimates are fitted.
"""

from collections.abc import Sequence

import numpy as np

from laserbatch.retrieval_pools.calibration.replay import DraftOptions, Nodes, ReplayText, replay_nodes
from laserbatch.retrieval_pools.index.calibration_record import Reliability, ReliabilityBin
from laserbatch.retrieval_pools.index.pool import Pool

NUM_BINS = 20
DIGITS = 5  # of what the manifest keeps


def reliability(checks: Sequence[tuple[Pool, Sequence[ReplayText]]], options: DraftOptions) -> Reliability:
    """Estimated and realised acceptance of drafts.

    Parameters
    ----------
    checks : pools, and texts that neither each nor its curves have seen; one text at least.
    options : how they are drafted.
    """
    of_texts = [replay_nodes(pool, [text], options) for pool, texts in checks for text in texts]
    nodes = Nodes.joined(of_texts)
    bins = reliability_bins(_estimates(nodes), nodes.is_accepted)
    error = sum(abs(one.mean_estimate - one.share_accepted) * one.num_nodes for one in bins) / max(1, len(nodes))
    by_chance = error_by_chance([_estimates(of_text) for of_text in of_texts], [one.is_accepted for one in of_texts])
    return Reliability(
        num_texts=len(of_texts),
        num_nodes=len(nodes),
        max_nodes=options.max_nodes,
        min_acceptance=options.min_acceptance,
        expected_calibration_error=round(error, DIGITS),
        error_by_chance=None if by_chance is None else round(by_chance, DIGITS),
        bins=bins,
    )


def reliability_bins(estimates: np.ndarray, is_accepted: np.ndarray) -> tuple[ReliabilityBin, ...]:
    """Estimates in bins of equal width over [0, 1], float64[n], with what became of them, bool[n]."""
    bin_of = _bins_of(estimates)
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


def error_by_chance(estimates: Sequence[np.ndarray], is_accepted: Sequence[np.ndarray]) -> float | None:
    """The expected calibration error that estimates would show on average if they were right: what few texts add.

    Of a bin's gap, the sum over texts of accepted less estimated, the variance is told by how much texts differ, since
    the tokens of one stand and fall together; of a normal distribution of mean 0 and that variance the mean distance
    from 0 is taken. Estimates that are right on average but not for each text also raise it.

    Parameters
    ----------
    estimates, is_accepted : float64[n] and bool[n] of each text's nodes.

    Returns
    -------
    float or None
        None for fewer than two texts, which tell nothing of how they differ.
    """
    num_texts, num_nodes = len(estimates), sum(map(len, estimates))
    if num_texts < 2:
        return None
    gaps = np.array(
        [
            np.bincount(_bins_of(estimate), accepted - estimate, NUM_BINS)
            for estimate, accepted in zip(estimates, is_accepted, strict=True)
        ]
    )  # (num_texts, NUM_BINS)
    deviations = np.sqrt(num_texts * gaps.var(axis=0, ddof=1))
    return float(np.sqrt(2 / np.pi) * deviations.sum() / max(1, num_nodes))


def _estimates(nodes: Nodes) -> np.ndarray:
    return np.exp(nodes.log_acceptance.astype(np.float64))


def _bins_of(estimates: np.ndarray) -> np.ndarray:
    return np.minimum((estimates * NUM_BINS).astype(np.int64), NUM_BINS - 1)
