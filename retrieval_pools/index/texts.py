"""What goes into a pool: texts, checked as they come and laid end to end in a file.

Only a block of texts is in memory at a time, and a few bytes for each text.
"""

import itertools
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laserbatch.retrieval_pools.compiled import cached
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.arrays import ArrayWriter, map_array
from laserbatch.retrieval_pools.index.layout import TextSpans
from laserbatch.retrieval_pools.index.manifest import GroupCounts, group_code_dtype
from laserbatch.retrieval_pools.index.suffix_order import SEPARATOR

MAX_GROUPS = 1 << 16
MAX_POSITIONS = (1 << 31) - 1
_BLOCK_TEXTS = 1024
_INT32 = np.dtype(np.int32)
_SEPARATOR = np.array([SEPARATOR], np.int32)


@dataclass(frozen=True, slots=True)
class PoolText:
    """One earlier text.

    Parameters
    ----------
    token_ids : int32[n], n >= 0, without the end token: where a text ends is known by itself.
    group : the group of the entity that it was written for.
    entity : that entity, for `min_support`: its texts count once. None: an entity with this one text.
    age_nights : nights since it was written, for `half_life_nights`.
    """

    token_ids: np.ndarray
    group: str = ""
    entity: str | int | None = None
    age_nights: float = 0.0


@dataclass(frozen=True)
class LaidTexts:
    """Texts as they lie in a file.

    Parameters
    ----------
    tokens : int32[num_positions], mapped: separator, text, separator, text, ..., separator.
    group_codes : uint8[num_texts] or, with more than 256 groups, uint16.
    entity_codes : int32[num_texts], or None when nobody asked for them.
    ages_nights : float32[num_texts].
    groups : in the order of their codes: as they came.
    """

    tokens: np.ndarray
    spans: TextSpans
    group_codes: np.ndarray
    entity_codes: np.ndarray | None
    ages_nights: np.ndarray
    groups: dict[str, GroupCounts]
    vocab_size: int

    @property
    def num_tokens(self) -> int:
        """The texts' own tokens, without separators."""
        return len(self.tokens) - 1 - self.spans.num_texts

    def texts(self, chosen: np.ndarray) -> Iterator[PoolText]:
        """The texts of some numbers again, in their order."""
        names, starts = list(self.groups), self.spans.starts
        for text in chosen.tolist():
            its_own = slice(starts[text] + 1, starts[text + 1])
            entity = None if self.entity_codes is None else int(self.entity_codes[text])
            group, age_nights = names[self.group_codes[text]], float(self.ages_nights[text])
            yield PoolText(self.tokens[its_own], group, entity, age_nights)


def lay_end_to_end(
    texts: Iterable[PoolText], path: Path, vocab_size: int | None, with_entities: bool = False
) -> LaidTexts:
    """Write all texts' tokens to a `.npy` file and say where each lies.

    Parameters
    ----------
    texts : read once.
    vocab_size : ids must be below it; None takes the largest id for the last.
    with_entities : also number the texts' entities, which are all in memory then.

    Raises
    ------
    PoolError
        A text is not a row of token ids of the vocabulary (the message numbers it, from 0), or there are more groups or
        tokens than a pool holds.
    """
    limit = MAX_POSITIONS - 2 if vocab_size is None else vocab_size
    groups, entities = _Codes("H"), _Codes("i")
    lengths, ages = array("i"), array("f")
    num_positions, largest_id = 1, -1
    source = iter(texts)
    with ArrayWriter(path, np.int32) as tokens:
        tokens.write(_SEPARATOR)
        while block := list(itertools.islice(source, _BLOCK_TEXTS)):
            first = len(lengths)
            rows = _rows([text.token_ids for text in block], first, limit)
            block_lengths = np.fromiter(map(len, rows), np.int64, len(rows))
            _require_room(groups, block, first, num_positions + np.cumsum(block_lengths + 1))
            num_positions += int(block_lengths.sum()) + len(rows)
            largest_id = max(largest_id, _write_rows(tokens, rows, block_lengths, first, limit))
            lengths.extend(block_lengths.tolist())
            groups.add([text.group for text in block])
            ages.extend([text.age_nights for text in block])
            if with_entities:
                named = ((k,) if text.entity is None else text.entity for k, text in enumerate(block, first))
                entities.add(list(named))
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(np.array(lengths, np.int32) + 1, out=starts[1:])
    codes = np.array(groups.codes, group_code_dtype(len(groups.code_of)))
    return LaidTexts(
        map_array(path),
        TextSpans.of_starts(starts),
        codes,
        np.array(entities.codes, np.int32) if with_entities else None,
        np.array(ages, np.float32),
        _count_groups(list(groups.code_of), codes, np.array(lengths, np.int64)),
        largest_id + 1 if vocab_size is None else vocab_size,
    )


