"""The order in which `engine.py` lets systems write, and how passes are compared. Knows no system's insides.

Whatever slows a machine lasts for seconds, so two systems are compared by what they took shortly after each other:
alone (batch 1) they take turns prompt by prompt, else pass by pass, in an order that is drawn each time anew. Ratios
are of one repetition and of the prompts that both wrote in it.
"""

import logging
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from common import Spread
from engine_systems import Contestant
from night_systems import Pass

logger = logging.getLogger("engine")

WARM_UP_TOKENS = 8
SEED = 0

Repetitions = list[tuple[Pass, ...]]  # of each repetition the passes over its prompts' parts


@dataclass(frozen=True)
class Amount:
    """How much is written at one batch size.

    Attributes
    ----------
    num_slow_prompts, num_slow_repetitions : of systems without a pool, which take many times as long when they write
        alone, and of those with a part of one, which are compared with these only: the first prompts, in the first
        repetitions.
    """

    num_prompts: int
    num_repetitions: int
    num_slow_prompts: int
    num_slow_repetitions: int

    def includes(self, one: Contestant, repetition: int, prompt: int) -> bool:
        """Whether a system writes a prompt in a repetition."""
        return not one.is_slow or (repetition < self.num_slow_repetitions and prompt < self.num_slow_prompts)


def measure(
    contestants: Sequence[Contestant],
    prompts: Sequence[np.ndarray],
    batch: int,
    max_new_tokens: int,
    amount: Amount,
    num_warm_up: int,
) -> dict[tuple, Repetitions]:
    """Passes of every contestant by its key; `num_warm_up` prompts come before.

    A peer that the device has no memory for has no passes.
    """
    prompts = prompts[: amount.num_prompts]
    parts = [(number, [prompt]) for number, prompt in enumerate(prompts)] if batch == 1 else [(0, prompts)]
    passes: dict[tuple, Repetitions] = {one.key: [] for one in contestants}
    for one in contestants:
        one.runner.run(prompts[:num_warm_up], batch, WARM_UP_TOKENS)  # compiles and touches everything once
    order = random.Random(SEED)
    for repetition in range(amount.num_repetitions):
        written: dict[tuple, list[Pass]] = {key: [] for key in passes}
        for number, part in parts:
            taking_part = [one for one in contestants if amount.includes(one, repetition, number)]
            for one in order.sample(taking_part, len(taking_part)):
                if one.key not in passes:
                    continue
                try:
                    written[one.key].append(one.runner.run(part, batch, max_new_tokens))
                except torch.OutOfMemoryError:
                    if not one.is_peer:
                        raise
                    logger.warning("%s: no memory at batch %d", one.system, batch)
                    del passes[one.key]
        for key in passes:
            if written[key]:
                passes[key].append(tuple(written[key]))
    return passes


def ratios(own: Repetitions, other: Repetitions) -> list[float]:
    """Tokens per second over another's, within each repetition that both have and on the prompts that both wrote."""
    return [
        Pass.joined(mine[: len(others)]).tokens_per_s / Pass.joined(others[: len(mine)]).tokens_per_s
        for mine, others in zip(own, other, strict=False)
    ]


def over_best(own: Repetitions, others: Mapping[int, Repetitions]) -> tuple[int, Spread]:
    """The fastest of others, and tokens per second over its.

    Of several that are alike the luckiest looks best. So each repetition is compared with the one that was best in the
    other repetitions.
    """
    over = {name: ratios(own, other) for name, other in others.items()}

    def best_without(repetition: int | None) -> int:
        return min(over, key=lambda name: statistics.median(_left(over[name], repetition)))

    num_repetitions = len(next(iter(over.values())))
    fair = [over[best_without(repetition)][repetition] for repetition in range(num_repetitions)]
    return best_without(None), Spread.of(fair)


def _left(values: list[float], place: int | None) -> list[float]:
    return [value for number, value in enumerate(values) if number != place] or values
