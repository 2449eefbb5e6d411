"""`laserbatch init TABLES`: a commented configuration for the user's own tables, with what can be guessed filled in.

Tables that are in the input schema already need no mapping; for others a guessed one is written beside the
configuration, to be read and corrected by a person.
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import typer
import yaml

from laserbatch.jobs.console import say, summary
from laserbatch.jobs.settings import JSON, PACKAGE_ROOT, load_settings
from laserbatch.jobs.stages.inputs import NEEDS_A_MODEL, check_inputs
from laserbatch.pipeline.errors import ConfigError, TableError
from laserbatch.pipeline.sample.world import is_sample_world
from laserbatch.pipeline.storage.atomic import write_text
from laserbatch.pipeline.storage.uris import is_uri
from laserbatch.pipeline.tables.findings import count_faults
from laserbatch.pipeline.tables.guess import guess_mapping, read_sources
from laserbatch.pipeline.tables.schema import REQUIRED_COLUMNS, table_files


def init(
    tables: str = typer.Argument(
        ..., help="Folder with your tables, Parquet or CSV; or a URI of tables in the input schema."
    ),
    out: Path = typer.Option(Path("laserbatch.yaml"), help="Configuration to write."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace OUT if it is there."),
    as_json: bool = JSON,
) -> None:
    """Write a commented configuration for your own tables, with a guessed mapping to be corrected.

    Example: `laserbatch init exports/ --out laserbatch.yaml`
    """
    if out.exists() and not overwrite:
        raise ConfigError(f"{out} is there already; pass --overwrite to replace it")
    source = Path(tables)
    if not is_uri(tables) and not source.is_dir():
        raise TableError(f"{tables} is not a folder; expected one with your tables")
    if _is_in_schema(tables):
        first = pq.ParquetFile(table_files(tables, "interactions")[0]).iter_batches(65_536)
        write_text(
            _configuration(tables if is_uri(tables) else source.resolve(), "", _is_clicks(next(first, None), "rating")),
            out,
        )
        num_faults = count_faults(check_inputs(tables, load_settings(out)))
        said = {"configuration": str(out), "tables": "in the input schema already", "num_faults": num_faults}
        if not is_sample_world(tables):
            said["model"] = NEEDS_A_MODEL
        following = f"laserbatch data check {tables} --config {out}" if num_faults else f"laserbatch try --config {out}"
        summary(said | {"next": following}, as_json)
        return
    if is_uri(tables):
        raise TableError(
            f"the tables of {tables} are not all there in the input schema, or have other columns; copy your files to "
            "this machine and give their folder, of which a mapping is guessed"
        )
    mapping_path = out.with_name("mapping.yaml")
    if mapping_path.exists() and not overwrite:
        raise ConfigError(f"{mapping_path} is there already; pass --overwrite to replace it")
    sources = read_sources(source)
    mapping = guess_mapping(sources)
    events = mapping["interactions"]
    is_clicks = any(s.name == events["files"] and _is_clicks(s.head, events.get("rating")) for s in sources)
    command = f"laserbatch data import {tables} {out.with_name('tables')} --mapping {mapping_path}"
    head = "# Guessed from the names of files and columns: read it, correct it, then run\n#   " + command + "\n"
    head += "# configs/import_example.yaml explains every key.\n"
    write_text(head + yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True), mapping_path)
    note = f"# Made from {tables} by: {command}\n"
    write_text(_configuration(out.resolve().with_name("tables"), note, is_clicks), out)
    say("the mapping is a guess from names; read it before you import")
    said = {"configuration": str(out), "mapping": str(mapping_path), "model": NEEDS_A_MODEL}
    summary(said | {"next": f"{command}, then laserbatch try --config {out}"}, as_json)


def _is_clicks(rows: pa.Table | pa.RecordBatch | None, column: str | None) -> bool:
    """Whether the first ratings are 0 and 1 only, so that 1 is a positive."""
    if rows is None or column not in rows.schema.names:
        return False
    known = rows.column(column).drop_null().unique().to_pylist()
    return {str(value).lower() for value in known} <= {"0", "1", "0.0", "1.0", "false", "true"}


def _is_in_schema(folder: str) -> bool:
    try:
        found = {name: pq.read_schema(table_files(folder, name)[0]).names for name in REQUIRED_COLUMNS}
    except TableError:
        return False
    return all(set(columns) <= set(found[name]) for name, columns in REQUIRED_COLUMNS.items())


def _configuration(tables: Path | str, note: str, is_clicks: bool) -> str:
    head = f"# laserbatch configuration. Every option is shown with its default; delete what you do not change.\n{note}"
    options = (PACKAGE_ROOT / "configs" / "default.yaml").read_text(encoding="utf-8").split("\n", 2)[2]
    options = options.replace("  path: null", f"  path: {json.dumps(str(tables), ensure_ascii=False)}", 1)
    return head + (options.replace("label: rating >= 4", "label: rating >= 1") if is_clicks else options)
