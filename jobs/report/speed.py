"""How fast, against the previous night, plain decoding and the forecast; and why: which drafts were accepted."""

from laserbatch.jobs.formatting import (
    MISSING,
    SOURCE_LABELS,
    count,
    counted,
    decimal,
    percent,
    rate,
    ratio,
    seconds,
    times,
)
from laserbatch.jobs.report.blocks import (
    OTHER,
    PLAIN,
    PREVIOUS_NIGHT,
    SIDE_COLOURS,
    TONIGHT,
    Block,
    Figure,
    Note,
    Section,
    Table,
)
from laserbatch.jobs.report.charts import Series, grouped_bars, lines, stacked_shares
from laserbatch.jobs.report.sides import Side, speed_up, total
from laserbatch.pipeline.storage.manifest import RunManifest
from laserbatch.pipeline.storage.stats import DecodingStats

PASSES = (
    ("plain", "plain decoding", PLAIN),
    ("previous_night", "previous night", PREVIOUS_NIGHT),
    ("tonight", "tonight", TONIGHT),
)
SOURCE_COLOURS = {"pool": "#cc79a7", "previous": "#0072b2", "prompt": "#e69f00", "output": "#009e73", "target": PLAIN}
DRAFTING = [name for name in SOURCE_LABELS if name != "target"]


def speed_section(manifest: RunManifest, sides: list[Side]) -> Section:
    """The section "Speed"."""
    sides = [side for side in sides if side.tonight]
    if not sides:
        return Section("speed", "Speed", "", [Note("No text was generated tonight, so there is no speed to show.")])
    passes = [one for one in PASSES if any(getattr(side, one[0]) for side in sides)]
    labels = [side.label for side in sides]
    a_second, a_step = (
        [
            Series(name, [getattr(getattr(side, key), measured, None) for side in sides], colour)
            for key, name, colour in passes
        ]
        for measured in ("tokens_per_s", "tokens_per_step")
    )
    caption = f"Tokens written, divided by the seconds of writing{_workers(manifest)}."
    step_caption = "Accepted draft tokens per step, and the bonus token that each step adds."
    blocks: list[Block] = [
        grouped_bars("Tokens per second", labels, a_second, "tokens per second", rate, caption),
        grouped_bars("Tokens per step", labels, a_step, "tokens per verification step", decimal, step_caption),
    ]
    present = {key for key, _, _ in passes}
    if "previous_night" not in present:
        blocks.append(Note("This is the first night of the workspace: there is no earlier one to compare with."))
    if "plain" not in present:
        blocks.append(
            Note("Nothing was decoded plainly in this run, so there is no speed-up over plain decoding to show.")
        )
    verifier = manifest.settings.get("decoding", {}).get("verifier")
    blocks.append(_table(sides, f"tonight ({verifier})" if verifier else "tonight"))
    forecast = [side for side in sides if side.figures.budget]
    if forecast:
        blocks.append(_forecast(forecast))
    return Section("speed", "Speed", _lead(sides), blocks)


def _lead(sides: list[Side]) -> str:
    tonight = total(side.tonight for side in sides)
    pace = f"{rate(tonight.tokens_per_s)} tokens a second, {decimal(tonight.tokens_per_step)} a step"
    factors = [(speed_up(sides, "plain"), "plain decoding"), (speed_up(sides, "previous_night"), "the previous night")]
    known = [f"{times(factor)} the speed of {name}" for factor, name in factors if factor is not None]
    lead = f"{pace}: {' and '.join(known)}." if known else f"{pace}."
    if tonight.num_rewritten:
        lead += (
            f" {counted(tonight.num_rewritten, 'text')} had run on to their limit under relaxed verification, and "
            "were written again as plain decoding writes them."
        )
    return lead


def _workers(manifest: RunManifest) -> str:
    workers = manifest.workers
    if workers is None:
        return ""
    return f" by {counted(workers.num_workers, 'worker')}, {counted(workers.num_threads, 'thread')} each"


def _table(sides: list[Side], tonight_name: str) -> Table:
    rows, strong = [], set()
    for side in sides:
        for key, name, _ in reversed(PASSES):
            stats: DecodingStats | None = getattr(side, key)
            if stats is None:
                continue
            if key == "tonight":
                strong.add(len(rows))
            factor = MISSING
            if side.plain and key != "plain":
                factor = times(ratio(stats.tokens_per_s, side.plain.tokens_per_s))
            rows.append(
                [
                    side.label,
                    tonight_name if key == "tonight" else name,
                    *map(count, (stats.num_texts, stats.num_tokens, stats.num_steps)),
                    decimal(ratio(stats.num_tokens, stats.num_texts), 0),
                    percent(ratio(stats.finish_reasons.get("length", 0), stats.num_texts), 1),
                    seconds(stats.wall_s),
                    rate(stats.tokens_per_s),
                    decimal(stats.acceptance_length),
                    decimal(stats.tokens_per_step),
                    factor,
                ]
            )
    columns = ["Side", "Pass", "Texts", "Tokens", "Steps", "Tokens/text", "Cut", "Time", "Tokens/s"]
    return Table(
        "Speed, in numbers",
        [*columns, "Acceptance length", "Tokens/step", "vs plain"],
        rows,
        caption=(
            "Acceptance length: mean accepted draft tokens per step, the bonus token not counted. "
            "Tokens per step: acceptance length + 1, the bonus token counted. "
            "“vs plain” is the factor of tokens per second. Cut: texts that ended at the token limit."
        ),
        left=frozenset({0, 1}),
        strong_rows=frozenset(strong),
    )


