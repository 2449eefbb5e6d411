"""What a draft works on: flat arrays under names, and the limits that size them."""

from typing import NamedTuple

import numpy as np
from numba import njit

from retrieval_pools.sources import NUM_SOURCES

MAX_NODES = 64
LEAST_LEFT = 1 / 32  # shorter contexts are asked while so much is left to them: whatever the budget, so that estimates
# do not depend on it and a smaller budget's tree is the beginning of a larger one's
MIN_PROBABILITY = 1 / 2048  # the paths not yet drafted exclude each other, so no more than 2048 of them are as likely
END = -1  # the separator: the text ends here
NUM_LOCAL_POSITIONS = 16  # occurrences of a context followed in each of the sequence's own texts, the latest ones
MAX_LEVELS = 12
NUM_CANDIDATES = 1024
NUM_SLOTS = 2048  # of the hash table from token to candidate; a power of two
NUM_RUNS = NUM_CANDIDATES  # of next tokens of a level
NUM_OUTPUTS = 7
OUT_TOKEN, OUT_PARENT, OUT_LOG_ACCEPTANCE, OUT_SOURCE, OUT_NUM_SEEN, OUT_MATCH_LENGTH, OUT_RELATIVE_COUNT = range(7)


# How the parts of the query are compiled: each into its caller, since handing the arrays on costs more than most do.
part = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True, error_model="numpy")
called = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")  # long parts that are called rarely


class Index(NamedTuple):
    """The arrays of a pool: `group_codes[k]` belongs to the text of position `order[k]`; see `suffix_order`.

    Likewise `support[k]`, how many tokens from `order[k]` on enough entities have (see `support.py`); None
    where nothing is kept back. `alternatives[i]` is what the model nearly wrote in place of `tokens[i]`, -1: nothing;
    None where that is not kept.
    """

    tokens: np.ndarray
    order: np.ndarray
    group_codes: np.ndarray
    starts: np.ndarray
    support: np.ndarray | None
    alternatives: np.ndarray | None
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
    """Possible next tokens of a node: `total[c]` is the relative count of `token[c]`, `pool[c]` the pool's part of it.

    Each own text adds at most once: `own[c]` is the largest such part, `own_source[c]` whose it is. `length[c]` is the
    longest context that knows the token, the path included, and `num_seen[c]` how often that was seen. `slots` is a
    hash table from token to c + 1, `slot_of[c]` the place of c in it.
    """

    token: np.ndarray
    total: np.ndarray
    pool: np.ndarray
    own: np.ndarray
    own_source: np.ndarray
    length: np.ndarray
    num_seen: np.ndarray
    slots: np.ndarray
    slot_of: np.ndarray


class Runs(NamedTuple):
    """Next tokens of a level: how much each counts, and whether it may be drafted."""

    token: np.ndarray
    weight: np.ndarray
    is_drafted: np.ndarray


class Frontier(NamedTuple):
    """Paths in the order in which they are drafted: those drafted already, then those that may be.

    `probability` is in that order, and so is `slots`, which says where the rest of a path stands.
    """

    probability: np.ndarray
    slots: np.ndarray
    token: np.ndarray
    parent: np.ndarray
    source: np.ndarray
    length: np.ndarray
    num_seen: np.ndarray
    relative_count: np.ndarray


@part
def new_levels(max_nodes):
    """Room for every level at every node, not filled."""
    return Levels(
        np.empty(MAX_LEVELS, np.int64),
        np.empty(MAX_LEVELS, np.int64),
        np.empty(MAX_LEVELS, np.float64),
        np.empty((max_nodes + 1, MAX_LEVELS), np.int32),
        np.empty((max_nodes + 1, MAX_LEVELS), np.int32),
        np.empty((max_nodes + 1, NUM_SOURCES, NUM_LOCAL_POSITIONS), np.int32),
    )


@part
def new_candidates():
    """No candidates, and an empty table."""
    return Candidates(
        np.empty(NUM_CANDIDATES, np.int32),
        np.empty(NUM_CANDIDATES, np.float64),
        np.empty(NUM_CANDIDATES, np.float64),
        np.empty(NUM_CANDIDATES, np.float64),
        np.empty(NUM_CANDIDATES, np.uint8),
        np.empty(NUM_CANDIDATES, np.int32),
        np.empty(NUM_CANDIDATES, np.int32),
        np.zeros(NUM_SLOTS, np.int16),
        np.empty(NUM_CANDIDATES, np.int16),
    )


@part
def new_runs():
    """Room for the next tokens of one level."""
    return Runs(np.empty(NUM_RUNS, np.int32), np.empty(NUM_RUNS, np.float64), np.empty(NUM_RUNS, np.bool_))


@part
def new_frontier(max_nodes):
    """Room for `max_nodes` paths."""
    return Frontier(
        np.empty(max_nodes, np.float64),
        np.empty(max_nodes, np.int32),
        np.empty(max_nodes, np.int32),
        np.empty(max_nodes, np.int32),
        np.empty(max_nodes, np.int32),
        np.empty(max_nodes, np.int32),
        np.empty(max_nodes, np.int32),
        np.empty(max_nodes, np.float32),
    )
