"""Calibrating a pool: texts that it does not hold are replayed, and curves of acceptance are fitted to the drafts.

Then the texts are replayed under many draft budgets at once. Drafts have the best nodes first, so the draft of a small
budget is the beginning of the draft of a larger one: one draft at each position of a text serves all budgets, and the
steps of every budget along the text follow from these. `replay.replay` does the same slowly, one budget at a time. The
caller holds the texts back from the pool.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from laserbatch.retrieval_pools.calibration.replay import ReplayText, accepted_path, replay, replay_nodes
from laserbatch.retrieval_pools.draft import DraftOptions, draft_batch
from laserbatch.retrieval_pools.drafting.estimate import NUM_PLACES, NUM_TOKEN_KINDS
from laserbatch.retrieval_pools.drafting.state import MAX_NODES
from laserbatch.retrieval_pools.index import calibration_record as record
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.sources import NUM_TEXT_SOURCES

MAX_TOKENS = 50_000  # tokens replayed: the time does not grow with the pool; three times as many gain nothing
MAX_ESCAPE_TOKENS = 8_000  # of these tokens, the number replayed for each escape that is tried
POOL_ESCAPES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # tried if none is configured
NUM_CALIBRATION_TEXTS = 400  # texts of a side that a night replays; more gain nothing, see MAX_TOKENS
MIN_TEXTS = 50  # a pool of fewer texts is not calibrated
TEXTS_PER_HELD_BACK = 5  # at most one text in five is held back
INVERSE_PRIOR = 1.0  # prior variance of the fitted weights; 10 accepts no more, and estimates worse from few nodes
DIGITS = 5  # decimals of the numbers in the manifest
GRID = tuple((size, least) for size in record.DRAFT_TOKENS for least in record.MIN_ACCEPTANCES)
MAX_BUDGET_TOKENS = 10_000  # tokens of each kind of text replayed under all budgets; each takes a draft
MIN_CHANGED_TEXTS = 10


def num_held_back(num_texts: int, num_requested: int) -> int:
    """The number of a pool's texts to hold back: as requested, but at most a fifth, and none of a small pool."""
    return min(num_requested, num_texts // TEXTS_PER_HELD_BACK) if num_texts >= MIN_TEXTS else 0


def spread_positions(num_texts: int, num_chosen: int, seed: int = 0) -> np.ndarray:
    """Positions of texts to replay, evenly spread, shifted by `seed`, ascending: int64[min(num_texts, num_chosen)]."""
    num_chosen = min(num_texts, num_chosen)
    offset = np.random.default_rng(seed).random()
    return np.floor((np.arange(num_chosen) + offset) * (num_texts / max(1, num_chosen))).astype(np.int64)


def calibrate(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions | None = None) -> record.Calibration:
    """Replay texts and fit curves of acceptance. The same inputs give the same result.

    The pool must not hold the texts; its present curves are not used. If the texts are long, some are left out, so that
    about MAX_TOKENS tokens are replayed. `options` are those of the run. The fit uses the largest trees, with unlikely
    paths too, at the positions where such a run drafts: a text is easier to predict where a tree ended than after a
    wrong token. Raises ValueError if there are fewer than two texts.
    """
    if len(texts) < 2:
        raise ValueError(f"{len(texts)} texts to calibrate with; expected two or more")
    options = DraftOptions() if options is None else options
    texts = _of_bounded_length(texts, MAX_TOKENS)
    plain = _with_best_escape(pool.with_calibration(None), texts, options)
    pool_escape = plain.settings.pool_escape_per_token
    assert pool_escape is not None
    widest = replace(options, max_nodes=MAX_NODES, min_acceptance=0.0)
    nodes = replay_nodes(plain, texts, widest, options)
    return record.Calibration(
        pool_escape=pool_escape,
        num_texts=len(texts),
        num_tokens=sum(len(text.text_ids) for text in texts),
        sources=fit_sources(nodes[nodes["is_parent_accepted"]]),
    )


def fit_sources(nodes: np.ndarray) -> tuple[record.SourceCurve, ...]:
    """The curve of each source that drafted: one logistic regression over NODE[n], nodes whose parents are accepted.

    There is a weight for each kind of token, and for each source one more per kind of token and one per kind of place.
    Regularisation pulls all of them towards 0, so a source with few nodes of a kind of token gets the weight that it
    has in all sources.
    """
    from scipy.sparse import csr_matrix, hstack
    from sklearn.linear_model import LogisticRegression  # takes a second to load, and drafting does not need it

    if len(np.unique(nodes["is_accepted"])) < 2:
        return ()  # there is nothing to fit
    sources = nodes["source"].astype(np.int64)
    token_kinds, place_kinds = np.divmod(nodes["kind"].astype(np.int64), NUM_PLACES)
    count_features = np.zeros((len(nodes), NUM_TEXT_SOURCES, 3))
    count_features[np.arange(len(nodes)), sources] = record.beta_features(nodes["relative_count"])

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
        record.SourceCurve(
            source=source,
            **dict(zip(("offset", "low", "high"), beta[source], strict=True)),
            of_tokens=tuple(token_weights[source].tolist()),
            of_places=tuple(place_weights[source].tolist()),
        )
        for source in np.unique(sources).tolist()
    )


