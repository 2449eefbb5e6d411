"""The named flat arrays that the compiled code of a draft works on, and the limits that size them.

A pool is passed as two rows of numbers: the addresses of its arrays with whole-number settings, and its weights. numba
would take microseconds to unpack the read-only arrays themselves.
"""

from collections import namedtuple
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from laserbatch.retrieval_pools.compiled import arrays_at, float32s_at, int32s_at, part, uint8s_at, uint16s_at
from laserbatch.retrieval_pools.drafting.estimate import (
    CURVES_SHAPE,
    NUM_KNOTS,
    NUM_OWN_SLOTS,
    token_frequencies,
    upper_bounds,
)
from laserbatch.retrieval_pools.settings import MAX_MATCH_TOKENS, DraftSettings
from laserbatch.retrieval_pools.sources import NUM_TEXT_SOURCES

MAX_NODES = 64
# Shorter contexts are looked up while at least this share of the probability is left to them. It does not depend on the
# budget, so neither do the estimates: the tree of a smaller budget is the beginning of the tree of a larger one.
MIN_SHARE_LEFT = 1 / 32
MIN_ACCEPTANCE = 1 / 2048  # the paths not yet drafted exclude each other, so at most 2048 of them are as likely
DEPTH_DISCOUNT = 0.5  # weight of a chain's token relative to the token before it. When a text leaves the chain, the
# next step drafts from there: an early wrong token costs a step, a late right token saves little. With 1 (which
# maximises the expected tokens of this step) whole texts took 1 % more steps; with 0.3 to 0.5 they took fewest
END = -1  # the separator: the text ends here
MIN_SAMPLES_BITS = 4  # after unlikely paths a 16th of the samples is enough
NUM_LOCAL_POSITIONS = 16  # latest occurrences of a context that are followed in each of the sequence's own texts
MAX_LEVELS = 12
NUM_CANDIDATES = 1024
NUM_SLOTS = 2048  # size of the hash table from token to candidate; a power of two
NUM_RUNS = NUM_CANDIDATES  # largest number of different next tokens of a level
NO_GROUP, UNKNOWN = -1, -2  # in place of a group code: the sequence has no group, or its group has no texts
CONTEXT_BEGIN, CONTEXT_END, NUM_PROMPT, PREVIOUS_BEGIN, PREVIOUS_END, GROUP, MAX_DEPTH, NUM_NODES = range(8)
NUM_SEQUENCE_COLUMNS = NUM_NODES + 1
NUM_OUTPUTS = 6
OUT_TOKEN, OUT_PARENT, OUT_LOG_ACCEPTANCE, OUT_SOURCE, OUT_RELATIVE_COUNT, OUT_KIND = range(NUM_OUTPUTS)


class Index(NamedTuple):
    """The arrays of a pool: `group_codes[k]` is the group of the text at position `order[k]`; see `index.order`.

    `support[k]` is the number of tokens from `order[k]` on that enough entities have (see `support.py`); `support` is
    None if the pool may draft every n-gram.
    """

    tokens: np.ndarray
    order: np.ndarray
    group_codes: np.ndarray
    starts: np.ndarray
    support: np.ndarray | None
    depth: int

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], depth: int) -> "Index":
        """The index made from arrays by name; `support` may be missing."""
        tokens, order, group_codes, starts = (arrays[name] for name in cls._fields[:4])
        return cls(tokens, order, group_codes, starts, arrays.get("support"), depth)


# `Index` in compiled code: `support` is empty if every n-gram may be drafted; one of the code arrays is empty.
CompiledIndex = namedtuple("CompiledIndex", "tokens order group_codes wide_codes starts support depth")
# The arrays that turn counts into probabilities; see `estimate`. `frequencies[token + 1]` is a token's bin.
Estimates = namedtuple("Estimates", "frequencies bounds curves")
# The weight of an occurrence in the pool: `inside` for texts of the group, `outside` for all others.
Preference = namedtuple("Preference", "group inside outside num_samples")
# The sequence: `tokens[:num_prompt]` is the prompt, the rest the output; `previous` is an earlier night's text.
Context = namedtuple("Context", "tokens num_prompt previous max_match max_tokens")
# The options that all sequences of a call share; see `DraftSettings` and `draft`.
Options = namedtuple(
    "Options",
    "num_context_lengths pool_escape previous_escape local_escape use_output use_prompt max_nodes min_acceptance "
    "is_chain",
)
_Places = namedtuple(
    "_Places",
    "tokens num_tokens order num_positions group_codes num_codes num_wide_codes starts num_starts support num_support "
    "frequencies bounds curves depth num_samples max_match max_local_tokens num_context_lengths",
)
_Weights = namedtuple("_Weights", "inside outside pool_escape previous_escape local_escape")
PLACE, WEIGHT = _Places(*range(len(_Places._fields))), _Weights(*range(len(_Weights._fields)))


