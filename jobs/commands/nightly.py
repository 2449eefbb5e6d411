"""The commands that run nights: `nightly`, `backfill` for a range of dates, and `demo` for two nights in a row."""

import datetime
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from laserbatch.jobs.commands.ctr import print_ctr
from laserbatch.jobs.commands.dry_run import planned_night
from laserbatch.jobs.console import print_table, say, stdout, summary
from laserbatch.jobs.formatting import count, decimal
from laserbatch.jobs.notify import NOTIFY_URL, notified
from laserbatch.jobs.report.blocks import Table
from laserbatch.jobs.report.sides import side_warnings
from laserbatch.jobs.settings import CONFIG, JSON, PACKAGE_ROOT, WORKSPACE, Settings, load_settings
from laserbatch.jobs.stages.night import Night, parse_night
from laserbatch.jobs.stages.publishing import command_to_publish, deliver, force_publish
from laserbatch.jobs.stages.run_night import run_night
from laserbatch.pipeline.errors import ConfigError, LaserbatchError, TableError
from laserbatch.pipeline.sample.world import LAST_DATE, write_sample_world
from laserbatch.pipeline.storage.atomic import atomic_folder, write_text
from laserbatch.pipeline.storage.figures import SideFigures
from laserbatch.pipeline.storage.manifest import LEFT_OUT, RunManifest
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.parts import require_only_tables
from laserbatch.pipeline.tables.read import describe

NUM_ASKED = 40  # ratings of each user after the last night, on which the CTR models are judged
DEMO_SEED = 7  # neither the sample model was trained nor a CTR setting chosen on the world of this seed


def nightly(
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    date: str = typer.Option(..., help="Date of the night; it uses what was known at the end of this day."),
    force: bool = typer.Option(
        False, help="Also write unchanged entities again, in a new run; also accept a date after tomorrow."
    ),
    redo: bool = typer.Option(
        False, help="Run a finished date again, in a new run, if its tables changed since; unchanged texts carry over."
    ),
    publish: bool = typer.Option(
        False, "--publish", help="Publish the run even if a run of a later date is published."
    ),
    dry_run: bool = typer.Option(
        False,
        "--dry-run",
        help="Write nothing; print how many texts would be written and why, columns that changed for most entities, "
        "tokens, hours and money.",
    ),
    ray_address: str | None = typer.Option(
        None, show_default="a local cluster is started", help="Address of a Ray cluster to use."
    ),
    notify_url: str | None = NOTIFY_URL,
    as_json: bool = JSON,
) -> None:
    """Run a whole night: generate, encode, build pools, compare, report, publish.

    The same command finishes a night that was killed. A night of an older date reads only older interactions, and is
    not published while a run of a later date is, unless you pass `--publish`. With `--dry-run` nothing is written.

    Example: `laserbatch nightly --config laserbatch.yaml --date 2025-03-01`
    """
    with notified(None if dry_run else notify_url, command="nightly", date=date) as result:
        settings = load_settings(config, {"workspace": workspace, "cluster.ray_address": ray_address})
        night_date = parse_night(date, force)
        if dry_run:
            return summary(planned_night(settings, night_date, force, redo), as_json)
        night = run_night(settings, night_date, force, redo, "always" if publish else "if-newer")
        result |= _night_summary(night)
    if as_json:
        return summary(result, as_json)
    summary({name: value for name, value in result.items() if name not in ("gates", "ctr")}, as_json)
    print_ctr(night.manifest.judgement.ctr)


def _night_summary(night: Night) -> dict[str, Any]:
    server, left_out = night.manifest.generation.endpoint, left_out_columns(night.manifest)
    return {
        "run_id": night.run.run_id,
        "published": night.workspace.publication.run_id(),
        **({"changed_since": list(night.changed_inputs)} if night.changed_inputs else {}),
        **night_counts(night),
        **({"cost": server.cost} if server and server.cost else {}),
        **({"left_out_of_prompts": left_out} if left_out else {}),
        "gates": [asdict(gate) for gate in night.manifest.judgement.gates],
        "ctr": asdict(night.manifest.judgement.ctr),
        "report": str(night.run.report_path),
    }