def _with_best_escape(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions) -> Pool:
    """The pool with the configured escape, otherwise with that of POOL_ESCAPES whose full trees are accepted most.

    A low escape is best for texts that resemble each other, as one model's do, a high one for texts of many authors.
    """
    if pool.settings.pool_escape_per_token is not None:
        return pool
    full = replace(options, min_acceptance=0.0)
    texts = _of_bounded_length(texts, MAX_ESCAPE_TOKENS)
    tried = [pool.with_settings(pool_escape_per_token=escape) for escape in POOL_ESCAPES]
    return max(tried, key=lambda candidate: replay(candidate, texts, full).mean_accepted)  # the lowest among equals


def _of_bounded_length(texts: Sequence[ReplayText], max_tokens: int) -> Sequence[ReplayText]:
    """Choose texts, spread evenly, that have about `max_tokens` tokens in all; at least two if there are two."""
    num_tokens = sum(len(text.text_ids) for text in texts)
    num_replayed = max(2, int(len(texts) * min(1.0, max_tokens / max(1, num_tokens))))
    return [texts[position] for position in spread_positions(len(texts), num_replayed)]


def budget_curve(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions | None = None) -> record.BudgetCurve:
    """Replay texts, at least one, under every budget of the grid. The same inputs give the same result.

    The pool is calibrated, as runs draft from it, and must not hold the texts. If they are long, some are left out:
    about MAX_BUDGET_TOKENS tokens of each kind are replayed. Of `options` the budget is ignored.
    """
    options = DraftOptions() if options is None else options
    new = [replace(text, previous_ids=None) for text in texts]
    changed = [text for text in texts if text.previous_ids is not None] if options.use_previous else []
    return record.BudgetCurve(
        sources=options.sources,
        new=_replayed(pool, new, options),
        changed=_replayed(pool, changed, options) if len(changed) >= MIN_CHANGED_TEXTS else None,
    )


def with_budgets(
    calibration: record.Calibration, pool: Pool, texts: Sequence[ReplayText], options: DraftOptions | None = None
) -> record.Calibration:
    """Add the gain of each budget to a calibration, replayed on the texts that it was fitted to.

    The curves have a few hundred parameters and are fitted to tens of thousands of nodes, so they hardly overfit.
    """
    curve = budget_curve(pool.with_calibration(calibration), texts, options)
    return calibration.model_copy(update={"budgets": curve})


def replay_budgets(
    pool: Pool | None, text: ReplayText, options: DraftOptions, budgets: Sequence[tuple[int, float]] = GRID
) -> np.ndarray:
    """The number of steps along one text under each budget, by tree size: float64[num_budgets, num_knots].

    A budget is a largest tree size and a least acceptance; those of `options` are not used. Each step counts 1 in all,
    split between knots as in `BudgetCell`; each step but the last ends with a token that was not drafted.
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
    num_at_knots = np.zeros((len(budgets), len(record.SIZE_KNOTS)))
    while len(walkers):
        position = text.next_open[position]
        num_at_knots[walkers] += record.KNOT_SHARES[num_drafted[position, walkers]]
        position = position + num_accepted[position, walkers] + 1
        on_the_way = position < len(contexts)
        walkers, position = walkers[on_the_way], position[on_the_way]
    return num_at_knots


def _replayed(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions) -> record.ReplayedBudgets | None:
    num_tokens = sum(len(text.text_ids) for text in texts)
    stride = max(1, -(-num_tokens // MAX_BUDGET_TOKENS))
    texts = texts[::stride]
    if not texts:
        return None
    num_at_knots = np.sum([replay_budgets(pool, text, options) for text in texts], axis=0)
    num_steps, num_tokens = num_at_knots.sum(axis=1), sum(len(text.text_ids) for text in texts)
    tokens_per_step = (num_tokens + len(texts)) / num_steps  # every text's end is written too
    shares = num_at_knots / num_steps[:, None]
    return record.ReplayedBudgets(
        num_texts=len(texts),
        num_tokens=num_tokens,
        num_form=sum(text.num_form for text in texts),
        cells=tuple(
            record.BudgetCell(
                max_draft_tokens=size,
                min_acceptance=least,
                tokens_per_step=round(float(pace), DIGITS),
                size_shares=tuple(np.round(share, DIGITS).tolist()),
            )
            for (size, least), pace, share in zip(GRID, tokens_per_step, shares, strict=True)
        ),
    )
