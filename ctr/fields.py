"""Ids and attribute columns as small integers, by vocabularies and bins that training rows alone decide.

Code 0 is "absent" (padding, null), code 1 "unknown" (rare or never seen in training), known values follow. An entity
that training never saw gets codes from its attributes like any other; only its id is unknown.
"""

import logging
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

ABSENT, UNKNOWN, NUM_RESERVED = 0, 1, 2
NUM_BINS = 10  # quantiles of a number
MAX_DISTINCT_SHARE = 0.5  # a text column with more distinct values is no category
MIN_ENTITIES_TO_JUDGE = 20  # with fewer, "nearly all values distinct" says nothing

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Field:
    """One categorical input of a side: a column's."""

    name: str
    codes: np.ndarray  # int64 (num_entities, num_slots); of a list column as many slots as its longest list
    num_codes: int  # codes are below this


def id_field(name: str, num_seen: np.ndarray, min_seen: int) -> Field:
    """Field of an entity's own id, known from `min_seen` training interactions on; `num_seen` int64 (num_entities,)."""
    is_known = num_seen >= min_seen
    codes = np.full(len(num_seen), UNKNOWN, np.int64)
    codes[is_known] = NUM_RESERVED + np.arange(is_known.sum())
    return Field(name, codes[:, None], NUM_RESERVED + int(is_known.sum()))


def attribute_fields(table: pa.Table, id_column: str, is_trained: np.ndarray) -> list[Field]:
    """Fields of an entity table's attribute columns, in the types that tables are read in.

    Strings and booleans become categories, lists of strings bags of their elements (a path's levels), numbers quantile
    bins. Timestamps, and text columns whose values are nearly all distinct (titles, descriptions), are left out.

    `is_trained` bool (num_rows,): entities that occur in training rows; they alone decide vocabularies and bins.
    """
    fields = []
    for name in table.schema.names:
        if name == id_column:
            continue
        column = table[name].combine_chunks()
        kind, field = column.type, None
        if pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind):
            field = _binned(name, column, is_trained)
        elif kind == pa.list_(pa.string()):
            field = _bag(name, column, is_trained)
        elif pt.is_boolean(kind) or pt.is_string(kind):
            field = _category(name, column.cast(pa.string()), is_trained)
        if field is None:
            logger.info("column %s (%s) is no CTR field", name, kind)
        else:
            fields.append(field)
    return fields


def _category(name: str, column: pa.Array, is_trained: np.ndarray) -> Field | None:
    trained = column.filter(pa.array(is_trained)).drop_null()
    num_distinct = pc.count_distinct(trained).as_py()
    if len(trained) >= MIN_ENTITIES_TO_JUDGE and num_distinct > MAX_DISTINCT_SHARE * len(trained):
        return None
    vocabulary = _vocabulary(trained)
    codes = _codes(column, vocabulary)
    return Field(name, codes[:, None], NUM_RESERVED + len(vocabulary))


def _bag(name: str, column: pa.Array, is_trained: np.ndarray) -> Field:
    vocabulary = _vocabulary(column.filter(pa.array(is_trained)).flatten().drop_null())
    rows = pc.list_parent_indices(column).to_numpy()
    elements = _codes(column.flatten(), vocabulary)
    slots = np.arange(len(rows)) - np.searchsorted(rows, rows)  # position of each element in its own list
    codes = np.zeros((len(column), int(slots.max(initial=0)) + 1), np.int64)
    codes[rows, slots] = elements
    return Field(name, codes, NUM_RESERVED + len(vocabulary))


def _binned(name: str, column: pa.Array, is_trained: np.ndarray) -> Field:
    values = column.cast(pa.float64()).to_numpy(zero_copy_only=False)  # null becomes nan
    is_present = np.isfinite(values)
    trained = values[is_trained & is_present]
    edges = np.unique(np.quantile(trained, np.arange(1, NUM_BINS) / NUM_BINS)) if len(trained) else np.zeros(0)
    codes = np.where(is_present, NUM_RESERVED + np.searchsorted(edges, values, side="right"), ABSENT)
    return Field(name, codes.astype(np.int64)[:, None], NUM_RESERVED + len(edges) + 1)


def _vocabulary(values: pa.Array) -> pa.Array:
    """Distinct values, sorted, so that row order does not show."""
    known = pc.unique(values)
    return known.take(pc.sort_indices(known))


def _codes(values: pa.Array, vocabulary: pa.Array) -> np.ndarray:
    """Code of each value, int64 (n,)."""
    known = pc.add(pc.index_in(values, vocabulary).cast(pa.int64()), NUM_RESERVED)
    codes = pc.if_else(pc.is_null(values), ABSENT, pc.fill_null(known, UNKNOWN))
    return codes.to_numpy(zero_copy_only=False).astype(np.int64)
