"""The night in one sentence, and the few numbers under it."""

import statistics
from collections.abc import Mapping

from laserbatch.jobs.formatting import count, counted, decimal, rate, seconds, times
from laserbatch.jobs.report.blocks import KeyFigure, Phrase
from laserbatch.jobs.report.ctr_table import ALL_MODELS, Gain, comparisons, ctr_results, own_gains
from laserbatch.jobs.report.reading import SideView, total
from laserbatch.jobs.report.speed import speed_up
from laserbatch.jobs.report.work import total_wall_s

NOTABLE_QUARANTINE_SHARE = 0.05  # more failed rows than this belong into the headline
STATUS_PHRASES = {"failed": "This run failed and published nothing: ", "running": "This run is not finished: "}


def headline(manifest: Mapping, sides: list[SideView]) -> list[Phrase]:
    """The result of the night as one sentence."""
    entities = sum(side.num_entities for side in sides)
    generated = sum(side.num_generated for side in sides)
    status = manifest.get("status")
    phrases = [Phrase(STATUS_PHRASES[str(status)])] if str(status) in STATUS_PHRASES else []
    if not entities:
        if status == "failed":
            return [Phrase("This run failed and published nothing")]
        return [
            *phrases,
            Phrase("there was no entity to write about" if phrases else "There was no entity to write about"),
        ]
    if not generated and sum(side.num_carried_over for side in sides) == entities:
        return [
            *phrases,
            Phrase(f"all {count(entities)}", True),
            Phrase(" entities were unchanged and kept their text"),
        ]
    verb = "rewritten" if manifest.get("previous_night") else "written"
    phrases += [Phrase(f"{count(generated)} of {count(entities)}", True), Phrase(f" entities {verb}")]
    quarantined = sum(side.num_quarantined for side in sides)
    if quarantined > NOTABLE_QUARANTINE_SHARE * entities:
        phrases.append(Phrase(f" ({count(quarantined)} quarantined)"))
    if status == "failed":
        return phrases
    tonight = total(side.tonight for side in sides)
    if tonight and tonight.tokens_per_step is not None:
        phrases += [Phrase(" at "), Phrase(f"{decimal(tonight.tokens_per_step, 1)} tokens a step", True)]
    for over, name in (("plain", "plain"), ("previous_night", "the previous night")):
        factor = speed_up(sides, over)
        if factor is not None:
            phrases += [Phrase(", "), Phrase(f"{times(factor)} {name}", True)]
            break
    judged = _judgement(manifest, sides)
    return [*phrases, Phrase("; "), *judged] if judged else phrases


def key_figures(manifest: Mapping, sides: list[SideView]) -> list[KeyFigure]:
    """Four numbers with what they compare to."""
    tonight = total(side.tonight for side in sides)
    before = total(side.previous_night for side in sides)
    plain = total(side.plain for side in sides)
    entities, carried, failed = (
        sum(getattr(side, name) for side in sides) for name in ("num_entities", "num_carried_over", "num_quarantined")
    )
    cards = [
        KeyFigure(
            "entities written",
            count(sum(side.num_generated for side in sides)),
            [f"of {count(entities)}; {count(carried)} carried over", f"{count(failed)} quarantined"],
        )
    ]
    speed = [f"{times(factor)} plain" for factor in [speed_up(sides, "plain")] if factor is not None]
    speed += [
        f"{times(factor)} the previous night" for factor in [speed_up(sides, "previous_night")] if factor is not None
    ]
    cards.append(
        KeyFigure(
            "tokens per second",
            rate(tonight and tonight.tokens_per_s),
            speed or ["nothing to compare with"],
        )
    )
    steps = [f"previous night {decimal(before.tokens_per_step)}"] if before else []
    steps += [f"plain {decimal(plain.tokens_per_step)}"] if plain else []
    cards.append(
        KeyFigure(
            "tokens per step, bonus counted",
            decimal(tonight and tonight.tokens_per_step),
            steps or ["nothing to compare with"],
        )
    )
    cards.append(_ctr_card(manifest) or KeyFigure("wall time", seconds(total_wall_s(manifest)), ["all stages"]))
    return cards


def _judgement(manifest: Mapping, sides: list[SideView]) -> list[Phrase]:
    """What the CTR comparison has shown, and no more; nothing where no text could differ from plain decoding's."""
    verdicts = {model: found.verdict for model, found in comparisons(manifest).items() if model != ALL_MODELS}
    if not verdicts:
        gains = own_gains(ctr_results(manifest))
        is_shown = gains and not any(gain.doubt for gain in gains)
        return [Phrase("AUC "), Phrase(_median(gains), True), Phrase(" from knowledge")] if is_shown else []
    if not any(side.num_carried_over or (side.tonight and side.tonight.num_drafted) for side in sides):
        return []
    worse = [model for model, verdict in verdicts.items() if verdict == "worse"]
    if worse:
        return [Phrase("AUC harmed", True), Phrase(f" with {' and '.join(worse)}")]
    unharmed = [model for model, verdict in verdicts.items() if verdict in ("equivalent", "better")]
    if len(unharmed) == len(verdicts):
        return [Phrase("AUC unharmed", True)]
    if unharmed:
        open_ones = " and ".join(model for model in verdicts if model not in unharmed)
        return [Phrase(f"AUC unharmed with {' and '.join(unharmed)}, undecided with {open_ones}")]
    return [Phrase("whether AUC is harmed is undecided")]


def _ctr_card(manifest: Mapping) -> KeyFigure | None:
    gains = own_gains(ctr_results(manifest))
    if not gains:
        return None
    doubt = next((gain.doubt for gain in gains if gain.doubt), "")
    notes = [f"median of {counted(len(gains), 'model')}"]
    if doubt:
        notes = [f"{_median(gains)}, {notes[0]}, but {doubt}"]
    overall = comparisons(manifest).get(ALL_MODELS)
    if overall is not None:
        notes.append(f"{decimal(overall.mean, 4, signed=True)} against plain texts")
    return KeyFigure("AUC from knowledge", "not shown" if doubt else _median(gains), notes)


def _median(gains: list[Gain]) -> str:
    return decimal(statistics.median(gain.auc for gain in gains), 4, signed=True)
