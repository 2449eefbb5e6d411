"""Codes of distinct ids, and the rows of ids in other columns, from a hash table over their bytes that can grow.

Arrow's own functions build a new hash table for each part, or need whole columns.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from llvmlite import ir
from numba import njit, types

from laserbatch.retrieval_pools.compiled import cached, fetch, intrinsic

ROWS_AT_ONCE = 1 << 20
FEWER = 4  # the table holds the values, not the known ids, if there are at most 1 / FEWER as many values
MIN_SLOTS = 1024
MAX_BYTES = 2**31 - 1  # of an array of Arrow's `string`, whose offsets are int32
_AHEAD = 32  # rows whose slots are prefetched together
_HALF, _LOW, _FIRST, _SECOND = (np.uint64(n) for n in (32, 0xFFFFFFFF, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53))


class IdCodes:
    """Distinct ids, strings (also of type `large_string`) or int64, with codes from 0 in the order of their addition.

    An id takes 22 to 32 bytes besides its own: a slot, and a record with its length, its code and its bytes in words of
    8 bytes. So a lookup in a table that fits into no cache waits for two places in memory.
    """

    def __init__(self, kind: pa.DataType) -> None:
        kind = _kind(kind)
        if kind not in (pa.string(), pa.int64()):
            raise TypeError(f"ids are strings or int64, not {kind}")
        self.kind, self._num, self._num_bytes, self._num_words = kind, 0, 0, 0
        # A slot has an id's hash in its upper half, and the place of its record + 1 in the lower one.
        self._slots = np.zeros(MIN_SLOTS, np.uint64)
        self._records = np.empty(MIN_SLOTS, np.uint64)

    def __len__(self) -> int:
        return self._num

    def add(self, ids: pa.Array) -> np.ndarray:
        """The code of each id, int32[n]; -1 for null. Ids that were not there are added and get the next codes."""
        return self._codes(ids, adds=True)

    def find(self, ids: pa.Array) -> np.ndarray:
        """The code of each id, int32[n]; -1 if it was not added, or is null."""
        return self._codes(ids, adds=False)

    def values(self) -> pa.Array:
        """The distinct ids in the order of their codes; more than 2 GiB of text are of type `large_string`."""
        starts, data = np.empty(self._num + 1, np.int64), np.empty(self._num_bytes, np.uint8)
        _unpack(self._records, starts, data)
        if pt.is_int64(self.kind):
            return pa.array(data.view(np.int64))
        ids = pa.Array.from_buffers(pa.large_string(), self._num, [None, pa.py_buffer(starts), pa.py_buffer(data)])
        return ids if self._num_bytes > MAX_BYTES else ids.cast(self.kind)

    def _codes(self, ids: pa.Array, adds: bool) -> np.ndarray:
        if ids.null_count:
            codes = np.full(len(ids), -1, np.int32)
            codes[ids.is_valid().to_numpy(zero_copy_only=False)] = self._codes(ids.drop_null(), adds)
            return codes
        starts, data = _bytes_of(ids)
        if adds:
            self._reserve(len(ids), int(starts[-1]) - int(starts[0]))
        codes, counts = np.empty(len(ids), np.int32), (self._num, self._num_bytes, self._num_words)
        counts = _look_up(starts, data, self._slots, self._records, *counts, adds, codes)
        self._num, self._num_bytes, self._num_words = counts
        return codes

    def _reserve(self, num_ids: int, num_bytes: int) -> None:
        """Make room for `num_ids` further ids that have `num_bytes` bytes."""
        num_words = self._num_words + 2 * num_ids + num_bytes // 8
        num_ids += self._num
        if 4 * num_ids > 3 * len(self._slots):
            slots = np.zeros(1 << (4 * num_ids // 3).bit_length(), np.uint64)
            _move(self._slots, slots)
            self._slots = slots
        if num_words > len(self._records):
            self._records.resize(max(num_words, len(self._records) * 3 // 2), refcheck=False)


def rows_among(values: pa.Array | pa.ChunkedArray, known: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """The first row of `known` that has each value, int64[n]; -1 where no row has it, and for null.

    Values of another type than `known` equal none of its values, but strings and large strings can be equal.
    """
    kind = _kind(values.type)
    if kind != _kind(known.type) or not len(known):
        return np.full(len(values), -1)
    codes = IdCodes(kind)
    if FEWER * len(values) > len(known):
        code_of = _joined(map(codes.add, _parts(known)))
        rows = np.full(len(codes) + 1, -1)  # the last row is for code -1
        rows[code_of[::-1]] = np.arange(len(code_of))[::-1]
        rows[-1] = -1
        return rows[_joined(map(codes.find, _parts(values)))]
    code_of, first = _joined(map(codes.add, _parts(values))), 0
    rows = np.full(len(codes) + 1, -1)
    for part in _parts(known):
        of_part = codes.find(part)
        places = np.flatnonzero((of_part >= 0) & (rows[of_part] < 0))[::-1]
        rows[of_part[places]] = first + places
        first += len(part)
    return rows[code_of]


def _kind(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pt.is_large_string(kind) else kind


def _parts(ids: pa.Array | pa.ChunkedArray) -> Iterator[pa.Array]:
    for chunk in ids.chunks if isinstance(ids, pa.ChunkedArray) else [ids]:
        for start in range(0, len(chunk), ROWS_AT_ONCE):
            yield chunk.slice(start, ROWS_AT_ONCE)


def _joined(codes: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int32), *codes])


def _bytes_of(ids: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The start of each id, int64[n + 1], and the bytes of all ids, uint8; read-only, so that numba sees one type."""
    _, *buffers = ids.buffers()
    data = np.empty(0, np.uint8) if buffers[-1] is None else np.frombuffer(buffers[-1], np.uint8)
    if pt.is_int64(ids.type):
        starts, data = np.arange(len(ids) + 1) * 8, data[ids.offset * 8 :]
    elif len(ids):
        offsets = np.frombuffer(buffers[0], np.int64 if pt.is_large_string(ids.type) else np.int32)
        offsets = offsets[ids.offset : ids.offset + len(ids) + 1]
        starts, data = offsets.astype(np.int64) - offsets[0], data[offsets[0] : offsets[-1]]
    else:
        starts = np.zeros(1, np.int64)
    starts.flags.writeable = data.flags.writeable = False
    return starts, data


