"""Shared parts of commands that a user sees: progress, summaries, exit codes, help.

Progress and log lines go to standard error, summaries to standard output: `laserbatch ... --json | jq` works.
"""

import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from laserbatch.jobs.events import emit
from laserbatch.jobs.formatting import MISSING, rate, seconds, significant
from laserbatch.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from laserbatch.jobs.report.blocks import Table as ReportTable

logger = logging.getLogger("laserbatch")
stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False, width=None if sys.stdout.isatty() else 140)

PLAIN_LINE_EVERY_S = 5.0
EVENT_EVERY_S = 30.0
TABLE_FILES = ("users.parquet", "items.parquet", "interactions.parquet")
WORKSPACE_FOLDERS = ("runs", "pools", "experiments", "recommendations", "forgotten", "step-costs")  # nights write them


class ExitCode(IntEnum):
    """The documented exit codes of every command."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    BAD_INPUT = 3
    RUN_FAILED = 4
    BUSY = 5
    UNAVAILABLE = 6
    INTERRUPTED = 130
    NOT_READ = 141
    TERMINATED = 143


def _can_be_written(path: Path) -> Path:
    """Return the path of an option. Raises ConfigError if it cannot be written, or would replace what nights need."""
    place = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    place = place.parent if place == path.absolute() and place.is_file() else place
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        reason = "may not be written" if place.is_dir() else "is a file, not a folder"
        raise ConfigError(f"{path} cannot be written: {place} {reason}. Give another path.")
    target = path.resolve()
    is_table = target.is_file() and target.name in TABLE_FILES and (target.parent / TABLE_FILES[0]).exists()
    precious = [target] if is_table else []
    for pattern in ("workspace.json", "*/workspace.json", *TABLE_FILES, "interactions/"):
        precious += target.glob(pattern)
    for root in target.parents:
        if (root / "workspace.json").exists() and target.relative_to(root).parts[0] in WORKSPACE_FOLDERS:
            precious.append(root)
    if precious:
        raise ConfigError(f"{path} would replace {precious[0]}, part of a workspace or of tables. Give another path.")
    return path


TO_FILE: dict[str, Any] = {"dir_okay": False, "callback": _can_be_written}  # for options that name an output
TO_FOLDER: dict[str, Any] = {"file_okay": False, "callback": _can_be_written}


class ProgressBar:
    """A running count: a bar on a terminal; in a log a line at its start, every few seconds and at its end."""

    def __init__(self, terminal: Progress, label: str, total: int | None) -> None:
        self._terminal, self._task = terminal, terminal.add_task(label, total=total, detail="", rate="")
        self._printed_s = self._noted_s = time.monotonic()
        self._printed_count: float | None = None
        self.print_state()

    def advance(self, num_done: int = 1, detail: str = "") -> None:
        """Add to the count; `detail` replaces the text behind the bar."""
        self._terminal.update(self._task, advance=num_done)
        if detail:
            self._terminal.update(self._task, detail=detail)
        now_s = time.monotonic()
        if now_s - self._printed_s >= PLAIN_LINE_EVERY_S:
            self.print_state(notes=now_s - self._noted_s >= EVENT_EVERY_S)

    def reach(self, num_done: int, detail: str) -> None:
        """Set the count; `detail` as in `advance`."""
        self.advance(num_done - int(self._terminal.tasks[self._task].completed), detail)

    def begin(self, seconds_ago: float) -> None:
        """Set when the first step began; the rate and the time left are computed from then on."""
        task = self._terminal.tasks[self._task]
        task.start_time = task.get_time() - seconds_ago

    def print_state(self, notes: bool = True, is_last: bool = False) -> None:
        """Update the rate; in a log, print the count, the rate and the time left; with `notes`, emit them.

        The last state is not printed again if the line before it had the same count.
        """
        self._printed_s = time.monotonic()
        task = self._terminal.tasks[self._task]
        elapsed_s, done, pace, left_s = task.elapsed or 0.0, f"{task.completed:.0f}", None, None
        if task.completed and elapsed_s > 0:
            pace = task.completed / elapsed_s
            left_s = None if task.total is None else (task.total - task.completed) / pace
        going = f"{rate(pace)}/s" if pace else ""
        self._terminal.update(self._task, rate=going)
        if self._terminal.disable and not (is_last and task.completed == self._printed_count):
            self._printed_count = task.completed
            done += "" if task.total is None else f"/{task.total:.0f}"
            going += f", {seconds(left_s)} left" if left_s else ""
            parts = (f"{task.description}: {done}", f"{elapsed_s:.0f} s", going, task.fields["detail"])
            print_line("  ".join(part for part in parts if part))
        if notes:
            self._noted_s = self._printed_s
            whole = None if task.total is None else int(task.total)
            emit("progress", of=task.description, done=int(task.completed), total=whole, rate=pace, left_s=left_s)


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[ProgressBar]:
    """Show a progress bar of `total` steps; None if the number of steps is unknown."""
    columns = (TextColumn("{task.description:<22}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn())
    columns += (TimeRemainingColumn(), TextColumn("{task.fields[rate]}"), TextColumn("{task.fields[detail]}"))
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as terminal:
        bar = ProgressBar(terminal, label, total)
        yield bar
        bar.print_state(is_last=True)


def say(line: str) -> None:
    """Print a line to standard error, and add it to the events of the run that is under way."""
    print_line(line)
    emit("said", line=line)


def print_line(line: str) -> None:
    """Print a line to standard error."""
    stderr.print(visible(line), markup=False, soft_wrap=True)


def visible(text: str) -> str:
    """The text without control characters, except line ends and tabs."""
    return re.sub(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]", "\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def summary(data: Mapping, as_json: bool) -> None:
    """Print the result of a command as one JSON object or as a table."""
    if as_json:
        print(json.dumps(data, indent=2, default=str, ensure_ascii=False))
    else:
        stdout.print(summary_table(data))


def summary_table(data: Mapping) -> Table:
    """The result of a command as a table; nested mappings become indented rows."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            table.add_row(Text(_title(key), "bold"), "")
            for inner, inner_value in value.items():
                table.add_row(Text(f"  {_title(inner)}"), _shown(inner_value, inner))
        else:
            table.add_row(Text(_title(key)), _shown(value, key))
    return table


