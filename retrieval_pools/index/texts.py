"""The texts of a pool: checked block by block and laid end to end in a file; known texts are found in an older pool.

There is a separator before the first text, between two texts, and after the last. `starts`, int32[num_texts + 1], has
the positions of the separators: the one before each text, and the last one. Only a block of texts, and a few bytes per
text, are in memory at a time.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from laserbatch.retrieval_pools.compiled import cached
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.arrays import ArrayWriter, map_array
from laserbatch.retrieval_pools.index.manifest import GroupCounts, group_code_dtype

SEPARATOR = -1  # smaller than every token id: a text that ends comes before one that goes on
MAX_GROUPS = 1 << 16
MAX_POSITIONS = (1 << 31) - 1
MAX_VOCABULARY = 1 << 24  # a pool has a table with a row per id up to the largest; vocabularies have some 100,000
_BLOCK_TEXTS = 1024
_STRETCH = 64
_SEPARATOR = np.array([SEPARATOR], np.int32)


@dataclass(frozen=True, slots=True)
class PoolText:
    """One earlier text."""

    token_ids: np.ndarray  # int32[n], n >= 0, without the end token: the pool knows where a text ends
    group: str = ""  # the group of the entity that it was written for
    entity: str | int | None = None  # that entity, for `min_support`: its texts count once; None: it has only this text


@dataclass(frozen=True)
class PoolTexts:
    """Several texts in columns, the form that a pool is built from fastest."""

    tokens: np.ndarray  # int[n], the tokens of the texts, possibly among others
    begins: np.ndarray  # int64[num_texts], where each text's tokens begin
    lengths: np.ndarray  # int64[num_texts]
    group_codes: np.ndarray  # int[num_texts], places in `groups`
    groups: Sequence[str]
    entity_codes: np.ndarray  # int[num_texts], codes of the entities, the same in all blocks of a pool


@dataclass(frozen=True)
class LaidTexts:
    """Texts laid end to end in a file."""

    tokens: np.ndarray  # int32[num_positions], mapped: separator, text, separator, text, ..., separator
    starts: np.ndarray  # int32[num_texts + 1], the separators' positions
    group_codes: np.ndarray  # uint8[num_texts] or, with more than 256 groups, uint16
    entity_codes: np.ndarray | None  # int32[num_texts], if requested
    groups: dict[str, GroupCounts]  # in the order of their codes, which is that of their first texts
    vocab_size: int

    @property
    def num_texts(self) -> int:
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        """The number of the texts' own tokens, without separators."""
        return len(self.tokens) - len(self.starts)


def lay_end_to_end(texts: Iterable[PoolText] | Iterable[PoolTexts], path: Path, with_entities: bool) -> LaidTexts:
    """Write the tokens of all texts to a `.npy` file and return where each text is; the texts are iterated once.

    `with_entities` also numbers the texts' entities, and keeps all of these in memory. Raises PoolError if a text is
    not a row of token ids (the message has its number, from 0), or there are more groups or tokens than a pool holds.
    """
    code_of: dict[str, int] = {}
    lengths, codes, entities = ([np.zeros(0, np.int32)] for _ in range(3))
    num_texts, num_positions, largest_id = 0, 1, -1
    with ArrayWriter(path, np.int32) as tokens:
        tokens.write(_SEPARATOR)
        for block in _in_blocks(texts, with_entities):
            largest_id = max(largest_id, _largest_id(block, num_texts))
            num_texts += len(block.lengths)
            num_positions += len(block.lengths) + int(block.lengths.sum())
            if num_positions > MAX_POSITIONS:
                raise PoolError(f"a pool has at most {MAX_POSITIONS:,} tokens; the first {num_texts} texts have more.")
            tokens.write(gather_texts(block.tokens, block.begins, block.lengths)[1:])
            in_block, first = np.unique(block.group_codes, return_index=True)
            code_in_pool = np.zeros(len(block.groups), np.int32)
            as_they_come: list[int] = in_block[np.argsort(first)].tolist()
            for code in as_they_come:
                code_in_pool[code] = code_of.setdefault(block.groups[code], len(code_of))
            if len(code_of) > MAX_GROUPS:
                raise PoolError(f"a pool has at most {MAX_GROUPS:,} groups; the first {num_texts} texts have more.")
            lengths.append(block.lengths.astype(np.int32))
            codes.append(code_in_pool[block.group_codes])
            entities += [block.entity_codes] if with_entities else []
    lengths = np.concatenate(lengths)
    starts = np.zeros(num_texts + 1, np.int32)
    np.cumsum(lengths + 1, out=starts[1:])
    codes = np.concatenate(codes).astype(group_code_dtype(len(code_of)))
    return LaidTexts(
        map_array(path),
        starts,
        codes,
        np.unique(np.concatenate(entities), return_inverse=True)[1].astype(np.int32) if with_entities else None,
        _count_groups(list(code_of), codes, lengths),
        largest_id + 1,
    )


