"""What a draft works on: flat arrays under names, and the limits that size them.

Of a pool it is handed two rows of numbers: where its arrays lie, and how much is believed of them. Its eleven read-only
arrays would take numba microseconds to unpack.
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
# budget, so that estimates do not either and the tree of a smaller budget is the beginning of that of a larger one.
MIN_SHARE_LEFT = 1 / 32
MIN_ACCEPTANCE = 1 / 2048  # the paths not yet drafted exclude each other, so no more than 2048 of them are as likely
DEPTH_DISCOUNT = 0.5  # of a chain's token, beside one before it that is as likely. Where a text leaves a chain, the
# next step drafts what comes then: to be wrong early costs a step, to be right late saves little. With 1 (most tokens
# expected of this step) whole texts took 1 % more steps; with 0.3 to 0.5 they took fewest
END = -1  # the separator: the text ends here
MIN_SAMPLES_BITS = 4  # behind unlikely paths a 16th of the samples is enough
NUM_LOCAL_POSITIONS = 16  # occurrences of a context followed in each of the sequence's own texts, the latest ones
MAX_LEVELS = 12
NUM_CANDIDATES = 1024
NUM_SLOTS = 2048  # of the hash table from token to candidate; a power of two
NUM_RUNS = NUM_CANDIDATES  # of next tokens of a level
NO_GROUP, UNKNOWN = -1, -2  # in place of a group: a sequence of none, one of a group that has no texts
NUM_SEQUENCE_COLUMNS = 8
CONTEXT_BEGIN, CONTEXT_END, NUM_PROMPT, PREVIOUS_BEGIN, PREVIOUS_END, GROUP, MAX_DEPTH, NUM_NODES = range(
    NUM_SEQUENCE_COLUMNS
)
NUM_OUTPUTS = 6
OUT_TOKEN, OUT_PARENT, OUT_LOG_ACCEPTANCE, OUT_SOURCE, OUT_RELATIVE_COUNT, OUT_KIND = range(NUM_OUTPUTS)


class Index(NamedTuple):
    """The arrays of a pool: `group_codes[k]` belongs to the text of position `order[k]`; see `index.order`.

    Likewise `support[k]`, how many tokens from `order[k]` on enough entities have (see `support.py`); None where
    nothing is kept back.
    """

    tokens: np.ndarray
    order: np.ndarray
    group_codes: np.ndarray
    starts: np.ndarray
    support: np.ndarray | None
    depth: int

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], depth: int) -> "Index":
        """The index of arrays by name; `support` may be missing."""
        tokens, order, group_codes, starts = (arrays[name] for name in cls._fields[:4])
        return cls(tokens, order, group_codes, starts, arrays.get("support"), depth)


class CompiledIndex(NamedTuple):
    """The same in compiled code: `support` is empty where nothing is kept back, and one array of codes always is."""

    tokens: np.ndarray
    order: np.ndarray
    group_codes: np.ndarray
    wide_codes: np.ndarray
    starts: np.ndarray
    support: np.ndarray
    depth: int


class Estimates(NamedTuple):
    """What makes probabilities of counts; see `estimate`. `frequencies[token + 1]` is a token's bin."""

    frequencies: np.ndarray
    bounds: np.ndarray
    curves: np.ndarray


_Places = namedtuple(
    "_Places",
    "tokens num_tokens order num_positions group_codes num_codes num_wide_codes starts num_starts support num_support "
    "frequencies bounds curves depth num_samples max_match max_local_tokens num_context_lengths",
)
_Weights = namedtuple("_Weights", "inside outside pool_escape previous_escape local_escape")
PLACE, WEIGHT = _Places(*range(len(_Places._fields))), _Weights(*range(len(_Weights._fields)))


class PoolHandle(NamedTuple):
    """A pool as the compiled query takes it."""

    places: np.ndarray  # int64, by PLACE: the addresses of its arrays, and the whole numbers of its settings
    weights: np.ndarray  # float64, by WEIGHT
    owners: tuple[Index, Estimates]  # the arrays that lie at these addresses

    @classmethod
    def of(cls, index: Index, curves: np.ndarray, settings: DraftSettings, fitted_escape: float) -> "PoolHandle":
        """Of arrays that nobody changes; `curves` float32 `estimate.CURVES_SHAPE`."""
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
    """What makes probabilities of its counts."""
    return Estimates(
        uint8s_at(places[PLACE.frequencies], places[PLACE.num_starts] - 1),
        float32s_at(places[PLACE.bounds], NUM_KNOTS),
        float32s_at(places[PLACE.curves], CURVES_SHAPE),
    )


class Preference(NamedTuple):
    """How much an occurrence counts in the pool: `inside` texts of the group, `outside` them."""

    group: int
    inside: float
    outside: float
    num_samples: int


class Context(NamedTuple):
    """The sequence: `tokens[:num_prompt]` is the prompt, the rest the output; `previous` an earlier night's text."""

    tokens: np.ndarray
    num_prompt: int
    previous: np.ndarray
    max_match: int
    max_tokens: int


class Options(NamedTuple):
    """What holds of all sequences of a call; see `DraftSettings` and `draft`."""

    num_context_lengths: int
    pool_escape: float
    previous_escape: float
    local_escape: float
    use_output: bool
    use_prompt: bool
    max_nodes: int
    min_acceptance: float
    is_chain: bool


