"""Calibrating a pool: texts that it does not hold are replayed, and acceptance is fitted to what became of the drafts.

Then they are replayed under many draft budgets at once. Drafts come best first, so what a smaller budget drafts is the
beginning of what a larger one does: one draft at each position of a text serves them all, and where every budget's walk
along the text goes is read off. `replay.replay`, one budget at a time, says the same slowly. The caller holds the texts
back.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from laserbatch.retrieval_pools.calibration.replay import ReplayText, accepted_path, replay, replay_nodes
from laserbatch.retrieval_pools.draft import DraftOptions, draft_batch
from laserbatch.retrieval_pools.drafting.estimate import NUM_PLACES, NUM_TOKEN_KINDS
from laserbatch.retrieval_pools.drafting.state import MAX_NODES
from laserbatch.retrieval_pools.index.calibration_record import (
    DRAFT_TOKENS,
    KNOT_SHARES,
    MIN_ACCEPTANCES,
    SIZE_KNOTS,
    BudgetCell,
    BudgetCurve,
    Calibration,
    Reliability,
    ReplayedBudgets,
    SourceCurve,
    beta_features,
    curves_of,
)
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.sources import NUM_TEXT_SOURCES

MAX_TOKENS = 50_000  # replayed, so that the time it takes does not grow with the pool; three times as many gain nothing
MAX_ESCAPE_TOKENS = 8_000  # of these, for each escape that is tried
POOL_ESCAPES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # tried where none is configured
NUM_CALIBRATION_TEXTS = 400  # of a side that a night replays; more of them gain nothing, see MAX_TOKENS
MIN_TEXTS = 50  # a pool of fewer texts is not calibrated
TEXTS_PER_HELD_BACK = 5  # at most one text of so many is held back
INVERSE_PRIOR = 1.0  # variance of what is fitted, before any node; 10 accepts no more and estimates worse of few
NUM_BINS = 20  # of estimates that are checked
DIGITS = 5  # of what the manifest keeps
GRID = tuple((size, least) for size in DRAFT_TOKENS for least in MIN_ACCEPTANCES)
MAX_BUDGET_TOKENS = 10_000  # replayed of each kind of text under all budgets: a draft a token
MIN_CHANGED_TEXTS = 10


def num_held_back(num_texts: int, num_requested: int) -> int:
    """How many of a pool's texts to hold back: as requested, but a fifth at most, and none of a small pool."""
    return min(num_requested, num_texts // TEXTS_PER_HELD_BACK) if num_texts >= MIN_TEXTS else 0


def spread_positions(num_texts: int, num_chosen: int, seed: int = 0) -> np.ndarray:
    """Positions of texts to replay, spread evenly, all moved by `seed`: int64[min(num_texts, num_chosen)], rising."""
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
    options : how the run drafts. The fit looks at trees as large as may be, of less likely paths too, at the positions
        where such a run drafts: behind a tree that was too small a text is easier to foresee than behind a wrong token.

    Raises ValueError where there are fewer than two texts.
    """
    if len(texts) < 2:
        raise ValueError(f"{len(texts)} texts to calibrate with; one half is fitted to and the other checked: give two")
    options = DraftOptions() if options is None else options
    texts = _of_bounded_length(texts, MAX_TOKENS)
    plain = _with_best_escape(pool.with_calibration(None), texts, options)
    pool_escape = plain.settings.pool_escape_per_token
    assert pool_escape is not None
    widest = replace(options, max_nodes=MAX_NODES, min_acceptance=0.0)
    checked = texts[1::2]
    nodes = [replay_nodes(plain, half, widest, options) for half in (texts[0::2], checked)]
    nodes = [part[part["is_parent_accepted"]] for part in nodes]
    fitted_to_half = plain.with_curves(curves_of(fit_sources(nodes[0])))
    return Calibration(
        pool_escape=pool_escape,
        num_texts=len(texts),
        num_tokens=sum(len(text.text_ids) for text in texts),
        sources=fit_sources(np.concatenate(nodes)),
        reliability=reliability(fitted_to_half, checked, options),
    )


def fit_sources(nodes: np.ndarray) -> tuple[SourceCurve, ...]:
    """The curve of each source that drafted: one logistic regression over NODE[n], whose parents are accepted.

    A kind of token has a number, and so have a kind of token and a kind of place of each source, all held towards 0:
    what there are few nodes of is as its kind is elsewhere. Odds that a curve would let fall with the count are the
    same for all.
    """
    from scipy.sparse import csr_matrix, hstack
    from sklearn.linear_model import LogisticRegression  # takes a second to load; who drafts needs it not

    if len(np.unique(nodes["is_accepted"])) < 2:
        return ()  # nothing can be told apart
    sources, (token_kinds, place_kinds) = (
        nodes["source"].astype(np.int64),
        np.divmod(nodes["kind"].astype(np.int64), NUM_PLACES),
    )
    count_features = np.zeros((len(nodes), NUM_TEXT_SOURCES, 3))
    count_features[np.arange(len(nodes)), sources] = beta_features(nodes["relative_count"])

    def one_hot(place: np.ndarray, size: int) -> csr_matrix:
        return csr_matrix((np.ones(len(place)), (np.arange(len(place)), place)), (len(place), size))

    features = hstack(
        [
            csr_matrix(count_features.reshape(len(nodes), -1)),
            one_hot(token_kinds, NUM_TOKEN_KINDS),
            one_hot(sources * NUM_TOKEN_KINDS + token_kinds, NUM_TEXT_SOURCES * NUM_TOKEN_KINDS),
            one_hot(sources * NUM_PLACES + place_kinds, NUM_TEXT_SOURCES * NUM_PLACES),
        ],
        format="csr",
    )
    regression = LogisticRegression(C=INVERSE_PRIOR, fit_intercept=False, tol=1e-3, max_iter=200)
    regression.fit(features, nodes["is_accepted"])
    numbers = np.round(regression.coef_[0], DIGITS)
    sizes = 3 * NUM_TEXT_SOURCES, NUM_TOKEN_KINDS, NUM_TEXT_SOURCES * NUM_TOKEN_KINDS
    beta, token_weights, source_weights, place_weights = np.split(numbers, np.cumsum(sizes))
    beta, place_weights = beta.reshape(NUM_TEXT_SOURCES, 3), place_weights.reshape(NUM_TEXT_SOURCES, NUM_PLACES)
    token_weights = np.round(token_weights + source_weights.reshape(NUM_TEXT_SOURCES, NUM_TOKEN_KINDS), DIGITS)
    return tuple(
        SourceCurve(
            source=source,
            offset=beta[source, 0],
            low=beta[source, 1],
            high=beta[source, 2],
            of_tokens=tuple(token_weights[source].tolist()),
            of_places=tuple(place_weights[source].tolist()),
        )
        for source in np.unique(sources).tolist()
    )


def reliability(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions) -> Reliability:
    """Estimated and realised acceptance of drafts along texts, one at least, that neither pool nor curves have seen."""
    nodes = replay_nodes(pool, texts, options)
    error = calibration_error(np.exp(nodes["log_acceptance"].astype(np.float64)), nodes["is_accepted"])
    return Reliability(
        num_texts=len(texts),
        num_nodes=len(nodes),
        max_nodes=options.max_nodes,
        min_acceptance=options.min_acceptance,
        expected_calibration_error=round(error, DIGITS),
    )


def calibration_error(estimates: np.ndarray, is_accepted: np.ndarray) -> float:
    """Mean distance, in bins of equal width over [0, 1], of float64[n] estimates from the share of bool[n] accepted."""
    bin_of = np.minimum((estimates * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    return float(np.abs(np.bincount(bin_of, is_accepted - estimates)).sum() / max(1, len(estimates)))


def _with_best_escape(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions) -> Pool:
    """The pool with the configured escape, or else with that of POOL_ESCAPES whose full trees are accepted most.

    Texts that resemble each other, as one model's do, want a low one, texts of many hands a high one.
    """
    if pool.settings.pool_escape_per_token is not None:
        return pool
    full = replace(options, min_acceptance=0.0)
    texts = _of_bounded_length(texts, MAX_ESCAPE_TOKENS)
    tried = [pool.with_settings(pool_escape_per_token=escape) for escape in POOL_ESCAPES]
    return max(tried, key=lambda candidate: replay(candidate, texts, full).mean_accepted)  # of equals the lowest


def _of_bounded_length(texts: Sequence[ReplayText], max_tokens: int) -> Sequence[ReplayText]:
    """Choose texts, spread evenly, that have about `max_tokens` tokens in all; at least two if there are two."""
    num_tokens = sum(len(text.text_ids) for text in texts)
    num_replayed = max(2, int(len(texts) * min(1.0, max_tokens / max(1, num_tokens))))
    return [texts[position] for position in spread_positions(len(texts), num_replayed)]


def budget_curve(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions | None = None) -> BudgetCurve:
    """Replay texts under every budget of the grid. The same inputs give the same result.

    Parameters
    ----------
    pool : calibrated, as it will be drafted from; it must not hold the texts.
    texts : at least one. Of long ones some are left out: about MAX_BUDGET_TOKENS of each kind are replayed.
    options : which sources are drafted from; its budget is not looked at.
    """
    options = DraftOptions() if options is None else options
    new = [replace(text, previous_ids=None) for text in texts]
    changed = [text for text in texts if text.previous_ids is not None] if options.use_previous else []
    return BudgetCurve(
        sources=options.sources,
        new=_replayed(pool, new, options),
        changed=_replayed(pool, changed, options) if len(changed) >= MIN_CHANGED_TEXTS else None,
    )


def with_budgets(
    calibration: Calibration, pool: Pool, texts: Sequence[ReplayText], options: DraftOptions | None = None
) -> Calibration:
    """A calibration that also says what each budget gains, replayed on the texts that it was fitted to.

    Curves of a few hundred numbers are fitted to tens of thousands of nodes, so that the texts hardly know them.
    """
    curve = budget_curve(pool.with_calibration(calibration), texts, options)
    return calibration.model_copy(update={"budgets": curve})


def replay_budgets(
    pool: Pool | None, text: ReplayText, options: DraftOptions, budgets: Sequence[tuple[int, float]] = GRID
) -> np.ndarray:
    """Steps along one text under each of the budgets, by the size of their trees: float64[num_budgets, num_knots].

    `budgets` are a largest tree and a least acceptance each; those of `options` are not used. A step counts 1 in all,
    as in `BudgetCell`; each but the last ends with a token that was not drafted.
    """
    sizes = np.array([size for size, _ in budgets])
    least = np.log([least for _, least in budgets], dtype=np.float32)
    widest = replace(options, max_nodes=int(sizes.max()), min_acceptance=min(least for _, least in budgets))
    num_prompt, num_tokens = len(text.prompt_ids), len(text.text_ids)
    context = np.concatenate([text.prompt_ids, text.text_ids]).astype(np.int32)
    contexts = [context[: num_prompt + position] for position in range(num_tokens + 1)]
    num_prompts, previous = [num_prompt] * len(contexts), [text.previous_ids] * len(contexts)
    drafts = draft_batch(pool, contexts, num_prompts, previous, [text.group] * len(contexts), options=widest)
    truth = text.text_ids.tolist()
    num_drafted, num_accepted = np.zeros((2, len(contexts), len(budgets)), np.int64)
    for position, tree in enumerate(drafts):
        likely = np.searchsorted(-tree.log_acceptance, -least, side="right")  # the most probable nodes come first
        num_drafted[position] = np.minimum(sizes, likely)
        num_accepted[position] = np.searchsorted(accepted_path(tree, truth, position), num_drafted[position])
    walkers, position = np.arange(len(budgets)), np.zeros(len(budgets), np.int64)
    num_at_knots = np.zeros((len(budgets), len(SIZE_KNOTS)))
    while len(walkers):
        position = text.next_open[position]
        num_at_knots[walkers] += KNOT_SHARES[num_drafted[position, walkers]]
        position = position + num_accepted[position, walkers] + 1
        on_the_way = position < len(contexts)
        walkers, position = walkers[on_the_way], position[on_the_way]
    return num_at_knots


def _replayed(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions) -> ReplayedBudgets | None:
    num_tokens = sum(len(text.text_ids) for text in texts)
    stride = max(1, -(-num_tokens // MAX_BUDGET_TOKENS))
    texts = texts[::stride]
    if not texts:
        return None
    num_at_knots = np.sum([replay_budgets(pool, text, options) for text in texts], axis=0)
    num_steps, num_tokens = num_at_knots.sum(axis=1), sum(len(text.text_ids) for text in texts)
    tokens_per_step = (num_tokens + len(texts)) / num_steps  # every text's end is written too
    shares = num_at_knots / num_steps[:, None]
    return ReplayedBudgets(
        num_texts=len(texts),
        num_tokens=num_tokens,
        num_form=sum(text.num_form for text in texts),
        cells=tuple(
            BudgetCell(
                max_draft_tokens=size,
                min_acceptance=least,
                tokens_per_step=round(float(pace), DIGITS),
                size_shares=tuple(np.round(share, DIGITS).tolist()),
            )
            for (size, least), pace, share in zip(GRID, tokens_per_step, shares, strict=True)
        ),
    )
