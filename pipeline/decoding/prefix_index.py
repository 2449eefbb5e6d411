"""Which of many texts begins most like another: a few comparisons, however many there are.

Asked for each text that is admitted: looking at every one took several milliseconds at a batch of 256. Texts are in
sorted order, where the one with the longest beginning in common with any other stands next to it.
"""

from bisect import bisect_left, insort
from typing import Generic, TypeVar

import numpy as np

Held = TypeVar("Held")


class PrefixIndex(Generic[Held]):
    """Texts of token ids, each with a name, which is a number, and with what is held for it."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[bytes, Held]] = {}  # the first to come first
        self._sorted: list[tuple[bytes, int]] = []

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, name: int) -> bool:
        return name in self._texts

    def __getitem__(self, name: int) -> Held:
        return self._texts[name][1]

    def values(self) -> list[Held]:
        """What is held, that of the first to come first."""
        return [held for _, held in self._texts.values()]

    def put(self, name: int, token_ids: np.ndarray, held: Held) -> None:
        """Keep a text, int32[n], in place of the one of this name, if there is one."""
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
        """The most leading tokens that a text shares with `token_ids`, int32[n], and its entry; (0, None) for none.

        Among texts that share as many, a neighbour in sorted order is returned, whatever the order of insertion.
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
    """Sorts texts token by token, single tokens in any order."""
    return np.ascontiguousarray(token_ids, np.int32).tobytes()


def _num_shared(first: bytes, second: bytes) -> int:
    """Leading tokens that two keys have in common."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length // 4
    first_ids, second_ids = (np.frombuffer(key, np.int32, length // 4) for key in (first, second))
    return int((first_ids != second_ids).argmax())
