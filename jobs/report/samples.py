"""Sample texts with the source of every span; and what the run was given: inputs, settings, machine."""

from collections.abc import Mapping

from laserbatch.jobs.formatting import MISSING, count, decimal, millions, percent, ratio
from laserbatch.jobs.report.blocks import Block, Folded, Note, Sample, Section, SourceLegend
from laserbatch.jobs.report.palette import SOURCE_LABELS
from laserbatch.jobs.report.reading import SideView, mapping, sequence, side_label
from laserbatch.jobs.spans import Span


def samples_section(sides: list[SideView]) -> Section:
    """The section "Sample texts"."""
    blocks: list[Block] = []
    for side in sides:
        samples = [mapping(sample) for sample in sequence(side.data.get("samples"))]
        alone = len(samples) - 1 if len(samples) % 2 else None  # the last of an odd number takes both columns
        blocks += [_sample(side, sample, wide=place == alone) for place, sample in enumerate(samples)]
    if not blocks:
        return Section("samples", "Sample texts", "", [Note("No sample texts were kept in this run.")])
    legend = SourceLegend(list(SOURCE_LABELS.items()))
    lead = "Each span is marked by what drafted it; what is not marked, the model chose itself."
    return Section("samples", "Sample texts", lead, [legend, *blocks])


def _sample(side: SideView, sample: Mapping, wide: bool) -> Sample:
    spans = [
        Span(str(span.get("text", "")), str(span.get("source", "target")))
        for span in map(mapping, sequence(sample.get("spans")))
    ]
    text = str(sample.get("text") or "")
    drafted = sum(len(span.text) for span in spans if span.source != "target")
    facts = []
    if spans:
        facts.append(f"{percent(ratio(drafted, sum(len(span.text) for span in spans)))} of its characters drafted")
    if sample.get("tokens_per_step") is not None:
        facts.insert(0, f"{decimal(sample['tokens_per_step'])} tokens per step")
    facts.insert(0, f"pool group {sample['group']}" if sample.get("group") else "no pool group")
    name = side_label(side.name).removesuffix("s")
    return Sample(
        title=f"{name} {sample.get('entity_id', MISSING)}",
        facts=" · ".join(facts),
        spans=spans or [Span(text or "(no text)", "target")],
        prompt=str(sample.get("prompt") or ""),
        wide=wide,
    )


def provenance_section(manifest: Mapping) -> Section:
    """The section "Inputs, settings, machine"."""
    blocks: list[Block] = []
    inputs = [(name, mapping(table)) for name, table in mapping(manifest.get("inputs")).items() if mapping(table)]
    folds = [
        ("Inputs", [(name, _input(table)) for name, table in inputs]),
        ("Model", [(key, _value(key, value)) for key, value in mapping(manifest.get("model")).items()]),
        (
            "Features",
            [
                (side_label(name), _feature(mapping(f)))
                for name, f in mapping(manifest.get("features")).items()
                if mapping(f)
            ],
        ),
        ("Machine and versions", _flat(mapping(manifest.get("machine")))),
        ("Settings, resolved", _flat(mapping(manifest.get("settings")))),
    ]
    for title, rows in folds:
        blocks.append(Folded(title, rows) if rows else Note(f"{title}: not recorded."))
    digest = manifest.get("settings_hash")
    return Section("provenance", "Inputs, settings, machine", f"Settings hash {digest}." if digest else "", blocks)


def _input(table: Mapping) -> str:
    parts = [f"{count(table.get('num_rows'))} rows", str(table.get("path") or "")]
    if table.get("num_unknown_ids") is not None:
        parts.insert(1, f"{count(table['num_unknown_ids'])} of unknown ids")
    if table.get("sha256"):
        parts.append(f"SHA-256 {table['sha256']}")
    return " · ".join(part for part in parts if part)


def _feature(table: Mapping) -> str:
    parts = [f"{count(table.get('num_rows'))} rows", f"vectors of {count(table.get('dim'))}"]
    if table.get("num_clusters") is not None:
        parts.append(f"{count(table['num_clusters'])} clusters")
    return " · ".join([*parts, str(table.get("file") or "")])


def _flat(data: Mapping, prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", _value(key, value)))
    return rows


def _value(key: str, value: object) -> str:
    if key == "num_parameters":
        return millions(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == "":
        return "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)
