"""What a run starts from, checked before anything is written and described for its manifest."""

import datetime
import hashlib
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.settings import Settings
from pipeline.errors import ConfigError, TableError
from pipeline.sides import SIDES
from pipeline.storage.atomic import sha256_file
from pipeline.tables.check import require_sound_tables
from pipeline.tables.read import Tables, describe, read_tables
from pipeline.tables.schema import TABLE_NAMES
from retrieval_pools.grouping.embeddings import read_embeddings
from retrieval_pools.grouping.ids import id_column
from retrieval_pools.routing_rule import RoutingRule

ROWS_AT_ONCE = 64 * 1024


def checked_inputs(settings: Settings, date: datetime.date) -> tuple[dict[str, dict[str, Any]], Tables]:
    """Check everything that a run of this date reads: its tables, the function that routes, embeddings.

    Returns
    -------
    dict
        The manifest's `inputs`: by table, and `user_embeddings` and `item_embeddings` where they are configured, the
        file's name, rows and SHA-256; of a table also the SHA-256 of what of it is known on the date (`known_sha256`),
        of embeddings how many ids are of no entity that is known then.
    Tables
        As they are known on the date.

    Raises
    ------
    ConfigError
        There is no path of tables.
    TableError
        The input tables are not what they should be; every finding is named. Or neither a user nor an item is known.
    PoolError
        The rule of routing cannot be imported, or a file of embeddings is not what it should be.
    """
    if settings.tables.path is None:
        raise ConfigError("no input tables: set tables.path in the configuration; `laserbatch init TABLES` writes one")
    require_sound_tables(settings.tables.path)
    RoutingRule.of(settings.routing)  # a night that will not find its function fails here, not at its end
    tables = read_tables(settings.tables.path, as_of=date)
    if not any(tables.entities(side).num_rows for side in SIDES):
        raise TableError(
            f"neither a user nor an item of {settings.tables.path} is known at the end of {date}: every created_at is "
            "later; give a later --date, or correct created_at"
        )
    inputs = describe(settings.tables.path)
    for name in TABLE_NAMES:
        inputs[name]["known_sha256"] = _content_sha256(getattr(tables, name))
    return inputs | _described_embeddings(settings, tables), tables


def changed_inputs(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of the inputs that say something else of the date than they did; what only came later is no change."""

    def is_same(name: str) -> bool:
        old, new = before.get(name, {}), now[name]
        keys = ("sha256", "known_sha256")
        return any(old.get(key) is not None and old[key] == new.get(key) for key in keys)

    return [name for name in now if not is_same(name)]


def _content_sha256(table: pa.Table) -> str:
    """Of a table's columns and values, whatever its file and its chunks are like."""
    digest = hashlib.sha256(str(list(zip(table.schema.names, table.schema.types, strict=True))).encode())
    for start in range(0, table.num_rows, ROWS_AT_ONCE):
        for batch in table.slice(start, ROWS_AT_ONCE).combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()


def _described_embeddings(settings: Settings, tables: Tables) -> dict[str, dict[str, Any]]:
    paths = {side: path for side in SIDES if (path := settings.routing.embeddings_of(side)) is not None}
    described = {}
    for side, path in paths.items():
        embeddings = read_embeddings(path, side, id_column(tables.entities(side), f"{side}_id", f"{side}s"))
        num_rows = pq.read_metadata(path).num_rows
        described[f"{side}_embeddings"] = {
            "path": path.name,
            "num_rows": num_rows,
            "sha256": sha256_file(path),
            "num_unknown_ids": num_rows - len(embeddings.ids),
        }
    return described
