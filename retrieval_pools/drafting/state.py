"""What a draft works on: flat arrays under names, and the limits that size them."""

from typing import NamedTuple

import numpy as np
from numba import njit

from retrieval_pools.sources import NUM_SOURCES

MAX_NODES = 64
MIN_PROBABILITY = 1 / 2048  # the paths not yet drafted exclude each other, so no more than 2048 of them are as likely
END = -1  # the separator: the text ends here
NUM_LOCAL_POSITIONS = 16  # occurrences of a context followed in each of the sequence's own texts, the latest ones
MAX_LEVELS = 12
NUM_CANDIDATES = 1024
NUM_SLOTS = 4096  # of the hash table from token to candidate; a power of two
FRONTIER_SIZE = 2048 + NUM_CANDIDATES


# How the parts of the query are compiled: for one another only, which saves a quarter of the time that it takes.
part = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")


class Index(NamedTuple):
    """The arrays of a pool: `group_codes[k]` belongs to the text of position `order[k]`; see `suffix_order`.

    Likewise `support[k]`, how many tokens from `order[k]` on enough entities have (see `support.py`); None
    where nothing is kept back.
    """

    tokens: np.ndarray
    order: np.ndarray
    group_codes: np.ndarray
    starts: np.ndarray
    support: np.ndarray | None
    depth: int


class Preference(NamedTuple):
    """How much an occurrence counts in the pool: `inside` texts of the group, `outside` them."""

    group: int
    inside: float
    outside: float
    num_samples: int
    num_group_samples: int


class Context(NamedTuple):
    """The sequence: `tokens[:num_prompt]` is the prompt, the rest the output; `previous` an earlier night's text."""

    tokens: np.ndarray
    num_prompt: int
    previous: np.ndarray
    max_match: int
    max_tokens: int


class Levels(NamedTuple):
    """Who is asked, longest context first, and where each stands at every node of the tree (node 0: the root).

    `first` and `last`, (MAX_NODES + 1, MAX_LEVELS): the interval of the pool's order that begins with context and path;
    for the sequence's own texts 0 and the number of `positions`, (MAX_NODES + 1, NUM_SOURCES, NUM_LOCAL_POSITIONS),
    where the next token would stand.
    """

    source: np.ndarray
    length: np.ndarray
    escape: np.ndarray
    first: np.ndarray
    last: np.ndarray
    positions: np.ndarray


class Candidates(NamedTuple):
    """Possible next tokens of a node: `share[c, source]` is what a source adds to the probability of `token[c]`.

    `slots` is a hash table from token to c + 1, `slot_of[c]` the place of c in it.
    """

    token: np.ndarray
    share: np.ndarray
    slots: np.ndarray
    slot_of: np.ndarray


class Frontier(NamedTuple):
    """A heap of the paths that may be drafted next, the most probable on top."""

    probability: np.ndarray
    token: np.ndarray
    parent: np.ndarray
    source: np.ndarray


@part
def new_levels(max_nodes):
    """Room for every level at every node, not filled."""
    return Levels(
        np.empty(MAX_LEVELS, np.int64),
        np.empty(MAX_LEVELS, np.int64),
        np.empty(MAX_LEVELS, np.float64),
        np.empty((max_nodes + 1, MAX_LEVELS), np.int64),
        np.empty((max_nodes + 1, MAX_LEVELS), np.int64),
        np.empty((max_nodes + 1, NUM_SOURCES, NUM_LOCAL_POSITIONS), np.int64),
    )


@part
def new_candidates():
    """No candidates, and an empty table."""
    return Candidates(
        np.empty(NUM_CANDIDATES, np.int32),
        np.empty((NUM_CANDIDATES, NUM_SOURCES), np.float64),
        np.zeros(NUM_SLOTS, np.int16),
        np.empty(NUM_CANDIDATES, np.int64),
    )


@part
def new_frontier():
    """An empty heap."""
    return Frontier(
        np.empty(FRONTIER_SIZE, np.float64),
        np.empty(FRONTIER_SIZE, np.int32),
        np.empty(FRONTIER_SIZE, np.int32),
        np.empty(FRONTIER_SIZE, np.uint8),
    )
