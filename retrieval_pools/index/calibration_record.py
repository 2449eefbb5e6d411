"""What replays say of a pool's drafts, as its manifest keeps it: curves, how well they hold, what each budget gains.

Values and their checks only; `calibration/` replays and fits, `drafting/estimate.py` says how a curve is read.
"""

import numpy as np
from pydantic import Field

from laserbatch.retrieval_pools.drafting.estimate import COUNT_KNOTS, IDENTITY_CURVES, NUM_PLACES, NUM_TOKEN_KINDS
from laserbatch.retrieval_pools.settings import Frozen
from laserbatch.retrieval_pools.sources import NUM_TEXT_SOURCES

MIN_ACCEPTANCE, MAX_ACCEPTANCE = 1e-4, 0.9999  # nothing is impossible, nothing certain: paths keep an order
DRAFT_TOKENS = (1, 2, 4, 8, 16, 32, 64)
MIN_ACCEPTANCES = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
SIZE_KNOTS = (0, *DRAFT_TOKENS)  # tree sizes between which a step's cost is about linear, so counts are kept at them
# How much a tree of 0, 1, ... nodes counts for each knot: float64[largest + 1, num_knots].
KNOT_SHARES = np.stack(
    [np.interp(np.arange(SIZE_KNOTS[-1] + 1), SIZE_KNOTS, row) for row in np.eye(len(SIZE_KNOTS))], 1
)


class SourceCurve(Frozen):
    """Acceptance of a source's tokens, given that the parent is accepted, over their relative count x.

    The log odds are offset + low * log(x) - high * log(1 - x) (beta calibration: Kull, Silva Filho and Flach 2017,
    section 4) and the numbers of its token's kind and its place's, see `drafting.estimate`.
    """

    source: int = Field(ge=0, lt=NUM_TEXT_SOURCES)  # a code of `sources`
    offset: float
    low: float
    high: float
    of_tokens: tuple[float, ...] = Field(min_length=NUM_TOKEN_KINDS, max_length=NUM_TOKEN_KINDS)
    of_places: tuple[float, ...] = Field(min_length=NUM_PLACES, max_length=NUM_PLACES)

    @property
    def values(self) -> np.ndarray:
        """Acceptance at each of COUNT_KNOTS by kind, nondecreasing: float32[NUM_KINDS, NUM_KNOTS]."""
        count_effects = beta_features(COUNT_KNOTS) @ (self.offset, self.low, self.high)
        kind_effects = np.add.outer(self.of_tokens, self.of_places).ravel()
        values = 1 / (1 + np.exp(-np.add.outer(kind_effects, count_effects)))
        values = np.clip(values, MIN_ACCEPTANCE, MAX_ACCEPTANCE).astype(np.float32)
        return np.maximum.accumulate(values, axis=-1)


def beta_features(relative_counts: np.ndarray) -> np.ndarray:
    """1, log(x) and -log(1 - x) of float[n] in 0 to 1: float64[n, 3]."""
    inside = np.clip(relative_counts.astype(np.float64), MIN_ACCEPTANCE, MAX_ACCEPTANCE)
    return np.stack([np.ones_like(inside), np.log(inside), -np.log1p(-inside)], axis=-1)


class Reliability(Frozen):
    """How well estimates hold on texts that nothing was fitted to.

    The `expected_calibration_error` is the mean over drafted tokens of the distance, within their bin, from the mean
    estimate of the whole path's acceptance to the share of paths accepted (Guo et al. 2017, Eq. 3; 20 bins of equal
    width).
    """

    num_texts: int = Field(ge=1)
    num_nodes: int = Field(ge=0)  # tokens drafted for them
    max_nodes: int
    min_acceptance: float
    expected_calibration_error: float = Field(ge=0)


class BudgetCell(Frozen):
    """One budget: the largest tree, and the least estimated acceptance of a path in it.

    `size_shares` are those of its steps by the size of their trees, at each of SIZE_KNOTS: a tree between two knots
    counts for each by its nearness. So the mean of anything linear between the knots is exact, the mean size too.
    """

    max_draft_tokens: int = Field(ge=1, le=DRAFT_TOKENS[-1])
    min_acceptance: float = Field(gt=0, le=1)
    tokens_per_step: float = Field(ge=1)  # what a text grew by in a step, bonus token included
    size_shares: tuple[float, ...] = Field(min_length=len(SIZE_KNOTS), max_length=len(SIZE_KNOTS))

    @property
    def mean_drafted(self) -> float:
        return float(np.dot(SIZE_KNOTS, self.size_shares))


class ReplayedBudgets(Frozen):
    """All budgets of the grid on the same texts."""

    num_texts: int = Field(ge=1)
    num_tokens: int = Field(ge=0)
    # Of these tokens, those that the form of the answer appended: they take no step, drafted or not.
    num_form: int = Field(default=0, ge=0)
    cells: tuple[BudgetCell, ...]  # by rising `max_draft_tokens`, then by rising `min_acceptance`

    @property
    def plain_tokens_per_step(self) -> float:
        """What a text grows by in a step without drafts: 1, and what the form appends."""
        num_written = self.num_tokens + self.num_texts  # every text's end is written too
        return num_written / (num_written - self.num_form)


class BudgetCurve(Frozen):
    """Replays under every budget. Where the texts were not written with relaxed drafts, a relaxed run accepts more."""

    sources: tuple[str, ...]  # what drafts came from, of "previous", "prompt", "output" and "pool"
    new: ReplayedBudgets | None  # texts without an earlier one of their entity; None: no text was replayed so
    changed: ReplayedBudgets | None = None  # texts of entities that had one; None: there were too few


class Calibration(Frozen):
    """What replays of held-back texts say of a pool's drafts.

    Replays are greedy: a token counts as accepted when it is the text's own. Under a relaxed verifier more is accepted
    than this says.
    """

    pool_escape: float = Field(gt=0)  # see `DraftSettings`: the configured one, or that which accepted most
    num_texts: int = Field(ge=1)  # that were replayed, and the curves are fitted to
    num_tokens: int = Field(ge=0)
    sources: tuple[SourceCurve, ...]  # a source that drafted nothing has no curve and is not calibrated
    reliability: Reliability  # of curves that are fitted to one half of the texts, on the other half
    budgets: BudgetCurve | None = None  # what each draft budget gained
    replayed_run: str = ""  # whose texts were replayed, where that is known
    num_texts_changed: int = Field(default=0, ge=0)  # of the side, written since by runs that kept this calibration

    @property
    def curves(self) -> np.ndarray:
        """Acceptance by source, kind and relative count: float32 `estimate.CURVES_SHAPE`."""
        return curves_of(self.sources)


def curves_of(sources: tuple[SourceCurve, ...]) -> np.ndarray:
    """The values of each source's curves, and the identity where there are none: float32 `estimate.CURVES_SHAPE`."""
    curves = IDENTITY_CURVES.copy()
    for source in sources:
        curves[source.source] = source.values
    return curves
