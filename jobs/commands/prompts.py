"""`laserbatch prompts`: the tokens of prompts by part, and the savings of shorter ones."""

import datetime
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import typer

from laserbatch.jobs.console import print_table, stdout, summary
from laserbatch.jobs.formatting import decimal, percent
from laserbatch.jobs.report.blocks import Table
from laserbatch.jobs.settings import CONFIG, JSON, load_settings
from laserbatch.jobs.stages.inputs import require_plain_words, require_template_columns, say_left_out
from laserbatch.jobs.stages.night import parse_date
from laserbatch.pipeline.decoding.model.folder import load_tokenizer
from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge.chat_format import encode_content
from laserbatch.pipeline.knowledge.histories import labels_of
from laserbatch.pipeline.knowledge.prompts import RenderedPrompt, Shown, render_shown
from laserbatch.pipeline.knowledge.questions import SideQuestions
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.tables.read import read_tables

NUM_SAMPLED = 200  # entities a side, spread evenly over its table

app = typer.Typer(no_args_is_help=True, add_completion=False)


@dataclass(frozen=True)
class PromptPart:
    """A part of a side's prompts, in tokens a prompt."""

    part: str
    tokens: float
    share: float


@dataclass(frozen=True)
class PromptReport:
    """The tokens of the prompts of a side, by part."""

    side: str
    template: str
    num_sampled: int
    tokens: float  # a prompt
    parts: list[PromptPart]
    num_events: float  # shown a prompt
    num_events_left_out: float
    saved_by_half: float  # tokens a prompt that half the history would save


@app.command()
def report(
    config: Path | None = CONFIG,
    date: str | None = typer.Option(
        None, show_default="all interactions", help="Use what was known at the end of this day."
    ),
    as_json: bool = JSON,
) -> None:
    """Show by field what prompts spend their tokens on, and what half the history saves.

    Example: `laserbatch prompts report --config laserbatch.yaml`
    """
    settings = load_settings(config)
    path, as_of = settings.tables.required_path, parse_date(date) if date else None
    tables = read_tables(path, as_of=as_of, keep_duplicates=settings.tables.keep_duplicates)
    require_plain_words(settings)
    say_left_out(settings, tables.personal)
    tokenizer = load_tokenizer(settings.model_dir, settings.decoding.adapter)
    labels = labels_of(tables.interactions, settings.knowledge.words.events)
    newest = pc.max(tables.interactions["timestamp"]).as_py()
    day = as_of or (newest.date() if newest else datetime.date.today())  # a chat template may print the night's
    reports = []
    for side in SIDES:
        require_template_columns(path, settings, side)
        template = settings.template(side, labels)
        shown = SideQuestions(tables, side, template, "").sampled(NUM_SAMPLED)
        render = partial(render_shown, template, tokenizer=tokenizer, date=day,
                         max_prompt_tokens=settings.knowledge.max_prompt_tokens)  # fmt: skip
        reports.append(_report(template, shown, tokenizer, render))
    if as_json:
        summary({"sides": [asdict(report) for report in reports]}, as_json=True)
        return
    for report in reports:
        _print(report)


def _report(template, shown: list[Shown], tokenizer, render: Callable[[Shown], RenderedPrompt]) -> PromptReport:
    def size(of: Shown) -> int:
        return len(render(of).token_ids)

    sizes, history_sizes, halves, by_part = [], [], [], {}
    for entity in shown:
        try:
            rendered = render(entity)
        except RowError:  # too long or without a title: a night says so
            continue
        events = entity.events[len(entity.events) - rendered.num_history :]
        sizes.append(len(rendered.token_ids))
        history_sizes.append((rendered.num_history, rendered.num_history_dropped))
        halves.append(size(replace(entity, events=events[len(events) // 2 :])))
        lines = [] if entity.attributes is None else entity.attributes.split("\n")
        for line, name in zip(lines, _names(template, lines), strict=True):
            by_part[name] = by_part.get(name, 0) + len(encode_content(tokenizer, f"{line}\n"))
        by_part["history"] = by_part.get("history", 0) + sizes[-1] - size(replace(entity, events=()))
    num, total = max(len(sizes), 1), sum(sizes)
    by_part = {"question and chat format": total - sum(by_part.values())} | by_part
    parts = [PromptPart(name, tokens / num, tokens / max(total, 1)) for name, tokens in by_part.items() if tokens]
    num_shown, num_left_out = np.array(history_sizes, np.float64).reshape(-1, 2).sum(axis=0) / num
    saved = (total - sum(halves)) / num
    return PromptReport(
        template.side, template.identity, len(sizes), total / num, parts, num_shown, num_left_out, saved
    )


def _names(template, lines: list[str]) -> list[str]:
    """The column of each attribute's line, by the label in it."""
    before, has_label, rest = template.attributes.line.partition("{label}")
    if not has_label:
        return ["attributes"] * len(lines)
    after = rest.partition("{value}")[0]
    column = {label: name for name, label in template.attributes.labels.items()}
    labels = [line[len(before) :].partition(after)[0] if after else line for line in lines]
    return [column.get(label, label) for label in labels]


def _print(report: PromptReport) -> None:
    rows = [
        {"part": part.part, "tokens a prompt": decimal(part.tokens), "share": percent(part.share)}
        for part in report.parts
    ]
    size = f"{decimal(report.tokens)} tokens a prompt"
    title = f"{report.side}s, {report.template}: {size} ({report.num_sampled} sampled)"
    print_table(Table(title, rows, words=("part",)))
    if report.num_events:
        stdout.print(
            f"{decimal(report.num_events)} events are shown, {decimal(report.num_events_left_out)} left out. Half of "
            f"them would save {decimal(report.saved_by_half)} tokens, {percent(report.saved_by_half / report.tokens)} "
            "of a prompt: `history.max_events`, `max_days`, `half_life`, `deduplicate` of the template shorten it.\n",
            markup=False,
            soft_wrap=True,
        )
