"""Routing and pools: which groups entities were sent to, what they drafted from, what was built for the next night."""

from collections.abc import Mapping
from typing import Any

from scipy.stats import binomtest

from laserbatch.jobs.formatting import MISSING, ROUTE_LABELS, count, counted, decimal, seconds
from laserbatch.jobs.report.blocks import OTHER, SIDE_COLOURS, Block, Figure, Note, Section, Table
from laserbatch.jobs.report.charts import Series, lines, stacked_shares
from laserbatch.jobs.report.sides import SIDE_LABELS, Side
from laserbatch.pipeline.storage.manifest import PoolBuilt, PoolFigures, RunManifest

ROUTE_COLOURS = {
    "collaborative": "#0b4f8a",
    "attribute": "#7fb2de",
    "random": "#e69f00",
    "global": "#f0d58a",
    "none": "#d5dae0",
}


def pools_section(manifest: RunManifest, sides: list[Side]) -> Section:
    """The section "Router and pools"."""
    used = {name: pool for name in SIDE_LABELS if (pool := getattr(manifest.pools, name)) is not None}
    built = manifest.pools_built
    routed = [side for side in sides if any(side.figures.routes.values())]
    blocks: list[Block] = [_routes(routed) if routed else Note("No entity was routed to a pool tonight.")]
    lacking = [side.label for side in sides if side.name not in used]
    if lacking:
        blocks.append(Note(f"{' and '.join(lacking)} had no pool to draft from."))
    calibrated = {name: pool.calibration for name, pool in built.items() if pool.calibration is not None}
    if calibrated:
        blocks.append(_reliability(calibrated))
    elif built:
        blocks.append(Note("The pools built tonight are not calibrated: too few texts, or no replays wanted."))
    rows = [
        _row(name, use, pool)
        for name in SIDE_LABELS
        for use, pool in (("tonight", used.get(name)), ("next night", built.get(name)))
        if pool is not None
    ]
    if rows:
        blocks.append(_table(rows))
    if not built:
        blocks.append(Note("No pool was built from tonight's texts."))
    return Section("pools", "Router and pools", _lead(used), blocks)


def how_built(pool: PoolBuilt) -> str:
    """How a pool was made, in a few words."""
    sorted_texts = f"{counted(pool.num_texts_changed, 'text')} sorted"
    return f"merged from the earlier version, {sorted_texts}" if pool.incremental else "whole"


def _lead(used: Mapping[str, PoolFigures]) -> str:
    if not used:
        return ""
    texts, tokens = sum(pool.num_texts for pool in used.values()), sum(pool.num_tokens for pool in used.values())
    groups = sum(len(pool.groups) for pool in used.values())
    return (
        f"Tonight could draft from {counted(texts, 'earlier text')} ({counted(tokens, 'token')}) "
        f"in {counted(groups, 'group')}; pools are frozen during a run."
    )


def _routes(sides: list[Side]) -> Figure:
    routes = [side.figures.routes for side in sides]
    return stacked_shares(
        "Where the router sent entities",
        [side.label for side in sides],
        [
            Series(label, [counts.get(name, 0) for counts in routes], ROUTE_COLOURS[name])
            for name, label in ROUTE_LABELS.items()
            if any(counts.get(name) for counts in routes)
        ],
        "share of the side's entities",
        "Collaborative: known well enough for a cluster of tastes. Attribute: the others, and cold ones.",
    )


def _reliability(calibrated: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Estimated acceptance of drafts against what replays of held-back texts accepted."""
    series = []
    for name, calibration in calibrated.items():
        bins = [one for one in calibration["reliability"]["bins"] if one["num_nodes"]]
        shares = [one["share_accepted"] for one in bins]
        intervals = [interval(share, one["num_nodes"]) for share, one in zip(shares, bins, strict=True)]
        errors = [(share - low, high - share) for share, (low, high) in zip(shares, intervals, strict=True)]
        places = [one["mean_estimate"] for one in bins]
        series.append(Series(SIDE_LABELS[name], shares, SIDE_COLOURS.get(name, OTHER), places, errors))
    return lines(
        "Estimated and realised acceptance",
        series,
        "estimated acceptance",
        "accepted",
        "Drafted tokens of held-back texts by the estimated acceptance of their path; bars: 95 % intervals, tokens "
        "taken as independent. On the dashed line, estimates are right. Replays are greedy; a relaxed verifier accepts "
        "more.",
        diagonal=True,
    )


def interval(share: float, num: int) -> tuple[float, float]:
    """95 % interval of a share of `num` independent trials (Wilson 1927)."""
    found = binomtest(round(share * num), num).proportion_ci(0.95, "wilson")
    return min(found.low, share), max(found.high, share)


def _row(name: str, use: str, pool: PoolFigures) -> list[str]:
    counts = map(count, (pool.num_texts, pool.num_tokens, len(pool.groups)))
    row = [SIDE_LABELS[name], use, pool.version, *counts]
    if not isinstance(pool, PoolBuilt):
        return [*row, *[MISSING] * 4]
    checked = pool.calibration["reliability"] if pool.calibration is not None else {}
    error = decimal(checked.get("expected_calibration_error"), 3)
    if checked.get("error_by_chance") is not None:
        error += f" ({decimal(checked['error_by_chance'], 3)})"
    return [*row, how_built(pool), count(pool.num_texts_left_out), seconds(pool.build_s), error]


def _table(rows: list[list[str]]) -> Table:
    words = "Side, Use, Version, Texts, Tokens, Groups, Built, Texts left out, Build time, Error (by chance)"
    return Table(
        "Pools, in numbers",
        words.split(", "),
        rows,
        caption=(
            "Left out: the texts that draft least, for which pool_building.max_tokens leaves no room. Error: mean "
            "distance between estimated and realised acceptance, on texts that estimates were not fitted to; by "
            "chance: what it would be on average, were estimates right."
        ),
        left=frozenset({0, 1, 2, 6}),
    )
