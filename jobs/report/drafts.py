"""The section about sources and acceptance of drafts, routes of entities, and the pools used and built."""

from laserbatch.jobs.formatting import MISSING, ROUTE_LABELS, SOURCE_LABELS, count, counted, percent, ratio, seconds
from laserbatch.jobs.report.blocks import PLAIN, Block, Figure, Note, Section, Series, Table, stacked_shares
from laserbatch.jobs.report.sides import SIDE_LABELS, SideReport
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.figures import PoolBuilt, PoolFigures
from laserbatch.pipeline.storage.manifest import RunManifest
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.retrieval_pools.calibration.calibrate import MIN_TEXTS

SOURCE_COLOURS = {
    "pool": "#cc79a7", "previous": "#0072b2", "prompt": "#e69f00", "output": "#009e73", "aligned": "#56b4e9",
    "lookahead": "#f0e442", "model": "#d55e00", "head": "#a6761d", "form": "#7a8490",
}  # fmt: skip
_UNBUILT = (
    "no pool was built, because the run has no text of its model's tokenizer. The next night drafts from no pool; "
    "pools of another tokenizer cannot be used."
)
_UNCALIBRATED = (
    f"the new pool is not calibrated, because too few texts could be replayed: a first pool needs {MIN_TEXTS} texts, a "
    f"later one {MIN_TEXTS} that tonight wrote. Until then relative counts are used as probabilities of acceptance."
)
ROUTE_COLOURS = {
    "collaborative": "#0b4f8a", "attribute": "#7fb2de", "random": "#e69f00", "global": "#f0d58a", "none": "#d5dae0",
}  # fmt: skip


def drafts_section(manifest: RunManifest, sides: list[SideReport]) -> Section:
    written = [side for side in sides if side.tonight]
    has_drafts = any(side.figures.stats.num_drafted for side in written)
    routed = [side for side in sides if any(side.figures.routes.values())]
    reason = "nothing was drafted" if written else "no text was generated"
    blocks: list[Block] = [
        _origins(written) if has_drafts else Note(f"No acceptance to show: {reason} tonight."),
        _routes(routed) if routed else Note("No entity was routed to a pool tonight."),
    ]
    if has_drafts:
        blocks.append(_by_source(written))
    used = {name: pool for name in SIDES if (pool := getattr(manifest.generation.pools, name)) is not None}
    built = manifest.pools_built
    if lacking := [side.label for side in sides if side.name not in used]:
        blocks.append(Note(f"{' and '.join(lacking)} had no pool to draft from."))
    if not built:
        blocks.append(Note("No pool was built from tonight's texts."))
    elif unbuilt := [side.label for side in sides if side.name not in built]:
        blocks.append(Note(f"{' and '.join(unbuilt)}: {_UNBUILT}"))
    if uncalibrated := [side.label for side in sides if (pool := built.get(side.name)) and pool.is_calibrated is False]:
        blocks.append(Note(f"{' and '.join(uncalibrated)}: {_UNCALIBRATED}"))
    both = [("tonight", used), ("next night", built)]
    if rows := [_pool_row(name, use, pools[name]) for name in SIDES for use, pools in both if name in pools]:
        blocks.append(Table("Pools", rows, ("Side", "Use", "Version", "Built")))
    return Section("drafts", "Drafts and pools", blocks)


def _origins(sides: list[SideReport]) -> Figure:
    stats, undrafted = [side.figures.stats for side in sides], [side.figures.stats.num_tokens for side in sides]
    series = []
    for name, colour in SOURCE_COLOURS.items():
        accepted = [part.accepted_by_source.get(name, 0) for part in stats]
        undrafted = [left - number for left, number in zip(undrafted, accepted, strict=True)]
        if any(_is_used(part, name) for part in stats):
            series.append(Series(SOURCE_LABELS[name], accepted, colour))
    series.append(Series(SOURCE_LABELS["target"], undrafted, PLAIN))
    title, measured = "Where the written tokens came from", "share of the side's written tokens"
    caption = "“The model itself”: bonus tokens and corrections, one per step."
    return stacked_shares(title, [side.label for side in sides], series, measured, caption)


def _by_source(sides: list[SideReport]) -> Table:
    rows = []
    for side in sides:
        stats = side.figures.stats
        for name in SOURCE_COLOURS:
            if _is_used(stats, name):
                drafted, accepted = stats.drafted_by_source.get(name, 0), stats.accepted_by_source.get(name, 0)
                row = {
                    "Side": side.label,
                    "Source": SOURCE_LABELS[name],
                    "Drafted": count(drafted),
                    "Accepted": count(accepted),
                    "Accepted of drafted": percent(ratio(accepted, drafted)),
                }
                rows.append(row)
    caption = "A draft is a tree, and at most one of its paths is accepted. Shares are of all drafted tokens."
    return Table("Drafted and accepted by source", rows, ("Side", "Source"), caption)


def _is_used(stats: DecodingStats, source: str) -> bool:
    return bool(stats.drafted_by_source.get(source) or stats.accepted_by_source.get(source))


def _routes(sides: list[SideReport]) -> Figure:
    counts = {name: [side.figures.routes.get(name, 0) for side in sides] for name in ROUTE_LABELS}
    series = [Series(ROUTE_LABELS[name], of, ROUTE_COLOURS[name]) for name, of in counts.items() if any(of)]
    title, measured = "Where the router sent entities", "share of the side's entities"
    caption = "Collaborative: entities known well enough for a cluster of tastes. Attribute: all others, cold ones too."
    return stacked_shares(title, [side.label for side in sides], series, measured, caption)


def _pool_row(name: Side, use: str, pool: PoolFigures) -> dict[str, str]:
    how = took = MISSING
    if isinstance(pool, PoolBuilt):
        merged = f"merged from the earlier version, {counted(pool.num_texts_changed, 'text')} sorted"
        how, took = merged if pool.incremental else "whole", seconds(pool.build_s)
    row = {
        "Side": SIDE_LABELS[name],
        "Use": use,
        "Version": pool.version,
        "Texts": count(pool.num_texts),
        "Tokens": count(pool.num_tokens),
        "Groups": count(len(pool.groups)),
    }
    return row | {"Built": how, "Build time": took}