_NUM_KNOWN = MAX_NODES + 1  # the root, and every node
_LOOKUP = np.dtype(
    [
        ("recent", np.int32, (MAX_MATCH_TOKENS,)),  # tokens that are looked up in the pool
        ("intervals", np.int64, (MAX_MATCH_TOKENS + 1, 2)),  # the interval of each number of them, -1: not yet
        ("own", np.int32, (NUM_OWN_SLOTS,)),  # hash table of the tokens of prompt and output, see `estimate.kind_of`
    ],
    align=True,
)
_LEVELS = np.dtype(  # who is asked, longest context first, and where each stands at every node (node 0: the root)
    [
        ("source", np.int64, (MAX_LEVELS,)),
        ("length", np.int64, (MAX_LEVELS,)),
        ("escape", np.float64, (MAX_LEVELS,)),
        # The interval of the pool's order that begins with context and path; for the sequence's own texts 0 and the
        # number of `positions`, where the next token would stand.
        ("first", np.int32, (_NUM_KNOWN, MAX_LEVELS)),
        ("last", np.int32, (_NUM_KNOWN, MAX_LEVELS)),
        ("positions", np.int32, (_NUM_KNOWN, NUM_TEXT_SOURCES, NUM_LOCAL_POSITIONS)),
        ("depth", np.int32, (_NUM_KNOWN,)),
        ("worth", np.float64, (_NUM_KNOWN,)),  # of chains: of the path to it
        ("path", np.int32, (MAX_NODES,)),  # of a chain, its nodes
        # A bit for each level: whether those are known there, every occurrence was counted, there may be any.
        ("matched", np.int32, (_NUM_KNOWN,)),
        ("counted", np.int32, (_NUM_KNOWN,)),
        ("may_match", np.int32, (_NUM_KNOWN,)),
    ],
    align=True,
)
_CANDIDATES = np.dtype(  # possible next tokens of a node
    [
        ("token", np.int32, (NUM_CANDIDATES,)),
        ("total", np.float64, (NUM_CANDIDATES,)),  # the relative count
        ("pool", np.float64, (NUM_CANDIDATES,)),  # the pool's part of it
        ("own", np.float64, (NUM_CANDIDATES,)),  # the largest part of an own text, each of which adds at most once
        ("own_source", np.uint8, (NUM_CANDIDATES,)),  # whose that is
        ("num_seen", np.float64, (NUM_CANDIDATES,)),  # how often the longest context that knows it was seen
        ("slots", np.int16, (NUM_SLOTS,)),  # hash table from token to c + 1; every draft leaves it empty
        ("slot_of", np.int16, (NUM_CANDIDATES,)),  # the place of c in it
        ("runs", np.int32, (NUM_CANDIDATES, MAX_LEVELS, 2)),  # the token's run at a level, as in Runs, where its bit
        ("has_run", np.int32, (NUM_CANDIDATES,)),  # is set here
    ],
    align=True,
)
_RUNS = np.dtype(  # next tokens of a level: how much each counts, and whether it may be drafted
    [
        ("token", np.int32, (NUM_RUNS,)),
        ("weight", np.float64, (NUM_RUNS,)),
        ("is_drafted", np.uint8, (NUM_RUNS,)),
        # Where a pool's run stands in its interval: by the numbers of its samples, or exactly where the whole interval
        # was counted; 0 and 0 where that is not known.
        ("begin", np.int32, (NUM_RUNS,)),
        ("end", np.int32, (NUM_RUNS,)),
    ],
    align=True,
)
_FRONTIER = np.dtype(  # paths in the order in which they are drafted: those drafted already, then those that may be
    [
        ("probability", np.float64, (MAX_NODES,)),
        ("slots", np.int32, (MAX_NODES,)),  # where the rest of a path stands, all of it its last token's
        ("token", np.int32, (MAX_NODES,)),
        ("parent", np.int32, (MAX_NODES,)),
        ("source", np.int32, (MAX_NODES,)),
        ("relative_count", np.float32, (MAX_NODES,)),
        ("kind", np.int32, (MAX_NODES,)),
        ("runs", np.int32, (MAX_NODES, MAX_LEVELS, 2)),
        ("has_run", np.int32, (MAX_NODES,)),
    ],
    align=True,
)
SCRATCH = np.dtype(
    [("lookup", _LOOKUP), ("levels", _LEVELS), ("candidates", _CANDIDATES), ("runs", _RUNS), ("frontier", _FRONTIER)],
    align=True,
)
Lookup, Levels, Candidates, Runs, Frontier = (
    namedtuple(name.title(), SCRATCH[name].names or ()) for name in SCRATCH.names or ()
)
Scratch = namedtuple("Scratch", SCRATCH.names or ())
scratch_at = arrays_at(SCRATCH, Scratch, (Lookup, Levels, Candidates, Runs, Frontier))


def new_scratch() -> np.ndarray:
    """The memory of one thread's drafts, uint8: made anew, its arrays would cost each as much as looking up a context.

    The hash table of candidates is empty.
    """
    return np.zeros(SCRATCH.itemsize, np.uint8)
