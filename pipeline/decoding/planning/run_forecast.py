"""How much faster a whole run is than plain decoding: prompts take the same time, and a shard's end has few texts.

What a budget is chosen by are tokens a second of a full batch whose prompts are there. A short night is mostly prompts
and ends. Texts are put through the engine's own order here: as many at once as the batch holds, the next one when one
ends, shard after shard. Knows no model, no files and no clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from laserbatch.pipeline.decoding.budget import PLAIN, Budget, known_batch_size
from laserbatch.pipeline.decoding.expected_step import plain_seconds, step_seconds
from laserbatch.pipeline.decoding.memory.prefix_index import PrefixIndex
from laserbatch.retrieval_pools.index.budget_curve import SIZE_KNOTS, BudgetCell, BudgetCurve, ReplayedBudgets
from laserbatch.retrieval_pools.step_cost import StepCost

MAX_TEXTS = 4096  # put through; more of the same take as much longer
PREFILL_TOKENS = 256  # of a step that computes prompts: their cost per token is read off there


@dataclass(frozen=True)
class RunTexts:
    """The texts of a run, in its order; arrays of one length.

    Attributes
    ----------
    num_prompt_tokens : int[n], tokens of each prompt that have to be computed.
    num_tokens : int[n], tokens of each text, as expected, its end token among them.
    has_previous : bool[n], whether its entity has an earlier text.
    shard_size : texts of a shard; at its end the batch empties.
    """

    num_prompt_tokens: np.ndarray
    num_tokens: np.ndarray
    has_previous: np.ndarray
    shard_size: int

    @classmethod
    def of(
        cls,
        prompts: Sequence[np.ndarray],
        num_tokens: Sequence[int],
        has_previous: Sequence[bool],
        shard_size: int,
        batch_size: int,
    ) -> "RunTexts":
        """Of prompts, of which the beginning that one of the last `batch_size` had too is not computed again."""
        shared, newest = [], PrefixIndex()
        for number, prompt in enumerate(prompts):
            shared.append(newest.longest(prompt)[0])
            newest.put(number, prompt, None)
            if len(newest) > batch_size:
                newest.pop_first()
        num_prompt_tokens = np.array([len(prompt) for prompt in prompts]) - shared
        return cls(num_prompt_tokens, np.asarray(num_tokens), np.asarray(has_previous, bool), shard_size)


def run_speed_up(
    step_cost: StepCost,
    batch_size: int,
    texts: RunTexts,
    curve: BudgetCurve,
    budget: Budget,
    num_steps: np.ndarray | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
) -> float:
    """Seconds of plain decoding over those with drafts, of the same texts.

    Parameters
    ----------
    batch_size : as in `choose_budget`.
    curve : of the pool, with texts of the new kind.
    budget : the nearest one of the curve's grid is taken.
    num_steps : int[n], steps of each text where they are known; None: its tokens by what a step of its kind gains.
    prefill_tokens : of a step that computes prompts.
    """
    if budget.max_draft_tokens == 0:
        return 1.0
    new, changed = (nearest_cell(kind, budget) for kind in (curve.new, curve.changed or curve.new))
    return cells_speed_up(step_cost, batch_size, texts, new, changed, num_steps, prefill_tokens)


def cells_speed_up(
    step_cost: StepCost,
    batch_size: int,
    texts: RunTexts,
    new: BudgetCell,
    changed: BudgetCell,
    num_steps: np.ndarray | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
) -> float:
    """The same where it is known what a step of a new and of a changed text gains."""
    batch_size = known_batch_size(step_cost, batch_size)
    prompt_seconds = texts.num_prompt_tokens * prompt_token_seconds(step_cost, batch_size, prefill_tokens)
    plainly = _by_live(batch_size, {size: plain_seconds(step_cost, size) for size in _known(step_cost, batch_size)})
    plain = run_seconds(plainly, texts.num_tokens, prompt_seconds, texts.shard_size)
    pace = np.where(texts.has_previous, changed.tokens_per_step, new.tokens_per_step)
    num_steps = np.ceil(texts.num_tokens / pace) if num_steps is None else num_steps
    share = float(num_steps[texts.has_previous].sum() / num_steps.sum())  # of steps, that are of changed texts
    of_new, of_changed = (live_step_seconds(step_cost, batch_size, cell) for cell in (new, changed))
    drafted = run_seconds((1 - share) * of_new + share * of_changed, num_steps, prompt_seconds, texts.shard_size)
    return plain / drafted


def written_seconds(
    step_cost: StepCost,
    batch_size: int,
    prompts: Sequence[np.ndarray],
    num_steps: Sequence[int],
    mean_drafted: float,
    prefill_tokens: int = PREFILL_TOKENS,
) -> float:
    """What texts of one shard should have taken, whose steps and mean tree are known."""
    batch_size = known_batch_size(step_cost, batch_size)
    texts = RunTexts.of(prompts, num_steps, [False] * len(prompts), len(prompts), batch_size)
    prompt_seconds = texts.num_prompt_tokens * prompt_token_seconds(step_cost, batch_size, prefill_tokens)
    by_live = live_step_seconds(step_cost, batch_size, _cell_of_mean(Budget(), 1.0, mean_drafted))
    return run_seconds(by_live, texts.num_tokens, prompt_seconds, len(prompts))


def judged_on_run(
    budget: Budget,
    step_cost: StepCost,
    batch_size: int,
    texts: RunTexts,
    curve: BudgetCurve | None,
    prefill_tokens: int = PREFILL_TOKENS,
    *,
    may_be_plain: bool,
) -> Budget:
    """A chosen budget with the forecast of its run; plain decoding, where that would be faster.

    Parameters
    ----------
    curve : of the pool; None: nothing was replayed. What a pilot saw comes before it. Without either nothing changes.
    may_be_plain : whether not to draft at all is among the choices.
    """
    forecast = budget.forecast
    if (
        budget.max_draft_tokens == 0
        or forecast is None
        or forecast.tokens_per_step is None
        or not len(texts.num_tokens)
    ):
        return budget
    if forecast.trials or curve is None or curve.new is None:
        of_all = _cell_of_mean(budget, forecast.tokens_per_step, forecast.mean_drafted)
        gain = cells_speed_up(step_cost, batch_size, texts, of_all, of_all, prefill_tokens=prefill_tokens)
    else:
        gain = run_speed_up(step_cost, batch_size, texts, curve, budget, prefill_tokens=prefill_tokens)
    if gain >= 1 or not may_be_plain:
        return replace(budget, forecast=replace(forecast, run_speed_up=gain))
    reason = (
        f"up to {budget.max_draft_tokens} draft tokens above {budget.min_acceptance:g} would be {gain:.2f} times plain "
        f"with the prompts and the ends of shards, though {forecast.speed_up or 1:.2f} times in full batches"
    )
    plainly = replace(forecast, reason=reason, tokens_per_step=1.0, mean_drafted=0.0, speed_up=1.0, run_speed_up=1.0)
    return replace(PLAIN, forecast=plainly)


def live_step_seconds(step_cost: StepCost, batch_size: int, cell: BudgetCell) -> np.ndarray:
    """Mean seconds of a step of 1, 2, ... live texts under one budget: float64[batch_size].

    Between the step cost's batch sizes they are linear; below its smallest a step costs as much as there.
    """
    return _by_live(batch_size, {size: step_seconds(step_cost, size, cell) for size in _known(step_cost, batch_size)})


def _known(step_cost: StepCost, batch_size: int) -> list[int]:
    return [size for size in step_cost.batch_sizes if size <= batch_size]


def _by_live(batch_size: int, seconds: dict[int, float]) -> np.ndarray:
    return np.interp(np.arange(1, batch_size + 1), list(seconds), list(seconds.values()))


def run_seconds(
    seconds_by_live: np.ndarray, num_steps: np.ndarray, prompt_seconds: np.ndarray, shard_size: int
) -> float:
    """Seconds of all texts.

    Parameters
    ----------
    seconds_by_live : float64[batch_size], of a step of 1, 2, ... texts.
    num_steps, prompt_seconds : float64[n], of each text, in their order.
    """
    seconds, num_done = 0.0, 0
    for steps, prompts in _shards(num_steps, prompt_seconds, shard_size):
        seconds += float(prompts.sum()) + _shard_seconds(seconds_by_live, steps.tolist())
        num_done += len(steps)
        if num_done >= MAX_TEXTS:
            break
    return seconds * len(num_steps) / max(1, num_done)


def _shards(num_steps: np.ndarray, prompts: np.ndarray, shard_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, len(num_steps), shard_size):
        yield num_steps[start : start + shard_size], prompts[start : start + shard_size]


def _shard_seconds(seconds_by_live: np.ndarray, num_steps: list[float]) -> float:
    """Of the steps that write. A heap holds the step after which each live text ends."""
    seconds, now, waiting = 0.0, 0.0, iter(num_steps)
    ends: list[float] = []
    while True:
        for steps in waiting:
            heappush(ends, now + steps)
            if len(ends) == len(seconds_by_live):
                break
        if not ends:
            return seconds
        seconds += (ends[0] - now) * seconds_by_live[len(ends) - 1]
        now = ends[0]
        while ends and ends[0] == now:
            heappop(ends)


def prompt_token_seconds(step_cost: StepCost, batch_size: int, prefill_tokens: int = PREFILL_TOKENS) -> float:
    """What one prompt token adds to a step of a full batch."""
    without, with_prompts = step_cost.seconds(batch_size, np.array([batch_size, batch_size + prefill_tokens]))
    return float(with_prompts - without) / prefill_tokens


def nearest_cell(kind: ReplayedBudgets, budget: Budget) -> BudgetCell:
    """What replays say of the budget of their grid that is most like another."""

    def distance(cell: BudgetCell) -> tuple[int, float]:
        return abs(cell.max_draft_tokens - budget.max_draft_tokens), abs(cell.min_acceptance - budget.min_acceptance)

    return min(kind.cells, key=distance)


def _cell_of_mean(budget: Budget, tokens_per_step: float, mean_drafted: float) -> BudgetCell:
    """Steps whose trees all have the mean size: a pilot keeps no more."""
    return BudgetCell(
        max_draft_tokens=budget.max_draft_tokens,
        min_acceptance=budget.min_acceptance,
        tokens_per_step=tokens_per_step,
        size_shares=tuple(float(np.interp(mean_drafted, SIZE_KNOTS, row)) for row in np.eye(len(SIZE_KNOTS))),
    )
