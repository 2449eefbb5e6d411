"""How often drafted tokens were really accepted, as a pool's manifest keeps it: counts, curves, and how well they hold.

Values and their checks only; `calibrate.py` replays and fits, `calibration_table.py` says how a curve is read.
"""

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from laserbatch.retrieval_pools.drafting.calibration_table import (
    DEPTH_EDGES,
    LENGTH_EDGES,
    NUM_KINDS,
    NUM_KNOTS,
    SEEN_EDGES,
    identity_kinds,
    identity_paths,
    identity_table,
)
from laserbatch.retrieval_pools.index.budget_curve import BudgetCurve
from laserbatch.retrieval_pools.sources import NUM_SOURCES


class CalibrationCell(BaseModel):
    """Acceptance, given that the parent is accepted, as a curve over the relative count.

    Attributes
    ----------
    source : a code of `sources`.
    seen_bin, length_bin, depth_bin : bins of how often the context was seen, match length and depth; None: all of them,
        for what has no cell of its own.
    num_tried, num_accepted : replayed nodes of the cell whose parent was accepted, and those accepted too.
    values : acceptance at each of COUNT_KNOTS, nondecreasing.
    standard_errors : of the values: deviations of a beta distribution of the counts near each knot. Nodes of one draft
        are not independent, so the truth varies somewhat more.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: int = Field(ge=0, lt=NUM_SOURCES)
    seen_bin: int | None = Field(ge=0, lt=len(SEEN_EDGES))
    length_bin: int | None = Field(ge=0, lt=len(LENGTH_EDGES))
    depth_bin: int | None = Field(ge=0, lt=len(DEPTH_EDGES))
    num_tried: int = Field(ge=0)
    num_accepted: int = Field(ge=0)
    values: tuple[float, ...] = Field(min_length=NUM_KNOTS, max_length=NUM_KNOTS)
    standard_errors: tuple[float, ...] = Field(min_length=NUM_KNOTS, max_length=NUM_KNOTS)


class KindCurve(BaseModel):
    """Acceptance of one kind of token as a curve over what the cells say, which do not know it.

    Attributes
    ----------
    source : a code of `sources`.
    kind : see `calibration_table.token_kind`.
    num_tried, num_accepted : replayed nodes of source and kind whose parent was accepted, and those accepted too.
    values : acceptance at each of COUNT_KNOTS, nondecreasing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: int = Field(ge=0, lt=NUM_SOURCES)
    kind: int = Field(ge=0, lt=NUM_KINDS)
    num_tried: int = Field(ge=0)
    num_accepted: int = Field(ge=0)
    values: tuple[float, ...] = Field(min_length=NUM_KNOTS, max_length=NUM_KNOTS)


class PathCurve(BaseModel):
    """Acceptance of whole paths as a curve over the product of the conditional acceptances along them.

    Attributes
    ----------
    with_previous : whether of sequences that have an earlier text; their paths are long, and small errors multiply.
    num_nodes, num_accepted : drafted nodes, on texts that the products were not fitted to, and those accepted.
    values : acceptance at each of COUNT_KNOTS, nondecreasing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    with_previous: bool
    num_nodes: int = Field(ge=0)
    num_accepted: int = Field(ge=0)
    values: tuple[float, ...] = Field(min_length=NUM_KNOTS, max_length=NUM_KNOTS)


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
    error_by_chance : what that error would be on average were estimates right, with so few texts, each of whose tokens
        stand and fall together; None where it is not known.
    bins : those that hold a node, by rising estimate.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_texts: int = Field(ge=1)
    num_nodes: int = Field(ge=0)
    max_nodes: int
    min_probability: float
    expected_calibration_error: float = Field(ge=0)
    error_by_chance: float | None = Field(None, ge=0)
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
    kinds : of kinds of tokens; what the cells say is believed where there is none.
    paths : of sequences without an earlier text, and with one; products are believed where there is none.
    reliability : of curves that are fitted to one half of the texts, on the other half; of few texts both ways.
    uncalibrated : the same without curves.
    budgets : what each draft budget gained; None in a calibration that has none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pool_escape: float = Field(gt=0)
    num_texts: int = Field(ge=1)
    num_tokens: int = Field(ge=0)
    num_nodes: int = Field(ge=0)
    cells: tuple[CalibrationCell, ...]
    kinds: tuple[KindCurve, ...] = ()
    paths: tuple[PathCurve, ...]
    reliability: Reliability
    uncalibrated: Reliability
    budgets: BudgetCurve | None = None

    @property
    def table(self) -> np.ndarray:
        """The curves as a table: float32[TABLE_SHAPE]."""
        return table_of(self.cells)

    @property
    def kind_curves(self) -> np.ndarray:
        """The curves of kinds of tokens: float32[KINDS_SHAPE]."""
        return kinds_of(self.kinds)

    @property
    def path_curves(self) -> np.ndarray:
        """The curves of paths: float32[PATHS_SHAPE]."""
        return paths_of(self.paths)


def table_of(cells: tuple[CalibrationCell, ...]) -> np.ndarray:
    """One curve for every source, and bins of the other axes: its own, or else the finest that covers it."""
    table = identity_table()
    for cell in sorted(cells, key=lambda cell: sum(number is not None for number in _bins_of(cell))):
        place = (slice(None) if number is None else number for number in _bins_of(cell))
        table[cell.source, *place] = cell.values
    return table


def kinds_of(kinds: tuple[KindCurve, ...]) -> np.ndarray:
    """The row of each curve, and the identity where there is none."""
    curves = identity_kinds()
    for one in kinds:
        curves[one.source, one.kind] = one.values
    return curves


def paths_of(paths: tuple[PathCurve, ...]) -> np.ndarray:
    """The row of each curve, and the identity where there is none."""
    curves = identity_paths()
    for path in paths:
        curves[int(path.with_previous)] = path.values
    return curves


def _bins_of(cell: CalibrationCell) -> tuple[int | None, int | None, int | None]:
    return cell.seen_bin, cell.length_bin, cell.depth_bin
