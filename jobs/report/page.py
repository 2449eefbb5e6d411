"""From a manifest to one self-contained HTML file. Reads nothing else: no run folder, no network, no clock."""

import datetime
import statistics
from pathlib import Path

import jinja2
from markupsafe import Markup

from laserbatch.jobs.formatting import SOURCE_LABELS, count, counted, decimal, millions, rate, seconds, times
from laserbatch.jobs.report.blocks import KeyFigure, Page, Phrase
from laserbatch.jobs.report.ctr_table import ALL_MODELS, Gain, ctr_rows, ctr_section, own_gains
from laserbatch.jobs.report.pools import pools_section
from laserbatch.jobs.report.samples import provenance_section, samples_section
from laserbatch.jobs.report.sides import Side, side_warnings, sides_of, speed_up, total
from laserbatch.jobs.report.speed import acceptance_section, speed_section
from laserbatch.jobs.report.work import total_wall_s, work_section
from laserbatch.pipeline.storage.atomic import write_text
from laserbatch.pipeline.storage.manifest import RunManifest

FOLDER = Path(__file__).parent
NOTABLE_QUARANTINE_SHARE = 0.05  # more failed rows than this belong into the headline
STATUS_PHRASES = {"failed": "This run failed and published nothing: ", "running": "This run is not finished: "}


def write_report(manifest: RunManifest, out_path: Path) -> None:
    """Write the report of a run.

    Parameters
    ----------
    manifest : of a run, finished or failed; sections whose data it lacks say so in a sentence.
    out_path : the HTML file to write or replace, atomically; its folder is created.
    """
    write_text(render_page(page_of(manifest)), out_path)


def render_page(page: Page) -> str:
    """A page as one self-contained HTML text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,  # by default only for names that end in .html
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css = Markup((FOLDER / "report.css").read_text(encoding="utf-8"))  # our own file: the only text that is not escaped
    return environment.get_template("report.html.jinja").render(page=page, css=css, source_labels=SOURCE_LABELS)


def page_of(manifest: RunManifest) -> Page:
    """Everything that the report of a manifest shows."""
    sides = sides_of(manifest)
    sections = [provenance_section(manifest)]
    was_stopped = manifest.status == "failed" and not sides  # nothing was counted: there is only why to say
    if not was_stopped:
        sections = [
            work_section(manifest, sides),
            speed_section(manifest, sides),
            acceptance_section(sides),
            pools_section(manifest, sides),
            ctr_section(manifest.ctr),
            samples_section(sides),
            *sections,
        ]
    return Page(
        title=f"Night of {_long_date(manifest.date)}",
        run_id=manifest.run_id,
        status=manifest.status,
        facts=_facts(manifest),
        headline=headline(manifest, sides),
        warnings=_warnings(manifest, sides),
        key_figures=[] if was_stopped else key_figures(manifest, sides),
        sections=sections,
        made_by=f"laserbatch {manifest.laserbatch_version} from the manifest of {manifest.run_id}",
    )


def _long_date(date: datetime.date) -> str:
    months = "January February March April May June July August September October November December"
    return f"{date.day} {months.split()[date.month - 1]} {date.year}"


def headline(manifest: RunManifest, sides: list[Side]) -> list[Phrase]:
    """The result of the night as one sentence."""
    entities, generated, carried, failed = (
        sum(getattr(side.figures, f"num_{name}") for side in sides)
        for name in ("entities", "generated", "carried_over", "quarantined")
    )
    status = manifest.status
    phrases = [Phrase(STATUS_PHRASES[status])] if status in STATUS_PHRASES else []
    if not entities:
        if status == "failed":
            return [Phrase("This run failed and published nothing")]
        return [*phrases, Phrase(f"{'t' if phrases else 'T'}here was no entity to write about")]
    if carried == entities:
        return [
            *phrases,
            Phrase(f"all {count(entities)}", True),
            Phrase(" entities were unchanged and kept their text"),
        ]
    verb = "rewritten" if manifest.previous_night else "written"
    phrases += [Phrase(f"{count(generated)} of {count(entities)}", True), Phrase(f" entities {verb}")]
    if failed > NOTABLE_QUARANTINE_SHARE * entities:
        phrases.append(Phrase(f" ({count(failed)} quarantined)"))
    if status == "failed":
        return phrases
    tonight = total(side.tonight for side in sides)
    if tonight and tonight.num_steps:
        phrases += [Phrase(" at "), Phrase(f"{decimal(tonight.tokens_per_step, 1)} tokens a step", True)]
    for over, name in (("plain", "plain"), ("previous_night", "the previous night")):
        factor = speed_up(sides, over)
        if factor is not None:
            phrases += [Phrase(", "), Phrase(f"{times(factor)} {name}", True)]
            break
    judged = _judgement(manifest, sides)
    return [*phrases, Phrase("; "), *judged] if judged else phrases


def _judgement(manifest: RunManifest, sides: list[Side]) -> list[Phrase]:
    """What the CTR comparison has shown, and no more; nothing where no text could differ from plain decoding's."""
    verdicts = {model: found.verdict for model, found in manifest.ctr.equivalence.items() if model != ALL_MODELS}
    if not verdicts:
        gains = own_gains(ctr_rows(manifest.ctr))
        is_shown = gains and not any(gain.doubt for gain in gains)
        return [Phrase("AUC "), Phrase(_median(gains), True), Phrase(" from knowledge")] if is_shown else []
    if not any(side.figures.num_carried_over or side.figures.stats.num_drafted for side in sides):
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


