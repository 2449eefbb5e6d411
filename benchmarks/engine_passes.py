"""Passes of `engine.py`: the order in which systems write, and two comparisons, by the clock and by counted steps.

At batch 1 systems take turns prompt by prompt, otherwise pass by pass. A ratio by the clock is taken within one
repetition, over the prompts that both systems wrote in it. A ratio by counted steps has no noise of the machine: it
takes the counted steps with their live texts and trees, costs each step by the cost curve of its number of live texts,
and adds what a prompt's tokens cost in a step. It is as exact as the cost curve, which both systems share.
"""

import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from common import Interval, Spread, resampled_totals, turns
from engine_systems import Contestant
from systems import Pass

from laserbatch.pipeline.budget.choice import known_batch_size
from laserbatch.pipeline.decoding.prefix_index import PrefixIndex
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.retrieval_pools.step_cost import StepCost

logger = logging.getLogger("benchmarks")

WARM_UP_TOKENS = 8
PREFILL_TOKENS = 256  # prompt tokens in a step, from which the cost per prompt token is derived

Repetitions = list[tuple[Pass, ...]]  # for each repetition, the passes over the parts of its prompts


@dataclass(frozen=True)
class Amount:
    """The amount of work at one batch size.

    Attributes
    ----------
    num_slow_prompts, num_slow_repetitions : the numbers of prompts and repetitions, from the first, of slow systems.
        These have no pool, and take many times as long at batch 1, or only a group's pool; the latter are compared only
        with the former.
    """

    num_prompts: int
    num_repetitions: int
    num_slow_prompts: int
    num_slow_repetitions: int

    def includes(self, contestant: Contestant, repetition: int, prompt: int) -> bool:
        """Whether a system writes a prompt in a repetition."""
        return not contestant.is_slow or (repetition < self.num_slow_repetitions and prompt < self.num_slow_prompts)


def measure(
    contestants: Sequence[Contestant],
    prompts: Sequence[np.ndarray],
    batch: int,
    max_new_tokens: int,
    amount: Amount,
    num_warm_up: int,
) -> dict[tuple, Repetitions]:
    """The passes of every contestant, by its key, after a warm-up on `num_warm_up` prompts.

    A peer that does not fit into the device's memory has no passes.
    """
    prompts = prompts[: amount.num_prompts]
    parts = [(number, [prompt]) for number, prompt in enumerate(prompts)] if batch == 1 else [(0, prompts)]
    passes: dict[tuple, Repetitions] = {contestant.key: [] for contestant in contestants}

    def run(contestant: Contestant, part: Sequence, num_tokens: int) -> Pass | None:
        """A contestant's pass; None for a peer that runs out of memory, which is then removed from `passes`."""
        try:
            return contestant.runner.run(part, batch, num_tokens)
        except torch.OutOfMemoryError:
            if not contestant.is_peer:
                raise
            logger.warning("%s: out of memory at batch %d", contestant.system, batch)
            del passes[contestant.key]
            return None

    for contestant in contestants:
        run(contestant, prompts[:num_warm_up], WARM_UP_TOKENS)  # compiles, and touches all memory once
    orders = turns(contestants)
    for repetition in range(amount.num_repetitions):
        written: dict[tuple, list[Pass]] = {key: [] for key in passes}
        for number, part in parts:
            for contestant in next(orders):
                if contestant.key not in passes or not amount.includes(contestant, repetition, number):
                    continue
                if (done := run(contestant, part, max_new_tokens)) is not None:
                    written[contestant.key].append(done)
        for key in passes:
            if written[key]:
                passes[key].append(tuple(written[key]))
    return passes


def ratios(own: Repetitions, other: Repetitions) -> list[float]:
    """Ratios of tokens per second, one for each repetition that both have, over the prompts that both wrote."""
    return [
        Pass.joined(mine[: len(others)]).tokens_per_s / Pass.joined(others[: len(mine)]).tokens_per_s
        for mine, others in zip(own, other, strict=False)
    ]