def print_table(shown: "ReportTable") -> None:
    table = Table(title=shown.title, caption=shown.caption, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.title_justify = table.caption_justify = "left"
    for name in shown.rows[0]:
        table.add_column(name, justify="left" if name in shown.words else "right")
    for row in shown.rows:
        table.add_row(*(Text(visible(cell)) for cell in row.values()))
    stdout.print(table)


def _title(key: str) -> str:
    return visible(key.removeprefix("num_").replace("_", " "))


def _shown(value: object, name: str = "") -> Text:
    if value is None:
        return Text(MISSING)
    if isinstance(value, float):
        return Text(seconds(3600 * value) if name.endswith("hours") else significant(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return Text(f"{value:,}")
    if isinstance(value, Mapping):
        value = [f"{key} {_shown(inner)}" for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return Text(", ".join(str(_shown(item)) for item in value) or MISSING)
    return Text(visible(str(value)))


@dataclass(frozen=True)
class LazyCommand:
    """A command whose module is imported when it is run: `--help` and completion do not wait for torch and Ray."""

    target: str  # "module:name" of a function or a Typer app; a module without a dot is in `jobs/commands/`
    short_help: str  # the first line of the command's own help, or the whole help of an app

    def load(self, name: str):
        """Import the command and convert it with Typer."""
        module, attribute = self.target.split(":")
        loaded = getattr(import_module(module if "." in module else f"laserbatch.jobs.commands.{module}"), attribute)
        if isinstance(loaded, typer.Typer):
            loaded.rich_markup_mode = "markdown"
            command = typer.main.get_group(loaded)
            command.help = self.short_help
        else:
            alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
            alone.command(name)(loaded)
            command = typer.main.get_command(alone)
        command.name = name
        return command


def lazy_app(commands: dict[str, LazyCommand], **options: Any) -> typer.Typer:
    """An app that lists the commands by their short help and loads a command when it runs."""

    class LazyGroup(TyperGroup):
        def resolve_command(self, ctx, args):
            name, command, rest = super().resolve_command(ctx, args)
            if command is not None and name in commands:
                command = commands[name].load(name)
            return name, command, rest

    app = typer.Typer(cls=LazyGroup, no_args_is_help=True, **options)
    for name, command in commands.items():
        app.command(name, help=command.short_help)(lambda: None)
    return app
