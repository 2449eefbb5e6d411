"""Calibrating a pool: texts that it does not hold are replayed, and acceptance is fitted to what became of the drafts.

The caller holds the texts back.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from laserbatch.retrieval_pools.calibration.replay import DraftOptions, Nodes, ReplayText, replay, replay_nodes
from laserbatch.retrieval_pools.drafting.estimate import NUM_KINDS
from laserbatch.retrieval_pools.drafting.state import MAX_NODES
from laserbatch.retrieval_pools.index.calibration_record import (
    Calibration,
    Reliability,
    ReliabilityBin,
    SourceCurve,
    beta_features,
    curves_of,
)
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.sources import NUM_SOURCES

MAX_TOKENS = 50_000  # replayed, so that the time it takes does not grow with the pool
POOL_ESCAPES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # tried where none is configured
MIN_TEXTS = 50  # a pool of fewer texts is not calibrated
TEXTS_PER_HELD_BACK = 5  # at most one text of so many is held back
INVERSE_PRIOR = 10.0  # variance of what is fitted, before any node; with 1 texts were accepted up to 1 % less far
NUM_BINS = 20  # of estimates that are checked
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
    texts : at least two. Curves fitted to the first, third, ... are checked on the others, and the other way round;
        what is kept is fitted to all. Of long texts some are left out: about MAX_TOKENS are replayed.
    options : how the run drafts. The fit looks at trees as large as may be, of less likely paths too, at the positions
        where such a run drafts: behind a tree that was too small a text is easier to foresee than behind a wrong token.

    Raises
    ------
    ValueError
        There are fewer than two texts.
    """
    if len(texts) < 2:
        raise ValueError(f"{len(texts)} texts to calibrate with; one half is fitted to and the other checked: give two")
    options = DraftOptions() if options is None else options
    texts = _of_bounded_length(texts, MAX_TOKENS)
    plain = _with_best_escape(pool.with_calibration(None), texts, options)
    widest = replace(options, max_nodes=MAX_NODES, min_acceptance=0.0)
    halves = texts[0::2], texts[1::2]
    nodes = [_behind_accepted(replay_nodes(plain, half, widest, options)) for half in halves]
    fitted = [plain.with_curves(curves_of(fit_sources(part))) for part in nodes]
    all_nodes = Nodes.joined(nodes)
    return Calibration(
        pool_escape=plain.settings.pool_escape_per_token,
        num_texts=len(texts),
        num_tokens=sum(len(text.text_ids) for text in texts),
        num_nodes=len(all_nodes),
        sources=fit_sources(all_nodes),
        reliability=reliability(list(zip(fitted, reversed(halves), strict=True)), options),
        uncalibrated=reliability([(plain, texts)], options),
    )


def fit_sources(nodes: Nodes) -> tuple[SourceCurve, ...]:
    """The curve of each source that drafted: one logistic regression over all nodes, whose parents are accepted.

    A source and a kind of token have a number each, and so has a kind of a source, all held towards 0: what there are
    few nodes of is as its kind is elsewhere. Odds that a curve would let fall with the count are the same for all.
    """
    from scipy.sparse import csr_matrix, hstack
    from sklearn.linear_model import LogisticRegression  # takes a second to load; who drafts needs it not

    if len(np.unique(nodes.is_accepted)) < 2:
        return ()  # nothing can be told apart
    sources, kinds = nodes.source.astype(np.int64), nodes.token_kind.astype(np.int64)
    of_counts = np.zeros((len(nodes), NUM_SOURCES, 3))
    of_counts[np.arange(len(nodes)), sources] = beta_features(nodes.relative_count)

    def one_hot(place: np.ndarray, size: int) -> csr_matrix:
        return csr_matrix((np.ones(len(place)), (np.arange(len(place)), place)), (len(place), size))

    features = hstack(
        [
            csr_matrix(of_counts.reshape(len(nodes), -1)),
            one_hot(kinds, NUM_KINDS),
            one_hot(sources * NUM_KINDS + kinds, NUM_SOURCES * NUM_KINDS),
        ],
        format="csr",
    )
    regression = LogisticRegression(C=INVERSE_PRIOR, fit_intercept=False, tol=1e-3, max_iter=200)
    regression.fit(features, nodes.is_accepted)
    numbers = np.round(regression.coef_[0], DIGITS)
    beta, of_kinds, of_each = np.split(numbers, [3 * NUM_SOURCES, 3 * NUM_SOURCES + NUM_KINDS])
    beta, of_each = beta.reshape(NUM_SOURCES, 3), of_each.reshape(NUM_SOURCES, NUM_KINDS)
    return tuple(
        SourceCurve(
            source=source,
            num_tried=int((sources == source).sum()),
            num_accepted=int(nodes.is_accepted[sources == source].sum()),
            offset=beta[source, 0],
            low=beta[source, 1],
            high=beta[source, 2],
            of_kinds=tuple(np.round(of_kinds + of_each[source], DIGITS).tolist()),
        )
        for source in np.unique(sources).tolist()
    )


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


def _behind_accepted(nodes: Nodes) -> Nodes:
    return nodes.where(nodes.is_parent_accepted)


def _with_best_escape(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions) -> Pool:
    """The pool with the configured escape, or else with that of POOL_ESCAPES whose full trees are accepted most.

    Texts that resemble each other, as one model's do, want a low one, texts of many hands a high one.
    """
    if pool.settings.pool_escape_per_token is not None:
        return pool
    full = replace(options, min_acceptance=0.0)
    texts = _of_bounded_length(texts, MAX_TOKENS // len(POOL_ESCAPES))
    tried = [pool.with_settings(pool_escape_per_token=escape) for escape in POOL_ESCAPES]
    return max(tried, key=lambda one: replay(one, texts, full).mean_accepted)  # of equals the lowest


def _of_bounded_length(texts: Sequence[ReplayText], max_tokens: int) -> Sequence[ReplayText]:
    """As many of the texts, spread evenly, as have about so many tokens in all; two at least, if there are."""
    num_tokens = sum(len(text.text_ids) for text in texts)
    num_kept = max(2, int(len(texts) * min(1.0, max_tokens / max(1, num_tokens))))
    return [texts[position] for position in spread_positions(len(texts), num_kept)]


def _estimates(nodes: Nodes) -> np.ndarray:
    return np.exp(nodes.log_acceptance.astype(np.float64))


def _bins_of(estimates: np.ndarray) -> np.ndarray:
    return np.minimum((estimates * NUM_BINS).astype(np.int64), NUM_BINS - 1)
