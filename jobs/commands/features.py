"""`laserbatch features ...`: the features of runs for other tools: joined by time, or in the layouts of these tools."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer

from laserbatch.jobs.console import TO_FILE, TO_FOLDER, progress, say, summary
from laserbatch.jobs.settings import CONFIG, JSON, WORKSPACE, load_settings, open_workspace
from laserbatch.jobs.stages.night import open_run
from laserbatch.pipeline.encoding.exports import FORMATS, FormatName, SideExport
from laserbatch.pipeline.encoding.features import changed_rows
from laserbatch.pipeline.encoding.schema import DAY_US, MOMENT, moments
from laserbatch.pipeline.encoding.versions import Versions, feature_versions
from laserbatch.pipeline.errors import TableError, WorkspaceError
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.atomic import atomic_folder
from laserbatch.pipeline.storage.parquet import ROW_GROUP_ROWS, iter_parquet, parquet_files, write_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.tables.schema import UNITS_PER_SECOND, TimeUnit, plain_ids
from laserbatch.pipeline.tables.streamed import iter_log, log_times, log_unit

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command()
def asof(
    interactions: Path = typer.Argument(..., help="Parquet file or folder of files, with user_id, item_id, timestamp."),
    out: Path = typer.Argument(
        ..., help="Parquet file to write: the same rows with the features of both sides.", **TO_FILE
    ),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    unit: TimeUnit | None = typer.Option(
        None,
        show_default="the unit that fits all values, or s",
        help="Unit of `timestamp` since 1970, if it holds integers.",
    ),
    as_json: bool = JSON,
) -> None:
    """Join to each row of a log the newest features of all finished runs that are older than the row.

    A text is valid from the day after its night's date, so no row gets a text that was written from that row.
    Rows without such a text have null features.

    Example: `laserbatch features asof tables/interactions.parquet train.parquet --workspace workspace`
    """
    with feature_versions(_runs(config, workspace)) as versions:
        num_without, unmatched = dict.fromkeys(SIDES, 0), set(SIDES)
        batches = iter_log(interactions, "interactions")
        first = next(batches)
        read_unit = unit or log_unit(interactions, lambda finding: say(str(finding)))
        advice = f"Set --unit ({', '.join(UNITS_PER_SECOND)})"
        added = [field for side, of_side in versions.items() for field in of_side.fields(f"{side}_")]
        for name in {field.name for field in added} & set(first.schema.names):
            raise TableError(f"{interactions} already has a column {name!r}, which is to be added. Rename or drop it.")
        for side, of_side in versions.items():
            if (found := plain_ids(first[f"{side}_id"]).type) != of_side.ids.type:
                raise TableError(
                    f"{interactions}, column {side}_id: found ids of type {found}, expected {of_side.ids.type}, the "
                    f"type in the features. Write them as the {side}s table has them."
                )
        schema = pa.schema([*first.schema, *added])
        with progress("join features") as bar:

            def joined() -> Iterator[pa.RecordBatch]:
                first_row = 0
                for batch in chain([first], batches):
                    times = log_times(batch["timestamp"], read_unit, interactions, first_row, advice).cast(pa.int64())
                    days = pc.fill_null(times, 0).to_numpy() // DAY_US  # no version is older than a missing time
                    first_row += batch.num_rows
                    columns = list(batch.columns)
                    for side, of_side in versions.items():
                        ids = plain_ids(batch[f"{side}_id"])
                        if side in unmatched and pc.any(pc.is_in(ids, value_set=of_side.ids)).as_py():
                            unmatched.discard(side)
                        rows = of_side.of(ids, days)
                        num_without[side] += int((rows < 0).sum())
                        columns += of_side.columns(rows)
                    bar.advance(batch.num_rows)
                    yield pa.record_batch(columns, schema=schema)
                for side in sorted(unmatched) if first_row else ():
                    _refuse_unknown_ids(interactions, side, first, versions[side], first_row)

            written = write_parquet(joined(), out, schema)
    without = {f"{side}s": number for side, number in num_without.items()}
    summary({"file": out, "rows": written.num_rows, "rows without features": without}, as_json)


def _runs(config: Path | None, workspace: Path | None) -> list[RunFolder]:
    """The published run's `line_of`, or all finished runs, whose versions count in this order."""
    opened = open_workspace(config, workspace)
    published = opened.publication.run_id()
    return opened.finished_runs() if published is None else opened.line_of(opened.run(published))