def _in_blocks(texts: Iterable[PoolText] | Iterable[PoolTexts], with_entities: bool) -> Iterator[PoolTexts]:
    source, num_texts, entity_codes = iter(texts), 0, {}
    while block := list(itertools.islice(source, 1)):
        if isinstance(block[0], PoolTexts):
            yield block[0]
            continue
        block += itertools.islice(source, _BLOCK_TEXTS - 1)
        block = cast(list[PoolText], block)
        rows = [_row(text, number) for number, text in enumerate(block, num_texts)]
        names = ((k,) if text.entity is None else text.entity for k, text in enumerate(block, num_texts))
        entities = [entity_codes.setdefault(name, len(entity_codes)) for name in names] if with_entities else []
        group_codes: dict[str, int] = {}
        codes = [group_codes.setdefault(text.group, len(group_codes)) for text in block]
        if wrong := [name for name in group_codes if not isinstance(name, str)]:
            number = num_texts + codes.index(group_codes[wrong[0]])
            raise PoolError(f"text {number} has the group {wrong[0]!r}; expected a string, empty for no group.")
        lengths = np.array([len(row) for row in rows])
        begins = np.cumsum(lengths) - lengths
        yield PoolTexts(np.concatenate(rows), begins, lengths, np.array(codes), list(group_codes), np.array(entities))
        num_texts += len(block)


def _row(text: PoolText, number: int) -> np.ndarray:
    row = np.asarray(text.token_ids)
    if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
        raise PoolError(f"text {number} is not a row of token ids: shape {row.shape} of {row.dtype}.")
    return row.astype(np.int64)


def _largest_id(block: PoolTexts, num_before: int) -> int:
    """The largest id of a block of texts; raises PoolError if an id is below 0 or not below MAX_VOCABULARY."""
    largest, text, token = _checked(block.tokens, block.begins, block.lengths, MAX_VOCABULARY)
    if text >= 0:
        raise PoolError(
            f"text {num_before + text} has the token id {token}; expected 0 to {MAX_VOCABULARY - 1}. Build the pool "
            "from texts of the same tokenizer."
        )
    return largest


@cached()
def _checked(tokens, begins, lengths, limit):
    """The largest id, the first text with an invalid id (-1 if there is none), and that id."""
    largest = -1
    for text in range(begins.shape[0]):
        for i in range(begins[text], begins[text] + lengths[text]):
            if tokens[i] < 0 or tokens[i] >= limit:
                return largest, text, tokens[i]
            largest = max(largest, tokens[i])
    return largest, -1, -1


def _count_groups(names: list[str], codes: np.ndarray, lengths: np.ndarray) -> dict[str, GroupCounts]:
    counts = (np.bincount(codes, weights, minlength=len(names)).astype(int).tolist() for weights in (None, lengths))
    rows = zip(names, *counts, strict=True)
    return {name: GroupCounts(num_texts=num_texts, num_tokens=num_tokens) for name, num_texts, num_tokens in rows}


