"""Writes metrics for Prometheus while a night runs and after it ends: a file for the node exporter.

An extension has its own file, and its metrics another prefix, such as `laserbatch_lists`.
"""

import datetime
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

from laserbatch.jobs.console import ExitCode
from laserbatch.jobs.events import last_attempt
from laserbatch.jobs.failures import exit_code_of, line_of
from laserbatch.jobs.formatting import ratio
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages.publishing import ends_no_night
from laserbatch.jobs.writing import cost_so_far, current_stage, sides_so_far, writing_state
from laserbatch.pipeline.errors import LaserbatchError
from laserbatch.pipeline.storage.atomic import write_text
from laserbatch.pipeline.storage.manifest import RunManifest
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.workspace import Workspace

logger = logging.getLogger("laserbatch")

NAME = "laserbatch"
REFRESH_S = 15.0  # between two writes while a night runs
OUTCOMES = ("generated", "carried_over", "quarantined")
OF_SIDES = (
    ("quarantine_share", "Share of a side's entities in quarantine.",
     lambda figures: ratio(figures.num_quarantined, figures.num_entities) or 0.0),
    ("tokens", "Tokens written.", lambda figures: figures.stats.num_tokens),
    ("tokens_per_second", "Tokens written per second of writing.", lambda figures: figures.stats.tokens_per_s),
    ("tokens_per_step", "Tokens per verification step, the bonus token counted.",
     lambda figures: figures.stats.tokens_per_step),
)  # fmt: skip
OF_WRITING = (
    ("shards_planned", "Shards of the stage that is writing or wrote last.", "num_shards"),
    ("shards_done", "Finished shards of that stage.", "num_shards_done"),
    ("rows_planned", "Rows of that stage's shards.", "num_rows"),
    ("rows_done", "Rows of that stage's finished shards, quarantined rows included.", "num_rows_done"),
    ("left_seconds", "Estimated time for that stage's other shards, from expected tokens or rows.", "left_s"),
)
ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


@dataclass
class NightMetrics:
    """A night's manifest, None until the run is opened, its exit code and its start time."""

    manifest: RunManifest | None = None
    exit_code: int = 0
    start_s: float = field(default_factory=time.time)


@dataclass
class _Page:
    """Lines of the exposition format: the samples of a metric follow its help and type.

    Every sample has the path of its workspace as a label, so that one Prometheus tells workspaces of a host apart.
    """

    prefix: str
    workspace: Path
    lines: list[str] = field(default_factory=list)

    def add(self, name: str, about: str, *samples: tuple[Mapping[str, str], float | None]) -> None:
        known = [(labels, value) for labels, value in samples if value is not None and math.isfinite(value)]
        if not known:
            return
        name = f"{self.prefix}_{name}"
        self.lines += [f"# HELP {name} {about}", f"# TYPE {name} gauge"]
        for labels, value in known:
            label_pairs = ",".join([self.label, *(_label(key, text) for key, text in labels.items())])
            self.lines.append(f"{name}{{{label_pairs}}} {float(value):.17g}")

    @property
    def label(self) -> str:
        return _label("workspace", str(self.workspace.resolve()))


def _label(name: str, text: str) -> str:
    return f'{name}="{text.translate(ESCAPES)}"'


@contextmanager
def night_metrics(settings: Settings, name: str = NAME, within: str = ".") -> Iterator[NightMetrics]:
    """Write metrics while the block runs, and its exit code when it ends. A failure to write does not end the night.

    `within` : the folder of an extension's workspace, relative to the nights' workspace.
    """
    night, path, workspace = NightMetrics(), settings.metrics.textfile, settings.workspace / within
    if path is None:
        yield night
        return
    path, has_ended = path.with_stem(path.stem + name.removeprefix(NAME)), Event()
    thread = Thread(target=_refresh, args=(path, night, workspace, name, has_ended), daemon=True)
    thread.start()
    try:
        yield night
    except BaseException as error:
        night.exit_code = exit_code_of(error)
        raise
    finally:
        has_ended.set()
        thread.join()  # its last write must precede the final one
        with ends_no_night("the metrics were not written"):
            write_text(exposition(night, workspace, night.start_s, time.time(), name), path)


def _refresh(path: Path, night: NightMetrics, workspace: Path, name: str, has_ended: Event) -> None:
    """Write the metrics of a running night every few seconds. The first failure is logged as a warning."""
    log = logger.warning
    while not has_ended.wait(REFRESH_S):
        try:
            write_text(running_exposition(night, workspace, path, name), path)
        except Exception as error:  # metrics must not end the night
            log("the metrics were not refreshed: %s", line_of(error, names_values=False))
            log = logger.debug


