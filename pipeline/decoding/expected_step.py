"""What a step of a full batch is expected to take, whose texts draft trees of known sizes. Knows no model and no clock.

Trees differ in size, and a step's cost is not linear where a kernel changes: so sizes of a batch's trees together are
taken as they fall, were they drawn independently, and not at their mean.
"""

import numpy as np

from laserbatch.retrieval_pools.index.budget_curve import SIZE_KNOTS, BudgetCell
from laserbatch.retrieval_pools.step_cost import StepCost


def plain_seconds(step_cost: StepCost, batch_size: int) -> float:
    """A step of a full batch without drafts."""
    return float(step_cost.seconds(batch_size, np.array([batch_size]))[0])


def step_seconds(step_cost: StepCost, batch_size: int, cell: BudgetCell) -> float:
    """Mean over a full batch's steps."""
    shares = np.array(cell.size_shares)
    of_all = _sizes_together(shares, batch_size, batch_size)
    verified_s = float(of_all @ _seconds_by_size(step_cost, batch_size))
    return verified_s + float(step_cost.draft_seconds(batch_size, cell.mean_drafted))


def knot_seconds(step_cost: StepCost, batch_size: int, size_shares: np.ndarray) -> np.ndarray:
    """Seconds of a step that one text with a tree of each of SIZE_KNOTS answers for: float64[num_knots].

    A text bears its part of the mean step, and alone what its own tree makes dearer or cheaper: so sums over any texts
    tell, to first order, what a batch of such texts would take. Weighted by `size_shares` they are the mean step.

    Parameters
    ----------
    size_shares : float64[num_knots], of the other texts' steps.
    """
    of_sizes = _seconds_by_size(step_cost, batch_size)
    of_others = _sizes_together(size_shares, batch_size - 1, batch_size)
    with_one = np.array([of_others[: len(of_sizes) - knot] @ of_sizes[knot:] for knot in SIZE_KNOTS])
    mean_s = float(with_one @ size_shares / np.sum(size_shares))
    drafting_s = step_cost.draft_seconds(batch_size, np.array(SIZE_KNOTS, float))  # were all trees of one size
    return (mean_s + drafting_s) / batch_size + (with_one - mean_s)


def _seconds_by_size(step_cost: StepCost, batch_size: int) -> np.ndarray:
    """Of steps with 0, 1, ... draft tokens of all texts together."""
    return step_cost.seconds(batch_size, batch_size + np.arange(SIZE_KNOTS[-1] * batch_size + 1))


def _sizes_together(size_shares: np.ndarray, num_texts: int, batch_size: int) -> np.ndarray:
    """How likely the trees of some texts have 0, 1, ... tokens together, up to those of a full batch."""
    of_one = np.zeros(SIZE_KNOTS[-1] + 1)
    of_one[list(SIZE_KNOTS)] = size_shares
    of_one /= of_one.sum()
    num_bins = SIZE_KNOTS[-1] * batch_size + 1
    return np.fft.irfft(np.fft.rfft(of_one, 2 * num_bins) ** num_texts, 2 * num_bins)[:num_bins]
