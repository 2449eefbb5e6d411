"""`laserbatch init TABLES`: a commented configuration for the user's own tables, with what can be guessed filled in.

Tables that are in the input schema already need no mapping; for others a mapping is guessed from file and column
names and written beside the configuration, to be read and corrected by a person.
"""

import re
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import typer
import yaml

from laserbatch.jobs.console import say, summary
from laserbatch.jobs.inputs import NEEDS_A_MODEL, check_inputs
from laserbatch.jobs.settings import Settings, commented_yaml, load_settings
from laserbatch.pipeline.errors import ConfigError, TableError, first_line
from laserbatch.pipeline.sample.world import is_sample_world
from laserbatch.pipeline.storage.atomic import write_text
from laserbatch.pipeline.tables.findings import count_faults
from laserbatch.pipeline.tables.schema import TABLE_NAMES, table_files

USER_ID = r"^(user|member|customer|reader|viewer|account|visitor)s?_?(id|no|key|code)?$|^uid$"
ITEM_ID = r"^(item|product|movie|book|article|news|video|song|track|job|post|sku|asin)s?_?(id|no|key|code)?$|^iid$"
TITLE = r"title|name|headline|label"
TIME = r"time|date|^ts$|_at$|when"
RATING = r"rating|stars|score|^grade$|click|like"
PATH_SEPARATORS = (" > ", ">", "|", ";", "/")


@dataclass(frozen=True)
class SourceTable:
    """One file of the user's: its name, columns, and a few rows."""

    name: str
    head: pa.Table

    @property
    def stem(self) -> str:
        """The name without suffix or parts."""
        return re.split(r"[./]", self.name)[0]

    def find(self, pattern: str, taken: Container[str] = ()) -> str | None:
        """The first column whose name matches and is not taken."""
        free = (column for column in self.head.column_names if column not in taken)
        return next((column for column in free if re.search(pattern, column, re.IGNORECASE)), None)


