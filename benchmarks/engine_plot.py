"""The page of `engine.py`: speed over plain decoding by batch size and by budget, and the figures. Measures nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from common import command_line, machine
from engine_systems import ADAPTIVE, PEER, PLAIN

from laserbatch.jobs.formatting import decimal
from laserbatch.jobs.report.blocks import Figure, Note, Page, Phrase, Section, Table
from laserbatch.jobs.report.charts import Series, grouped_bars
from laserbatch.jobs.report.page import render_page
from laserbatch.pipeline.storage.atomic import write_text

COLOURS = ("#8b95a1", "#e69f00", "#009e73", "#cc79a7", "#7fb2de", "#0b4f8a")
DRAWN = (PEER, "own-text", "rrp", "resd", "crp", "laser")


def write_plot(content: Mapping, path: Path) -> None:
    """Write one self-contained HTML file of what `engine.py` measured."""
    write_text(render_page(page_of(content)), path)


def page_of(content: Mapping) -> Page:
    """Charts of every task, and the figures that were asked for."""
    tasks = list(dict.fromkeys(row["task"] for row in content["rows"]))
    found = machine()
    return Page(
        title=f"Speed of the engine: {content['model']}",
        run_id=content["model"],
        status="",
        facts=[found["gpu"] or found["cpu"], f"{content['dtype']}; medians of ratios within one repetition"],
        headline=[
            Phrase("Speculative decoding, in times the speed of "),
            Phrase("plain decoding", True),
            Phrase(" of the same engine"),
        ],
        key_figures=[],
        sections=[*(_task_section(task, content["rows"]) for task in tasks), _figures_section(content["figures"])],
        made_by=command_line(),
    )


def _task_section(task: str, rows: Sequence[Mapping]) -> Section:
    rows = [row for row in rows if row["task"] == task]
    batches = sorted({row["batch"] for row in rows})
    systems = [name for name in DRAWN if any(row["system"] == name for row in rows)]
    by_batch = [
        Series(name, [_speed_up(rows, name, batch) for batch in batches], COLOURS[DRAWN.index(name)])
        for name in systems
    ]
    blocks = [
        _chart("By batch size, adaptive budgets", [f"batch {batch}" for batch in batches], by_batch),
        *(_budget_chart(name, rows, batches) for name in ("resd", "laser") if name in systems),
    ]
    return Section(task, f"Task {task}", "Plain decoding is 1.", blocks)


def _budget_chart(system: str, rows: Sequence[Mapping], batches: Sequence[int]) -> Figure:
    budgets = sorted({row["budget"] for row in rows if row["system"] == system and isinstance(row["budget"], int)})
    series = [
        Series(
            f"batch {batch}",
            [_speed_up(rows, system, batch, budget) for budget in (*budgets, ADAPTIVE)],
            COLOURS[place % len(COLOURS)],
        )
        for place, batch in enumerate(batches)
    ]
    return _chart(f"{system}, by budget", [*(f"K={budget}" for budget in budgets), ADAPTIVE], series)


def _chart(title: str, categories: Sequence[str], series: Sequence[Series]) -> Figure:
    return grouped_bars(title, categories, series, "times plain decoding", decimal, wide=True)


def _speed_up(rows: Sequence[Mapping], system: str, batch: int, budget: str | int = ADAPTIVE) -> float | None:
    wanted = None if system in (PEER, PLAIN) else budget
    found = [row for row in rows if (row["system"], row["batch"], row["budget"]) == (system, batch, wanted)]
    return found[0]["ratio_to_plain"].median if found else None


def _figures_section(figures: Sequence) -> Section:
    if not figures:
        return Section("figures", "Figures asked for", "", [Note("None was asked for of what was measured.")])
    rows = [
        [one.name, decimal(one.measured), f"{one.comparison} {one.wanted:g}", "met" if one.met else "not met"]
        for one in sorted(figures, key=lambda one: one.met)
    ]
    return Section("figures", "Figures asked for", "", [Table("", ["", "Measured", "Wanted", ""], rows)])
