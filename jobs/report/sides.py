"""A night's sides as the sections read them: what was counted tonight, and of what it is compared with."""

from collections.abc import Iterable
from dataclasses import dataclass

from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.storage.manifest import RunManifest, SideFigures
from laserbatch.pipeline.storage.stats import DecodingStats

SIDE_LABELS = {"user": "Users", "item": "Items"}


@dataclass(frozen=True)
class Side:
    """One side of a manifest, and the passes that counted a text.

    `plain` is of the entities that were written about tonight, where it was counted apart: those that are carried over
    differ in the length of their prompts.
    """

    name: str
    figures: SideFigures
    tonight: DecodingStats | None
    previous_night: DecodingStats | None
    plain: DecodingStats | None

    @property
    def label(self) -> str:
        """`Users`, `Items`."""
        return SIDE_LABELS[self.name]


def sides_of(manifest: RunManifest) -> list[Side]:
    """The sides of a run, users first. A run that failed early has none."""
    before = manifest.previous_night.sides if manifest.previous_night is not None else {}
    sides = []
    for name in SIDES:
        if name in manifest.sides:
            previous_night = before[name].stats if name in before else None
            plain = manifest.plain.get(name)
            of_same = plain and (_counted(plain.stats_of_tonight) or _counted(plain.stats))
            figures = manifest.sides[name]
            sides.append(Side(name, figures, _counted(figures.stats), _counted(previous_night), of_same))
    return sides


def total(parts: Iterable[DecodingStats | None]) -> DecodingStats | None:
    """The sum of several passes; None where there is none."""
    known = [part for part in parts if part is not None]
    return DecodingStats.total(known) if known else None


def speed_up(sides: list[Side], over: str) -> float | None:
    """Tonight's tokens per second over those of "plain" or "previous_night", on the sides that both did."""
    both = [side for side in sides if side.tonight and getattr(side, over)]
    mine, other = total(side.tonight for side in both), total(getattr(side, over) for side in both)
    return mine.tokens_per_s / other.tokens_per_s if mine and mine.tokens_per_s and other.tokens_per_s else None


def _counted(stats: DecodingStats | None) -> DecodingStats | None:
    return stats if stats is not None and stats.num_texts else None
