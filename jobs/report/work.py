"""What the night did and what it left alone: entities by outcome, quarantine, stages and their time."""

from collections.abc import Mapping

from laserbatch.jobs.formatting import MISSING, count, counted, finite, percent, ratio, seconds, whole
from laserbatch.jobs.report.blocks import Block, Figure, LegendEntry, Note, Section, Table
from laserbatch.jobs.report.charts import Part, lying_bars, stacked_shares
from laserbatch.jobs.report.palette import TONIGHT
from laserbatch.jobs.report.reading import SideView, mapping, sequence

STAGE_LABELS = {
    "plan": "Plan, prompts, fingerprints",
    "route": "Route to pools",
    "generate": "Generate knowledge",
    "generate plain": "Decode plainly, to compare",
    "encode": "Encode to features",
    "features": "Encode to features",
    "ctr": "Train CTR models",
    "pools": "Build the next pools",
    "report": "Write the report",
}
OUTCOMES = (("num_generated", "generated", "#0b4f8a"), ("num_carried_over", "carried over", "#a9cbe8"),
            ("num_quarantined", "quarantined", "#e69f00"))  # fmt: skip


def work_section(manifest: Mapping, sides: list[SideView]) -> Section:
    """The section "What was done"."""
    blocks: list[Block] = []
    busy = [side for side in sides if side.num_entities]
    for side in sides:
        if side not in busy:
            blocks.append(Note(f"{side.label}: there were no entities."))
    if not sides:
        blocks.append(Note("No side was finished in this run."))
    if busy:
        blocks.append(_outcomes(busy))
    stages = _stages(manifest)
    if stages:
        chart = lying_bars(stages, "wall time", seconds, TONIGHT)
        caption = "In the order of the run; a resumed run's times are added up."
        blocks.append(Figure("Time by stage", chart, caption))
    else:
        blocks.append(Note("No stage was timed.", wide=not busy))
    if busy:
        blocks.append(_table(busy))
    blocks.append(_quarantine(sides))
    return Section("work", "What was done and skipped", _lead(busy, stages), blocks)


def total_wall_s(manifest: Mapping) -> float | None:
    """Wall time of all stages in seconds; None when none was timed."""
    stages = _stages(manifest)
    return sum(value for _, value in stages) if stages else None


def _lead(busy: list[SideView], stages: list[tuple[str, float]]) -> str:
    carried = sum(side.num_carried_over for side in busy)
    entities = sum(side.num_entities for side in busy)
    if not entities:
        return ""
    skipped = f"{count(carried)} of {counted(entities, 'entity', 'entities')} had not changed and kept their text"
    if not carried:
        skipped = f"None of {counted(entities, 'entity', 'entities')} had an unchanged text to carry over"
    if not stages:
        return skipped + "."
    longest = max(stages, key=lambda stage: stage[1])
    share = percent(ratio(longest[1], sum(value for _, value in stages)))
    return f"{skipped}. The longest stage took {share} of the time: {longest[0][0].lower()}{longest[0][1:]}."


def _stages(manifest: Mapping) -> list[tuple[str, float]]:
    stages = [mapping(stage) for stage in sequence(manifest.get("stages"))]
    return [
        (STAGE_LABELS.get(str(stage.get("name")), str(stage.get("name"))), finite(stage["wall_s"]))
        for stage in stages
        if finite(stage.get("wall_s")) is not None
    ]


def _outcomes(busy: list[SideView]) -> Figure:
    rows = []
    for side in busy:
        parts = [
            Part(name, whole(side.data.get(key)), colour, key == "num_generated") for key, name, colour in OUTCOMES
        ]
        rest = side.num_entities - sum(part.value for part in parts)
        rows.append((side.label, [*parts, Part("not done", max(0, rest), "#e3e6ea", False)]))
    unfinished = any(parts[-1].value for _, parts in rows)
    legend = [LegendEntry(name, colour) for _, name, colour in OUTCOMES]
    return Figure(
        "Entities by outcome",
        stacked_shares(rows, "share of the side's entities"),
        caption="Carried over: prompt, template, model and decoding are those of the last text.",
        legend=[*legend, LegendEntry("not done", "#e3e6ea")] if unfinished else legend,
    )


def _table(busy: list[SideView]) -> Table:
    rows = []
    for side in busy:
        shards = [mapping(shard) for shard in sequence(side.data.get("shards"))]
        slowest = max((finite(shard.get("wall_s")) or 0.0 for shard in shards), default=None)
        written = side.tonight.num_tokens if side.tonight else 0
        counts = [
            side.num_entities,
            side.num_generated,
            side.num_carried_over,
            side.num_quarantined,
            written,
            len(shards),
        ]
        rows.append([side.label, *map(count, counts), seconds(slowest) if shards else MISSING])
    columns = [
        "Side",
        "Entities",
        "Generated",
        "Carried over",
        "Quarantined",
        "Tokens written",
        "Shards",
        "Slowest shard",
    ]
    return Table("Entities, in numbers", columns, rows)


def _quarantine(sides: list[SideView]) -> Block:
    rows = []
    for side in sides:
        reasons = mapping(side.data.get("quarantine_reasons"))
        for reason, number in sorted(reasons.items(), key=lambda item: (-whole(item[1]), item[0])):
            rows.append([side.label, str(reason), count(number), percent(ratio(number, side.num_entities))])
    if not rows:
        done = sum(side.num_quarantined for side in sides)
        if done:
            return Note(f"{counted(done, 'row')} went to quarantine; the reasons were not recorded.")
        return Note("No row went to quarantine.")
    return Table(
        "Quarantined rows by reason",
        ["Side", "Reason", "Rows", "Share of the side"],
        rows,
        caption="These rows have no new text tonight; each lies in the run's quarantine folder with its reason.",
        left=frozenset({0, 1}),
    )
