"""Texts as they lie end to end in a token array, a separator before the first, between two, and behind the last.

Which text a position belongs to, in tables of a few bytes a text, and what follows from a text being the same as in
another array.
"""

from typing import NamedTuple

import numpy as np

from laserbatch.retrieval_pools.compiled import cached, fetch
from laserbatch.retrieval_pools.index.arrays import in_threads
from laserbatch.retrieval_pools.index.suffix_order import SEPARATOR

_BLOCK_BITS = 4  # one entry for 16 positions, a quarter of a byte each: most are found in one step
_AHEAD = 16  # places whose texts are asked for before they are needed, and as many whose blocks are


class TextSpans(NamedTuple):
    """Where texts begin.

    Parameters
    ----------
    starts : int32[num_texts + 1], the separator before each text, and the last separator.
    blocks : int32[num_positions // 16 + 1], the text that each 16th position belongs to.
    """

    starts: np.ndarray
    blocks: np.ndarray

    @classmethod
    def of_starts(cls, starts: np.ndarray) -> "TextSpans":
        """From the separators' positions."""
        return cls(starts, _first_texts(starts))

    @classmethod
    def of_tokens(cls, tokens: np.ndarray) -> "TextSpans":
        """From the tokens themselves, int32[n], in one pass."""
        return cls.of_starts(_separators(tokens))

    @property
    def num_texts(self) -> int:
        """Number of texts."""
        return len(self.starts) - 1


@cached()
def text_at(spans, position):
    """The text that a position, or the separator before it, belongs to. Compiled code only."""
    text = spans.blocks[position >> _BLOCK_BITS]
    while spans.starts[text + 1] <= position:
        text += 1
    return text


@cached()
def fetch_text_at(spans, order, k):
    """Ask for what `text_at` reads of the places of an order that come after the k-th. Compiled code only.

    Returns the text of a place that is nearer, or one before it: for the caller to ask for what it keeps of texts.
    """
    last = order.shape[0] - 1
    fetch(spans.blocks, order[min(k + 2 * _AHEAD, last)] >> _BLOCK_BITS)
    text = spans.blocks[order[min(k + _AHEAD, last)] >> _BLOCK_BITS]
    fetch(spans.starts, text + 1)
    return text


@cached(nogil=True)
def values_by_place(order, spans, value_of_text):
    """The value of the text that each place of an order belongs to, in the dtype of `value_of_text`."""
    values = np.empty(order.shape[0], value_of_text.dtype)
    for k in range(order.shape[0]):
        fetch(value_of_text, fetch_text_at(spans, order, k))
        values[k] = value_of_text[text_at(spans, order[k])]
    return values


@cached()
def count_first_tokens(tokens, vocab_size):
    """int32[vocab_size + 2], the `starts` of `suffix_order.SuffixOrder` for all positions but the last separator."""
    starts = np.zeros(vocab_size + 2, np.int32)
    for i in range(tokens.shape[0] - 1):
        starts[tokens[i] + 2] += 1
    for t in range(vocab_size + 1):
        starts[t + 1] += starts[t]
    return starts


@cached()
def gather_texts(tokens, starts, texts):
    """Some texts end to end in an array of their own, separators around them: (tokens, their `starts` there)."""
    new_starts = np.zeros(texts.shape[0] + 1, np.int32)
    for k in range(texts.shape[0]):
        new_starts[k + 1] = new_starts[k] + starts[texts[k] + 1] - starts[texts[k]]
    gathered = np.empty(new_starts[-1] + 1, np.int32)
    for k in range(texts.shape[0]):
        first = starts[texts[k]]
        for i in range(new_starts[k + 1] - new_starts[k]):
            gathered[new_starts[k] + i] = tokens[first + i]
    gathered[-1] = SEPARATOR
    return gathered, new_starts


