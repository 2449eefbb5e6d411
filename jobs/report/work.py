"""What the night did and what it left alone: entities by outcome, quarantine, stages and their time."""

from laserbatch.jobs.formatting import MISSING, count, counted, percent, ratio, seconds
from laserbatch.jobs.report.blocks import TONIGHT, Block, Note, Section, Table
from laserbatch.jobs.report.charts import Series, lying_bars, stacked_shares
from laserbatch.jobs.report.sides import Side
from laserbatch.pipeline.storage.manifest import RunManifest

STAGE_LABELS = {
    "generate": "Generate knowledge",
    "generate plain": "Decode plainly, to compare",
    "encode": "Encode to features",
    "ctr": "Train CTR models",
    "pools": "Build the next pools",
}
OUTCOMES = (
    ("num_generated", "generated", TONIGHT),
    ("num_carried_over", "carried over", "#a9cbe8"),
    ("num_quarantined", "quarantined", "#e69f00"),
)


def work_section(manifest: RunManifest, sides: list[Side]) -> Section:
    """The section "What was done"."""
    busy = [side for side in sides if side.figures.num_entities]
    blocks: list[Block] = [Note(f"{side.label}: there were no entities.") for side in sides if side not in busy]
    if not sides:
        blocks.append(Note("No side was finished in this run."))
    if busy:
        outcomes = [
            Series(name, [getattr(side.figures, key) for side in busy], colour) for key, name, colour in OUTCOMES
        ]
        left = [side.figures.num_entities - sum(_outcomes(side)) for side in busy]
        if any(left):
            outcomes.append(Series("not done", left, "#e3e6ea"))
        caption = "Carried over: prompt, template, model and decoding are those of the last text."
        blocks.append(
            stacked_shares(
                "Entities by outcome",
                [side.label for side in busy],
                outcomes,
                "share of the side's entities",
                caption,
            )
        )
    stages = _stages(manifest)
    if stages:
        caption = "In the order of the run; a resumed run's times are added up."
        blocks.append(lying_bars("Time by stage", stages, "wall time", seconds, TONIGHT, caption))
    else:
        blocks.append(Note("No stage was timed.", wide=not busy))
    if busy:
        blocks.append(_table(busy))
    blocks.append(_quarantine(sides))
    return Section("work", "What was done and skipped", _lead(busy, stages), blocks)


def total_wall_s(manifest: RunManifest) -> float | None:
    """Wall time of all stages in seconds; None when none was timed."""
    stages = _stages(manifest)
    return sum(wall_s for _, wall_s in stages) if stages else None


def _lead(busy: list[Side], stages: list[tuple[str, float]]) -> str:
    carried = sum(side.figures.num_carried_over for side in busy)
    entities = counted(sum(side.figures.num_entities for side in busy), "entity", "entities")
    if not busy:
        return ""
    skipped = f"{count(carried)} of {entities} had not changed and kept their text"
    if not carried:
        skipped = f"None of {entities} had an unchanged text to carry over"
    if not stages:
        return skipped + "."
    name, wall_s = max(stages, key=lambda stage: stage[1])
    share = percent(ratio(wall_s, sum(other for _, other in stages)))
    return f"{skipped}. The longest stage took {share} of the time: {name[0].lower()}{name[1:]}."


def _stages(manifest: RunManifest) -> list[tuple[str, float]]:
    return [(STAGE_LABELS.get(stage.name, stage.name.capitalize()), stage.wall_s) for stage in manifest.stages]


def _outcomes(side: Side) -> list[int]:
    return [getattr(side.figures, key) for key, _, _ in OUTCOMES]


def _table(busy: list[Side]) -> Table:
    rows = []
    for side in busy:
        shards = side.figures.shards
        counts = [side.figures.num_entities, *_outcomes(side), side.figures.stats.num_tokens, len(shards)]
        slowest = seconds(max(shard.wall_s for shard in shards)) if shards else MISSING
        rows.append([side.label, *map(count, counts), slowest])
    columns = [
        "Side",
        "Entities",
        *(name.capitalize() for _, name, _ in OUTCOMES),
        "Tokens written",
        "Shards",
        "Slowest shard",
    ]
    return Table("Entities, in numbers", columns, rows)


def _quarantine(sides: list[Side]) -> Block:
    rows = [
        [side.label, reason, count(number), percent(ratio(number, side.figures.num_entities))]
        for side in sides
        for reason, number in sorted(side.figures.quarantine_reasons.items(), key=lambda item: (-item[1], item[0]))
    ]
    if not rows:
        return Note("No row went to quarantine.")
    return Table(
        "Quarantined rows by reason",
        ["Side", "Reason", "Rows", "Share of the side"],
        rows,
        caption="These rows have no new text tonight; each lies in the run's quarantine folder with its reason.",
        left=frozenset({0, 1}),
    )
