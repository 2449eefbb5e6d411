"""Encodes ids and attribute columns as small integers, by vocabularies and bins of the training rows.

Code 0 is "absent" (padding, null), code 1 "unknown" (rare or never seen in training); known values follow. An entity
that training never saw gets codes for its attributes like any other; only its id is unknown.
"""

import logging
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.ctr.errors import CtrError

ABSENT, UNKNOWN, NUM_RESERVED = 0, 1, 2
NUM_BINS = 10  # quantile bins of a numeric column
MAX_DISTINCT_SHARE = 0.5  # a text column with a larger share of distinct values is not a category
MAX_SLOTS = 64  # only this many elements of a list are read: every entity has as many slots as the longest list
MIN_ENTITIES_TO_JUDGE = 20  # with fewer values, the share of distinct values is not judged

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Field:
    """A column of a side as a categorical input."""

    name: str
    codes: np.ndarray  # int32 (num_entities, num_slots); for a list column, num_slots is its longest list's length
    num_codes: int  # codes are below this
    tree_slots: int | None = None  # slots that are columns of trees, as in training; None: all


@dataclass(frozen=True)
class Encoder:
    """Encodes a column: by its vocabulary, which has the values in the order of their codes, or by edges of bins."""

    name: str
    kind: Literal["category", "bag", "bins"]  # an id is a category
    vocabulary: pa.Array | None = None
    edges: tuple[float, ...] = ()
    tree_slots: int | None = None  # of a bag: the slots that its field had in training

    def encode(self, table: pa.Table) -> Field:
        """Encode a table's column. Raises CtrError if it is missing, or has another type than in training."""
        if self.name not in table.schema.names:
            raise CtrError(f"the tables have no column {self.name!r}, which the model was trained with")
        column = table[self.name].combine_chunks()
        if self.kind == "bins":
            if not _is_number(column.type):
                raise CtrError(f"column {self.name} is of type {column.type}; the model was trained with numbers")
            return Field(self.name, _bins(column, self.edges), NUM_RESERVED + len(self.edges) + 1)
        assert self.vocabulary is not None
        num_codes = NUM_RESERVED + len(self.vocabulary)
        column = column.cast(pa.string()) if pt.is_boolean(column.type) else column
        expected = pa.list_(self.vocabulary.type) if self.kind == "bag" else self.vocabulary.type
        if plain(column.type) != plain(expected):
            raise CtrError(f"column {self.name} is of type {column.type}; the model was trained with {expected}")
        if self.kind == "bag":
            codes = _bag_codes(self.name, column, self.vocabulary, self.tree_slots or 1)
            return Field(self.name, codes, num_codes, self.tree_slots)
        return Field(self.name, _codes(column, self.vocabulary)[:, None], num_codes)


def fit_encoders(table: pa.Table, id_column: str, num_seen: np.ndarray, min_seen: int) -> list[Encoder]:
    """Fit encoders for the columns of an entity table, in the types in which tables are read; the id's comes first.

    Strings and booleans become categories, lists of strings bags of their elements (such as levels of a path), numbers
    quantile bins. Timestamps, and text columns with mostly distinct values (titles, descriptions), are left out.

    `num_seen`, int (num_rows,), is the number of training interactions of each entity: entities with any decide
    vocabularies and bins; an id is known if it has `min_seen` or more.
    """
    ids = table[id_column].combine_chunks()
    encoders = [Encoder(id_column, "category", ids.filter(pa.array(num_seen >= min_seen)))]
    is_trained = pa.array(num_seen > 0)
    for name in table.schema.names:
        if name == id_column:
            continue
        column = table[name].combine_chunks()
        encoder = _fit(name, column.filter(is_trained))
        if encoder is None:
            logger.info("column %s (%s) is not used as a CTR field", name, column.type)
        elif encoder.kind == "bag":
            longest = pc.max(pc.list_value_length(column)).as_py() or 1
            encoders.append(replace(encoder, tree_slots=min(longest, MAX_SLOTS)))
        else:
            encoders.append(encoder)
    return encoders


def plain(kind: pa.DataType) -> pa.DataType:
    """The type of values, or of lists of them, whatever their size: text of more than 2 GiB is of large strings."""
    if pt.is_list(kind):
        return pa.list_(plain(kind.value_type))
    return pa.string() if pt.is_large_string(kind) else kind


def _is_number(kind: pa.DataType) -> bool:
    return pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind)


def _fit(name: str, trained: pa.Array) -> Encoder | None:
    if _is_number(trained.type):
        values = trained.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)  # null becomes nan
        values = values[np.isfinite(values)]
        edges = np.unique(np.quantile(values, np.arange(1, NUM_BINS) / NUM_BINS)) if len(values) else np.zeros(0)
        return Encoder(name, "bins", edges=tuple(edges.tolist()))
    kind = plain(trained.type)
    if kind == pa.list_(pa.string()):
        return Encoder(name, "bag", _vocabulary(trained.flatten()))
    if not (pt.is_boolean(kind) or pt.is_string(kind)):
        return None
    vocabulary = _vocabulary(trained.cast(pa.string()) if pt.is_boolean(kind) else trained)
    num_values = len(trained) - trained.null_count
    if num_values >= MIN_ENTITIES_TO_JUDGE and len(vocabulary) > MAX_DISTINCT_SHARE * num_values:
        return None
    return Encoder(name, "category", vocabulary)


def _vocabulary(values: pa.Array) -> pa.Array:
    """The distinct values, sorted, so that they do not depend on row order."""
    distinct = pc.unique(values.drop_null())
    distinct = distinct.cast(plain(distinct.type))
    return distinct.take(pc.sort_indices(distinct))


def _codes(values: pa.Array, vocabulary: pa.Array) -> np.ndarray:
    """The code of each value, int32 (n,)."""
    codes_or_null = pc.add(pc.index_in(values, vocabulary.cast(values.type)), pa.scalar(NUM_RESERVED, pa.int32()))
    codes = pc.if_else(pc.is_null(values), pa.scalar(ABSENT, pa.int32()), pc.fill_null(codes_or_null, UNKNOWN))
    return codes.to_numpy(zero_copy_only=False).astype(np.int32)


def _bag_codes(name: str, column: pa.Array, vocabulary: pa.Array, num_slots: int) -> np.ndarray:
    rows = pc.list_parent_indices(column).to_numpy()
    slots = np.arange(len(rows)) - np.searchsorted(rows, rows)  # position of each element in its own list
    if num_long := np.count_nonzero(slots == MAX_SLOTS):
        logger.warning("column %s: of %d long lists, models read only the first %d elements", name, num_long, MAX_SLOTS)
    is_read = slots < MAX_SLOTS
    codes = np.zeros((len(column), max(min(int(slots.max(initial=0)) + 1, MAX_SLOTS), num_slots)), np.int32)
    codes[rows[is_read], slots[is_read]] = _codes(column.flatten(), vocabulary)[is_read]
    return codes


def _bins(column: pa.Array, edges: tuple[float, ...]) -> np.ndarray:
    values = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    bins = NUM_RESERVED + np.searchsorted(np.array(edges), values, side="right")
    return np.where(np.isfinite(values), bins, ABSENT).astype(np.int32)[:, None]
