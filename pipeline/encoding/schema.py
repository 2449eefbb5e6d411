"""The feature table, as an Arrow schema: all that CTR training needs to know of the pipeline.

It has one row per entity; the files of a side hold consecutive ranges of ids. This module is the contract between
making features and training on them, so it imports neither torch nor anything of the pipeline.
"""

import datetime

import numpy as np
import pyarrow as pa

FEATURE_VERSION = 2
LEVELS = ("cluster_id", "residual_id")  # columns of codes, coarse first
MOMENT = pa.timestamp("us", "UTC")
DAY_US = 86_400_000_000
_EPOCH = datetime.date(1970, 1, 1)


def feature_schema(side: str, entity_id_type: pa.DataType, dim: int) -> pa.Schema:
    """The Arrow schema of a feature file; ids keep the type that they have in the input tables."""
    return pa.schema(
        [
            pa.field(f"{side}_id", entity_id_type, nullable=False),
            pa.field("vector", pa.list_(pa.float32(), dim), nullable=False),  # L2-normalised
            pa.field("cluster_id", pa.int32(), nullable=False),  # code of the first level: the nearest centroid
            pa.field("residual_id", pa.int32(), nullable=False),  # code of the second level, of the residual
            pa.field("run_id", pa.string(), nullable=False),  # the run that generated the text; begins with its date
            pa.field("fingerprint", pa.string(), nullable=False),  # of the prompt that the text answers
            pa.field("valid_from", MOMENT, nullable=False),  # the day after `run_id`'s: rows from then on may see it
        ],
        metadata={"laserbatch.record": "feature", "laserbatch.version": str(FEATURE_VERSION), "laserbatch.side": side},
    )


def check_feature_schema(schema: pa.Schema, side: str) -> None:
    """Raise ValueError if a table is not a feature table of this version and side."""
    metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    actual = metadata.get("laserbatch.record"), metadata.get("laserbatch.version"), metadata.get("laserbatch.side")
    if actual != ("feature", str(FEATURE_VERSION), side):
        raise ValueError(
            f"expected a feature table of version {FEATURE_VERSION} of side {side}, found record {actual[0]}, "
            f"version {actual[1]}, side {actual[2]}"
        )
    columns = [f"{side}_id", "vector", *LEVELS, "run_id", "fingerprint"]  # earlier tables have no `valid_from`
    if not set(columns) <= set(schema.names):
        raise ValueError(f"expected the columns {columns} in a feature table, found {schema.names}")


def run_date(run_id: str) -> datetime.date:
    """The date of a run id (`<date>-<settings hash>`): the text was made from data known at the end of that day."""
    try:
        return datetime.date.fromisoformat(run_id[:10])
    except ValueError:
        raise ValueError(f"run id {run_id!r} does not begin with a date; expected YYYY-MM-DD-...") from None


def days_valid(run_ids: pa.Array) -> np.ndarray:
    """The first day on which each run's texts may be seen, the day after its date: int32[n], days since 1970 (UTC).

    The texts of a night know all data up to the end of its date.
    """
    coded = run_ids.dictionary_encode()
    run_days = [(run_date(run) - _EPOCH).days + 1 for run in coded.dictionary.to_pylist()]
    return np.array(run_days, np.int32)[coded.indices.to_numpy()]


def vector_column(vectors: np.ndarray, is_null: np.ndarray | None = None) -> pa.Array:
    """Vectors, float32 (n, dim), as a column; `is_null`, bool (n,), are null."""
    mask = None if is_null is None else pa.array(is_null)
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1], mask=mask)


def vectors_of(rows: pa.RecordBatch | pa.Table) -> np.ndarray:
    """The vectors of a feature table, or of a batch of it: float32 (num_rows, dim)."""
    column = rows["vector"].combine_chunks() if isinstance(rows, pa.Table) else rows["vector"]
    return column.flatten().to_numpy().reshape(len(column), column.type.list_size)


def moments(days: np.ndarray) -> pa.Array:
    """The beginnings of days since 1970 (UTC), as `MOMENT`; -1 is null."""
    return pa.array(days.astype(np.int64) * DAY_US, MOMENT, mask=days < 0)
