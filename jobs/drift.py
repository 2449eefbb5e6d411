"""Whether a night accepted what its budget was chosen for, and took the time that its steps should have taken.

The forecast is of a pilot, or of replays, which are greedy: a relaxed night accepts more. Less means that texts are
no longer those that the pool was calibrated on.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from laserbatch.jobs.console import say
from laserbatch.jobs.formatting import percent, ratio
from laserbatch.pipeline.decoding.planning.step_cost_cache import note_taken
from laserbatch.pipeline.storage.manifest import SideFigures
from laserbatch.pipeline.storage.run_folder import ShardRecord

MOST_MISSING = 0.2  # share of the forecast acceptance that may be missing before a night says so
MIN_STEPS = 200  # of fewer steps nothing can be said
MOST_CUT = 0.05  # share of a side's texts that may end at the limit before it is said
MIN_EXPECTED_S = 30.0  # of shards by a step cost; of less it is no judge


@dataclass(frozen=True)
class Drift:
    """Accepted draft tokens a step, the bonus token not counted.

    Attributes
    ----------
    forecast : by a pilot or by the replays of the pool's calibration, at the budget of the run.
    realised : by the run.
    num_steps : of the run.
    """

    forecast: float
    realised: float
    num_steps: int

    @property
    def missing(self) -> float:
        """Share of the forecast that was not realised; below 0 where more was."""
        return 1 - self.realised / self.forecast

    @property
    def is_notable(self) -> bool:
        """Whether so much is missing that the pools should be rebuilt."""
        return self.num_steps >= MIN_STEPS and self.missing > MOST_MISSING

    @property
    def sentence(self) -> str:
        """The finding and what to do about it."""
        return (
            f"drafts were accepted {self.realised:.2f} tokens a step, {self.missing:.0%} less than the "
            f"{self.forecast:.2f} that its budget was chosen for (up to {MOST_MISSING:.0%} is usual): the texts "
            "have changed since. Run `laserbatch pools rebuild`; the next night then drafts by new replays"
        )


def drift_of(side: SideFigures) -> Drift | None:
    """The drift of a side of a manifest; None where nothing was forecast, drafted or written."""
    budget, stats = side.budget or {}, side.stats
    pace = (budget.get("forecast") or {}).get("tokens_per_step")
    if not budget.get("max_draft_tokens") or not pace or pace <= 1 or not stats.num_steps:
        return None
    return Drift(pace - 1, stats.acceptance_length, stats.num_steps)


def side_warnings(side: SideFigures) -> list[str]:
    """What a side's figures warn of: texts that end at their limit, and drafts that are not accepted as forecast."""
    cut = ratio(side.stats.finish_reasons.get("length"), side.stats.num_texts) or 0.0
    warnings = []
    if cut > MOST_CUT:
        warnings.append(
            f"{percent(cut, 1)} of the texts end at the token limit, in the middle of what they say: raise "
            "decoding.max_new_tokens, or have the template ask for less"
        )
    drift = drift_of(side)
    return [*warnings, drift.sentence] if drift is not None and drift.is_notable else warnings


def note_step_costs(folder: Path, records: Iterable[ShardRecord]) -> None:
    """Keep with each step cost how long shards took, of what they should have; the next run measures what is far off.

    This run's budgets stay as they are: its texts must not depend on when it was killed.
    """
    seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for record in records:
        info = record.info
        if info is not None and info.expected is not None:
            seconds[info.expected.step_cost].append((info.stats.wall_s, info.expected.seconds))
    for name, pairs in seconds.items():
        taken_s, expected_s = (sum(column) for column in zip(*pairs, strict=True))
        if expected_s >= MIN_EXPECTED_S:
            doubt = note_taken(folder, name, taken_s / expected_s)
            if doubt is not None:
                say(f"the next run measures again what steps cost: {doubt}")