class TextOf:
    """Finds the text of each position (a separator belongs to the text after it), with 1/16 byte per position."""

    def __init__(self, starts: np.ndarray) -> None:
        self._starts = starts
        self._firsts = _texts_of_stretches(starts)

    def values(self, per_text: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The value in `per_text` of the text of each position, [n] in the dtype of `per_text`."""
        return _values_of_texts(per_text, self._starts, self._firsts, positions)


@cached()
def _texts_of_stretches(starts):
    firsts, text = np.empty((starts[-1] + _STRETCH - 1) // _STRETCH, np.int32), 0
    for stretch in range(firsts.shape[0]):
        while starts[text + 1] <= stretch * _STRETCH:
            text += 1
        firsts[stretch] = text
    return firsts


@cached()
def _values_of_texts(per_text, starts, firsts, positions):
    """The value of each position's text; `firsts` has the text of every `_STRETCH`-th position."""
    values = np.empty(positions.shape[0], per_text.dtype)
    for k in range(positions.shape[0]):
        text = firsts[positions[k] // _STRETCH]
        while starts[text + 1] <= positions[k]:
            text += 1
        values[k] = per_text[text]
    return values


@cached()
def gather_texts(tokens, begins, lengths):
    """Copy texts from anywhere in an array end to end into a new one, int32, with separators around each."""
    gathered = np.empty(lengths.sum() + lengths.shape[0] + 1, np.int32)
    gathered[0] = SEPARATOR
    end = 1
    for text in range(lengths.shape[0]):
        begin = begins[text]
        for i in range(lengths[text]):
            gathered[end + i] = tokens[begin + i]
        end += lengths[text] + 1
        gathered[end - 1] = SEPARATOR
    return gathered


def find_known_texts(
    tokens: np.ndarray, starts: np.ndarray, old_tokens: np.ndarray, old_starts: np.ndarray
) -> np.ndarray:
    """Find the texts of an older array that a newer one has too, in the same sequence.

    Texts are matched by their tokens; the k-th of several equal texts matches the k-th of the newer array. Of the
    matches only a longest increasing subsequence is returned, so that positions move by a monotone map.

    `starts` are the separators of each array. Returns the number of each older text in the newer array, int32[number of
    older texts], increasing, with -1 for texts without a match.
    """
    num_bits = max(len(old_starts), len(starts)).bit_length()
    old_keys, keys = (np.sort(_text_keys(*texts, num_bits)) for texts in ((old_tokens, old_starts), (tokens, starts)))
    new_numbers = _with_same_hash(old_keys, keys, num_bits)
    _keep_longest_increasing(new_numbers)
    _drop_unequal(new_numbers, old_tokens, old_starts, tokens, starts)
    return new_numbers


@cached()
def _text_keys(tokens, starts, num_bits):
    """The hash of each text's tokens, with the text's number in the lowest `num_bits` bits, uint64[num_texts]."""
    keys = np.empty(starts.shape[0] - 1, np.uint64)
    for text in range(keys.shape[0]):
        value = np.uint64(0xCBF29CE484222325)
        for i in range(starts[text] + 1, starts[text + 1]):
            value = (value ^ np.uint64(tokens[i])) * np.uint64(0x9E3779B97F4A7C15)
            value ^= value >> np.uint64(29)
        keys[text] = value >> np.uint64(num_bits) << np.uint64(num_bits) | np.uint64(text)
    return keys


@cached()
def _with_same_hash(old_keys, keys, num_bits):
    """The newer text with the hash of each older one, int32, -1 if there is none; both arrays of keys ascend.

    The k-th of several texts with the same hash gets the k-th newer one.
    """
    new_numbers = np.full(old_keys.shape[0], -1, np.int32)
    bits, numbers = np.uint64(num_bits), (np.uint64(1) << np.uint64(num_bits)) - np.uint64(1)
    i = j = 0
    while i < old_keys.shape[0] and j < keys.shape[0]:
        older, newer = old_keys[i] >> bits, keys[j] >> bits
        if older == newer:
            new_numbers[old_keys[i] & numbers] = keys[j] & numbers
        i += older <= newer
        j += newer <= older
    return new_numbers


@cached()
def _keep_longest_increasing(new_numbers):
    """Set numbers outside a longest increasing subsequence to -1 (patience sorting, O(n log n))."""
    last_values = np.empty_like(new_numbers)  # [length - 1]: the smallest last value of a subsequence of this length
    last_places = np.empty_like(new_numbers)  # the place of that value
    before = np.empty_like(new_numbers)  # the place before each place in its subsequence
    length = 0
    for place in range(new_numbers.shape[0]):
        value = new_numbers[place]
        if value >= 0:
            shorter = length
            if length > 0 and value <= last_values[length - 1]:
                shorter = np.searchsorted(last_values[:length], value)
            before[place] = last_places[shorter - 1] if shorter > 0 else -1
            last_values[shorter], last_places[shorter] = value, place
            length = max(length, shorter + 1)
    kept = last_places[length - 1] if length > 0 else -1
    for place in range(new_numbers.shape[0] - 1, -1, -1):
        if place == kept:
            kept = before[place]
        else:
            new_numbers[place] = -1


@cached()
def _drop_unequal(new_numbers, old_tokens, old_starts, tokens, starts):
    """Set matches whose tokens differ to -1: two texts may have the same hash."""
    for text in range(new_numbers.shape[0]):
        if new_numbers[text] >= 0:
            older = old_tokens[old_starts[text] : old_starts[text + 1]]
            newer = tokens[starts[new_numbers[text]] : starts[new_numbers[text] + 1]]
            if older.shape[0] != newer.shape[0] or (older != newer).any():
                new_numbers[text] = -1
