"""`laserbatch nightly`: every stage of a night in order; and `laserbatch demo`, two nights on a sample world.

Owns the order of the stages and what is published when. A night that was killed goes on where it stopped.
"""

import datetime
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from laserbatch.ctr.errors import CtrError
from laserbatch.jobs.build_pools import build_pools
from laserbatch.jobs.console import say, stdout, summary
from laserbatch.jobs.ctr import ctr_summary, ctr_table
from laserbatch.jobs.encode import encode_run
from laserbatch.jobs.generate import generate_knowledge, generate_plain, night_counts
from laserbatch.jobs.night import Night, open_night, parse_date, pools_in_use
from laserbatch.jobs.pools_collect import collect_pools
from laserbatch.jobs.report.page import write_report
from laserbatch.jobs.settings import CONFIG, PACKAGE_ROOT, WORKSPACE, Settings, load_settings
from laserbatch.pipeline.errors import RunFailed, TableError, WorkspaceError
from laserbatch.pipeline.sample.world import LAST_DATE, write_sample_world
from laserbatch.pipeline.storage.atomic import atomic_folder
from laserbatch.pipeline.storage.manifest import PreviousNight, SideFigures, SideStats
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.read import describe, read_tables
from laserbatch.pipeline.tables.schema import require_only_tables

DEMO_SEED = 7  # a world on which nothing was trained or chosen: neither the sample model nor a CTR setting


