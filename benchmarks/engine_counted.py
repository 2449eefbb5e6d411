"""What a pass of `engine.py` would take by the measured cost of its steps: no noise of the machine in it.

Steps, their live texts and their trees are those that were counted; each costs what the curve of its live texts says,
and prompts what their tokens add to a step. The same steps cost the same, whatever else ran meanwhile, so that two
systems are compared as exactly as one cost curve knows them. Measures nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from night_systems import Pass

from laserbatch.pipeline.decoding.budget import Budget, known_batch_size
from laserbatch.pipeline.decoding.planning.run_forecast import RunTexts, prompt_token_seconds
from laserbatch.retrieval_pools.calibration.estimates import Bootstrap, Estimate
from laserbatch.retrieval_pools.step_cost import StepCost

SEED = 0


@dataclass(frozen=True)
class Counted:
    """What texts take by their counted steps, in the order of their prompts; a step is shared by its texts.

    Attributes
    ----------
    num_tokens, seconds : float64[num_texts].
    """

    num_tokens: np.ndarray
    seconds: np.ndarray

    @property
    def tokens_per_s(self) -> float:
        return float(self.num_tokens.sum() / self.seconds.sum())

    def over(self, other: "Counted") -> Estimate:
        """Tokens per second over another's on the texts that both wrote; the interval is one of texts."""
        num_texts = min(len(self.seconds), len(other.seconds))
        bootstrap = Bootstrap(num_texts, SEED)
        own, others = (
            bootstrap.totals(one.num_tokens[:num_texts]) / bootstrap.totals(one.seconds[:num_texts])
            for one in (self, other)
        )
        return Estimate.of(own / others)


def counted(
    step_cost: StepCost, batch: int, passes: Sequence[Pass], prompts: Sequence[np.ndarray], budget: Budget | None
) -> Counted:
    """Put the steps of passes of the engine over consecutive prompts through the cost of steps.

    Parameters
    ----------
    batch : texts side by side; a text begins when there is room for it, in the order of prompts.
    budget : None where there is none; it says whether a drafter was asked.
    """
    drafts = budget is not None and budget.max_draft_tokens > 0
    per_prompt_token = prompt_token_seconds(step_cost, known_batch_size(step_cost, batch))
    seconds, first = [], 0
    for one in passes:
        num_texts = len(one.texts)
        texts = RunTexts.of(prompts[first : first + num_texts], one.text_tokens, np.zeros(num_texts), num_texts, batch)
        taken = texts.num_prompt_tokens * per_prompt_token
        for live, num_drafted in _steps(one.tree_sizes, batch):
            taken[live] += _step_seconds(step_cost, len(live), num_drafted, drafts) / len(live)
        seconds.append(taken)
        first += num_texts
    num_tokens = [count for one in passes for count in one.text_tokens]
    return Counted(np.array(num_tokens, float), np.concatenate(seconds))


def _steps(tree_sizes: Sequence[Sequence[int]], batch: int) -> Iterator[tuple[list[int], int]]:
    """Each step's live texts, and the draft tokens of all of them."""
    waiting = iter(range(len(tree_sizes)))
    live: dict[int, int] = {}  # the steps that each text has taken
    while True:
        while len(live) < batch and (text := next(waiting, None)) is not None:
            live[text] = 0
        if not live:
            return
        yield list(live), sum(tree_sizes[text][step] for text, step in live.items())
        live = {text: step + 1 for text, step in live.items() if step + 1 < len(tree_sizes[text])}


def _step_seconds(step_cost: StepCost, num_live: int, num_drafted: int, drafts: bool) -> float:
    """Between the cost's batch sizes linear, at the same draft tokens of a text."""
    known = step_cost.batch_sizes
    nearest = {max([size for size in known if size <= num_live] or known[:1])}
    nearest |= {min([size for size in known if size >= num_live] or known[-1:])}
    seconds = []
    for size in sorted(nearest):
        of_one = num_drafted / num_live
        step_s = float(step_cost.seconds(size, np.array([size * (1 + of_one)]))[0])
        seconds.append(step_s + (float(step_cost.draft_seconds(size, np.array(of_one))) if drafts else 0.0))
    return float(np.interp(num_live, sorted(nearest), seconds))
