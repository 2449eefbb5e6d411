"""How much is drafted: the largest tree, and the threshold that a drafted token's path must reach.

What a sequence is offered depends on this pair and on the sequence alone, so the pair is fixed for a run. Knows no
model, no pool and no clock; `budget_choice` finds the pair that is fastest.
"""

import math
from dataclasses import dataclass, field

from pipeline.decoding.settings import DecodingSettings


@dataclass(frozen=True)
class BudgetForecast:
    """What a budget was chosen for.

    Attributes
    ----------
    reason : how it was chosen, in a sentence.
    step_cost : the name of the step cost, None where it did not matter.
    batch_size : that of the forecast.
    tokens_per_step, mean_drafted : of replays, bonus token included; None without a calibration that has them.
    speed_up : tokens per second over plain decoding, prompts not counted; None likewise.
    """

    reason: str
    step_cost: str | None = None
    batch_size: int | None = None
    tokens_per_step: float | None = None
    mean_drafted: float | None = None
    speed_up: float | None = None


@dataclass(frozen=True)
class Budget:
    """A draft budget.

    Attributes
    ----------
    max_draft_tokens : largest tree, 0 to 64; 0 decodes plainly.
    min_acceptance : a token whose path is estimated less likely to be accepted is not drafted.
    forecast : why, where it was chosen by measurement; budgets compare without it.
    """

    max_draft_tokens: int = 16
    min_acceptance: float = 0.07
    forecast: BudgetForecast | None = field(default=None, compare=False)

    @classmethod
    def of(cls, settings: DecodingSettings) -> "Budget":
        """The settings' own numbers; where they leave the choice, those of the class: nothing is measured here."""
        given = {"max_draft_tokens": settings.max_draft_tokens, "min_acceptance": settings.min_acceptance}
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def min_log_acceptance(self) -> float:
        """Natural logarithm of `min_acceptance`."""
        return math.log(self.min_acceptance) if self.min_acceptance > 0 else -math.inf


PLAIN = Budget(0, 1.0)