def find_known_texts(tokens: np.ndarray, starts: np.ndarray, old_tokens: np.ndarray, old: TextSpans) -> np.ndarray:
    """Which texts of an older array stand in a newer one too, in the same sequence.

    Texts are told by their tokens. Where the two arrays have them in different sequences, a longest common subsequence
    is known (of equal texts the k-th is taken for the k-th), so that positions move by a monotone map.

    Parameters
    ----------
    tokens, starts : the newer array and its separators.
    old_tokens, old : the older array and its spans.

    Returns
    -------
    int32[old.num_texts], the number that each older text has now, increasing where it is not -1: not known.
    """
    both = in_threads(lambda texts: _text_keys(*texts), ((old_tokens, old.starts), (tokens, starts)))
    _, old_texts, texts = np.intersect1d(*both, return_indices=True)
    same = np.full(old.num_texts, -1, np.int32)
    same[old_texts] = texts
    _keep_longest_increasing(same)
    _drop_unequal(same, old_tokens, old.starts, tokens, starts)
    return same


def _text_keys(tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """uint64[num_texts], another for each: the hash of its tokens, and how many equal texts are before it."""
    hashes = _text_hashes(tokens, starts)
    order = np.argsort(hashes, kind="stable")
    risen = hashes[order]
    num_before = np.arange(len(risen), dtype=np.uint64) - np.searchsorted(risen, risen).astype(np.uint64)
    keys = np.empty_like(hashes)
    keys[order] = risen + num_before * np.uint64(0xD1342543DE82EF95)
    return keys


@cached()
def _separators(tokens):
    num_separators = 0
    for i in range(tokens.shape[0]):
        num_separators += tokens[i] == SEPARATOR
    starts = np.empty(num_separators, np.int32)
    k = 0
    for i in range(tokens.shape[0]):
        if tokens[i] == SEPARATOR:
            starts[k] = i
            k += 1
    return starts


@cached()
def _first_texts(starts):
    blocks = np.zeros((starts[-1] >> _BLOCK_BITS) + 1, np.int32)
    text = 0
    for b in range(blocks.shape[0]):
        while text + 2 < starts.shape[0] and starts[text + 1] <= b << _BLOCK_BITS:
            text += 1
        blocks[b] = text
    return blocks


@cached(nogil=True)
def _text_hashes(tokens, starts):
    hashes = np.empty(starts.shape[0] - 1, np.uint64)
    for text in range(hashes.shape[0]):
        value = np.uint64(0xCBF29CE484222325)
        for i in range(starts[text] + 1, starts[text + 1]):
            value = (value ^ np.uint64(tokens[i])) * np.uint64(0x9E3779B97F4A7C15)
            value ^= value >> np.uint64(29)
        hashes[text] = value
    return hashes


@cached()
def _keep_longest_increasing(same):
    """Set to -1 what is not of a longest increasing subsequence (patience sorting, O(n log n))."""
    n = same.shape[0]
    last_of = np.empty(n, np.int32)  # by length less one: the place of the smallest last value
    before = np.full(n, -1, np.int32)
    longest = 0
    for place in range(n):
        if same[place] < 0:
            continue
        low, high = 0, longest
        while low < high:
            middle = (low + high) >> 1
            if same[last_of[middle]] < same[place]:
                low = middle + 1
            else:
                high = middle
        if low > 0:
            before[place] = last_of[low - 1]
        last_of[low] = place
        longest = max(longest, low + 1)
    kept = last_of[longest - 1] if longest > 0 else -1
    for place in range(n - 1, -1, -1):
        if place == kept:
            kept = before[place]
        else:
            same[place] = -1


@cached()
def _drop_unequal(same, old_tokens, old_starts, tokens, starts):
    """A hash may be that of two texts; nobody is to rely on it not being so."""
    for text in range(same.shape[0]):
        if same[text] < 0:
            continue
        first, new_first = old_starts[text], starts[same[text]]
        length = old_starts[text + 1] - first
        if starts[same[text] + 1] - new_first != length:
            same[text] = -1
            continue
        for i in range(length):
            if old_tokens[first + i] != tokens[new_first + i]:
                same[text] = -1
                break
