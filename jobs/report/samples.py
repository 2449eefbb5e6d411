"""Sample texts with the source of every span; and what the run was given: inputs, settings, machine."""

from collections.abc import Mapping
from typing import Any

from laserbatch.jobs.formatting import decimal, percent, ratio
from laserbatch.jobs.report.blocks import Block, Folded, Note, Sample, Section, SourceLegend
from laserbatch.jobs.report.sides import Side
from laserbatch.pipeline.storage import manifest as recorded

GIVEN = (
    ("inputs", "Inputs"),
    ("model", "Model"),
    ("features", "Features"),
    ("machine", "Machine and versions"),
    ("settings", "Settings, resolved"),
)


def samples_section(sides: list[Side]) -> Section:
    """The section "Sample texts"."""
    blocks: list[Block] = []
    for side in sides:
        samples = side.figures.samples
        alone = len(samples) - 1 if len(samples) % 2 else None  # the last of an odd number takes both columns
        blocks += [_sample(side, sample, wide=place == alone) for place, sample in enumerate(samples)]
    if not blocks:
        return Section("samples", "Sample texts", "", [Note("No sample texts were kept in this run.")])
    lead = "Each span is marked by what drafted it; what is not marked, the model chose itself."
    return Section("samples", "Sample texts", lead, [SourceLegend(), *blocks])


def _sample(side: Side, sample: recorded.SampleText, wide: bool) -> Sample:
    facts = [f"pool group {sample.group}" if sample.group else "no pool group"]
    if sample.tokens_per_step is not None:
        facts.append(f"{decimal(sample.tokens_per_step)} tokens per step")
    if sample.spans:
        whole = sum(len(span.text) for span in sample.spans)
        drafted = sum(len(span.text) for span in sample.spans if span.source != "target")
        facts.append(f"{percent(ratio(drafted, whole))} of its characters drafted")
    return Sample(
        title=f"{side.name.capitalize()} {sample.entity_id}",
        facts=" · ".join(facts),
        spans=sample.spans or [recorded.SampleSpan(sample.text or "(no text)", "target")],
        prompt=sample.prompt,
        wide=wide,
    )


def provenance_section(manifest: recorded.RunManifest) -> Section:
    """The section "Inputs, settings, machine"."""
    blocks: list[Block] = []
    values = manifest.as_json()
    for key, title in GIVEN:
        rows = _flat(values[key] or {})
        blocks.append(Folded(title, rows) if rows else Note(f"{title}: not recorded."))
    return Section("provenance", "Inputs, settings, machine", f"Settings hash {manifest.settings_hash}.", blocks)


def _flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", _shown(value)))
    return rows


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None or value == "" or value == {} else str(value)
