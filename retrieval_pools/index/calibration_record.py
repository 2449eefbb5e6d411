"""The calibration in a pool's manifest, from replays: acceptance curves, and the gain of each budget.

This module has only the values and their checks; `calibration/` replays and fits, `drafting/estimate.py` reads curves.
"""

import numpy as np
from pydantic import Field

from laserbatch.retrieval_pools.drafting.estimate import COUNT_KNOTS, IDENTITY_CURVES, NUM_PLACES, NUM_TOKEN_KINDS
from laserbatch.retrieval_pools.settings import Frozen
from laserbatch.retrieval_pools.sources import NUM_TEXT_SOURCES

MIN_ACCEPTANCE, MAX_ACCEPTANCE = 1e-4, 0.9999  # no token is impossible or certain, so paths always have an order
DRAFT_TOKENS = (1, 2, 4, 8, 16, 32, 64)
MIN_ACCEPTANCES = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
SIZE_KNOTS = (0, *DRAFT_TOKENS)  # tree sizes at which counts are kept; a step's cost is about linear between them
# The share with which a tree of 0, 1, ... nodes counts for each knot: float64[largest + 1, num_knots].
KNOT_SHARES = np.stack(
    [np.interp(np.arange(SIZE_KNOTS[-1] + 1), SIZE_KNOTS, row) for row in np.eye(len(SIZE_KNOTS))], 1
)


class SourceCurve(Frozen):
    """Acceptance of a source's tokens as a function of their relative count x, given that the parent is accepted.

    The log odds are offset + low * log(x) - high * log(1 - x) (beta calibration: Kull, Silva Filho and Flach 2017,
    section 4), plus a term for the kind of the token and one for its place; see `drafting.estimate`.
    """

    source: int = Field(ge=0, lt=NUM_TEXT_SOURCES)  # a code of `sources`
    offset: float
    low: float
    high: float
    of_tokens: tuple[float, ...] = Field(min_length=NUM_TOKEN_KINDS, max_length=NUM_TOKEN_KINDS)
    of_places: tuple[float, ...] = Field(min_length=NUM_PLACES, max_length=NUM_PLACES)

    @property
    def values(self) -> np.ndarray:
        """Acceptance of each kind at each of COUNT_KNOTS, nondecreasing: float32[NUM_KINDS, NUM_KNOTS]."""
        count_effects = beta_features(COUNT_KNOTS) @ (self.offset, self.low, self.high)
        kind_effects = np.add.outer(self.of_tokens, self.of_places).ravel()
        values = 1 / (1 + np.exp(-np.add.outer(kind_effects, count_effects)))
        values = np.clip(values, MIN_ACCEPTANCE, MAX_ACCEPTANCE).astype(np.float32)
        return np.maximum.accumulate(values, axis=-1)


def beta_features(relative_counts: np.ndarray) -> np.ndarray:
    """1, log(x) and -log(1 - x) of float[n] in 0 to 1: float64[n, 3]."""
    inside = np.clip(relative_counts.astype(np.float64), MIN_ACCEPTANCE, MAX_ACCEPTANCE)
    return np.stack([np.ones_like(inside), np.log(inside), -np.log1p(-inside)], axis=-1)


class BudgetCell(Frozen):
    """One budget: the size of the largest tree, and the least estimated acceptance of a path in it.

    `size_shares` are the shares of steps by tree size, at each of SIZE_KNOTS; a tree between two knots is split between
    them by linear interpolation. So the mean of any function that is linear between the knots is exact.
    """

    max_draft_tokens: int = Field(ge=1, le=DRAFT_TOKENS[-1])
    min_acceptance: float = Field(gt=0, le=1)
    tokens_per_step: float = Field(ge=1)  # mean number of tokens of a step, bonus token included
    size_shares: tuple[float, ...] = Field(min_length=len(SIZE_KNOTS), max_length=len(SIZE_KNOTS))

    @property
    def mean_drafted(self) -> float:
        return float(np.dot(SIZE_KNOTS, self.size_shares))


class ReplayedBudgets(Frozen):
    """The results of all budgets of the grid on the same texts."""

    num_texts: int = Field(ge=1)
    num_tokens: int = Field(ge=0)
    # Number of these tokens that the form of the answer appended: they take no step, with or without drafts.
    num_form: int = Field(default=0, ge=0)
    cells: tuple[BudgetCell, ...]  # sorted by `max_draft_tokens`, then by `min_acceptance`

    @property
    def plain_tokens_per_step(self) -> float:
        """The tokens of a step without drafts: 1, and those that the form appends."""
        num_written = self.num_tokens + self.num_texts  # every text's end is written too
        return num_written / (num_written - self.num_form)


class BudgetCurve(Frozen):
    """Replays under every budget. If relaxed drafts did not write the replayed texts, a relaxed run accepts more."""

    sources: tuple[str, ...]  # the sources drafted from, among "previous", "prompt", "output" and "pool"
    new: ReplayedBudgets | None  # replays without an earlier text of the entity; None: no text was replayed so
    changed: ReplayedBudgets | None = None  # replays with an earlier text of the entity; None: there were too few


class Calibration(Frozen):
    """The acceptance of a pool's drafts, measured by replaying held-back texts.

    Replays are greedy: a token counts as accepted if it equals the text's own token. A relaxed verifier accepts more
    than this.
    """

    pool_escape: float = Field(gt=0)  # see `DraftSettings`: the configured escape, or the one that accepted most
    num_texts: int = Field(ge=1)  # texts that were replayed and that the curves are fitted to
    num_tokens: int = Field(ge=0)
    sources: tuple[SourceCurve, ...]  # a source that drafted nothing has no curve and is not calibrated
    budgets: BudgetCurve | None = None  # the gain of each draft budget
    replayed_run: str = ""  # the run whose texts were replayed, if known
    num_texts_changed: int = Field(default=0, ge=0)  # texts that later runs wrote without a new calibration

    @property
    def curves(self) -> np.ndarray:
        """Acceptance by source, kind and relative count, of no curve the count itself: float32 `CURVES_SHAPE`."""
        curves = IDENTITY_CURVES.copy()
        for source in self.sources:
            curves[source.source] = source.values
        return curves
