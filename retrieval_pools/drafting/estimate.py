"""The curves from a draft node's relative count to the probability that it is accepted if its parent is.

There is a curve for each source and kind of node, given at COUNT_KNOTS; a path's probability is the product over its
nodes. `calibration/calibrate.py` fits the curves; `tests/retrieval_pools/slow_drafts.py` has a slow implementation.
"""

import numpy as np

from laserbatch.retrieval_pools.compiled import part
from laserbatch.retrieval_pools.sources import NUM_TEXT_SOURCES

LOWEST_EXPONENT = -11  # exponent of the lowest knot: less likely tokens are never drafted
COUNT_KNOTS = np.array(
    [mantissa * 2.0**exponent for exponent in range(LOWEST_EXPONENT, 0) for mantissa in (1.0, 1.5)] + [1.0], np.float32
)
NUM_KNOTS = len(COUNT_KNOTS)
# The kind of a node combines the kind of its token with the kind of its place in the draft. The token's: whether the
# prompt has it, whether the output has it, and the bin of its frequency in the pool; FREQUENCY_EXPONENTS has the lower
# edges of the bins after the first, as log2 of the share of the pool's positions. The place's: bins of how often the
# longest context that knows the token was seen, and of how many draft tokens precede it; *_EDGES has their lower edges.
FREQUENCY_EXPONENTS = (-16, -14, -12, -10, -9, -8, -7, -6)
NUM_FREQUENCIES = len(FREQUENCY_EXPONENTS) + 1
IN_PROMPT, IN_OUTPUT = 1, 2  # bits
NUM_OWN_TOKENS = 512  # the latest tokens of the prompt, and of the output, in which a token is looked for
NUM_OWN_SLOTS = 2048  # size of the hash table of these tokens; a power of two
SEEN_EDGES, DEPTH_EDGES = (2, 4, 32), (1, 2, 3, 7)
NUM_DEPTHS = len(DEPTH_EDGES) + 1
NUM_TOKEN_KINDS = (IN_PROMPT + IN_OUTPUT + 1) * NUM_FREQUENCIES
NUM_PLACES = (len(SEEN_EDGES) + 1) * NUM_DEPTHS
NUM_KINDS = NUM_TOKEN_KINDS * NUM_PLACES
CURVES_SHAPE = (NUM_TEXT_SOURCES, NUM_KINDS, NUM_KNOTS)
IDENTITY_CURVES = np.broadcast_to(COUNT_KNOTS, CURVES_SHAPE).copy()  # relative counts are used as probabilities
IDENTITY_CURVES.flags.writeable = False
# The knots are the floats whose mantissa has at most one bit set: the upper bits of a float32 tell the knot below it.
_MANTISSA_BITS = 22
_FIRST_KNOT = (127 + LOWEST_EXPONENT) << 1
_LOWEST = float(COUNT_KNOTS[0])


def token_frequencies(num_occurrences: np.ndarray, num_positions: int) -> np.ndarray:
    """The frequency bin of each token, uint8[n], from its number of occurrences in a pool, int64[n].

    `num_positions` is the number of the pool's positions: its tokens and the ends of its texts.
    """
    least = [-(-max(num_positions, 1) // 2**-exponent) for exponent in FREQUENCY_EXPONENTS]
    return np.searchsorted(least, num_occurrences, side="right").astype(np.uint8)


def upper_bounds(curves: np.ndarray) -> np.ndarray:
    """The acceptance that none of the curves exceeds for relative counts up to each knot, float32[num knots]."""
    return np.nextafter(np.maximum.accumulate(curves.reshape(-1, NUM_KNOTS).max(axis=0)), np.float32(2))


@part
def most_acceptance(bounds, relative_count):
    """The acceptance that no curve exceeds for a relative count; see `upper_bounds`."""
    x = np.float32(relative_count)
    if x >= 1:
        return bounds[bounds.shape[0] - 1]
    return bounds[0] if x < _LOWEST else bounds[(x.view(np.int32) >> _MANTISSA_BITS) - _FIRST_KNOT + 1]


@part
def acceptance(curve, relative_count):
    """The acceptance that a curve gives for a relative count: linear between the knots, and from the lowest to 0."""
    x = np.float32(relative_count)
    if x >= 1:
        return np.float64(curve[curve.shape[0] - 1])
    if x < _LOWEST:
        return np.float64(curve[0]) * (np.float64(x) / _LOWEST)
    bits = x.view(np.int32)
    k = (bits >> _MANTISSA_BITS) - _FIRST_KNOT
    beyond = (bits & ((1 << _MANTISSA_BITS) - 1)) / float(1 << _MANTISSA_BITS)
    low, high = np.float64(curve[k]), np.float64(curve[k + 1])
    return low + beyond * (high - low)


@part
def kind_of(own_tokens, frequencies, token, num_seen, depth):
    """The kind of a node: `own_tokens` says whether the prompt and the output have its token."""
    frequency = np.int64(frequencies[token + 1]) if token < frequencies.shape[0] - 1 else np.int64(0)
    token_kind = (own_tokens[_own_slot(own_tokens, token)] & 3) * NUM_FREQUENCIES + frequency
    seen, deep = np.int64(0), np.int64(0)
    for edge in SEEN_EDGES:
        seen += num_seen >= edge
    for edge in DEPTH_EDGES:
        deep += depth >= edge
    return token_kind * NUM_PLACES + seen * NUM_DEPTHS + deep


@part
def note_own_tokens(own_tokens, context, use_prompt, use_output):
    """Empty the hash table and write into it the latest tokens of the prompt and of the output."""
    num_prompt, num_tokens = context.num_prompt, context.tokens.shape[0]
    own_tokens[:] = 0
    if use_prompt:
        for i in range(max(0, num_prompt - NUM_OWN_TOKENS), num_prompt):
            _note(own_tokens, context.tokens[i], IN_PROMPT)
    if use_output:
        for i in range(max(num_prompt, num_tokens - NUM_OWN_TOKENS), num_tokens):
            _note(own_tokens, context.tokens[i], IN_OUTPUT)


@part
def _note(own_tokens, token, bit):
    if token >= 0:
        slot = _own_slot(own_tokens, token)
        own_tokens[slot] = (np.int64(token) + 1) << 2 | (own_tokens[slot] & 3) | bit


@part
def _own_slot(own_tokens, token):
    """The slot of a token in the hash table; it is 0 if the token is not there."""
    slot = (np.int64(token) * np.int64(0x9E3779B1) >> 12) & (NUM_OWN_SLOTS - 1)
    while (own_tokens[slot] != 0) & (own_tokens[slot] >> 2 != np.int64(token) + 1):  # one branch, not two
        slot = (slot + 1) & (NUM_OWN_SLOTS - 1)
    return slot
