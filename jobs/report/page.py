"""From a manifest to one self-contained HTML file. Reads nothing else: no run folder, no network, no clock."""

from collections.abc import Mapping
from pathlib import Path

import jinja2
from markupsafe import Markup

from laserbatch.jobs.formatting import millions, seconds
from laserbatch.jobs.report.acceptance import acceptance_section, lengths_section
from laserbatch.jobs.report.blocks import Page, Section
from laserbatch.jobs.report.ctr_table import ctr_section
from laserbatch.jobs.report.headline import headline, key_figures
from laserbatch.jobs.report.palette import SOURCE_COLOURS
from laserbatch.jobs.report.pools import pools_section
from laserbatch.jobs.report.reading import SideView, long_date, mapping, sides_of
from laserbatch.jobs.report.samples import provenance_section, samples_section
from laserbatch.jobs.report.speed import speed_section
from laserbatch.jobs.report.work import total_wall_s, work_section
from laserbatch.jobs.side_warnings import side_warnings
from laserbatch.pipeline.storage.atomic import write_text

FOLDER = Path(__file__).parent


def write_report(manifest: Mapping, out_path: Path) -> None:
    """Write the report of a run.

    Parameters
    ----------
    manifest : a run's manifest as plain JSON values; sections whose data it lacks say so in a sentence.
    out_path : the HTML file to write or replace, atomically; its folder is created.
    """
    write_text(render_report(manifest), out_path)


def render_report(manifest: Mapping) -> str:
    """The report of a run as HTML text; see `write_report`."""
    return render_page(page_of(manifest))


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
    template = environment.get_template("report.html.jinja")
    return template.render(page=page, css=css, source_colours=SOURCE_COLOURS)


def page_of(manifest: Mapping) -> Page:
    """Everything that the report of a manifest shows."""
    sides = sides_of(manifest)
    night = long_date(manifest.get("date"))
    return Page(
        title=f"Night of {night}",
        run_id=str(manifest.get("run_id") or "unnamed run"),
        status=str(manifest.get("status") or "unknown"),
        facts=_facts(manifest),
        headline=headline(manifest, sides),
        warnings=_warnings(manifest, sides),
        key_figures=[] if _was_stopped(manifest, sides) else key_figures(manifest, sides),
        sections=_sections(manifest, sides),
        made_by=f"laserbatch {manifest.get('laserbatch_version') or ''}".strip()
        + f" from the manifest of {manifest.get('run_id') or 'unnamed run'}",
    )


def _sections(manifest: Mapping, sides: list[SideView]) -> list[Section]:
    if _was_stopped(manifest, sides):
        return [provenance_section(manifest)]
    return [
        work_section(manifest, sides),
        speed_section(manifest, sides),
        acceptance_section(sides),
        lengths_section(sides),
        pools_section(manifest, sides),
        ctr_section(manifest),
        samples_section(sides),
        provenance_section(manifest),
    ]


def _was_stopped(manifest: Mapping, sides: list[SideView]) -> bool:
    """Whether the run failed before it had counted anything, so that there is nothing to say but why."""
    return manifest.get("status") == "failed" and not sides


def _warnings(manifest: Mapping, sides: list[SideView]) -> list[str]:
    """What needs somebody today: why a run failed, first."""
    failure = str(manifest.get("failure") or "") if manifest.get("status") == "failed" else ""
    found = [f"{side.label}: {warning}." for side in sides for warning in side_warnings(side.data)]
    return [failure, *found] if failure else found


def _facts(manifest: Mapping) -> list[str]:
    model, machine = mapping(manifest.get("model")), mapping(manifest.get("machine"))
    facts = []
    if model.get("id"):
        size = f" ({millions(model['num_parameters'])} parameters)" if model.get("num_parameters") else ""
        facts.append(f"model {model['id']}{size}")
    device = model.get("device") or mapping(manifest.get("workers")).get("device")
    if model.get("dtype") or device:
        facts.append(" on ".join(str(part) for part in (model.get("dtype"), device) if part))
    hardware = machine.get("gpu") or (f"{machine['num_cpus']} CPU cores" if machine.get("num_cpus") else None)
    if hardware:
        facts.append(str(hardware))
    wall_s = total_wall_s(manifest)
    if wall_s is not None:
        facts.append(f"{seconds(wall_s)} in all")
    return facts
