"""Replaying texts under many draft budgets at once: one draft at each position of a text serves them all.

Drafts come best first, so what a smaller budget drafts is the beginning of what a larger one does. Where every budget's
walk along the text goes is then read off. `replay.replay`, one budget at a time, says the same slowly. Knows neither
the cost of a step nor who chooses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from laserbatch.retrieval_pools.calibration.replay import DraftOptions, ReplayText, accepted_path
from laserbatch.retrieval_pools.draft import draft_batch
from laserbatch.retrieval_pools.index.calibration_record import (
    DRAFT_TOKENS,
    KNOT_SHARES,
    MIN_ACCEPTANCES,
    SIZE_KNOTS,
    BudgetCell,
    BudgetCurve,
    Calibration,
    ReplayedBudgets,
)
from laserbatch.retrieval_pools.index.pool import Pool

GRID = tuple((size, least) for size in DRAFT_TOKENS for least in MIN_ACCEPTANCES)
MAX_TOKENS = 10_000  # replayed of each kind of text: a draft a token
MIN_CHANGED_TEXTS = 10
DIGITS = 5


@dataclass(frozen=True)
class BudgetCounts:
    """Counts of one text under several budgets, one value a budget.

    Attributes
    ----------
    num_steps, num_drafted, num_accepted : int64[num_budgets].
    num_at_knots : float64[num_budgets, len(SIZE_KNOTS)], steps by the size of their trees; see `BudgetCell`.
    """

    num_steps: np.ndarray
    num_drafted: np.ndarray
    num_accepted: np.ndarray
    num_at_knots: np.ndarray

    def __add__(self, other: "BudgetCounts") -> "BudgetCounts":
        return BudgetCounts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def budget_curve(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions | None = None) -> BudgetCurve:
    """Replay texts under every budget of the grid. The same inputs give the same result.

    Parameters
    ----------
    pool : calibrated, as it will be drafted from; it must not hold the texts.
    texts : at least one. Of long ones some are left out: about MAX_TOKENS of each kind are replayed.
    options : which sources are drafted from; its budget is not looked at.
    """
    options = DraftOptions() if options is None else options
    new = [replace(text, previous_ids=None) for text in texts]
    changed = [text for text in texts if text.previous_ids is not None] if options.use_previous else []
    used = {"previous": options.use_previous, "prompt": options.use_prompt, "output": options.use_output, "pool": True}
    return BudgetCurve(
        sources=tuple(name for name, is_used in used.items() if is_used),
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
) -> BudgetCounts:
    """One text under each of the budgets.

    Parameters
    ----------
    options : all but its budget is used.
    budgets : largest tree and least acceptance of each.
    """
    sizes = np.array([size for size, _ in budgets])
    least = np.log([least for _, least in budgets], dtype=np.float32)
    widest = vars(options) | {
        "max_nodes": int(sizes.max()),
        "min_acceptance": min(least for _, least in budgets),
    }
    num_prompt, num_tokens = len(text.prompt_ids), len(text.text_ids)
    context = np.concatenate([text.prompt_ids, text.text_ids]).astype(np.int32)
    contexts = [context[: num_prompt + position] for position in range(num_tokens + 1)]
    of_each = ([value] * len(contexts) for value in (num_prompt, text.previous_ids, text.group))
    truth = text.text_ids.tolist() + ([] if options.end_token_id is None else [options.end_token_id])
    num_drafted, num_accepted = np.zeros((2, len(contexts), len(budgets)), np.int64)
    for position, tree in enumerate(draft_batch(pool, contexts, *of_each, **widest)):
        likely = np.searchsorted(-tree.log_acceptance, -least, side="right")  # the most probable nodes come first
        num_drafted[position] = np.minimum(sizes, likely)
        num_accepted[position] = np.searchsorted(accepted_path(tree, truth, position), num_drafted[position])
    return _walked(num_drafted, num_accepted)


def _walked(num_drafted: np.ndarray, num_accepted: np.ndarray) -> BudgetCounts:
    """Every budget's steps along a text, from int64[num_positions, num_budgets] of a draft at each position."""
    num_positions, num_budgets = num_drafted.shape
    walkers, position = np.arange(num_budgets), np.zeros(num_budgets, np.int64)
    num_steps, drafted, accepted = np.zeros((3, num_budgets), np.int64)
    num_at_knots = np.zeros((num_budgets, len(SIZE_KNOTS)))
    while len(walkers):
        sizes, gains = num_drafted[position, walkers], num_accepted[position, walkers]
        num_steps[walkers] += 1
        drafted[walkers] += sizes
        accepted[walkers] += gains
        num_at_knots[walkers] += KNOT_SHARES[sizes]
        position = position + gains + 1
        on_the_way = position < num_positions
        walkers, position = walkers[on_the_way], position[on_the_way]
    return BudgetCounts(num_steps, drafted, accepted, num_at_knots)


def _replayed(pool: Pool, texts: Sequence[ReplayText], options: DraftOptions) -> ReplayedBudgets | None:
    num_tokens = sum(len(text.text_ids) for text in texts)
    stride = max(1, -(-num_tokens // MAX_TOKENS))
    texts = texts[::stride]
    if not texts:
        return None
    counts = [replay_budgets(pool, text, options) for text in texts]
    total = sum(counts[1:], counts[0])
    tokens_per_step = 1 + total.num_accepted / total.num_steps
    shares = total.num_at_knots / total.num_steps[:, None]
    return ReplayedBudgets(
        num_texts=len(texts),
        num_tokens=sum(len(text.text_ids) for text in texts),
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
