"""How fast: tokens per second and per step, tonight against the previous night and plain decoding."""

from collections.abc import Callable, Mapping

from laserbatch.jobs.formatting import MISSING, count, counted, decimal, rate, ratio, seconds, times, whole
from laserbatch.jobs.report.blocks import Block, Figure, LegendEntry, Note, Section, Table
from laserbatch.jobs.report.budgets import budget_blocks
from laserbatch.jobs.report.charts import Series, grouped_bars
from laserbatch.jobs.report.palette import PLAIN, PREVIOUS_NIGHT, TONIGHT
from laserbatch.jobs.report.reading import Decoding, SideView, mapping, total

PASSES = (("plain", "plain decoding", PLAIN), ("previous_night", "previous night", PREVIOUS_NIGHT),
          ("tonight", "tonight", TONIGHT))  # fmt: skip


def speed_up(sides: list[SideView], over: str) -> float | None:
    """Tonight's tokens per second over another pass's, on the sides that both did; None when there is none.

    Parameters
    ----------
    over : "plain" or "previous_night".
    """
    both = [side for side in sides if side.tonight and getattr(side, over)]
    mine, other = total(side.tonight for side in both), total(getattr(side, over) for side in both)
    return ratio(mine.tokens_per_s, other.tokens_per_s) if mine and other else None


def speed_section(manifest: Mapping, sides: list[SideView]) -> Section:
    """The section "Speed"."""
    sides = [side for side in sides if side.tonight]
    if not sides:
        return Section("speed", "Speed", "", [Note("No text was generated tonight, so there is no speed to show.")])
    blocks: list[Block] = []
    passes = [item for item in PASSES if any(getattr(side, item[0]) for side in sides)]
    present = {key for key, _, _ in passes}
    legend = [LegendEntry(name, colour) for _, name, colour in passes]
    blocks.append(
        Figure(
            "Tokens per second",
            _chart(sides, passes, "tokens per second", lambda decoding: decoding.tokens_per_s, rate),
            caption=f"Tokens written, divided by the seconds of writing{_workers(manifest)}.",
            legend=legend,
        )
    )
    blocks.append(
        Figure(
            "Tokens per step",
            _chart(
                sides, passes, "tokens per verification step", lambda decoding: decoding.tokens_per_step, _two_digits
            ),
            caption="Accepted draft tokens per step, and the bonus token that each step adds.",
            legend=legend,
        )
    )
    if "previous_night" not in present:
        blocks.append(Note("This is the first night of the workspace: there is no earlier one to compare with."))
    if "plain" not in present:
        blocks.append(
            Note("Nothing was decoded plainly in this run, so there is no speed-up over plain decoding to show.")
        )
    verifier = mapping(mapping(manifest.get("settings")).get("decoding")).get("verifier")
    blocks.append(_table(sides, f"tonight ({verifier})" if verifier else "tonight"))
    blocks += budget_blocks(sides)
    return Section("speed", "Speed", _lead(sides), blocks)


def _lead(sides: list[SideView]) -> str:
    tonight = total(side.tonight for side in sides)
    parts = [f"{rate(tonight.tokens_per_s)} tokens a second, {decimal(tonight.tokens_per_step)} a step"]
    factors = [(speed_up(sides, "plain"), "plain decoding"), (speed_up(sides, "previous_night"), "the previous night")]
    known = [f"{times(factor)} the speed of {name}" for factor, name in factors if factor is not None]
    return ": ".join([*parts, " and ".join(known)]) + "." if known else parts[0] + "."


def _chart(sides, passes, y_name: str, value: Callable[[Decoding], float | None], show: Callable[[object], str]):
    series = [
        Series(name, [value(part) if (part := getattr(side, key)) else None for side in sides], colour)
        for key, name, colour in passes
    ]
    return grouped_bars([side.label for side in sides], series, y_name, show)


def _workers(manifest: Mapping) -> str:
    workers = mapping(manifest.get("workers"))
    if not whole(workers.get("num")):
        return ""
    threads = f", {counted(workers['num_threads'], 'thread')} each" if whole(workers.get("num_threads")) else ""
    return f" by {counted(workers['num'], 'worker')}{threads}"


def _two_digits(value: object) -> str:
    return decimal(value, 2)


def _table(sides: list[SideView], tonight_name: str) -> Table:
    rows, strong = [], set()
    for side in sides:
        for key, name, _ in reversed(PASSES):
            part: Decoding | None = getattr(side, key)
            if part is None:
                continue
            if key == "tonight":
                strong.add(len(rows))
            rows.append(
                [
                    side.label,
                    tonight_name if key == "tonight" else name,
                    count(part.num_texts),
                    count(part.num_tokens),
                    count(part.num_steps),
                    seconds(part.wall_s),
                    rate(part.tokens_per_s),
                    decimal(part.acceptance_length),
                    decimal(part.tokens_per_step),
                    times(ratio(part.tokens_per_s, side.plain.tokens_per_s))
                    if side.plain and key != "plain"
                    else MISSING,
                ]
            )
    columns = [
        "Side",
        "Pass",
        "Texts",
        "Tokens",
        "Steps",
        "Time",
        "Tokens/s",
        "Acceptance length",
        "Tokens/step",
        "vs plain",
    ]
    return Table(
        "Speed, in numbers",
        columns,
        rows,
        caption=(
            "Acceptance length: mean accepted draft tokens per step, the bonus token not counted. "
            "Tokens per step: acceptance length + 1, the bonus token counted. "
            "“vs plain” is the factor of tokens per second."
        ),
        left=frozenset({0, 1}),
        strong_rows=frozenset(strong),
    )
