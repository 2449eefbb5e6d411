"""What goes into a pool: texts, checked as they come and laid end to end in a file.

Only a block of texts is in memory at a time, and a few bytes for each text. Knows neither orders nor drafts.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrieval_pools.array_files import ArrayWriter, map_array
from retrieval_pools.errors import PoolError
from retrieval_pools.layout import TextSpans
from retrieval_pools.manifest import GroupCounts, group_code_dtype
from retrieval_pools.suffix_order import SEPARATOR

MAX_GROUPS = 1 << 16
MAX_POSITIONS = (1 << 31) - 1
_BLOCK_TOKENS = 1 << 18
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
            token_ids = self.tokens[starts[text] + 1 : starts[text + 1]]
            entity = None if self.entity_codes is None else int(self.entity_codes[text])
            yield PoolText(token_ids, names[self.group_codes[text]], entity, float(self.ages_nights[text]))


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
        A text is not a row of token ids of the vocabulary (the message numbers it, from 0), or there are more groups
        or tokens than a pool holds.
    """
    groups, entities = _Codes("H"), _Codes("i")
    ages = array("f")
    with ArrayWriter(path, np.int32) as writer:
        writer.write(_SEPARATOR)
        block = _Block(writer, vocab_size)
        for number, text in enumerate(texts):
            if text.group not in groups.code_of and len(groups.code_of) == MAX_GROUPS:
                raise PoolError(
                    f"text {number} is of a new group, {text.group!r}; a pool holds {MAX_GROUPS:,}. Make fewer."
                )
            groups.add(text.group)
            if with_entities:
                entities.add((number,) if text.entity is None else text.entity)
            ages.append(text.age_nights)
            block.add(text.token_ids, number)
        block.write()
    lengths = np.frombuffer(block.lengths, np.int32) if block.lengths else np.empty(0, np.int32)
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths + 1, out=starts[1:])
    codes = groups.codes.astype(group_code_dtype(len(groups.code_of)))
    return LaidTexts(
        map_array(path),
        TextSpans.of_starts(starts),
        codes,
        entities.codes.astype(np.int32) if with_entities else None,
        np.array(ages, np.float32),
        _count_groups(list(groups.code_of), codes, lengths),
        block.largest_id + 1 if vocab_size is None else vocab_size,
    )


class _Codes:
    """Numbers for names, in the order in which they came, and the number of each text."""

    def __init__(self, type_code: str) -> None:
        self.code_of: dict[object, int] = {}
        self._codes = array(type_code)

    def add(self, name: object) -> None:
        self._codes.append(self.code_of.setdefault(name, len(self.code_of)))

    @property
    def codes(self) -> np.ndarray:
        return np.array(self._codes)


class _Block:
    """Texts that wait to be checked and written at once."""

    def __init__(self, writer: ArrayWriter, vocab_size: int | None) -> None:
        self._writer, self._vocab_size = writer, vocab_size
        self._limit = MAX_POSITIONS - 2 if vocab_size is None else vocab_size
        self._pieces: list[np.ndarray] = []
        self._num_tokens = 0
        self._num_positions = 1
        self.lengths = array("i")
        self.largest_id = -1

    def add(self, token_ids: np.ndarray, number: int) -> None:
        if type(token_ids) is not np.ndarray or token_ids.dtype != np.int32 or token_ids.ndim != 1:
            token_ids = self._as_int32(token_ids, number)
        length = len(token_ids)
        self._num_positions += length + 1
        if self._num_positions > MAX_POSITIONS:
            raise PoolError(f"text {number} is one too many: a pool holds {MAX_POSITIONS:,} tokens. Split the texts.")
        self._pieces += (token_ids, _SEPARATOR)
        self.lengths.append(length)
        self._num_tokens += length + 1
        if self._num_tokens >= _BLOCK_TOKENS:
            self.write()

    def write(self) -> None:
        if not self._pieces:
            return
        tokens = np.concatenate(self._pieces)
        self.largest_id = max(self.largest_id, int(tokens.max()))
        num_texts = len(self._pieces) // 2
        if self.largest_id >= self._limit or np.count_nonzero(tokens < 0) > num_texts:
            for place, piece in enumerate(self._pieces[::2]):
                self._require_ids(piece, len(self.lengths) - num_texts + place)
        self._writer.write(tokens)
        self._pieces, self._num_tokens = [], 0

    def _as_int32(self, token_ids: np.ndarray, number: int) -> np.ndarray:
        values = np.asarray(token_ids)
        if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
            raise PoolError(f"text {number} is not a row of token ids: shape {values.shape} of {values.dtype}.")
        self._require_ids(values, number)
        return values.astype(np.int32)

    def _require_ids(self, values: np.ndarray, number: int) -> None:
        smallest, largest = (int(values.min()), int(values.max())) if values.size else (0, 0)
        if values.size and (smallest < 0 or largest >= self._limit):
            raise PoolError(
                f"text {number} has the token id {smallest if smallest < 0 else largest}; expected 0 to "
                f"{self._limit - 1}. Build the pool from texts of the same tokenizer."
            )


def _count_groups(names: list[str], codes: np.ndarray, lengths: np.ndarray) -> dict[str, GroupCounts]:
    num_texts = np.bincount(codes, minlength=len(names))
    num_tokens = np.bincount(codes, weights=lengths, minlength=len(names))
    return {
        name: GroupCounts(num_texts=int(num_texts[code]), num_tokens=int(num_tokens[code]))
        for code, name in enumerate(names)
    }
