"""What every draft budget of a grid gained on replayed texts, as a pool's calibration keeps it.

Values and their checks only: `budget_replay` fills them, and who knows what a step costs chooses by them.
"""

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

DRAFT_TOKENS = (1, 2, 4, 8, 16, 32, 64)
MIN_ACCEPTANCES = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
SIZE_KNOTS = (0, *DRAFT_TOKENS)  # tree sizes between which a step's cost is about linear, so counts are kept at them
# How much a tree of 0, 1, ... nodes counts for each knot: float64[largest + 1, num_knots].
KNOT_SHARES = np.stack(
    [np.interp(np.arange(SIZE_KNOTS[-1] + 1), SIZE_KNOTS, row) for row in np.eye(len(SIZE_KNOTS))], 1
)


class BudgetCell(BaseModel):
    """One budget.

    Attributes
    ----------
    max_draft_tokens, min_acceptance : largest tree, and the least estimated acceptance of a path in it.
    tokens_per_step : what a text grew by in a step, bonus token included.
    size_shares : of its steps, by the size of their trees, at each of SIZE_KNOTS: a tree between two knots counts for
        each by its nearness. So the mean of anything linear between the knots is exact, the mean size too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_draft_tokens: int = Field(ge=1, le=DRAFT_TOKENS[-1])
    min_acceptance: float = Field(gt=0, le=1)
    tokens_per_step: float = Field(ge=1)
    size_shares: tuple[float, ...] = Field(min_length=len(SIZE_KNOTS), max_length=len(SIZE_KNOTS))

    @property
    def mean_drafted(self) -> float:
        """Draft tokens of a step."""
        return float(np.dot(SIZE_KNOTS, self.size_shares))


class ReplayedBudgets(BaseModel):
    """All budgets of the grid on the same texts.

    Attributes
    ----------
    num_texts, num_tokens : that were replayed.
    cells : by rising `max_draft_tokens`, then by rising `min_acceptance`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_texts: int = Field(ge=1)
    num_tokens: int = Field(ge=0)
    cells: tuple[BudgetCell, ...]


class BudgetCurve(BaseModel):
    """Replays under every budget. Where the texts were not written with relaxed drafts, a relaxed run accepts more.

    Attributes
    ----------
    sources : what drafts came from, of "previous", "prompt", "output" and "pool".
    new : texts without an earlier one of their entity. None: no text was replayed so.
    changed : texts of entities that had one, which was drafted from too. None: there were too few.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sources: tuple[str, ...]
    new: ReplayedBudgets | None
    changed: ReplayedBudgets | None = None
