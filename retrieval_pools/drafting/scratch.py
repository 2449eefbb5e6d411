"""The memory that drafts work in: one block for each thread, which all its drafts use one after the other.

Made anew, its thirty arrays would cost a draft as much as the lookup of a context does.
"""

from collections import namedtuple

import numpy as np

from laserbatch.retrieval_pools.compiled import part
from laserbatch.retrieval_pools.drafting.addresses import (
    float32s_at,
    float64s_at,
    int16s_at,
    int32s_at,
    int64s_at,
    uint8s_at,
)
from laserbatch.retrieval_pools.drafting.state import (
    MAX_LEVELS,
    MAX_NODES,
    NUM_CANDIDATES,
    NUM_LOCAL_POSITIONS,
    NUM_OWN_SLOTS,
    NUM_RUNS,
    NUM_SLOTS,
    Candidates,
    Frontier,
    Levels,
    Lookup,
    Runs,
    Scratch,
)
from laserbatch.retrieval_pools.settings import MAX_MATCH_TOKENS
from laserbatch.retrieval_pools.sources import NUM_SOURCES

_NUM_FOUND = MAX_MATCH_TOKENS + 1
_NUM_KNOWN = MAX_NODES + 1  # the root, and every node
_LAYOUT = np.dtype(
    [
        ("recent", np.int32, MAX_MATCH_TOKENS),
        ("found", np.int64, (_NUM_FOUND, 2)),
        ("own", np.int32, NUM_OWN_SLOTS),
        ("level_source", np.int64, MAX_LEVELS),
        ("level_length", np.int64, MAX_LEVELS),
        ("level_escape", np.float64, MAX_LEVELS),
        ("first", np.int32, (_NUM_KNOWN, MAX_LEVELS)),
        ("last", np.int32, (_NUM_KNOWN, MAX_LEVELS)),
        ("positions", np.int32, (_NUM_KNOWN, NUM_SOURCES, NUM_LOCAL_POSITIONS)),
        ("depth", np.int32, _NUM_KNOWN),
        ("known_at", np.int32, _NUM_KNOWN),
        ("counted", np.int32, _NUM_KNOWN),
        ("may_know", np.int32, _NUM_KNOWN),
        ("token", np.int32, NUM_CANDIDATES),
        ("total", np.float64, NUM_CANDIDATES),
        ("pool", np.float64, NUM_CANDIDATES),
        ("own_share", np.float64, NUM_CANDIDATES),
        ("own_source", np.uint8, NUM_CANDIDATES),
        ("slots", np.int16, NUM_SLOTS),
        ("slot_of", np.int16, NUM_CANDIDATES),
        ("runs", np.int32, (NUM_CANDIDATES, MAX_LEVELS, 2)),
        ("has_run", np.int32, NUM_CANDIDATES),
        ("run_token", np.int32, NUM_RUNS),
        ("run_weight", np.float64, NUM_RUNS),
        ("run_is_drafted", np.uint8, NUM_RUNS),
        ("run_begin", np.int32, NUM_RUNS),
        ("run_end", np.int32, NUM_RUNS),
        ("path_probability", np.float64, MAX_NODES),
        ("path_slots", np.int32, MAX_NODES),
        ("path_token", np.int32, MAX_NODES),
        ("path_parent", np.int32, MAX_NODES),
        ("path_source", np.int32, MAX_NODES),
        ("path_relative_count", np.float32, MAX_NODES),
        ("path_kind", np.int32, MAX_NODES),
        ("path_runs", np.int32, (MAX_NODES, MAX_LEVELS, 2)),
        ("path_has_run", np.int32, MAX_NODES),
    ],
    align=True,
)
_Offsets = namedtuple("_Offsets", _LAYOUT.names)
_AT = _Offsets(*(_LAYOUT.fields[name][1] for name in _LAYOUT.names))


def new_scratch() -> np.ndarray:
    """A block for one thread, uint8: the hash table of candidates is empty, as every draft leaves it."""
    return np.zeros(_LAYOUT.itemsize, np.uint8)


@part
def scratch_in(block, max_nodes, max_match):
    """What lies in a block, for a draft of so many nodes, of contexts of so many tokens."""
    start = np.int64(block.ctypes.data)
    return Scratch(
        Lookup(
            int32s_at(start + _AT.recent, max_match),
            int64s_at(start + _AT.found, (max_match + 1, 2)),
            int32s_at(start + _AT.own, NUM_OWN_SLOTS),
        ),
        Levels(
            int64s_at(start + _AT.level_source, MAX_LEVELS),
            int64s_at(start + _AT.level_length, MAX_LEVELS),
            float64s_at(start + _AT.level_escape, MAX_LEVELS),
            int32s_at(start + _AT.first, (_NUM_KNOWN, MAX_LEVELS)),
            int32s_at(start + _AT.last, (_NUM_KNOWN, MAX_LEVELS)),
            int32s_at(start + _AT.positions, (_NUM_KNOWN, NUM_SOURCES, NUM_LOCAL_POSITIONS)),
            int32s_at(start + _AT.depth, _NUM_KNOWN),
            int32s_at(start + _AT.known_at, _NUM_KNOWN),
            int32s_at(start + _AT.counted, _NUM_KNOWN),
            int32s_at(start + _AT.may_know, _NUM_KNOWN),
        ),
        Candidates(
            int32s_at(start + _AT.token, NUM_CANDIDATES),
            float64s_at(start + _AT.total, NUM_CANDIDATES),
            float64s_at(start + _AT.pool, NUM_CANDIDATES),
            float64s_at(start + _AT.own_share, NUM_CANDIDATES),
            uint8s_at(start + _AT.own_source, NUM_CANDIDATES),
            int16s_at(start + _AT.slots, NUM_SLOTS),
            int16s_at(start + _AT.slot_of, NUM_CANDIDATES),
            int32s_at(start + _AT.runs, (NUM_CANDIDATES, MAX_LEVELS, 2)),
            int32s_at(start + _AT.has_run, NUM_CANDIDATES),
        ),
        Runs(
            int32s_at(start + _AT.run_token, NUM_RUNS),
            float64s_at(start + _AT.run_weight, NUM_RUNS),
            uint8s_at(start + _AT.run_is_drafted, NUM_RUNS),
            int32s_at(start + _AT.run_begin, NUM_RUNS),
            int32s_at(start + _AT.run_end, NUM_RUNS),
        ),
        Frontier(
            float64s_at(start + _AT.path_probability, max_nodes),
            int32s_at(start + _AT.path_slots, max_nodes),
            int32s_at(start + _AT.path_token, max_nodes),
            int32s_at(start + _AT.path_parent, max_nodes),
            int32s_at(start + _AT.path_source, max_nodes),
            float32s_at(start + _AT.path_relative_count, max_nodes),
            int32s_at(start + _AT.path_kind, max_nodes),
            int32s_at(start + _AT.path_runs, (max_nodes, MAX_LEVELS, 2)),
            int32s_at(start + _AT.path_has_run, max_nodes),
        ),
    )
