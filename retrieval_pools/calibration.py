"""How often drafted tokens were really accepted, as a pool's manifest keeps it: counts, curves, and how well they hold.

Values and their checks only; `calibrate.py` replays and fits, `calibration_table.py` says how a curve is read.
"""

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from retrieval_pools.budget_curve import BudgetCurve
from retrieval_pools.calibration_table import COUNT_KNOTS, DEPTH_EDGES, LENGTH_EDGES, identity_table
from retrieval_pools.sources import NUM_SOURCES

NUM_KNOTS = len(COUNT_KNOTS)


class CalibrationCell(BaseModel):
    """Acceptance, given that the parent is accepted, as a curve over the relative count.

    Attributes
    ----------
    source : a code of `sources`.
    length_bin, depth_bin : bins of match length and depth; None: all of them, for what has no cell of its own.
    num_tried, num_accepted : replayed nodes of the cell whose parent was accepted, and those accepted too.
    values : acceptance at each of COUNT_KNOTS, nondecreasing.
    standard_errors : of the values: deviations of a beta distribution of the counts near each knot. Nodes of one draft
        are not independent, so the truth varies somewhat more.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: int = Field(ge=0, lt=NUM_SOURCES)
    length_bin: int | None = Field(ge=0, lt=len(LENGTH_EDGES))
    depth_bin: int | None = Field(ge=0, lt=len(DEPTH_EDGES))
    num_tried: int = Field(ge=0)
    num_accepted: int = Field(ge=0)
    values: tuple[float, ...] = Field(min_length=NUM_KNOTS, max_length=NUM_KNOTS)
    standard_errors: tuple[float, ...] = Field(min_length=NUM_KNOTS, max_length=NUM_KNOTS)


class ReliabilityBin(BaseModel):
    """Drafted tokens of about the same estimated acceptance: its mean, and the share that was accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean_estimate: float
    share_accepted: float
    num_nodes: int = Field(ge=1)


class Reliability(BaseModel):
    """How well estimates hold on texts that nothing was fitted to.

    Attributes
    ----------
    num_texts, num_nodes : texts replayed, tokens drafted for them.
    max_nodes, min_probability : how they were drafted.
    expected_calibration_error : mean over drafted tokens of the distance, within their bin, from the mean estimate of
        the whole path's acceptance to the share of paths accepted (Guo et al. 2017, Eq. 3; 20 bins of equal width).
    bins : those that hold a node, by rising estimate.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_texts: int = Field(ge=1)
    num_nodes: int = Field(ge=0)
    max_nodes: int
    min_probability: float
    expected_calibration_error: float = Field(ge=0)
    bins: tuple[ReliabilityBin, ...]


class Calibration(BaseModel):
    """What replays of held-back texts say of a pool's drafts.

    Replays are greedy: a token counts as accepted when it is the text's own. Under a relaxed verifier more is accepted
    than this says.

    Attributes
    ----------
    pool_escape : the escape of the pool (see `PoolSettings`) that was tried and accepted most, or the configured one.
    num_texts, num_tokens, num_nodes : replayed texts that the curves are fitted to, their tokens, and the drafted nodes
        whose parent was accepted.
    cells : from coarse to fine; a source that drafted nothing has none and is not calibrated.
    reliability : of curves that are fitted to one half of the texts, on the other half.
    uncalibrated : the same without curves.
    budgets : what each draft budget gained; None in a calibration that has none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pool_escape: float = Field(gt=0)
    num_texts: int = Field(ge=1)
    num_tokens: int = Field(ge=0)
    num_nodes: int = Field(ge=0)
    cells: tuple[CalibrationCell, ...]
    reliability: Reliability
    uncalibrated: Reliability
    budgets: BudgetCurve | None = None

    @property
    def table(self) -> np.ndarray:
        """The curves as a table: float32[TABLE_SHAPE]."""
        return table_of(self.cells)


def table_of(cells: tuple[CalibrationCell, ...]) -> np.ndarray:
    """One curve for every source, length bin and depth bin: its own, or else the finest that covers it."""
    table = identity_table()
    for cell in sorted(cells, key=lambda cell: (cell.length_bin is not None) + (cell.depth_bin is not None)):
        lengths = slice(None) if cell.length_bin is None else cell.length_bin
        depths = slice(None) if cell.depth_bin is None else cell.depth_bin
        table[cell.source, lengths, depths] = cell.values
    return table