def backfill(
    first: str = typer.Option(..., "--from", help="The first night."),
    last: str = typer.Option(..., "--to", help="The last night, inclusive."),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    publish: bool = typer.Option(
        False, "--publish", help="Publish the last night, whatever its date, when all are done."
    ),
    redo: bool = typer.Option(False, help="Run finished nights again, in new runs, if their tables changed since."),
    force: bool = typer.Option(False, help="Accept dates after tomorrow; nothing else changes."),
    ray_address: str | None = typer.Option(
        None, show_default="a local cluster for each night", help="Address of a Ray cluster to use."
    ),
    notify_url: str | None = NOTIFY_URL,
    as_json: bool = JSON,
) -> None:
    """Run the nights of a range of dates, each built on the one before it; finished nights are skipped.

    A night reads what was known on its date and nothing later. The published run changes only at the end, and only with
    `--publish`. A night that fails stops the range; the same command continues from it.

    Example: `laserbatch backfill --config laserbatch.yaml --from 2025-02-01 --to 2025-02-14`
    """
    with notified(notify_url, command="backfill", **{"from": first, "to": last}) as result:
        settings = load_settings(config, {"workspace": workspace, "cluster.ray_address": ray_address})
        start, end = parse_night(first, force), parse_night(last, force)
        if end < start:
            raise ConfigError(f"--from {start} is after --to {end}; give the earlier date first")
        result |= _run_range(settings, start, end, publish, redo)
    if as_json:
        return summary(result, as_json=True)
    rows = result["nights"]
    shown = [{name: count(value) if isinstance(value, int) else value for name, value in row.items()} for row in rows]
    print_table(Table("Nights", shown, ("date", "run_id")))
    say(f"published run: {result['published'] or 'none yet'}")


def _run_range(
    settings: Settings, start: datetime.date, end: datetime.date, publish: bool, redo: bool
) -> dict[str, Any]:
    """Run the nights of a range of dates; return their counts and the run that is published at the end."""
    num_nights = (end - start).days + 1
    rows: list[dict[str, str | int]] = []
    run = base_run = None
    for number in range(num_nights):
        date = start + datetime.timedelta(days=number)
        say(f"night {number + 1} of {num_nights}: {date}")
        try:
            night = run_night(settings, date, redo=redo, policy="never", base_run=base_run)
        except BaseException as error:
            say(f"the backfill stopped at {date}, {number} of {num_nights} nights done; the same command continues it")
            if isinstance(error, LaserbatchError):
                error.args = (f"the night of {date}: {error}",)
            raise
        rows.append({"date": str(night.date), "run_id": night.run.run_id})
        for side, figures in night.manifest.generation.sides.items():
            rows[-1] |= {f"{side}s_{what}": getattr(figures, f"num_{what}") for what in ("generated", "carried_over")}
        run = night.run
        if run.run_id in night.workspace.publication.not_built_on():
            how = f"`laserbatch nightly --date {date} --force` runs it again"
            say(f"run {run.run_id} was rolled back, so the next night is built on an earlier one; {how}")
        else:
            base_run = run
    opened = Workspace.open(settings.workspace)
    if publish and run is not None and run is base_run:
        with opened.lock():
            force_publish(opened, run.run_id)
            deliver(opened, settings.deliver_to, force=True)
    elif run is not None and run.run_id != opened.publication.run_id():
        why = "--publish was not given" if run is base_run else f"run {run.run_id} was rolled back"
        say(f"not published: {why}; {command_to_publish(run)} publishes it")
    return {"nights": rows, "published": opened.publication.run_id()}