def key_figures(manifest: RunManifest, sides: list[Side]) -> list[KeyFigure]:
    """Four numbers with what they compare to."""
    tonight, before, plain = (
        total(getattr(side, name) for side in sides) for name in ("tonight", "previous_night", "plain")
    )
    entities, generated, carried, failed = (
        count(sum(getattr(side.figures, f"num_{name}") for side in sides))
        for name in ("entities", "generated", "carried_over", "quarantined")
    )
    factors = [(speed_up(sides, "plain"), "plain"), (speed_up(sides, "previous_night"), "the previous night")]
    speed = [f"{times(factor)} {name}" for factor, name in factors if factor is not None]
    compared = [(before, "previous night"), (plain, "plain")]
    steps = [f"{name} {decimal(stats.tokens_per_step)}" for stats, name in compared if stats]
    alone = ["nothing to compare with"]
    return [
        KeyFigure("entities written", generated, [f"of {entities}; {carried} carried over", f"{failed} quarantined"]),
        KeyFigure("tokens per second", rate(tonight and tonight.tokens_per_s), speed or alone),
        KeyFigure("tokens per step, bonus counted", decimal(tonight and tonight.tokens_per_step), steps or alone),
        _ctr_card(manifest) or KeyFigure("wall time", seconds(total_wall_s(manifest)), ["all stages"]),
    ]


def _ctr_card(manifest: RunManifest) -> KeyFigure | None:
    gains = own_gains(ctr_rows(manifest.ctr))
    if not gains:
        return None
    doubt = next((gain.doubt for gain in gains if gain.doubt), "")
    notes = [f"median of {counted(len(gains), 'model')}"]
    if doubt:
        notes = [f"{_median(gains)}, {notes[0]}, but {doubt}"]
    overall = manifest.ctr.equivalence.get(ALL_MODELS)
    if overall is not None:
        notes.append(f"{decimal(overall.mean_difference, 4, signed=True)} against plain texts")
    return KeyFigure("AUC from knowledge", "not shown" if doubt else _median(gains), notes)


def _median(gains: list[Gain]) -> str:
    return decimal(statistics.median(gain.auc for gain in gains), 4, signed=True)


def _warnings(manifest: RunManifest, sides: list[Side]) -> list[str]:
    """What needs somebody today: why a run failed, first."""
    found = [f"{side.label}: {warning}." for side in sides for warning in side_warnings(side.figures)]
    return [manifest.failure, *found] if manifest.status == "failed" and manifest.failure else found


def _facts(manifest: RunManifest) -> list[str]:
    model, machine, facts = manifest.model, manifest.machine, []
    if model is not None:
        facts.append(f"model {model.id} ({millions(model.num_parameters)} parameters)")
        facts.append(f"{model.dtype} on {model.device}")
    if machine.get("gpu") or machine.get("num_cpus"):
        facts.append(machine.get("gpu") or f"{machine['num_cpus']} CPU cores")
    if manifest.stages:
        facts.append(f"{seconds(total_wall_s(manifest))} in all")
    return facts
