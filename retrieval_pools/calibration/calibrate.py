"""Calibrating a pool: texts that it does not hold are replayed, and acceptance is fitted to what became of the drafts.

Cells know a node's features (`cell_fit`), curves over what they say know its token (`kind_fit`), and what is left over
along whole paths a last curve takes away, which leans on three numbers (`beta_fit`); each is fitted to texts that the
one before it was not. Knows neither tables nor runs; the caller holds the texts back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from laserbatch.retrieval_pools.calibration.beta_fit import BetaCurve
from laserbatch.retrieval_pools.calibration.cell_fit import BEYOND_WEIGHT, cell_estimates, fit_cells, fit_table
from laserbatch.retrieval_pools.calibration.curve_fit import IDENTITY, KnotCounts
from laserbatch.retrieval_pools.calibration.kind_fit import fit_kinds
from laserbatch.retrieval_pools.calibration.reliability import DIGITS, reliability
from laserbatch.retrieval_pools.calibration.replay import DraftOptions, Nodes, ReplayText, replay, replay_nodes
from laserbatch.retrieval_pools.drafting.calibration_table import IDENTITY_PATHS
from laserbatch.retrieval_pools.drafting.state import MAX_NODES
from laserbatch.retrieval_pools.index.calibration_record import Calibration, KindCurve, PathCurve, kinds_of, paths_of
from laserbatch.retrieval_pools.index.pool import Pool

# What the curve of three numbers counts for at each knot of that of a path: nodes of one draft stand and fall together.
# Of 512 and 2048 this had the lesser calibration error on texts not fitted to.
PRIOR_PATH_NODES = 512.0
# Replays behind the first curves, each drafted by what those before taught: curves of one alone may suit no trees but
# its own, and on planted texts two took turns for ever.
NUM_ROUNDS = 2
NUM_FOLDS = 4  # parts of the texts; products along paths of each are by cells that are fitted to the others
MAX_TOKENS = 50_000  # replayed, so that the time it takes does not grow with the pool
POOL_ESCAPES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # tried where none is configured
MIN_TEXTS = 50  # a pool of fewer texts is not calibrated
MIN_CHECKED = 100  # texts of the second half, below which the first half is checked too
TEXTS_PER_HELD_BACK = 5  # at most one text of so many is held back


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
    texts : at least two. Curves fitted to the first, third, ... are checked on the others, and of few texts those
        fitted to the others on the first, third, ...; what is kept is fitted to all. Of long texts some are left out:
        about MAX_TOKENS are replayed.
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
    uncalibrated = pool.with_calibration(None)
    fitted, checked = texts[0::2], texts[1::2]
    one = _fit(uncalibrated, fitted, options)
    checks = [(one, checked)]
    if len(checked) < MIN_CHECKED:
        checks.append((_fit(uncalibrated, checked, options), fitted))
    second = _folds(one.with_cells, checked, options)
    both = [fold.joined(other) for fold, other in zip(one.folds, second, strict=True)]
    cells = fit_cells(_nodes_of(both))
    return Calibration(
        pool_escape=one.plain.settings.pool_escape_per_token,
        num_texts=len(texts),
        num_tokens=sum(len(text.text_ids) for text in texts),
        num_nodes=sum(cell.num_tried for cell in cells if cell.seen_bin is None),
        cells=cells,
        kinds=_kinds_of(both),
        paths=_paths_of(one.plain, both, options),
        reliability=reliability([(fit.calibrated, others) for fit, others in checks], options),
        uncalibrated=reliability([(fit.plain, others) for fit, others in checks], options),
    )


def refit(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions) -> Pool:
    """A pool that is much like one that was calibrated, with curves of its own: fitted to one replay, checks left out.

    Parameters
    ----------
    pool : with the curves of the other, which decide what is drafted; its escape is kept.
    """
    folds = _folds(pool, _of_bounded_length(texts), options)
    paths = _paths_of(pool.with_path_curves(IDENTITY_PATHS), folds, options)
    return _fitted(pool, folds).with_path_curves(paths_of(paths))


@dataclass(frozen=True)
class _Fold:
    """Some of the texts, and those nodes of what was drafted along them whose parent was accepted."""

    texts: Sequence[ReplayText]
    nodes: Nodes

    def joined(self, other: "_Fold") -> "_Fold":
        return _Fold([*self.texts, *other.texts], Nodes.joined([self.nodes, other.nodes]))


@dataclass(frozen=True)
class _Fit:
    """A pool with the escape that suits some texts; with cells and kinds fitted to what was drafted along; with all."""

    plain: Pool
    folds: list[_Fold]
    with_cells: Pool
    calibrated: Pool


def _fit(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions) -> _Fit:
    plain = _with_best_escape(pool, texts, options)
    folds = _folds(plain, texts, options)
    roughly = _fitted(plain, folds)
    for _ in range(NUM_ROUNDS - 1):
        again = _folds(roughly, texts, options)
        folds = [one.joined(other) for one, other in zip(folds, again, strict=True)]
        roughly = _fitted(plain, folds)
    folds = _folds(roughly, texts, options)  # the trees that a calibrated pool drafts
    with_cells = _fitted(plain, folds)
    calibrated = with_cells.with_path_curves(paths_of(_paths_of(plain, folds, options)))
    return _Fit(plain, folds, with_cells, calibrated)


def _widest(options: DraftOptions) -> DraftOptions:
    return replace(options, max_nodes=MAX_NODES, min_probability=0.0)


def _folds(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions) -> list[_Fold]:
    parts = [texts[k::NUM_FOLDS] for k in range(NUM_FOLDS)]
    nodes = (replay_nodes(pool, part, _widest(options), options) for part in parts)
    return [_Fold(part, some.where(some.is_parent_accepted)) for part, some in zip(parts, nodes, strict=True)]


def _nodes_of(folds: Sequence[_Fold]) -> Nodes:
    return Nodes.joined([fold.nodes for fold in folds])


def _kinds_of(folds: Sequence[_Fold]) -> tuple[KindCurve, ...]:
    """Curves of kinds of tokens: what the cells say of each fold is by cells that are fitted to the others."""
    estimates = []
    for fold in folds:
        table = fit_table(_nodes_of([one for one in folds if one is not fold]))
        estimates.append(cell_estimates(table, fold.nodes))
    nodes = _nodes_of(folds)
    counts_for = np.where(nodes.is_verified, 1.0, BEYOND_WEIGHT)
    return fit_kinds(np.concatenate(estimates), nodes.is_accepted, counts_for, nodes.source, nodes.token_kind)


def _fitted(pool: Pool, folds: Sequence[_Fold]) -> Pool:
    table = fit_table(_nodes_of(folds))
    return pool.with_acceptance_table(table).with_kind_curves(kinds_of(_kinds_of(folds)))


def _paths_of(pool: Pool, folds: Sequence[_Fold], options: DraftOptions) -> tuple[PathCurve, ...]:
    """Curves of whole paths: each fold is drafted with cells that are fitted to the others."""
    full = replace(options, min_probability=0.0)
    found: dict[bool, list[Nodes]] = {False: [], True: []}
    for fold in folds:
        others = [one for one in folds if one is not fold]
        crossed = _fitted(pool, others)
        for with_previous in found:
            texts = [text for text in fold.texts if _has_previous(text, options) == with_previous]
            found[with_previous].append(replay_nodes(crossed, texts, full, options))
    return tuple(fit_path(Nodes.joined(nodes), with_previous) for with_previous, nodes in found.items())


def _has_previous(text: ReplayText, options: DraftOptions) -> bool:
    return options.use_previous and text.previous_ids is not None and len(text.previous_ids) > 0


def fit_path(nodes: Nodes, with_previous: bool, prior_nodes: float = PRIOR_PATH_NODES) -> PathCurve:
    """The curve of whole paths of nodes whose estimates are products along them.

    Parameters
    ----------
    prior_nodes : how many nodes at each knot the curve of three numbers counts for that it leans on.
    """
    products, ones = np.exp(nodes.log_acceptance.astype(np.float64)), np.ones(len(nodes))
    on_the_whole = BetaCurve.of(products, nodes.is_accepted, ones)
    counts = KnotCounts.of(products, nodes.is_accepted, ones, np.zeros(len(nodes), np.int64), (1,))
    return PathCurve(
        with_previous=with_previous,
        num_nodes=len(nodes),
        num_accepted=int(nodes.is_accepted.sum()),
        values=tuple(np.round(counts.curves(on_the_whole.at(IDENTITY), prior_nodes)[0], DIGITS).tolist()),
    )


def _with_best_escape(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions) -> Pool:
    """The pool with the configured escape, or else with that of POOL_ESCAPES whose full trees are accepted most.

    Texts that resemble each other, as one model's do, want a low one, texts of many hands a high one.
    """
    if pool.settings.pool_escape_per_token is not None:
        return pool
    full = replace(options, min_probability=0.0)
    texts = _of_bounded_length(texts, MAX_TOKENS // len(POOL_ESCAPES))
    tried = [pool.with_settings(pool_escape_per_token=escape) for escape in POOL_ESCAPES]
    return max(tried, key=lambda one: replay(one, texts, full).mean_accepted)  # of equals the lowest


def _of_bounded_length(texts: Sequence[ReplayText], max_tokens: int = MAX_TOKENS) -> Sequence[ReplayText]:
    """As many of the texts, spread evenly, as have about so many tokens in all; two at least, if there are."""
    num_tokens = sum(len(text.text_ids) for text in texts)
    num_kept = max(2, int(len(texts) * min(1.0, max_tokens / max(1, num_tokens))))
    return [texts[position] for position in spread_positions(len(texts), num_kept)]