class PoolHandle(NamedTuple):
    """A pool as the compiled query takes it."""

    places: np.ndarray  # int64, by PLACE: the addresses and sizes of its arrays, and its whole-number settings
    weights: np.ndarray  # float64, by WEIGHT
    owners: tuple[Index, Estimates]  # the arrays at these addresses, kept alive

    @classmethod
    def of(cls, index: Index, curves: np.ndarray, settings: DraftSettings, fitted_escape: float) -> "PoolHandle":
        """The handle of arrays that must not change; `curves` is float32 of `estimate.CURVES_SHAPE`."""
        frequencies = token_frequencies(np.diff(index.starts), len(index.order))
        estimates = Estimates(frequencies, upper_bounds(curves), curves)
        num_positions, is_wide = len(index.order), index.group_codes.dtype == np.uint16
        places = _Places(
            tokens=_address(index.tokens, np.int32),
            num_tokens=len(index.tokens),
            order=_address(index.order, np.int32),
            num_positions=num_positions,
            group_codes=_address(index.group_codes, np.uint16 if is_wide else np.uint8),
            num_codes=0 if is_wide else num_positions,
            num_wide_codes=num_positions if is_wide else 0,
            starts=_address(index.starts, np.int32),
            num_starts=len(index.starts),
            support=0 if index.support is None else _address(index.support, np.uint8),
            num_support=0 if index.support is None else num_positions,
            frequencies=_address(estimates.frequencies, np.uint8),
            bounds=_address(estimates.bounds, np.float32),
            curves=_address(curves, np.float32),
            depth=index.depth,
            num_samples=settings.num_samples,
            max_match=settings.max_match_tokens,
            max_local_tokens=settings.max_local_tokens,
            num_context_lengths=settings.num_context_lengths,
        )
        is_walled = settings.scope == "group"
        weights = _Weights(
            inside=1.0 if is_walled else settings.group_weight,
            outside=0.0 if is_walled else 1.0,
            pool_escape=settings.pool_escape_per_token or fitted_escape,
            previous_escape=settings.previous_escape,
            local_escape=settings.local_escape,
        )
        return cls(np.array(places, np.int64), np.array(weights, np.float64), (index, estimates))


def _address(array: np.ndarray, dtype: type) -> int:
    assert array.flags.c_contiguous and array.dtype == dtype, (array.flags, array.dtype)
    return array.ctypes.data


@part
def index_at(places):
    return CompiledIndex(
        int32s_at(places[PLACE.tokens], places[PLACE.num_tokens]),
        int32s_at(places[PLACE.order], places[PLACE.num_positions]),
        uint8s_at(places[PLACE.group_codes], places[PLACE.num_codes]),
        uint16s_at(places[PLACE.group_codes], places[PLACE.num_wide_codes]),
        int32s_at(places[PLACE.starts], places[PLACE.num_starts]),
        uint8s_at(places[PLACE.support], places[PLACE.num_support]),
        places[PLACE.depth],
    )


@part
def estimates_at(places):
    return Estimates(
        uint8s_at(places[PLACE.frequencies], places[PLACE.num_starts] - 1),
        float32s_at(places[PLACE.bounds], NUM_KNOTS),
        float32s_at(places[PLACE.curves], CURVES_SHAPE),
    )


def _layout(*arrays: tuple) -> np.dtype:
    return np.dtype(list(arrays), align=True)


