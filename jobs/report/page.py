"""Renders a manifest as one self-contained HTML file. Reads nothing else: no run folder, no network, no clock."""

import statistics
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from laserbatch.jobs.formatting import SOURCE_LABELS, count, counted, decimal, rate, seconds, times
from laserbatch.jobs.gates import age_of_judged, blocking, gate_sentence, warning
from laserbatch.jobs.log_age import recorded_age
from laserbatch.jobs.report.audit import audit_section
from laserbatch.jobs.report.blocks import Section
from laserbatch.jobs.report.ctr_table import ALL_MODELS, ctr_section, own_gains
from laserbatch.jobs.report.drafts import drafts_section
from laserbatch.jobs.report.sides import SideReport, side_warnings, sides_of, speed_up, total
from laserbatch.jobs.report.speed import speed_section
from laserbatch.jobs.report.work import gates_section, provenance_section, samples_section, work_section
from laserbatch.pipeline.storage.atomic import write_text
from laserbatch.pipeline.storage.manifest import LEFT_OUT, RunManifest

FOLDER = Path(__file__).parent
STATUS_PHRASES = {
    "failed": "This run failed and published nothing: ",
    "held": "This run is held back and not published: ",
    "running": "This run is not finished: ",
}
ENVIRONMENT = jinja2.Environment(  # keeps the compiled template for the next report of a process
    loader=jinja2.FileSystemLoader(FOLDER),
    autoescape=True,  # the default depends on the file's suffix
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
strong = Markup("<strong>{}</strong>").format


@dataclass(frozen=True)
class KeyFigure:
    """One of the numbers at the top of the page, with the values that it is compared with."""

    label: str
    value: str
    notes: list[str]


def write_report(manifest: RunManifest, out_path: Path) -> None:
    """Write or replace the report of a run, finished or failed; a section without data says so in a sentence."""
    write_text(render_page(manifest), out_path)


def render_page(manifest: RunManifest) -> str:
    """The report as one self-contained HTML text."""
    sides = sides_of(manifest)
    was_stopped = manifest.status == "failed" and not sides  # no figures, only the reason
    title, head = f"Night of {manifest.date.day} {manifest.date:%B %Y}", headline(manifest, sides)
    figures = [] if was_stopped else key_figures(manifest, sides)
    sections = [provenance_section(manifest)] if was_stopped else sections_of(manifest, sides)
    return render(manifest, title, head, figures, sections, _warnings(manifest, sides))


def render(
    manifest: RunManifest,
    title: str,
    headline: Markup,
    figures: list[KeyFigure],
    sections: list[Section],
    warnings: list[str] | None = None,
) -> str:
    """Render a page of a run."""
    sides = sides_of(manifest)
    return ENVIRONMENT.get_template("report.html.jinja").render(
        css=Markup((FOLDER / "report.css").read_text(encoding="utf-8")),  # our own file: the only text not escaped
        source_labels=SOURCE_LABELS,
        marked={span.source for side in sides for sample in side.figures.samples for span in sample.spans} - {"target"},
        manifest=manifest,
        title=title,
        headline=headline,
        warnings=warnings or [],
        facts=_facts(manifest),
        key_figures=figures,
        sections=sections,
    )


def sections_of(manifest: RunManifest, sides: list[SideReport]) -> list[Section]:
    sections = [work_section(manifest, sides), gates_section(manifest), speed_section(manifest, sides)]
    sections += [drafts_section(manifest, sides), ctr_section(manifest.judgement.ctr)]
    return [*sections, audit_section(manifest.judgement.audit), samples_section(sides), provenance_section(manifest)]


def headline(manifest: RunManifest, sides: list[SideReport]) -> Markup:
    """The result of the night as one sentence."""
    entities, generated, carried = (
        sum(getattr(side.figures, f"num_{name}") for side in sides)
        for name in ("entities", "generated", "carried_over")
    )
    if manifest.status == "failed" and not entities:
        return Markup("This run failed and published nothing")
    phrases = [STATUS_PHRASES.get(manifest.status, "")]
    if not entities:
        return Markup().join([*phrases, "there was no entity to write about"])
    if carried == entities:
        whole = strong(f"all {count(entities)}")
        return Markup().join([*phrases, whole, " entities were unchanged and kept their text"])
    verb = "rewritten" if manifest.judgement.previous_night else "written"
    phrases += [strong(f"{count(generated)} of {count(entities)}"), f" entities {verb}"]
    if manifest.status != "failed":
        tonight = total(side.tonight for side in sides)
        if tonight and tonight.num_steps:
            phrases += [" at ", strong(f"{decimal(tonight.tokens_per_step, 1)} tokens per step")]
        for factor in _factors(sides)[:1]:
            phrases += [", ", strong(factor)]
        phrases.append(_judgement(manifest, sides))
    return Markup().join(phrases)


def _factors(sides: list[SideReport]) -> list[str]:
    """Tonight's speed-ups over plain decoding and over the previous night, as text."""
    factors = [(speed_up(sides, "plain"), "plain"), (speed_up(sides, "previous_night"), "the previous night")]
    return [f"{times(factor)} {name}" for factor, name in factors if factor is not None]


def _judgement(manifest: RunManifest, sides: list[SideReport]) -> str:
    """The verdict of the CTR comparison; empty if no text can differ from plain decoding's."""
    judged = manifest.judgement.ctr
    verdicts = {model: verdict.verdict for model, verdict in judged.equivalence.items() if model != ALL_MODELS}
    if not verdicts or not any(side.figures.num_carried_over or side.figures.stats.has_guesses for side in sides):
        return ""
    worse = [model for model, verdict in verdicts.items() if verdict == "worse"]
    unharmed = [model for model, verdict in verdicts.items() if verdict in ("equivalent", "better")]
    undecided = [model for model, verdict in verdicts.items() if verdict == "undecided"]
    of = f" (of {age_of_judged(judged)})" if judged.judged_run_id else ""
    if worse:
        return f"; AUC is worse with {' and '.join(worse)}{of}"
    if not unharmed:
        return f"; whether AUC is worse is undecided{of}"
    if undecided:
        return f"; AUC is not worse with {' and '.join(unharmed)}, undecided with {' and '.join(undecided)}{of}"
    return f"; AUC is not worse{of}"


def key_figures(manifest: RunManifest, sides: list[SideReport]) -> list[KeyFigure]:
    """The four numbers at the top, with the values that they are compared with."""
    tonight, before, plain = (
        total(getattr(side, name) for side in sides) for name in ("tonight", "previous_night", "plain")
    )
    entities, generated, carried, failed = (
        count(sum(getattr(side.figures, f"num_{name}") for side in sides))
        for name in ("entities", "generated", "carried_over", "quarantined")
    )
    compared = [(before, "previous night"), (plain, "plain")]
    steps = [f"{name} {decimal(stats.tokens_per_step)}" for stats, name in compared if stats]
    alone = ["too few texts to compare" if before or plain else "nothing to compare with"]
    return [
        KeyFigure("entities written", generated, [f"of {entities}; {carried} carried over", f"{failed} quarantined"]),
        KeyFigure("tokens per second", rate(tonight and tonight.tokens_per_s), _factors(sides) or alone),
        KeyFigure("tokens per step, bonus counted", decimal(tonight and tonight.tokens_per_step), steps or alone),
        _ctr_figure(manifest),
    ]


def _ctr_figure(manifest: RunManifest) -> KeyFigure:
    gains = own_gains(manifest.judgement.ctr)
    if not gains:
        return KeyFigure("wall time", seconds(sum(manifest.stages.values())), ["all stages"])
    median = decimal(statistics.median(gain.auc for gain in gains), 4, signed=True)
    is_shown, note = all(gain.is_shown for gain in gains), f"median of {counted(len(gains), 'model')}"
    notes = [note if is_shown else f"{median}, {note}, but not above the spread of seeds with every model"]
    if (overall := manifest.judgement.ctr.equivalence.get(ALL_MODELS)) is not None:
        notes.append(f"{decimal(overall.mean_difference, 4, signed=True)} against plain texts")
    return KeyFigure("AUC from knowledge", median if is_shown else "not shown", notes)


def _warnings(manifest: RunManifest, sides: list[SideReport]) -> list[str]:
    """Warnings that need action, the reason of a failure first."""
    done = "Not published" if manifest.status == "held" else "Published although a gate blocks it"
    messages = [f"{done}: {gate_sentence(gate)}." for gate in blocking(manifest.judgement.gates)]
    messages += [f"{gate_sentence(gate)}." for gate in warning(manifest.judgement.gates)]
    messages += log_warnings(manifest)
    settings = manifest.origin.settings
    if (server := manifest.generation.endpoint) is not None and server.changes:
        messages.append(f"{server.changes[0].upper()}{server.changes[1:]}.")
    messages += [f"{side.label}: {warning}." for side in sides for warning in side_warnings(side.figures, settings)]
    for table, facts in manifest.origin.inputs.items():
        messages += [f"{table}.{column}: {why}." for column, why in facts.get(LEFT_OUT, {}).items()]
    return [manifest.failure, *messages] if manifest.status == "failed" and manifest.failure else messages


def log_warnings(manifest: RunManifest) -> list[str]:
    """A warning if the newest interaction is older than usual."""
    age = recorded_age(manifest.origin.inputs)
    return [] if age is None or not age.is_stale else [f"{str(age)[0].upper()}{str(age)[1:]}."]


def _facts(manifest: RunManifest) -> list[str]:
    model, machine = manifest.generation.model, manifest.origin.machine
    facts = [f"{side} prompts: {ref.framework} ({ref.template})" for side, ref in manifest.origin.prompts.items()]
    if model is not None:
        size = f" ({rate(model.num_parameters / 1e6)} M parameters)" if model.num_parameters else ""
        facts.append(f"model {model.id}{size}")
        by_vllm = manifest.origin.settings.get("decoding", {}).get("engine") == "vllm"
        reason = f" ({model.dtype_reason})" if model.dtype_reason else ""
        server = manifest.generation.endpoint
        by_us = f"{model.dtype} on {model.device}{reason}{', by vLLM, which verifies greedily' * by_vllm}"
        facts.append(by_us if server is None else f"written by {server.model} at {server.url}")
    if machine.get("gpu") or machine.get("num_cpus"):
        facts.append(machine.get("gpu") or f"{machine['num_cpus']} CPU cores")
    return [*facts, f"{seconds(sum(manifest.stages.values()))} in all"]