@intrinsic
def _eight_bytes(typing_context, data, place):
    """Eight bytes of an array from `place` on, unaligned, as a number; in compiled code only."""

    def emit(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(64).as_pointer())
        return builder.load(address, align=1)

    return types.uint64(data, types.intp), emit


@njit(inline="always")
def _word(data, begin, end):
    """At most eight bytes, up to `end`, as a number."""
    if end - begin >= 8:
        return _eight_bytes(data, begin)
    word = np.uint64(0)
    for place in range(begin, end):
        word = (word << np.uint64(8)) | np.uint64(data[place])
    return word


@njit(inline="always")
def _hash(data, begin, end):
    """A hash of 32 bits, as uint64, by the mixing function of MurmurHash3 (`fmix64`)."""
    mixed = np.uint64(end - begin)
    for place in range(begin, end, 8):
        mixed ^= _word(data, place, end)
        mixed = (mixed ^ (mixed >> np.uint64(33))) * _FIRST
        mixed = (mixed ^ (mixed >> np.uint64(33))) * _SECOND
        mixed ^= mixed >> np.uint64(33)
    return mixed & _LOW


@njit(inline="always")
def _is_equal(data, begin, end, records, place):
    """Whether an id is that of the record at a place."""
    if np.int64(records[place] >> _HALF) != end - begin:
        return False
    for at in range(begin, end, 8):
        place += 1
        if _word(data, at, end) != records[place]:
            return False
    return True


@cached()
def _look_up(starts, data, slots, records, num_known, num_bytes, num_words, adds, codes):
    """Write the code of each id into `codes`. Missing ids are added if `adds`, or get -1.

    Returns the numbers of ids, of their bytes, and of the words of their records.
    """
    last, hashes = len(slots) - 1, np.empty(_AHEAD, np.uint64)
    for first in range(0, len(codes), _AHEAD):
        stop = min(first + _AHEAD, len(codes))
        for row in range(first, stop):
            hashes[row - first] = _hash(data, np.int64(starts[row]), np.int64(starts[row + 1]))
            fetch(slots, np.int64(hashes[row - first]) & last)
        for row in range(first, stop):
            fetch(records, np.int64(slots[np.int64(hashes[row - first]) & last] & _LOW) - 1)  # -1 does no harm
        for row in range(first, stop):
            begin, end, tag = np.int64(starts[row]), np.int64(starts[row + 1]), hashes[row - first]
            place, code = np.int64(tag) & last, -1
            while slots[place] != 0:
                slot = slots[place]
                record = np.int64(slot & _LOW) - 1
                if slot >> _HALF == tag and _is_equal(data, begin, end, records, record):
                    code = np.int64(records[record] & _LOW)
                    break
                place = (place + 1) & last
            if code < 0 and adds:
                code = num_known
                slots[place] = (tag << _HALF) | np.uint64(num_words + 1)
                records[num_words] = np.uint64(end - begin) << _HALF | np.uint64(code)
                num_words += 1
                for at in range(begin, end, 8):
                    records[num_words] = _word(data, at, end)
                    num_words += 1
                num_known += 1
                num_bytes += end - begin
            codes[row] = code
    return num_known, num_bytes, num_words


@cached()
def _unpack(records, starts, data):
    """Write the ids of all records end to end into `data`, and where each begins and the last ends into `starts`."""
    place = at = np.int64(0)
    for code in range(len(starts) - 1):
        starts[code], stop = at, at + np.int64(records[place] >> _HALF)
        while at < stop:
            place += 1
            num, word = min(stop - at, 8), records[place]
            for byte in range(num):  # `_word` shifts fewer than eight bytes in from below
                shift = 8 * (byte if num == 8 else num - 1 - byte)
                data[at + byte] = (word >> np.uint64(shift)) & np.uint64(255)
            at += num
        place += 1
    starts[-1] = at


@cached()
def _move(slots, larger):
    """Put the ids of a table into an empty, larger one."""
    last = len(larger) - 1
    for slot in slots:
        if slot != 0:
            place = np.int64(slot >> _HALF) & last
            while larger[place] != 0:
                place = (place + 1) & last
            larger[place] = slot
