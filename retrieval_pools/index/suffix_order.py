"""The order of all positions of a token array by the text that follows them: what a pool is searched by.

Texts lie end to end, a separator before the first, between two, and behind the last. A position is ordered by the
tokens from it up to the separator that ends its text, at most `depth` of them, so its place does not depend on which
text comes next. A separator in the first place is the start of the text behind it.
"""

from dataclasses import dataclass

import numpy as np

from laserbatch.retrieval_pools.compiled import cached

SEPARATOR = -1  # smaller than every token id: a text that ends comes before one that goes on


@dataclass(frozen=True)
class SuffixOrder:
    """Positions sorted by the text that follows.

    Parameters
    ----------
    order : int32[num_tokens - 1], every position but the last separator; equal texts by position.
    starts : int32[vocab_size + 2], `order[starts[t + 1]:starts[t + 2]]` are the positions of token t, the
        separator included.
    """

    order: np.ndarray
    starts: np.ndarray


def sort_suffixes(tokens: np.ndarray, vocab_size: int, depth: int) -> SuffixOrder:
    """Sort by prefix doubling (Manber and Myers 1990) with one counting pass a round: O(n log depth), deterministic.

    Parameters
    ----------
    tokens : int32[n], n >= 1, SEPARATOR or ids below `vocab_size`; the last is SEPARATOR.
    depth : tokens compared, rounded up to a power of two.
    """
    order, starts = _sort_by_first_token(tokens, vocab_size)
    rank = _first_ranks(tokens, starts)
    remaining = _tokens_to_separator(tokens)
    length = 1
    while length < depth:
        order = _sort_by_second_half(order, rank, remaining, length)
        rank, num_classes = _ranks_of_double(order, rank, remaining, length)
        if num_classes == len(order):
            break
        length *= 2
    return SuffixOrder(order, starts)


@cached()
def _sort_by_first_token(tokens, vocab_size):
    n = tokens.shape[0] - 1
    starts = np.zeros(vocab_size + 2, np.int32)
    for i in range(n):
        starts[tokens[i] + 2] += 1
    for t in range(vocab_size + 1):
        starts[t + 1] += starts[t]
    free = starts.copy()
    order = np.empty(n, np.int32)
    for i in range(n):
        t = tokens[i] + 1
        order[free[t]] = i
        free[t] += 1
    return order, starts


@cached()
def _first_ranks(tokens, starts):
    """The rank of a position is the place in the order at which its class of equals begins."""
    rank = np.empty(tokens.shape[0] - 1, np.int32)
    for i in range(rank.shape[0]):
        rank[i] = starts[tokens[i] + 1]
    return rank


@cached()
def _tokens_to_separator(tokens):
    n = tokens.shape[0] - 1
    remaining = np.empty(n, np.int32)
    end = n
    for i in range(n - 1, -1, -1):
        remaining[i] = end - i
        if tokens[i] == SEPARATOR:
            end = i
    return remaining


@cached()
def _sort_by_second_half(order, rank, remaining, length):
    """From sorted by `length` tokens to sorted by twice as many: take positions by their second half, fill classes."""
    n = order.shape[0]
    free = np.arange(n).astype(np.int32)  # the next free place of the class that begins here
    doubled = np.empty(n, np.int32)
    for i in range(n):  # texts that end within the first half come first
        if remaining[i] <= length:
            doubled[free[rank[i]]] = i
            free[rank[i]] += 1
    for k in range(n):
        i = order[k] - length
        if i >= 0 and remaining[i] > length:
            doubled[free[rank[i]]] = i
            free[rank[i]] += 1
    return doubled


@cached()
def _ranks_of_double(order, rank, remaining, length):
    n = order.shape[0]
    doubled = np.empty(n, np.int32)
    num_classes = 0
    before_first = before_second = np.int32(-2)
    current = 0
    for k in range(n):
        i = order[k]
        first = rank[i]
        second = rank[i + length] if remaining[i] > length else np.int32(-1)
        if first != before_first or second != before_second:
            current = k
            num_classes += 1
            before_first, before_second = first, second
        doubled[i] = current
    return doubled, num_classes