def _forecast(sides: list[Side]) -> Table:
    """How much was drafted and why, with what was forecast of it beside what came."""
    rows = []
    for side in sides:
        budget, forecast = side.figures.budget, side.figures.budget.forecast
        rows.append(
            [
                side.label,
                count(budget.max_draft_tokens),
                decimal(budget.min_acceptance) if budget.max_draft_tokens else MISSING,
                decimal(forecast.mean_drafted),
                decimal(side.tonight.drafted_per_step),
                decimal(forecast.tokens_per_step),
                decimal(side.tonight.tokens_per_step),
                times(forecast.speed_up) if budget.max_draft_tokens else MISSING,
                forecast.reason,
            ]
        )
    words = (
        "Side, Largest tree, Threshold, Drafted/step; forecast, realised, Tokens/step; forecast, realised, "
        "vs plain; full batches, Why"
    )
    return Table(
        "How much was drafted, and what was forecast of it",
        [word.replace(";", ",") for word in words.split(", ")],
        rows,
        caption=(
            "Threshold: a token whose path was estimated less likely to be accepted was not drafted. Forecasts are of "
            "replays of the texts that the pool was calibrated with; where these were not written with relaxed drafts "
            "from it, a relaxed verifier accepts more. Full batches: prompts, and the ends of shards, are not counted."
        ),
        left=frozenset({0, 8}),
    )


def acceptance_section(sides: list[Side]) -> Section:
    """The section "Acceptance"."""
    sides = [side for side in sides if side.tonight]
    drafting = [side for side in sides if side.tonight.num_drafted]
    if not drafting:
        reason = "nothing was drafted" if sides else "no text was generated"
        return Section("acceptance", "Acceptance", "", [Note(f"There is no acceptance to show: {reason} tonight.")])
    night = total(side.tonight for side in drafting)
    lead = (
        f"{percent(ratio(night.num_accepted, night.num_tokens))} of the written tokens were drafted; a step was "
        f"offered {decimal(night.drafted_per_step, 1)} draft tokens and took "
        f"{decimal(night.acceptance_length)} of them."
    )
    return Section("acceptance", "Acceptance", lead, [_origins(sides), _by_depth(drafting), _by_source(drafting)])


def _origins(sides: list[Side]) -> Figure:
    drafted = [name for name in DRAFTING if any(_is_used(side.tonight, name) for side in sides)]
    by_source = [side.tonight.accepted_by_source for side in sides]
    series = [
        Series(SOURCE_LABELS[name], [counts.get(name, 0) for counts in by_source], SOURCE_COLOURS[name])
        for name in drafted
    ]
    own = [
        side.tonight.num_tokens - sum(counts.get(name, 0) for name in drafted)
        for side, counts in zip(sides, by_source, strict=True)
    ]
    return stacked_shares(
        "Where the written tokens came from",
        [side.label for side in sides],
        [*series, Series(SOURCE_LABELS["target"], own, SOURCE_COLOURS["target"])],
        "share of the side's written tokens",
        "“The model itself”: bonus tokens and corrections, one a step.",
    )


def _by_depth(sides: list[Side]) -> Figure:
    series = []
    for side in sides:
        shares = [number / side.tonight.num_steps for number in side.tonight.accepted_by_depth]
        series.append(Series(side.label, shares, SIDE_COLOURS.get(side.name, OTHER)))
    return lines(
        "How far drafts are accepted",
        series,
        "depth in the draft tree",
        "steps that accepted at least so many tokens",
        "The sum of a line's points is the acceptance length.",
    )


def _by_source(sides: list[Side]) -> Table:
    rows = []
    for side in sides:
        for name in DRAFTING:
            if _is_used(side.tonight, name):
                drafted = side.tonight.drafted_by_source.get(name, 0)
                accepted = side.tonight.accepted_by_source.get(name, 0)
                shown = percent(ratio(accepted, drafted)) if drafted else MISSING
                rows.append([side.label, SOURCE_LABELS[name], count(drafted), count(accepted), shown])
    return Table(
        "Drafted and accepted by source",
        ["Side", "Source", "Drafted", "Accepted", "Accepted of drafted"],
        rows,
        caption="A draft is a tree, of which one path at most is accepted: shares are of all its tokens.",
        left=frozenset({0, 1}),
    )


def _is_used(stats: DecodingStats, source: str) -> bool:
    return bool(stats.drafted_by_source.get(source) or stats.accepted_by_source.get(source))