def demo(
    folder: Path = typer.Option(Path("demo"), help="Folder for the sample world and the workspace; it may exist."),
    num_users: int = typer.Option(400, min=1, help="Number of users in the sample world."),
    num_items: int = typer.Option(300, min=20, help="Number of items in the sample world."),
    model_dir: Path | None = typer.Option(
        None, "--model", metavar="FOLDER", help="Write with the model of this folder instead of the bundled one."
    ),
    as_json: bool = JSON,
) -> None:
    """Run two nights on a sample world with the bundled model; the second drafts from the texts of the first.

    A model of your own writes real sentences and takes longer: begin with few entities, as `make demo-real` does.

    Example: `laserbatch demo --folder demo`
    """
    say(f"writing a sample world of {num_users} users and {num_items} items to {folder / 'tables'}")
    tables = folder / "tables"
    with atomic_folder(tables, overwrite=True) as made:
        write_sample_world(made, num_users, num_items, seed=DEMO_SEED, num_asked=NUM_ASKED)
        if tables.is_dir() and any(tables.iterdir()):
            require_only_tables(tables)
            if describe(tables) != describe(made):
                raise TableError(f"{tables} does not hold this demo's tables; give another --folder")
    config = folder / "laserbatch.yaml"
    text = (PACKAGE_ROOT / "configs" / ("demo.yaml" if model_dir is None else "demo_real.yaml")).read_text("utf-8")
    if model_dir is not None:
        text = text.replace("decoding:\n", f"decoding:\n  model: {json.dumps(str(model_dir.resolve()))}\n")
    text = f"workspace: workspace\ntables: {{path: tables}}\n{text}"
    if config.exists() and config.read_text(encoding="utf-8") != text:
        raise ConfigError(f"{config} is not this demo's configuration; remove it, or give another --folder")
    write_text(text, config)
    settings = load_settings(config)
    # Only the second night, which has every text, compares.
    alone = settings.night.model_copy(update={"train_ctr": False, "compare_with_plain": False})
    say("night 1: no pools yet, so drafts come from each text's own prompt and output")
    first = run_night(settings.model_copy(update={"night": alone}), LAST_DATE - datetime.timedelta(days=1))
    say("night 2, one day later: unchanged texts are carried over, the others are drafted from night 1")
    second = run_night(settings, LAST_DATE)
    if as_json:
        nights = {"first_night": night_counts(first), "second_night": night_counts(second)}
        return summary(nights | {"ctr": asdict(second.manifest.judgement.ctr)}, as_json=True)
    print_table(nights_table([first, second]))
    print_ctr(second.manifest.judgement.ctr)
    stdout.print(f"report: {second.run.report_path}", soft_wrap=True, markup=False)
    stdout.print(f"next, use --config {config}, for example: laserbatch try --config {config}", soft_wrap=True)


def left_out_columns(manifest: RunManifest) -> list[str]:
    """The columns that no prompt shows because they look like personal data, such as `users.email`."""
    inputs = manifest.origin.inputs.items()
    return [f"{table}.{column}" for table, facts in inputs for column in facts.get(LEFT_OUT, {})]


def night_counts(night: Night) -> dict[str, Any]:
    counts = {}
    for side, figures in night.manifest.generation.sides.items():
        names = ("num_entities", "num_generated", "num_carried_over", "num_quarantined")
        names += ("num_waiting", "num_without_text", "postponed") if figures.postponed else ()
        counts[f"{side}s"] = {name: getattr(figures, name) for name in names}
        counts[f"{side}s"] |= {n: getattr(figures.stats, n) for n in ("num_tokens", "tokens_per_step", "tokens_per_s")}
        if warnings := side_warnings(figures, night.manifest.origin.settings):
            counts[f"{side}s"]["warning"] = "; ".join(warnings)
    return counts


def nights_table(nights: list[Night]) -> Table:
    """One row per night and side; after each night, rows of plain decoding of the same texts, if there was any."""
    rows = []
    for night in nights:
        for side, figures in night.manifest.generation.sides.items():
            rows.append(_row(str(night.date), side, figures.stats, figures))
        for side, figures in night.manifest.generation.plain.items():
            if (stats := figures.stats_of_tonight) and stats.num_texts:
                rows.append(_row(f"{night.date} plain, these texts", side, stats))
    return Table("What the nights did", rows, ("night", "side"))


def _row(night: str, side: str, stats: DecodingStats, figures: SideFigures | None = None) -> dict[str, str]:
    row = {
        "night": night,
        "side": side,
        "entities": count(figures and figures.num_entities),
        "generated": count(stats.num_texts if figures is None else figures.num_generated),
        "carried over": count(figures and figures.num_carried_over),
        "failed": count(figures and figures.num_quarantined),
        "tokens/step": decimal(stats.tokens_per_step),
    }
    return row | {"tokens/s": decimal(stats.tokens_per_s, 0), "seconds": decimal(stats.wall_s, 1)}
