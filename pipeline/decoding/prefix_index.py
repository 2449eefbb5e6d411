"""An index that finds the text with the longest common prefix in a few comparisons, however many texts it has.

It is queried for each admitted text; comparing with every text took several milliseconds at a batch of 256. The texts
are sorted, so the one that shares the longest prefix with a text is a neighbour of that text's place.
"""

from bisect import bisect_left, insort
from typing import Generic, TypeVar

import numpy as np

Held = TypeVar("Held")


class PrefixIndex(Generic[Held]):
    """Texts of token ids, each with a name, which is a number, and a value that is held for it."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[bytes, Held]] = {}  # in order of insertion
        self._sorted: list[tuple[bytes, int]] = []

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, name: int) -> bool:
        return name in self._texts

    def __getitem__(self, name: int) -> Held:
        return self._texts[name][1]

    def values(self) -> list[Held]:
        """The held values, in order of insertion."""
        return [held for _, held in self._texts.values()]

    def put(self, name: int, token_ids: np.ndarray, held: Held) -> None:
        """Add a text, int32[n], with its value; a text of the same name is replaced."""
        if name in self._texts:
            self.pop(name)
        key = _key(token_ids)
        self._texts[name] = key, held
        insort(self._sorted, (key, name))

    def pop(self, name: int) -> Held:
        key, held = self._texts.pop(name)
        del self._sorted[bisect_left(self._sorted, (key, name))]
        return held

    def pop_first(self) -> Held:
        return self.pop(next(iter(self._texts)))

    def longest(self, token_ids: np.ndarray) -> tuple[int, Held | None]:
        """The length of the longest prefix that a text shares with `token_ids`, int32[n], and its value, or (0, None).

        Among texts that share equally many tokens, a neighbour in sorted order is taken, whatever was added first.
        """
        key = _key(token_ids)
        place = bisect_left(self._sorted, (key,))
        most, longest = 0, None
        for other, name in self._sorted[max(0, place - 1) : place + 1]:
            num_shared = _num_shared(other, key)
            if num_shared > most:
                most, longest = num_shared, self._texts[name][1]
        return most, longest


def _key(token_ids: np.ndarray) -> bytes:
    """A sort key that compares texts token by token; the order of single tokens is arbitrary."""
    return np.ascontiguousarray(token_ids, np.int32).tobytes()


def _num_shared(first: bytes, second: bytes) -> int:
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length // 4
    first_ids, second_ids = (np.frombuffer(key, np.int32, length // 4) for key in (first, second))
    return int((first_ids != second_ids).argmax())