def init(
    tables: Path = typer.Argument(..., help="Folder with your tables, Parquet or CSV."),
    out: Path = typer.Option(Path("laserbatch.yaml"), help="Configuration to write."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace OUT if it is there."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Write a commented configuration for your own tables, with a guessed mapping to be corrected.

    Example: `laserbatch init exports/ --out laserbatch.yaml`
    """
    if out.exists() and not overwrite:
        raise ConfigError(f"{out} is there already; pass --overwrite to replace it")
    if not tables.is_dir():
        raise TableError(f"{tables} is not a folder; expected one with your tables")
    if _is_in_schema(tables):
        first = pq.ParquetFile(table_files(tables, "interactions")[0]).iter_batches(65_536)
        write_text(_configuration(tables.resolve(), "", _is_clicks(next(first, None), "rating")), out)
        num_faults = count_faults(check_inputs(tables, load_settings(out)))
        said = {"configuration": str(out), "tables": "in the input schema already", "num_faults": num_faults}
        if not is_sample_world(tables):
            said["model"] = NEEDS_A_MODEL
        following = f"laserbatch data check {tables} --config {out}" if num_faults else f"laserbatch try --config {out}"
        summary(said | {"next": following}, as_json)
        return
    mapping_path = out.with_name("mapping.yaml")
    if mapping_path.exists() and not overwrite:
        raise ConfigError(f"{mapping_path} is there already; pass --overwrite to replace it")
    sources = read_sources(tables)
    mapping = guess_mapping(sources)
    events = mapping["interactions"]
    is_clicks = any(s.name == events["files"] and _is_clicks(s.head, events.get("rating")) for s in sources)
    command = f"laserbatch data import table {tables} {out.with_name('tables')} --mapping {mapping_path}"
    head = "# Guessed from the names of files and columns: read it, correct it, then run\n#   " + command + "\n"
    head += "# configs/import_example.yaml explains every key.\n"
    write_text(head + yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True), mapping_path)
    note = f"# Made from {tables} by: {command}\n"
    write_text(_configuration(out.resolve().with_name("tables"), note, is_clicks), out)
    say("the mapping is a guess from names; read it before you import")
    said = {"configuration": str(out), "mapping": str(mapping_path), "model": NEEDS_A_MODEL}
    summary(said | {"next": f"{command}, then laserbatch try --config {out}"}, as_json)


def read_sources(folder: Path) -> list[SourceTable]:
    """Every Parquet or CSV file of a folder (of a folder of Parquet files, one), with its first rows."""
    sources = []
    for path in sorted(folder.iterdir()):
        pattern, file = path.name, path
        if path.is_dir():
            parts = sorted(path.glob("*.parquet"))
            if not parts:
                continue
            pattern, file = f"{path.name}/*.parquet", parts[0]
        try:
            if file.suffix == ".parquet":
                sources.append(SourceTable(pattern, next(pq.ParquetFile(file).iter_batches(20), None)))
            elif file.suffix in (".csv", ".tsv"):
                options = pacsv.ParseOptions(delimiter="\t" if file.suffix == ".tsv" else ",")
                batches = iter(pacsv.open_csv(file, parse_options=options))
                sources.append(SourceTable(pattern, next(batches, None)))
        except (pa.ArrowException, OSError) as error:
            raise TableError(f"{file} cannot be read: {first_line(error)}") from None
    sources = [SourceTable(s.name, pa.Table.from_batches([s.head]).slice(0, 20)) for s in sources if s.head is not None]
    if not sources:
        raise TableError(f"{folder} holds no Parquet or CSV file with rows; expected users, items and interactions")
    return sources


def guess_mapping(sources: list[SourceTable]) -> dict:
    """A mapping for `data import table`, guessed from names.

    Raises
    ------
    TableError
        No file looks like interactions or like items; the message lists what was seen.
    """
    interactions = next((s for s in sources if s.find(USER_ID) and s.find(ITEM_ID) and s.find(TIME)), None)
    rest = [source for source in sources if source is not interactions]
    items = next((s for s in rest if s.find(ITEM_ID) and s.find(TITLE)), None) or next(
        (s for s in rest if s.find(TITLE) and not s.find(USER_ID)), None
    )
    users = next((s for s in rest if s is not items and (s.find(USER_ID) or re.search(USER_ID, s.stem))), None)
    if interactions is None or items is None:
        seen = "; ".join(f"{source.name}: {', '.join(source.head.column_names)}" for source in sources)
        wanted = "items (an id and a title)" if interactions else "interactions (a user id, an item id and a time)"
        raise TableError(f"no file looks like {wanted}; see configs/import_example.yaml. Found: {seen}")
    mapping: dict = {"ids": {}}
    if users is not None:
        user_id = users.find(USER_ID) or users.find(r"id$") or users.head.column_names[0]
        mapping["users"] = {"files": users.name, "id": user_id, "attributes": _attributes(users, {user_id})}
    title = items.find(TITLE)
    item_id = items.find(ITEM_ID) or items.find(r"id$") or items.head.column_names[0]
    mapping["items"] = {"files": items.name, "id": item_id, "title": title}
    mapping["items"]["attributes"] = _attributes(items, {item_id, title})
    mapping["interactions"] = {
        "files": interactions.name,
        "user_id": interactions.find(USER_ID),
        "item_id": interactions.find(ITEM_ID),
        "timestamp": {"column": interactions.find(TIME), "unit": _time_unit(interactions, interactions.find(TIME))},
        "drop_unknown": True,
    }
    for name, owner in (("user_id", users), ("item_id", items)):
        holders = [(interactions, mapping["interactions"][name])]
        holders += [(owner, mapping[f"{name.removesuffix('_id')}s"]["id"])] if owner is not None else []
        are_integers = all(
            source.name.endswith(".parquet") and pa.types.is_integer(source.head[column].type)
            for source, column in holders
        )
        mapping["ids"][name] = "int64" if are_integers else "string"  # of a CSV, 007 is a text
    of_events = mapping["interactions"]
    rating = interactions.find(RATING, (of_events["user_id"], of_events["item_id"], of_events["timestamp"]["column"]))
    if rating is not None:
        mapping["interactions"]["rating"] = rating
    return mapping


def _attributes(source: SourceTable, used: set[str]) -> dict:
    attributes: dict = {}
    for column in source.head.column_names:
        if column in used:
            continue
        values = [value for value in source.head[column].to_pylist() if isinstance(value, str) and value]
        separator = next((mark for mark in PATH_SEPARATORS if _in_most(values, mark)), None)
        attributes[column] = {"column": column, "separator": separator} if separator else column
    return attributes


def _in_most(values: list[str], mark: str) -> bool:
    return sum(mark in value for value in values) > len(values) / 2


def _time_unit(source: SourceTable, column: str) -> str:
    value = next((value for value in source.head[column].to_pylist() if value is not None), 0)
    if not isinstance(value, int | float):
        return "iso"
    return next((unit for unit, bound in (("s", 1e11), ("ms", 1e14), ("us", 1e17)) if value < bound), "ns")


def _is_clicks(rows: pa.Table | pa.RecordBatch | None, column: str | None) -> bool:
    """Whether the first ratings are 0 and 1 only, so that 1 is a positive."""
    if rows is None or column not in rows.schema.names:
        return False
    return set(rows.column(column).unique().to_pylist()) <= {0, 1, None}


def _is_in_schema(folder: Path) -> bool:
    try:
        for name in TABLE_NAMES:
            table_files(folder, name)
    except TableError:
        return False
    found = {name: pq.read_schema(table_files(folder, name)[0]).names for name in TABLE_NAMES}
    return (
        "user_id" in found["users"]
        and {"item_id", "title"} <= set(found["items"])
        and {"user_id", "item_id", "timestamp"} <= set(found["interactions"])
    )


def _configuration(tables: Path, note: str, is_clicks: bool) -> str:
    head = f"# laserbatch configuration. Every option is shown with its default; delete what you do not change.\n{note}"
    values = {"tables": {"path": tables}, "ctr": {"positive_rating": 1.0} if is_clicks else {}}
    return head + commented_yaml(Settings, values).lstrip("\n") + "\n"
