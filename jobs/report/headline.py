"""The night in one sentence, and the few numbers under it."""

from collections.abc import Mapping

from jobs.formatting import count, counted, decimal, rate, seconds, times
from jobs.report.blocks import KeyFigure, Phrase
from jobs.report.ctr_table import ALL_MODELS, auc_gain, comparisons, ctr_results, model_names
from jobs.report.reading import SideView, total
from jobs.report.speed import speed_up
from jobs.report.work import total_wall_s

NOTABLE_QUARANTINE_SHARE = 0.05  # more failed rows than this belong into the headline
STATUS_PHRASES = {"failed": "This run failed: ", "running": "This run is not finished: "}


def headline(manifest: Mapping, sides: list[SideView]) -> list[Phrase]:
    """The result of the night as one sentence."""
    entities = sum(side.num_entities for side in sides)
    generated = sum(side.num_generated for side in sides)
    status = manifest.get("status")
    phrases = [Phrase(STATUS_PHRASES[str(status)])] if str(status) in STATUS_PHRASES else []
    if not entities:
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
    tonight = total(side.tonight for side in sides)
    if tonight and tonight.tokens_per_step is not None:
        phrases += [Phrase(" at "), Phrase(f"{decimal(tonight.tokens_per_step, 1)} tokens a step", True)]
    for over, name in (("plain", "plain"), ("previous_night", "the previous night")):
        factor = speed_up(sides, over)
        if factor is not None:
            phrases += [Phrase(", "), Phrase(f"{times(factor)} {name}", True)]
            break
    judged = _judgement(manifest)
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


def _judgement(manifest: Mapping) -> list[Phrase]:
    compared = comparisons(manifest)
    worse = [model for model, found in compared.items() if found.verdict == "worse" and model != ALL_MODELS]
    if worse:
        return [Phrase("AUC harmed", True), Phrase(f" with {' and '.join(worse)}")]
    overall = compared.get(ALL_MODELS)
    if overall is None:
        gains = _gains(manifest)
        return [Phrase("AUC "), Phrase(_signed(_middle(gains)), True), Phrase(" from knowledge")] if gains else []
    if overall.verdict in ("equivalent", "better"):
        return [Phrase("AUC unharmed", True)]
    if overall.verdict == "worse":
        return [Phrase("AUC harmed", True)]
    return [Phrase("AUC "), Phrase(_signed(overall.mean), True), Phrase(" against plain, undecided")]


def _ctr_card(manifest: Mapping) -> KeyFigure | None:
    gains = _gains(manifest)
    if not gains:
        return None
    notes = [f"median of {counted(len(gains), 'model')}"]
    overall = comparisons(manifest).get(ALL_MODELS)
    if overall is not None:
        notes.append(f"{_signed(overall.mean)} against plain texts")
    return KeyFigure("AUC from knowledge", _signed(_middle(gains)), notes)


def _gains(manifest: Mapping) -> list[float]:
    results = ctr_results(manifest)
    found = [auc_gain(results, model, "relaxed", "none") for model in model_names(results)]
    return [gain for gain in found if gain is not None]


def _signed(value: float) -> str:
    return decimal(value, 4, signed=True)


def _middle(values: list[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