def nightly(
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    date: str = typer.Option(..., help="The night: what was known at the end of this day is used."),
    force: bool = typer.Option(False, help="Generate unchanged entities too, in a run of its own."),
    redo: bool = typer.Option(
        False, help="Do a finished date whose tables changed since again, in a run of its own; the unchanged is kept."
    ),
    ray_address: str | None = typer.Option(None, help="Use this Ray cluster; without it a local one is started."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Run a whole night: generate, encode, compare, publish, build pools, report.

    Killed at any moment, the same command finishes the night. A night of an older date sees only what is older, and is
    not published where one of a later date is.

    Example: `laserbatch nightly --config laserbatch.yaml --date 2025-03-01`
    """
    settings = load_settings(config, {"workspace": workspace, "cluster.ray_address": ray_address})
    night = run_night(settings, parse_date(date), force, redo)
    summary(
        {
            "run_id": night.run.run_id,
            "published": night.workspace.published().run_id,
            **({"changed_since": list(night.changed_inputs)} if night.changed_inputs else {}),
            **night_counts(night),
            "ctr": ctr_summary(night.manifest.ctr, as_json),
            "report": str(night.run.report_path),
        },
        as_json,
    )


def run_night(settings: Settings, date: datetime.date, force: bool = False, redo: bool = False) -> Night:
    """All stages of a night, under the workspace's lock. A finished night is left as it is, but published."""
    with Workspace.open(settings.workspace).lock():
        night = open_night(settings, date, force, redo)
        if night.run.is_finished:
            say(f"run {night.run.run_id} is finished already; --force generates everything again")
            if night.changed_inputs:
                names = " and ".join(night.changed_inputs)
                say(f"{names} of that date changed since: --redo writes what this changes, in a run of its own")
            _publish(night)
            return night
        try:
            generate_knowledge(night)
        except RunFailed as error:
            _close_failed(night, str(error))
            raise
        if settings.night.compare_with_plain:
            generate_plain(night)
        with night.stage("encode"):
            night.manifest.features = encode_run(night.run.root, settings.encoding, say, night.previous)
            if settings.night.compare_with_plain:
                encode_run(night.run.plain.root, settings.encoding, say)
        with night.stage("ctr"):
            night.manifest.ctr = compare_ctr(night)
        with night.stage("pools"):
            night.manifest.pools_built = build_pools(night, make_current=False)
        _close(night)
        _publish(night)
        return night


def compare_ctr(night: Night) -> dict[str, Any]:
    """The CTR comparison of a run, or why there is none."""
    if not night.settings.night.train_ctr:
        return {"skipped": "night.train_ctr is false", "rows": []}
    tables = read_tables(night.settings.tables.path, as_of=None)  # models are judged on what came after the date
    try:
        return ctr_table(night.run.root, tables, night.date, night.settings.decoding.verifier, night.settings.ctr, say)
    except CtrError as error:
        say(f"CTR models are not trained: {error}")
        return {"skipped": str(error), "rows": []}


def _close_failed(night: Night, reason: str) -> None:
    """Keep what there is to look at; nothing is published, and the next attempt goes on from the finished shards."""
    night.manifest.status, night.manifest.failure = "failed", reason
    night.manifest.save()
    write_report(night.manifest.as_json(), night.run.report_path)
    say(f"report of the failed night: {night.run.report_path}")


def _close(night: Night) -> None:
    manifest = night.manifest
    if night.previous is not None:
        try:
            earlier = night.previous.load_manifest()
            sides = {side: SideStats(figures.stats) for side, figures in earlier.sides.items()}
            manifest.previous_night = PreviousNight(earlier.run_id, sides)
        except WorkspaceError as error:
            say(f"not compared with the night before: {error}")
    manifest.status, manifest.failure = "success", None
    manifest.save()
    write_report(manifest.as_json(), night.run.report_path)
    night.run.finish()


def _publish(night: Night) -> None:
    """Let readers see a finished run, and the next night draft from its pools, unless one of a later date is published.

    May be called again: whatever a killed night has left of it is done.
    """
    run, workspace = night.run, night.workspace
    try:
        published = workspace.published()
    except WorkspaceError as error:
        say(f"{error} Run {run.run_id} takes its place")
        published = None
    if published is not None and published.date > run.date:
        say(f"not published: readers go on seeing run {published.run_id}, which is of a later date")
    elif published is None or published.run_id != run.run_id:
        if run.run_id in {known.version for known in night.pools.list() if known.problem is None}:
            night.pools.use(run.run_id)
        workspace.publish(run.run_id)
    in_use = pools_in_use(workspace) | {run.run_id}  # the next night of a backfill drafts from this one's
    collect_pools(night.pools, night.settings.pool_building.keep_versions, in_use)


def demo(
    folder: Path = typer.Option(Path("demo"), help="Where the world and the workspace go; it may exist."),
    num_users: int = typer.Option(400, help="Users of the sample world."),
    num_items: int = typer.Option(300, help="Items of the sample world."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Two nights on a sample world, with the bundled model: the second is faster because the first happened.

    Example: `laserbatch demo --folder demo`
    """
    say(f"a sample world of {num_users} users and {num_items} items goes to {folder / 'tables'}")
    tables = folder / "tables"
    with atomic_folder(tables, overwrite=True) as made:
        write_sample_world(made, num_users=num_users, num_items=num_items, seed=DEMO_SEED)
        if tables.is_dir() and any(tables.iterdir()):
            require_only_tables(tables)
            if describe(tables) != describe(made):
                raise TableError(f"{tables} holds other tables than this demo's; give another --folder")
    settings = load_settings(
        PACKAGE_ROOT / "configs" / "demo.yaml",
        {"workspace": str(folder / "workspace"), "tables.path": str(folder / "tables")},
    )
    # What the first night leaves out is compared on the second, which has every text.
    alone = settings.night.model_copy(update={"train_ctr": False, "compare_with_plain": False})
    say("night 1: no pools yet, so drafts come from each text's own prompt and output")
    first = run_night(settings.model_copy(update={"night": alone}), LAST_DATE - datetime.timedelta(days=1))
    say("night 2: one day later; the unchanged is carried over, the rest drafted from night 1")
    second = run_night(settings, LAST_DATE)
    if as_json:
        nights = {"first_night": night_counts(first), "second_night": night_counts(second)}
        summary(nights | {"ctr": second.manifest.ctr}, as_json=True)
        return
    stdout.print(nights_table([first, second]))
    stdout.print(ctr_rows_table(second.manifest.ctr))
    stdout.print(f"report: {second.run.report_path}", soft_wrap=True, markup=False)


def nights_table(nights: list[Night]) -> Table:
    """One row a night and side; plain decoding of the same entities, where it was run, beside it, and of all."""
    table = Table(title="What the nights did", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    counts = ("entities", "generated", "carried over", "failed", "tokens/step", "tokens/s", "seconds")
    for name in ("night", "side", *counts):
        table.add_column(name, justify="right" if name in counts else "left")
    for night in nights:
        for side, figures in night.manifest.sides.items():
            table.add_row(str(night.date), side, *_counts(figures), *_pace(figures.stats))
        for side, figures in night.manifest.plain.items():
            stats = figures.stats_of_tonight
            if stats.num_texts:
                of_same = ["-", f"{stats.num_texts:,}", "-", "-"]
                table.add_row(f"{night.date} plain, these texts", side, *of_same, *_pace(stats))
        for side, figures in night.manifest.plain.items():
            table.add_row(f"{night.date} plain, all texts", side, *_counts(figures), *_pace(figures.stats))
    return table


def _counts(figures: SideFigures) -> list[str]:
    counts = (figures.num_entities, figures.num_generated, figures.num_carried_over, figures.num_quarantined)
    return [f"{count:,}" for count in counts]


def _pace(stats: DecodingStats) -> list[str]:
    return [_number(stats.tokens_per_step, 2), _number(stats.tokens_per_s, 0), f"{stats.wall_s:.1f}"]


def ctr_rows_table(ctr: dict[str, Any]) -> Table:
    """The CTR comparison: mean and spread over seeds, on the test part."""
    title = f"CTR on what came after: not trained, {ctr['skipped']}" if ctr["skipped"] else "CTR on what came after"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("model", "knowledge", "AUC", "LogLoss", "AUC, cold users"):
        table.add_column(name, justify="left" if name in ("model", "knowledge") else "right")
    for row in ctr["rows"]:
        metrics = [_spread(row, name) for name in ("auc", "logloss", "auc_cold")]
        table.add_row(row["model"], row["variant"], *metrics)
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _spread(row: dict[str, Any], name: str) -> str:
    if row.get(name) is None:
        return "-"
    spread = row.get(f"{name}_std")
    return f"{row[name]:.4f}" + (f" ±{spread:.4f}" if spread is not None else "")
