"""What a pilot's texts took, text by text, and what other texts of the kind might take. Knows no budget's reasons."""

from dataclasses import dataclass

import numpy as np

from laserbatch.pipeline.decoding.budget import Budget
from laserbatch.pipeline.decoding.expected_step import knot_seconds
from laserbatch.pipeline.decoding.sequence import StepEvent
from laserbatch.retrieval_pools.calibration.estimates import Bootstrap
from laserbatch.retrieval_pools.index.budget_curve import KNOT_SHARES, SIZE_KNOTS, BudgetCell
from laserbatch.retrieval_pools.step_cost import StepCost


@dataclass(frozen=True)
class PilotTexts:
    """Counts of texts that were written under one budget.

    Attributes
    ----------
    names : of the texts; in one order under every budget.
    num_tokens : float64[num_texts], that the steps wrote.
    num_at_knots : float64[num_texts, len(SIZE_KNOTS)], steps by the size of their trees; see `BudgetCell`.
    """

    names: tuple[str, ...]
    num_tokens: np.ndarray
    num_at_knots: np.ndarray

    def cell(self, budget: Budget) -> BudgetCell:
        """What a budget gained, as replays say it; without any step, nothing."""
        num_steps = float(self.num_at_knots.sum())
        shares = self.num_at_knots.sum(axis=0) / num_steps if num_steps else KNOT_SHARES[0]
        return BudgetCell(
            max_draft_tokens=budget.max_draft_tokens,
            min_acceptance=budget.min_acceptance,
            tokens_per_step=max(1.0, self.num_tokens.sum() / max(1.0, num_steps)),  # steps may write an end token
            size_shares=tuple(shares.tolist()),
        )

    def of(self, names: set[str]) -> "PilotTexts":
        """Some of the texts alone."""
        kept = np.array([name in names for name in self.names], bool)
        return PilotTexts(
            tuple(name for name in self.names if name in names), self.num_tokens[kept], self.num_at_knots[kept]
        )

    def and_later(self, texts: "PilotTexts", part: int) -> "PilotTexts":
        """These and those of a later part, whose names are its own."""
        return PilotTexts(
            (*self.names, *(f"{part}/{name}" for name in texts.names)),
            np.concatenate([self.num_tokens, texts.num_tokens]),
            np.concatenate([self.num_at_knots, texts.num_at_knots]),
        )

    def speeds(self, step_cost: StepCost, batch_size: int, bootstrap: Bootstrap) -> np.ndarray:
        """Tokens a second and text of a full batch: of these texts, then of texts drawn from them.

        float64[1 + num_resamples]; those of two budgets are of the same draws.
        """
        seconds = self.num_at_knots @ knot_seconds(step_cost, batch_size, self.num_at_knots.sum(axis=0))
        return bootstrap.totals(self.num_tokens) / bootstrap.totals(seconds)


class StepCounts:
    """Counts the steps of texts as the engine reports them (`Engine.generate`, `on_event`)."""

    def __init__(self) -> None:
        self._num_tokens: dict[str, int] = {}
        self._num_at_knots: dict[str, np.ndarray] = {}

    def __call__(self, event: StepEvent) -> None:
        name = event.request_id
        if name not in self._num_tokens:
            self._num_tokens[name], self._num_at_knots[name] = 0, np.zeros(len(SIZE_KNOTS))
        self._num_tokens[name] += len(event.token_ids)
        self._num_at_knots[name] += KNOT_SHARES[event.num_drafted]

    def texts(self) -> PilotTexts:
        """What was counted so far."""
        names = tuple(sorted(self._num_tokens))
        return PilotTexts(
            names,
            np.array([self._num_tokens[name] for name in names], float),
            np.array([self._num_at_knots[name] for name in names]).reshape(len(names), len(SIZE_KNOTS)),
        )
