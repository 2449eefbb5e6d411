"""The sides of a night as the report's sections read them: counts, the passes to compare with, and warnings."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from laserbatch.jobs.formatting import percent, ratio
from laserbatch.jobs.gates import MAX_SHARE_MISSING, accepted_share
from laserbatch.pipeline.decoding.plugins import TEXT_SOURCES, drafter_plugin
from laserbatch.pipeline.plugins import UnknownPlugin
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.figures import SideFigures
from laserbatch.pipeline.storage.manifest import RunManifest
from laserbatch.pipeline.storage.stats import DecodingStats

SIDE_LABELS: dict[Side, str] = {"user": "Users", "item": "Items"}
MIN_TEXTS_COMPARED = 8  # a speed-up needs this many texts of both passes
MAX_SHARE_CUT = 0.05  # the report warns if a larger share of texts ended at the token limit


@dataclass(frozen=True)
class SideReport:
    """One side of a manifest, and the statistics of each pass; None for a pass that wrote no text.

    `plain` covers only entities that were written tonight, if they were counted separately: prompts of entities that
    are carried over differ in length.
    """

    name: Side
    figures: SideFigures
    tonight: DecodingStats | None
    previous_night: DecodingStats | None
    plain: DecodingStats | None

    @property
    def label(self) -> str:
        return SIDE_LABELS[self.name]


def sides_of(manifest: RunManifest) -> list[SideReport]:
    """The sides of a run, users first. A run that failed early has none."""
    before = manifest.judgement.previous_night.sides if manifest.judgement.previous_night is not None else {}
    sides = []
    for name in SIDES:
        if (figures := manifest.generation.sides.get(name)) is not None:
            plain = manifest.generation.plain.get(name)
            of_same = plain and (_counted(plain.stats_of_tonight) or _counted(plain.stats))
            sides.append(SideReport(name, figures, _counted(figures.stats), _counted(before.get(name)), of_same))
    return sides


def total(parts: Iterable[DecodingStats | None]) -> DecodingStats | None:
    """The sum of several passes; None if all are None."""
    present = [part for part in parts if part is not None]
    return DecodingStats.total(present) if present else None


def speed_up(sides: list[SideReport], over: str) -> float | None:
    """Tonight's tokens per second divided by those of "plain" or "previous_night", on the sides that both wrote.

    None if either wrote fewer than MIN_TEXTS_COMPARED texts, too few to measure speed.
    """
    both = [side for side in sides if side.tonight and getattr(side, over)]
    mine, other = total(side.tonight for side in both), total(getattr(side, over) for side in both)
    if not mine or not other or min(mine.num_texts, other.num_texts) < MIN_TEXTS_COMPARED:
        return None
    return ratio(mine.tokens_per_s, other.tokens_per_s)


def side_warnings(side: SideFigures, settings: Mapping[str, Any]) -> list[str]:
    """Warnings of texts that were cut or repaired, and of drafts that were not accepted as forecast, or not made."""
    cut = ratio(side.stats.finish_reasons.get("length"), side.stats.num_texts) or 0.0
    warnings, loops = [], side.quarantine_reasons.get("loops")
    if cut > MAX_SHARE_CUT:
        warnings.append(
            f"{percent(cut, 1)} of the texts were cut at the token limit: raise decoding.max_new_tokens, or let the "
            "template ask for less"
            + (f"; {loops} texts repeat in a loop, and a higher limit would not help them" if loops else "")
        )
    if side.stats.role_marks:
        marks = ", ".join(f"{mark} ({number})" for mark, number in sorted(side.stats.role_marks.items()))
        warnings.append(
            f"{sum(side.stats.role_marks.values())} of {side.stats.num_texts} texts were ended at role marks or "
            f"end tokens that the model's configuration does not name: {marks}. "
            + (f"{side.stats.num_invented} tokens written after them were cut. " if side.stats.num_invented else "")
            + "Add the token that ends the model's turns to eos_token_id in its generation_config.json"
        )
    if side.stats.num_thinking:
        share = ratio(side.stats.num_thought_tokens, side.stats.num_thought_tokens + side.stats.num_tokens)
        warnings.append(
            f"{side.stats.num_thinking} of {side.stats.num_texts} texts had thoughts, which were cut: "
            f"{side.stats.num_thought_tokens} tokens, {percent(share)} of what was written. decoding.thinking: off "
            "turns them off, if the model's chat template has a switch for them"
        )
    if side.stats.repairs:
        kinds = ", ".join(f"{name} {number}" for name, number in sorted(side.stats.repairs.items()))
        warnings.append(f"some of the {side.stats.num_texts} texts were repaired before parsing: {kinds}")
    share = accepted_share(side)
    if share is not None and 1 - share > MAX_SHARE_MISSING:
        warnings.append(
            f"{side.stats.acceptance_length:.2f} draft tokens were accepted per step, {1 - share:.0%} less than the "
            f"{side.forecast_acceptance:.2f} that the budget was chosen for (up to {MAX_SHARE_MISSING:.0%} less is "
            "usual). The texts may have changed since. The next night's budget is chosen from tonight's texts if pools "
            "are built from them (`laserbatch pools rebuild`)"
        )
    if side.budget is not None and side.budget.max_draft_tokens > 0 and side.stats.num_steps > 0:
        warnings += _plugin_warnings(settings.get("decoding", {}), side.stats.drafted_by_source)
    return warnings


def _plugin_warnings(decoding: Mapping[str, Any], drafted_by_source: Mapping[str, int]) -> list[str]:
    """What drafters of other packages say of their drafts; nothing if a package is no longer installed."""
    warnings = []
    for name in decoding.get("drafters", ()):
        if name not in TEXT_SOURCES:
            with suppress(UnknownPlugin):
                options = decoding.get("drafter_options", {}).get(name, {})
                warnings.append(drafter_plugin(name).warning(options, drafted_by_source))
    return [warning for warning in warnings if warning]


def _counted(stats: DecodingStats | None) -> DecodingStats | None:
    return stats if stats is not None and stats.num_texts else None