_NUM_KNOWN = MAX_NODES + 1  # the root, and every node
_LOOKUP = _layout(
    ("recent", np.int32, (MAX_MATCH_TOKENS,)),  # the last tokens of the output, which are looked up in the pool
    ("intervals", np.int64, (MAX_MATCH_TOKENS + 1, 2)),  # of the last k of them, in row k; -1: not searched yet
    ("own", np.int32, (NUM_OWN_SLOTS,)),  # hash table of the tokens of prompt and output, see `estimate.kind_of`
)
_LEVELS = _layout(  # the levels, longest context first, and their occurrences at every node (node 0: the root)
    ("source", np.int64, (MAX_LEVELS,)),
    ("length", np.int64, (MAX_LEVELS,)),
    ("escape", np.float64, (MAX_LEVELS,)),
    # The interval of the pool's order that begins with context and path; for the sequence's own texts 0 and the
    # number of `positions`, which are those of the possible next tokens.
    ("first", np.int32, (_NUM_KNOWN, MAX_LEVELS)),
    ("last", np.int32, (_NUM_KNOWN, MAX_LEVELS)),
    ("positions", np.int32, (_NUM_KNOWN, NUM_TEXT_SOURCES, NUM_LOCAL_POSITIONS)),
    ("depth", np.int32, (_NUM_KNOWN,)),
    ("worth", np.float64, (_NUM_KNOWN,)),  # chains only: the worth of the path to the node
    ("path", np.int32, (MAX_NODES,)),  # chains only: the nodes of the chain
    # One bit per level: its occurrences at the node are known; all of them were counted; there may be some.
    ("matched", np.int32, (_NUM_KNOWN,)),
    ("counted", np.int32, (_NUM_KNOWN,)),
    ("may_match", np.int32, (_NUM_KNOWN,)),
)
_CANDIDATES = _layout(  # possible next tokens of a node
    ("token", np.int32, (NUM_CANDIDATES,)),
    ("total", np.float64, (NUM_CANDIDATES,)),  # the relative count
    ("pool", np.float64, (NUM_CANDIDATES,)),  # the pool's part of the relative count
    ("own", np.float64, (NUM_CANDIDATES,)),  # the largest part of one own text, each of which adds at most once
    ("own_source", np.uint8, (NUM_CANDIDATES,)),  # the source of that own text
    ("num_seen", np.float64, (NUM_CANDIDATES,)),  # occurrences of the longest context that knows the token
    ("slots", np.int16, (NUM_SLOTS,)),  # hash table from token to c + 1; every draft leaves it empty
    ("slot_of", np.int16, (NUM_CANDIDATES,)),  # the slot of candidate c
    ("runs", np.int32, (NUM_CANDIDATES, MAX_LEVELS, 2)),  # `begin` and `end` of the token's run at a level
    ("has_run", np.int32, (NUM_CANDIDATES,)),  # one bit per level: its entry of `runs` is set
)
_RUNS = _layout(  # the next tokens of a level: the weight of each, and whether it may be drafted
    ("token", np.int32, (NUM_RUNS,)),
    ("weight", np.float64, (NUM_RUNS,)),
    ("is_drafted", np.uint8, (NUM_RUNS,)),
    # The run's part of a pool's interval: as numbers of samples, or of places if the whole interval was counted;
    # 0 and 0 if unknown.
    ("begin", np.int32, (NUM_RUNS,)),
    ("end", np.int32, (NUM_RUNS,)),
)
_FRONTIER = _layout(  # paths in the order of drafting: the drafted ones, then those that may be drafted
    ("probability", np.float64, (MAX_NODES,)),
    ("slots", np.int32, (MAX_NODES,)),  # index of the path's last token in the arrays below
    ("token", np.int32, (MAX_NODES,)),
    ("parent", np.int32, (MAX_NODES,)),
    ("source", np.int32, (MAX_NODES,)),
    ("relative_count", np.float32, (MAX_NODES,)),
    ("kind", np.int32, (MAX_NODES,)),
    ("runs", np.int32, (MAX_NODES, MAX_LEVELS, 2)),
    ("has_run", np.int32, (MAX_NODES,)),
)
SCRATCH = _layout(
    ("lookup", _LOOKUP), ("levels", _LEVELS), ("candidates", _CANDIDATES), ("runs", _RUNS), ("frontier", _FRONTIER)
)
Lookup, Levels, Candidates, Runs, Frontier = (
    namedtuple(name.title(), SCRATCH[name].names or ()) for name in SCRATCH.names or ()
)
Scratch = namedtuple("Scratch", SCRATCH.names or ())
scratch_at = arrays_at(SCRATCH, Scratch, (Lookup, Levels, Candidates, Runs, Frontier))


def new_scratch() -> np.ndarray:
    """The memory for the drafts of one thread, uint8, with an empty hash table of candidates.

    Threads reuse it: allocating one of its arrays costs as much as looking up a context.
    """
    return np.zeros(SCRATCH.itemsize, np.uint8)
