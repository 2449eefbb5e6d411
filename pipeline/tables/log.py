"""Interactions as arrays of fixed width: appended batch by batch, put in order in place, then a table over the arrays.

The arrays lie in mapped files, so that a process's own memory grows with the number of distinct ids alone. Nothing is
known here of the files of tables.
"""

from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.tables.order import slices
from laserbatch.pipeline.tables.schema import ID_COLUMNS
from laserbatch.retrieval_pools.ids import IdCodes
from laserbatch.retrieval_pools.mapped import MappedFiles

NULL_TIME = np.iinfo(np.int64).max  # so that it comes last


class StoredLog:
    """Rows of interactions. `kinds`: the types of columns; text that is no id is of few words, or of none (null)."""

    def __init__(self, kinds: Mapping[str, pa.DataType], max_rows: int, files: MappedFiles) -> None:
        self.num_rows, self._files, self._kinds = 0, files, kinds
        self._coded = {
            name: _Coded(kind, max_rows, files) for name, kind in kinds.items()
            if name in ID_COLUMNS.values() or pt.is_string(kind) or pt.is_null(kind)
        }  # fmt: skip
        self._fixed = {
            name: _Fixed(kind, max_rows, files, NULL_TIME if name == "timestamp" else 0)
            for name, kind in kinds.items() if name not in self._coded
        }  # fmt: skip

    def append(self, columns: Mapping[str, pa.Array]) -> None:
        """Add rows of all columns, each of its type; words may be of type null."""
        at = slice(self.num_rows, self.num_rows + len(columns["timestamp"]))
        for name, values in columns.items():
            (self._coded | self._fixed)[name].write(at, values)
        self.num_rows = at.stop

    def see(self, column: str, ids: pa.Array) -> None:
        """Have the ids of rows that are not added among those of `sort_ids`."""
        self._coded[column].codes_of(ids)

    def sort_ids(self) -> dict[str, pa.ChunkedArray]:
        """Make codes ascend with the ids of rows. Returns all ids by column, those that were seen too; null last."""
        return {name: self._coded[name].sort(self.num_rows, self._files) for name in ID_COLUMNS.values()}

    def dictionary(self, column: str) -> pa.Array:
        """The ids of the rows after `sort_ids`: their codes are places in it, the next code is that of null."""
        return self._coded[column].dictionary

    def rows(self) -> dict[str, np.ndarray]:
        """The rows as arrays, codes for ids and words; numbers and times beside whether each is null."""
        arrays = {name: column.codes for name, column in self._coded.items()}
        for name, column in self._fixed.items():
            arrays |= {name: column.values, f"{name} is null": column.is_null}
        return {name: array[: self.num_rows] for name, array in arrays.items()}

    def to_table(self, num_rows: int) -> pa.Table:
        """The first rows, which are not copied."""
        columns = {name: column.to_arrow(num_rows) for name, column in (self._coded | self._fixed).items()}
        nulls = {name: pa.nulls(num_rows, pa.string()) for name, kind in self._kinds.items() if pt.is_null(kind)}
        return pa.table({name: (columns | nulls)[name] for name in self._kinds})


class _Coded:
    """A column of ids or words: int32 codes, places in `dictionary`; null is -1, of sorted ids the code after the last.

    Words stay in the order in which they come.
    """

    def __init__(self, kind: pa.DataType, max_rows: int, files: MappedFiles) -> None:
        self.codes = files.empty((max_rows,), np.dtype(np.int32))
        self._ids, self._has_null = IdCodes(pa.string() if pt.is_null(kind) else kind), False
        self._sorted: pa.Array | None = None

    @property
    def dictionary(self) -> pa.Array:
        return self._ids.values() if self._sorted is None else self._sorted

    def codes_of(self, values: pa.Array) -> np.ndarray:
        self._has_null |= values.null_count > 0
        return self._ids.add(values.cast(self._ids.kind))

    def write(self, at: slice, values: pa.Array) -> None:
        self.codes[at] = self.codes_of(values)

    def sort(self, num_rows: int, files: MappedFiles) -> pa.ChunkedArray:
        ids, codes = self._ids.values(), self.codes[:num_rows]
        del self._ids
        order = pc.sort_indices(ids).to_numpy()
        ids = files.array(ids.take(pa.array(order)))
        occurs = np.zeros(len(ids) + 1, bool)
        for at in slices(num_rows):
            occurs[codes[at]] = True
        occurs = occurs[order]
        places = np.empty(len(ids) + 1, np.int32)
        places[order], places[-1] = np.cumsum(occurs, dtype=np.int32) - 1, np.count_nonzero(occurs)
        for at in slices(num_rows):
            codes[at] = places[codes[at]]  # -1 is the last place, that of null
        self._sorted = ids if occurs.all() else files.array(ids.filter(pa.array(occurs)))
        return pa.chunked_array([ids, pa.nulls(int(self._has_null), ids.type)])

    def to_arrow(self, num_rows: int) -> pa.Array:
        codes, words = self.codes[:num_rows], self.dictionary
        validity = _validity(num_rows, lambda at: (codes[at] >= 0) & (codes[at] < len(words)))
        kind = pa.dictionary(pa.int32(), words.type)
        return pa.DictionaryArray.from_buffers(kind, num_rows, [validity, pa.py_buffer(codes)], words)


class _Fixed:
    """A column of times or numbers: their bits as integers, (n,), or (n, k) where they have more than eight bytes."""

    def __init__(self, kind: pa.DataType, max_rows: int, files: MappedFiles, null_value: int) -> None:
        self._kind, self._null_value = kind, null_value
        width = max(kind.bit_width // 8, 1)
        dtype = np.dtype(np.int64 if pt.is_timestamp(kind) else f"u{min(width, 8)}")
        self.values = files.empty((max_rows,) if width <= 8 else (max_rows, width // 8), dtype)
        self.is_null = files.empty((max_rows,), np.dtype(bool))

    def write(self, at: slice, values: pa.Array) -> None:
        is_null = self.is_null[at] = values.is_null().to_numpy(zero_copy_only=False)
        if pt.is_boolean(self._kind):
            values = values.cast(pa.uint8())
        shape = (-1, *self.values.shape[1:])
        bits = np.frombuffer(values.buffers()[1] or b"", self.values.dtype).reshape(shape)
        bits = bits[values.offset : values.offset + len(values)]
        self.values[at] = np.where(is_null.reshape(-1, *[1] * (bits.ndim - 1)), self._null_value, bits)

    def to_arrow(self, num_rows: int) -> pa.Array:
        values, is_null = self.values[:num_rows], self.is_null[:num_rows]
        if pt.is_boolean(self._kind):
            return pa.array(values.view(bool), mask=is_null if is_null.any() else None)
        validity = _validity(num_rows, lambda at: ~is_null[at])
        return pa.Array.from_buffers(self._kind, num_rows, [validity, pa.py_buffer(values)])


def _validity(num_rows: int, is_valid: Callable[[slice], np.ndarray]) -> pa.Buffer | None:
    """Arrow's bitmap of the rows that are not null; None where all are."""
    bitmap, num_valid = [], 0
    for at in slices(num_rows):
        part = is_valid(at)
        bitmap.append(np.packbits(part, bitorder="little"))
        num_valid += np.count_nonzero(part)
    return None if num_valid == num_rows else pa.py_buffer(np.concatenate(bitmap))