class _Codes:
    """Numbers for names, in the order in which they came, and the number of each text."""

    def __init__(self, type_code: str) -> None:
        self.code_of: dict[object, int] = {}
        self.codes = array(type_code)

    def add(self, names: list) -> None:
        code_of = self.code_of
        self.codes.extend([code_of.setdefault(name, len(code_of)) for name in names])


def _rows(token_ids: list[np.ndarray], first: int, limit: int) -> list[np.ndarray]:
    """Token ids below `limit` as int32 rows; `first` is the number of the first text."""
    usual = {type(row) for row in token_ids} == {np.ndarray} and {row.dtype for row in token_ids} == {_INT32}
    if usual and {row.ndim for row in token_ids} == {1}:
        return token_ids
    rows = []
    for number, values in enumerate(map(np.asarray, token_ids), first):
        if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
            raise PoolError(f"text {number} is not a row of token ids: shape {values.shape} of {values.dtype}.")
        _require_ids(values, number, limit)
        rows.append(values.astype(np.int32))
    return rows


def _require_ids(values: np.ndarray, number: int, limit: int) -> None:
    smallest, largest = (int(values.min()), int(values.max())) if values.size else (0, -1)
    if smallest < 0 or largest >= limit:
        raise PoolError(
            f"text {number} has the token id {smallest if smallest < 0 else largest}; expected 0 to {limit - 1}. "
            "Build the pool from texts of the same tokenizer."
        )


def _write_rows(writer: ArrayWriter, rows: list[np.ndarray], lengths: np.ndarray, first: int, limit: int) -> int:
    """Write a block, a separator behind each row. Returns the largest id."""
    laid = np.empty(int(lengths.sum()) + len(rows), np.int32)
    smallest, largest = _lay(np.concatenate(rows), lengths, laid)
    if smallest < 0 or largest >= limit:
        for number, row in enumerate(rows, first):
            _require_ids(row, number, limit)
    writer.write(laid)
    return largest


def _require_room(groups: _Codes, block: list[PoolText], first: int, ends: np.ndarray) -> None:
    if ends[-1] > MAX_POSITIONS:
        number = first + int(np.searchsorted(ends, MAX_POSITIONS, side="right"))
        raise PoolError(f"text {number} is one too many: a pool holds {MAX_POSITIONS:,} tokens. Split the texts.")
    if len(groups.code_of) + len(block) <= MAX_GROUPS:
        return
    known = set(groups.code_of)
    for number, text in enumerate(block, first):
        known.add(text.group)
        if len(known) > MAX_GROUPS:
            raise PoolError(
                f"text {number} is of a new group, {text.group!r}; a pool holds {MAX_GROUPS:,}. Make fewer."
            )


@cached()
def _lay(tokens, lengths, laid):
    """Put a separator behind each text. Returns the smallest and the largest id, 0 and -1 where there is none."""
    smallest, largest = 0, -1
    read = written = 0
    for text in range(lengths.shape[0]):
        for _ in range(lengths[text]):
            token = tokens[read]
            smallest, largest = min(smallest, token), max(largest, token)
            laid[written] = token
            read += 1
            written += 1
        laid[written] = SEPARATOR
        written += 1
    return smallest, largest


def _count_groups(names: list[str], codes: np.ndarray, lengths: np.ndarray) -> dict[str, GroupCounts]:
    num_texts = np.bincount(codes, minlength=len(names))
    num_tokens = np.bincount(codes, weights=lengths, minlength=len(names))
    return {
        name: GroupCounts(num_texts=int(num_texts[code]), num_tokens=int(num_tokens[code]))
        for code, name in enumerate(names)
    }
