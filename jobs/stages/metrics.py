"""Figures of the last night for Prometheus, after each night however it ended: a file for the node exporter, a push.

Those of an extension have another prefix, such as `laserbatch_lists`, in names and job, and a file of their own.
"""

import base64
import datetime
import math
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from urllib.parse import unquote, urlsplit

from laserbatch.jobs.console import say
from laserbatch.jobs.failures import exit_code_of
from laserbatch.jobs.formatting import ratio
from laserbatch.jobs.settings import MetricsSettings, Settings
from laserbatch.jobs.stages.publishing import ends_no_night
from laserbatch.pipeline.errors import LaserbatchError
from laserbatch.pipeline.storage.atomic import write_text
from laserbatch.pipeline.storage.manifest import RunManifest
from laserbatch.pipeline.storage.workspace import Workspace

PUSH_TIMEOUT_S = 10.0
NAME = "laserbatch"
OUTCOMES = ("generated", "carried_over", "quarantined")
OF_SIDES = (
    ("quarantine_share", "Share of a side's entities that could not be done.",
     lambda figures: ratio(figures.num_quarantined, figures.num_entities) or 0.0),
    ("tokens", "Tokens written.", lambda figures: figures.stats.num_tokens),
    ("tokens_per_second", "Tokens written a second of writing.", lambda figures: figures.stats.tokens_per_s),
    ("tokens_per_step", "Tokens a step of verification, the bonus token counted.",
     lambda figures: figures.stats.tokens_per_step),
)  # fmt: skip
ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


@dataclass
class NightMetrics:
    """What is known of a night when it ends: its manifest, where it came so far as to have one."""

    manifest: RunManifest | None = None
    exit_code: int = 0


@dataclass
class _Page:
    """Lines of the exposition format, in which a metric's samples stand together behind its help and type."""

    prefix: str = NAME
    lines: list[str] = field(default_factory=list)

    def add(self, name: str, about: str, *samples: tuple[Mapping[str, str], float | None]) -> None:
        known = [(labels, value) for labels, value in samples if value is not None and math.isfinite(value)]
        if not known:
            return
        name = f"{self.prefix}_{name}"
        self.lines += [f"# HELP {name} {about}", f"# TYPE {name} gauge"]
        for labels, value in known:
            label_pairs = ",".join(f'{key}="{text.translate(ESCAPES)}"' for key, text in labels.items())
            self.lines.append(
                f"{name}{{{label_pairs}}} {float(value):.17g}" if label_pairs else f"{name} {float(value):.17g}"
            )


@contextmanager
def night_metrics(settings: Settings, name: str = NAME, within: str = ".") -> Iterator[NightMetrics]:
    """Write the figures when the block ends, with its exit code. That they cannot be written or pushed fails none.

    `within` : the folder of an extension's workspace in that of the nights.
    """
    night, start_s = NightMetrics(), time.time()
    try:
        yield night
    except BaseException as error:
        night.exit_code = exit_code_of(error)
        raise
    finally:
        if settings.metrics != MetricsSettings():
            with ends_no_night("the metrics are not written"):
                _publish(settings, name, exposition(night, settings.workspace / within, start_s, time.time(), name))


def exposition(night: NightMetrics, workspace: Path, start_s: float, end_s: float, name: str = NAME) -> str:
    """The figures in Prometheus' text format."""
    page, none = _Page(name), {}
    page.add("last_exit_code", "Exit code of the last attempt; 0 is a night that ended well.", (none, night.exit_code))
    page.add("last_attempt_timestamp_seconds", "When the last attempt ended.", (none, end_s))
    page.add("last_attempt_seconds", "How long the last attempt took.", (none, end_s - start_s))
    published, success_s = _successes(workspace)
    page.add("last_success_timestamp_seconds", "When a night last ended well.", (none, success_s))
    if published is not None:
        midnight = datetime.datetime.combine(published, datetime.time(), datetime.UTC).timestamp()
        page.add("published_date_timestamp_seconds", "Midnight (UTC) of the date that readers see.", (none, midnight))
    if night.manifest is None:
        return "\n".join([*page.lines, ""])
    sides = night.manifest.sides.items()
    entities = (
        ({"side": side, "outcome": outcome}, getattr(figures, f"num_{outcome}"))
        for side, figures in sides
        for outcome in OUTCOMES
    )
    page.add("entities", "Entities of the last run, by what became of them.", *entities)
    for name, about, value in OF_SIDES:
        page.add(name, about, *(({"side": side}, value(figures)) for side, figures in sides))
    stages = (({"stage": name}, seconds) for name, seconds in night.manifest.stages.items())
    page.add("stage_seconds", "Wall time by stage, over all attempts at the run.", *stages)
    return "\n".join([*page.lines, ""])


def _successes(workspace: Path) -> tuple[datetime.date | None, float | None]:
    """The date that readers see, and when a run was last finished."""
    try:
        opened = Workspace.open(workspace, create=False)
        finished = [run.success_path.stat().st_mtime for run in opened.runs() if run.is_finished]
    except (LaserbatchError, OSError):
        return None, None
    published = None
    with suppress(LaserbatchError, ValueError):
        run = opened.published()
        published = None if run is None else datetime.date.fromisoformat(run.date)
    return published, max(finished, default=None)


def _publish(settings: Settings, name: str, text: str) -> None:
    path = settings.metrics.textfile
    if path is not None:
        try:
            write_text(text, path.with_stem(path.stem + name.removeprefix(NAME)))
        except OSError as error:
            say(f"the metrics are not written: {error}")
    if settings.metrics.push_gateway is not None:
        try:
            request = _push_request(settings.metrics.push_gateway, name, text)
            urllib.request.urlopen(request, timeout=PUSH_TIMEOUT_S).close()
        except (OSError, ValueError, HTTPException) as error:
            say(f"the metrics are not pushed: {type(error).__name__}: {getattr(error, 'reason', error)}")


def _push_request(gateway: str, name: str, text: str) -> urllib.request.Request:
    """A push; name and password of the address go into a header, where no error names them."""
    url, headers = urlsplit(gateway), {"Content-Type": "text/plain; version=0.0.4"}
    if url.username is not None:
        given = f"{unquote(url.username)}:{unquote(url.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(given.encode()).decode()}"
    url = url._replace(netloc=url.netloc.rpartition("@")[2], path=f"{url.path.rstrip('/')}/metrics/job/{name}")
    return urllib.request.Request(url.geturl(), text.encode(), headers, method="PUT")
