"""What a run starts from, checked before anything is written and described for its manifest."""

import datetime
from typing import Any

import pyarrow.parquet as pq

from jobs.settings import Settings
from pipeline.errors import ConfigError
from pipeline.sides import SIDES
from pipeline.storage.atomic import sha256_file
from pipeline.tables.check import require_sound_tables
from pipeline.tables.read import describe, read_tables
from retrieval_pools.grouping.embeddings import read_embeddings
from retrieval_pools.grouping.ids import id_column
from retrieval_pools.routing_rule import RoutingRule


def checked_inputs(settings: Settings, date: datetime.date) -> dict[str, dict[str, Any]]:
    """Check everything that a run of this date reads: its tables, the function that routes, embeddings.

    Returns
    -------
    dict
        The manifest's `inputs`: by table, and `user_embeddings` and `item_embeddings` where they are configured, the
        file's name, rows and SHA-256; of embeddings also how many ids are of no entity that is known on the date.

    Raises
    ------
    ConfigError
        There is no path of tables.
    TableError
        The input tables are not what they should be; every finding is named.
    PoolError
        The rule of routing cannot be imported, or a file of embeddings is not what it should be.
    """
    if settings.tables.path is None:
        raise ConfigError("no input tables: set tables.path in the configuration; `laserbatch init TABLES` writes one")
    require_sound_tables(settings.tables.path)
    RoutingRule.of(settings.routing)  # a night that will not find its function fails here, not at its end
    return describe(settings.tables.path) | _described_embeddings(settings, date)


def _described_embeddings(settings: Settings, date: datetime.date) -> dict[str, dict[str, Any]]:
    paths = {side: path for side in SIDES if (path := settings.routing.embeddings_of(side)) is not None}
    tables = read_tables(settings.tables.path, as_of=date) if paths else None
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