def exposition(night: NightMetrics, workspace: Path, start_s: float, end_s: float, name: str = NAME) -> str:
    """The metrics of a night that has ended, in Prometheus' text format."""
    page, none = _Page(name, workspace), {}
    page.add("last_exit_code", "Exit code of the last attempt; 0 if the night succeeded.", (none, night.exit_code))
    page.add("last_attempt_timestamp_seconds", "Time at which the last attempt ended.", (none, end_s))
    page.add("last_attempt_seconds", "Duration of the last attempt.", (none, end_s - start_s))
    # A night that was refused because another one runs does not report whether that one runs.
    is_running = None if night.exit_code == ExitCode.BUSY else 0
    return _with_figures(page, night, workspace, is_running)


def running_exposition(night: NightMetrics, workspace: Path, path: Path, name: str = NAME) -> str:
    """The metrics of a running night; the metrics of the last attempt are copied from the file `path`."""
    page, earlier = _Page(name, workspace), path.read_text(encoding="utf-8") if path.exists() else ""
    of_attempt = rf"{name}_last_(?:exit_code|attempt)\w*"
    copied = rf"^(?:# \w+ {of_attempt}|{of_attempt}{{{re.escape(page.label)}}}) .*$"
    page.lines += re.findall(copied, earlier, re.MULTILINE)
    return _with_figures(page, night, workspace, is_running=1)


def _with_figures(page: _Page, night: NightMetrics, workspace: Path, is_running: int | None) -> str:
    none, manifest = {}, night.manifest
    events = [] if manifest is None else last_attempt(RunFolder(manifest.path.parent).events_path)
    if is_running is not None:
        times = [datetime.datetime.fromisoformat(event["time"]).timestamp() for event in events[-1:]]
        page.add("night_running", "1 while a night runs, 0 after its end.", (none, is_running))
        progress_s = max([night.start_s, *times])
        page.add("last_progress_timestamp_seconds", "Time of the last night's last progress.", (none, progress_s))
    published, success_s = _successes(workspace)
    page.add("last_success_timestamp_seconds", "Time at which a night last succeeded.", (none, success_s))
    if published is not None:
        midnight = datetime.datetime.combine(published, datetime.time(), datetime.UTC).timestamp()
        page.add("published_date_timestamp_seconds", "Midnight (UTC) of the published run's date.", (none, midnight))
    if manifest is None:
        return "\n".join([*page.lines, ""])
    if stage := current_stage(events):  # progress and cost as `laserbatch status` shows them
        about = "1 for the running stage; after the night's end, 0 for the stage that ran last."
        page.add("running_stage", about, ({"stage": stage["stage"]}, is_running))
    writing = writing_state(events, datetime.datetime.now(datetime.UTC)) or {}
    for name, about, figure in OF_WRITING:
        page.add(name, about, ({"stage": writing.get("of", "")}, writing.get(figure)))
    cost = cost_so_far(events, manifest.path.parent)
    page.add("cost", "Cost of the server's answers, in the currency of prices.", (none, cost))
    sides = (manifest.generation.sides or sides_so_far(events)).items()
    entities, quarantined = [], []
    for side, figures in sides:
        entities += [({"side": side, "outcome": name}, getattr(figures, f"num_{name}")) for name in OUTCOMES]
        quarantined += [({"side": side, "reason": name}, num) for name, num in figures.quarantine_reasons.items()]
    page.add("entities", "Entities of the last run by outcome.", *entities)
    page.add("quarantined", "Entities in quarantine by reason.", *quarantined)
    for name, about, value in OF_SIDES:
        page.add(name, about, *(({"side": side}, value(figures)) for side, figures in sides))
    stages = (({"stage": name}, seconds) for name, seconds in manifest.stages.copy().items())
    page.add("stage_seconds", "Wall time by stage, over all attempts at the run.", *stages)
    return "\n".join([*page.lines, ""])


def _successes(workspace: Path) -> tuple[datetime.date | None, float | None]:
    """The date of the published run, and the time at which a run was last finished."""
    try:
        opened = Workspace.open(workspace, create=False)
        finished = [run.finished_ns / 1e9 for run in opened.runs() if run.is_finished]
    except (LaserbatchError, OSError):
        return None, None
    published = None
    with suppress(LaserbatchError, ValueError):
        if (run := opened.publication.run()) is not None:
            published = datetime.date.fromisoformat(run.date)
    return published, max(finished, default=None)