def over_best(own: Repetitions, others: Mapping[int, Repetitions]) -> tuple[int, Spread]:
    """The fastest of `others`, and the ratios of tokens per second to the fastest.

    Among equally fast systems the luckiest looks best. So each repetition is compared with the system that was best in
    the other repetitions.
    """
    over = {name: ratios(own, other) for name, other in others.items()}

    def best_without(repetition: int | None) -> int:
        return min(over, key=lambda name: statistics.median(_left(over[name], repetition)))

    num_repetitions = len(next(iter(over.values())))
    fair = [over[best_without(repetition)][repetition] for repetition in range(num_repetitions)]
    return best_without(None), Spread.of(fair)


def _left(values: list[float], place: int | None) -> list[float]:
    return [value for number, value in enumerate(values) if number != place] or values


@dataclass(frozen=True)
class Counted:
    """Tokens and seconds of texts by counted steps, in the order of their prompts: float64[num_texts] each.

    The seconds of a step are divided among its texts.
    """

    num_tokens: np.ndarray
    seconds: np.ndarray

    @property
    def tokens_per_s(self) -> float:
        return float(self.num_tokens.sum() / self.seconds.sum())

    def over(self, other: "Counted") -> Interval:
        """The ratio of tokens per second to `other`, on the texts that both wrote; the interval is over texts."""
        num_texts = min(len(self.seconds), len(other.seconds))
        own, others = (
            resampled_totals(counted.num_tokens[:num_texts]) / resampled_totals(counted.seconds[:num_texts])
            for counted in (self, other)
        )
        return Interval.of(own / others)


def counted(
    step_cost: StepCost, batch: int, passes: Sequence[Pass], prompts: Sequence[np.ndarray], budget: Budget | None
) -> Counted:
    """Cost the steps of the engine's passes over consecutive prompts by `step_cost`.

    Parameters
    ----------
    batch : maximum number of live texts; texts begin in the order of prompts, each when there is room.
    budget : None for plain decoding; drafting is costed only if it allows draft tokens.
    """
    drafts = budget is not None and budget.max_draft_tokens > 0
    full = known_batch_size(step_cost, batch)
    without, with_prompts = step_cost.seconds(full, np.array([full, full + PREFILL_TOKENS]))
    per_prompt_token = float(with_prompts - without) / PREFILL_TOKENS
    seconds, first = [], 0
    for done in passes:
        num_texts = len(done.texts)
        text_seconds = _computed_prompt_tokens(prompts[first : first + num_texts], batch) * per_prompt_token
        for live, num_drafted in _steps(done.tree_sizes, batch):
            text_seconds[live] += _step_seconds(step_cost, len(live), num_drafted, drafts) / len(live)
        seconds.append(text_seconds)
        first += num_texts
    num_tokens = [count for done in passes for count in done.text_tokens]
    return Counted(np.array(num_tokens, float), np.concatenate(seconds))


def _computed_prompt_tokens(prompts: Sequence[np.ndarray], batch: int) -> np.ndarray:
    """The number of computed tokens of each prompt, without the prefix shared with one of the last `batch`: int[n]."""
    computed, newest = [], PrefixIndex()
    for number, prompt in enumerate(prompts):
        computed.append(len(prompt) - newest.longest(prompt)[0])
        newest.put(number, prompt, None)
        if len(newest) > batch:
            newest.pop_first()
    return np.array(computed)


def _steps(tree_sizes: Sequence[Sequence[int]], batch: int) -> Iterator[tuple[list[int], int]]:
    """Yield the live texts of each step and the number of draft tokens of all of them."""
    waiting = iter(range(len(tree_sizes)))
    live: dict[int, int] = {}  # number of steps that each text has taken
    while True:
        while len(live) < batch and (text := next(waiting, None)) is not None:
            live[text] = 0
        if not live:
            return
        yield list(live), sum(tree_sizes[text][step] for text, step in live.items())
        live = {text: step + 1 for text, step in live.items() if step + 1 < len(tree_sizes[text])}


def _step_seconds(step_cost: StepCost, num_live: int, num_drafted: int, drafts: bool) -> float:
    """The seconds of a step, interpolated between the cost's batch sizes at the same draft tokens per text."""
    of_one, seconds = num_drafted / num_live, []
    for size in step_cost.batch_sizes:
        step_s = float(step_cost.seconds(size, np.array([size * (1 + of_one)]))[0])
        seconds.append(step_s + (float(step_cost.draft_seconds(size, np.array(of_one))) if drafts else 0.0))
    return float(np.interp(num_live, step_cost.batch_sizes, seconds))
