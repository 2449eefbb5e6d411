"""`laserbatch backfill`: the nights of a range of dates, each from the one before it."""

import datetime
from pathlib import Path

import typer

from laserbatch.jobs.console import print_table, say, summary
from laserbatch.jobs.formatting import count
from laserbatch.jobs.report.blocks import Table
from laserbatch.jobs.settings import CONFIG, JSON, WORKSPACE, load_settings
from laserbatch.jobs.stages.night import Night, parse_date
from laserbatch.jobs.stages.publishing import deliver, let_readers_see
from laserbatch.jobs.stages.run_night import run_night
from laserbatch.pipeline.errors import ConfigError, PipelineError
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.retrieval_pools.errors import PoolError


def backfill(
    first: str = typer.Option(..., "--from", help="The first night."),
    last: str = typer.Option(..., "--to", help="The last night, itself among them."),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    publish: bool = typer.Option(
        False, "--publish", help="Publish the last night, whatever its date, when all are done."
    ),
    redo: bool = typer.Option(False, help="Do finished nights whose tables changed since again, in runs of their own."),
    ray_address: str | None = typer.Option(None, help="Use this Ray cluster; without it a local one a night."),
    as_json: bool = JSON,
) -> None:
    """Run the nights of a range of dates, each from the one before it; finished ones are left as they are.

    A night sees what was known on its date and nothing later. What readers see does not change before the end, and
    then with `--publish` alone. A night that fails stops the range; the same command goes on with it.

    Example: `laserbatch backfill --config laserbatch.yaml --from 2025-02-01 --to 2025-02-14`
    """
    settings = load_settings(config, {"workspace": workspace, "cluster.ray_address": ray_address})
    start, end = parse_date(first), parse_date(last)
    if end < start:
        raise ConfigError(f"--from {start} is after --to {end}; give the earlier date first")
    num_nights, before = (end - start).days + 1, None
    rows: list[dict[str, str | int]] = []
    for number in range(num_nights):
        date = start + datetime.timedelta(days=number)
        say(f"night {number + 1} of {num_nights}: {date}")
        try:
            night = run_night(settings, date, redo=redo, publishing="never", after=before)
        except BaseException as error:
            say(f"the backfill stopped at {date}, {number} of {num_nights} nights done; the same command goes on there")
            if isinstance(error, PipelineError | PoolError):
                error.args = (f"the night of {date}: {error}",)
            raise
        before = night.run
        rows.append(_row(night))
    opened = Workspace.open(settings.workspace)
    if publish:
        with opened.lock():
            let_readers_see(opened, before.run_id)
            deliver(opened, settings.deliver_to, is_asked=True)
    pointed_to = opened.pointed_to()
    if as_json:
        summary({"nights": rows, "published": pointed_to}, as_json=True)
        return
    shown = [{name: count(value) if isinstance(value, int) else value for name, value in row.items()} for row in rows]
    print_table(Table("Nights", shown, ("date", "run_id")))
    say(f"published is {pointed_to or 'nothing yet'}")


def _row(night: Night) -> dict[str, str | int]:
    row: dict[str, str | int] = {"date": str(night.date), "run_id": night.run.run_id}
    for side, figures in night.manifest.sides.items():
        row |= {f"{side}s_{what}": getattr(figures, f"num_{what}") for what in ("generated", "carried_over")}
    return row