def _refuse_unknown_ids(log: Path, side: Side, first: pa.RecordBatch, versions: Versions, num_rows: int) -> None:
    """Raise TableError because no row of a log has an id of a side's features, unless there are no features."""
    if len(versions.ids):
        both = plain_ids(first[f"{side}_id"]), versions.ids
        found, expected = (", ".join(map(repr, pc.unique(ids.drop_null())[:3].to_pylist())) for ids in both)
        raise TableError(
            f"{log}, column {side}_id: none of {num_rows} rows has an id that is in the features; found ids such as "
            f"{found}, expected ids such as {expected}. Write them as the {side}s table has them."
        )


@app.command()
def history(
    out: Path = typer.Argument(..., help="Folder to write user.parquet and item.parquet to.", **TO_FOLDER),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace OUT if it is there."),
    as_json: bool = JSON,
) -> None:
    """Write every version of the features that finished runs hold, with `valid_from` and `valid_to`.

    `valid_to` is the time at which the next version took over, or from which the features lack the entity because it
    left the tables; null for current versions.

    Example: `laserbatch features history versions/ --workspace workspace`
    """
    counts = {}
    with atomic_folder(out, overwrite) as folder, feature_versions(_runs(config, workspace)) as versions:
        for side, of_side in versions.items():
            ends = of_side.valid_to()
            id_field = pa.field(f"{side}_id", of_side.ids.type, nullable=False)
            schema = pa.schema([id_field, *of_side.fields(), pa.field("valid_to", MOMENT)])

            def groups(of_side: Versions = of_side, ends=ends, schema=schema) -> Iterator[pa.RecordBatch]:
                for start in range(0, len(ends), ROW_GROUP_ROWS):
                    rows = np.arange(start, min(start + ROW_GROUP_ROWS, len(ends)))
                    ids = of_side.ids.take(pa.array(of_side.entities[rows]))
                    yield pa.record_batch([ids, *of_side.columns(rows), moments(ends[rows])], schema=schema)

            written = write_parquet(groups(), folder / f"{side}.parquet", schema)
            counts[f"{side}s"] = {"entities": len(of_side.ids), "versions": written.num_rows}
    summary({"folder": out, **counts}, as_json)


@app.command()
def export(
    out: Path = typer.Argument(
        ..., help="Folder to write; its name names the data set in formats that need a name.", **TO_FOLDER
    ),
    layout: FormatName = typer.Option("merlin", "--format", help="Tool whose layout is written."),
    run: str | None = typer.Option(None, show_default="the published run", help="A run id."),
    since: str | None = typer.Option(
        None, help="Write only rows that differ from those of this earlier run, and ids that were removed since."
    ),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace OUT if it is there."),
    as_json: bool = JSON,
) -> None:
    """Write the features of a run in the layout of Merlin, FuxiCTR or RecBole, with settings that load them there.

    Example: `laserbatch features export fuxictr_data --format fuxictr --workspace workspace`
    """
    night = open_run(load_settings(config, {"workspace": workspace}), run)
    before = None if since is None else night.workspace.existing_run(since)
    counts: dict[str, dict[str, int]] = {}
    with atomic_folder(out, overwrite) as folder:
        sides = []
        for side in SIDES:
            path = night.run.features_path(side)
            counts[f"{side}s"] = {"rows": _num_rows(night.run, side)}
            rows = iter_parquet(path)
            if before is not None:
                _num_rows(before, side)
                has_changed, gone = changed_rows(path, before.features_path(side), f"{side}_id")
                counts[f"{side}s"] = {"rows": int(has_changed.sum()), "gone": len(gone)}
                write_parquet(pa.table({f"{side}_id": gone}), folder / f"gone_{side}s.parquet")
                rows = _selected_rows(path, has_changed)
            sides.append(SideExport(side, pq.read_schema(parquet_files(path)[0]), rows))
        FORMATS[layout](sides, folder, out.resolve())
    summary({"folder": out, "format": layout, "run_id": night.run.run_id, **counts}, as_json)


def _num_rows(run: RunFolder, side: Side) -> int:
    """The number of rows of a run's features. Raises WorkspaceError if they are missing or damaged."""
    path, figures = run.features_path(side), run.load_manifest().features.get(side)
    if figures is None or not path.exists():
        again = f"`laserbatch nightly --date {run.date} --force` makes features"
        raise WorkspaceError(f"{path} is missing; expected the features of {side}s. {again}")
    run.require_features({side: figures}, compare_bytes=True)
    return figures.num_rows


def _selected_rows(path: Path, is_selected: np.ndarray) -> Iterator[pa.RecordBatch]:
    start = 0
    for batch in iter_parquet(path):
        yield batch.filter(pa.array(is_selected[start : start + batch.num_rows]))
        start += batch.num_rows
