"""Routing and pools: which groups entities were sent to, what they drafted from, what was built for the next night."""

from collections.abc import Mapping

from laserbatch.jobs.formatting import MISSING, count, counted, finite, seconds, whole
from laserbatch.jobs.report.blocks import Block, Figure, LegendEntry, Note, Section, Table
from laserbatch.jobs.report.calibration import calibration_blocks
from laserbatch.jobs.report.charts import Part, stacked_shares
from laserbatch.jobs.report.palette import DARK_COLOURS, OTHER, ROUTE_COLOURS, ROUTE_LABELS
from laserbatch.jobs.report.reading import SideView, counts, mapping, side_label


def pools_section(manifest: Mapping, sides: list[SideView]) -> Section:
    """The section "Router and pools"."""
    used, built = mapping(manifest.get("pools")), mapping(manifest.get("pools_built"))
    blocks: list[Block] = []
    routed = [side for side in sides if sum(counts(side.data.get("routes")).values())]
    blocks.append(_routes(routed) if routed else Note("No entity was routed to a pool tonight."))
    blocks += [Note(sentence) for sentence in _missing(used, sides)]
    blocks += calibration_blocks(built)
    uses = (("tonight", used), ("next night", built))
    names = dict.fromkeys([*used, *built])
    rows = [_row(name, use, mapping(pools[name])) for name in names for use, pools in uses if mapping(pools.get(name))]
    if rows:
        blocks.append(_table(rows))
    if not any(mapping(pool) for pool in built.values()):
        blocks.append(Note("No pool was built from tonight's texts."))
    return Section("pools", "Router and pools", _lead(used), blocks)


def _missing(used: Mapping, sides: list[SideView]) -> list[str]:
    """What cannot be said of the pools that were drafted from, in sentences."""
    missing = [side.label for side in sides if not mapping(used.get(side.name))]
    if not missing:
        return []
    if used.get("version"):  # the pools of a version are listed by side only when the run looked into them
        return [f"Pool version {used['version']} was there; its texts and groups were not recorded in this run."]
    return [f"{' and '.join(missing)} had no pool to draft from."]


def _lead(used: Mapping) -> str:
    pools = [mapping(pool) for pool in used.values() if mapping(pool)]
    if not pools:
        return ""
    texts, tokens = (sum(whole(pool.get(key)) for pool in pools) for key in ("num_texts", "num_tokens"))
    groups = sum(len(mapping(pool.get("groups"))) for pool in pools)
    return (
        f"Tonight could draft from {counted(texts, 'earlier text')} ({counted(tokens, 'token')}) "
        f"in {counted(groups, 'group')}; pools are frozen during a run."
    )


def _routes(sides: list[SideView]) -> Figure:
    rows, names = [], {}
    for side in sides:
        routes = counts(side.data.get("routes"))
        ordered = [name for name in ROUTE_LABELS if name in routes] + sorted(set(routes) - set(ROUTE_LABELS))
        names |= {name: None for name in ordered if routes[name]}
        colours = {name: ROUTE_COLOURS.get(name, OTHER) for name in ordered}
        parts = [
            Part(ROUTE_LABELS.get(name, name), routes[name], colours[name], colours[name] in DARK_COLOURS)
            for name in ordered
        ]
        rows.append((side.label, parts))
    return Figure(
        "Where the router sent entities",
        stacked_shares(rows, "share of the side's entities"),
        legend=[LegendEntry(ROUTE_LABELS.get(name, name), ROUTE_COLOURS.get(name, OTHER)) for name in names],
        caption="Collaborative: known well enough for a cluster of tastes. Attribute: the others, and cold ones.",
    )


def _row(name: str, use: str, pool: Mapping) -> list[str]:
    return [
        side_label(name),
        use,
        str(pool.get("version") or MISSING),
        count(pool.get("num_texts")),
        count(pool.get("num_tokens")),
        count(len(mapping(pool.get("groups")))),
        how_built(pool) or MISSING,
        count(pool.get("num_texts_left_out")),
        seconds(pool.get("build_s")),
    ]


def _table(rows: list[list[str]]) -> Table:
    columns = [
        "Side",
        "Use",
        "Version",
        "Texts",
        "Tokens",
        "Groups",
        "Built",
        "Texts left out",
        "Build time",
    ]
    caption = (
        "Built: what had to be sorted; the files are the same. Left out: the texts that draft least, for which "
        "pool_building.max_tokens leaves no room."
    )
    return Table("Pools, in numbers", columns, rows, caption, left=frozenset({0, 1, 2, 6}))


def how_built(pool: Mapping) -> str:
    """How a manifest's `pools_built` says that a pool was made; empty where it does not."""
    incremental = pool.get("incremental")
    if not isinstance(incremental, bool):
        return ""
    if not incremental:
        return "whole"
    changed = finite(pool.get("num_texts_changed"))
    sorted_texts = "" if changed is None else f", {counted(changed, 'text')} sorted"
    return f"merged from the earlier version{sorted_texts}"
