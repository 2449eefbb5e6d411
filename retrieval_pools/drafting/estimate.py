"""From what is known of a node to the probability that it is accepted; `calibration_table` says the same slowly."""

import numpy as np

from laserbatch.retrieval_pools.drafting.calibration_table import (
    BEFORE_BINS,
    COUNT_KNOTS,
    DEPTH_BINS,
    IN_OUTPUT,
    IN_PROMPT,
    LARGEST_BINNED,
    LARGEST_SEEN,
    LENGTH_BINS,
    LOWEST_EXPONENT,
    NUM_BEFORE,
    NUM_FREQUENCIES,
    NUM_KNOTS,
    SEEN_BINS,
)
from laserbatch.retrieval_pools.drafting.state import END, NUM_OWN_SLOTS, NUM_OWN_TOKENS, part

# Knots are the floats whose mantissa has one bit at most: the upper bits of a float32 are the number of its knot.
_MANTISSA_BITS = 22
_FIRST_KNOT = (127 + LOWEST_EXPONENT) << 1
_LOWEST = float(COUNT_KNOTS[0])


@part
def most_acceptance(bounds, relative_count):
    """What no cell of the table and no kind of token gives more than; see `calibration_table.upper_bounds`."""
    x = np.float32(relative_count)
    if x >= 1:
        return bounds[bounds.shape[0] - 1]
    return bounds[0] if x < _LOWEST else bounds[(x.view(np.int32) >> _MANTISSA_BITS) - _FIRST_KNOT + 1]


@part
def conditional_acceptance(table, source, num_seen, match_length, depth, relative_count):
    """Probability that a node is accepted when its parent is."""
    lengths = table[source, SEEN_BINS[min(num_seen, LARGEST_SEEN)], LENGTH_BINS[min(match_length, LARGEST_BINNED)]]
    return on_knots(lengths[DEPTH_BINS[min(depth, LARGEST_BINNED)]], relative_count)


@part
def kind_of(own, frequencies, token, before):
    """The kind of a token; see `calibration_table.token_kind`. `own` knows where it stands.

    `before` is the bin of the token before it; see `before_bin`.
    """
    return (_stands_in(own, token) * NUM_FREQUENCIES + _frequency(frequencies, token)) * NUM_BEFORE + before


@part
def before_bin(frequencies, token):
    """How frequent a token is, as that matters to the one behind it."""
    return np.int64(BEFORE_BINS[_frequency(frequencies, token)])


@part
def _frequency(frequencies, token):
    return np.int64(frequencies[token + 1]) if END <= token < frequencies.shape[0] - 1 else np.int64(0)


@part
def note_own_tokens(own, context, use_prompt, use_output):
    """Write into an empty table which tokens the prompt and the output have, of each the latest ones."""
    num_prompt, num_tokens = context.num_prompt, context.tokens.shape[0]
    own[:] = 0
    if use_prompt:
        for i in range(max(0, num_prompt - NUM_OWN_TOKENS), num_prompt):
            _note(own, context.tokens[i], IN_PROMPT)
    if use_output:
        for i in range(max(num_prompt, num_tokens - NUM_OWN_TOKENS), num_tokens):
            _note(own, context.tokens[i], IN_OUTPUT)


@part
def _note(own, token, bit):
    if token >= 0:
        slot = _own_slot(own, token)
        own[slot] = (np.int64(token) + 1) << 2 | (own[slot] & 3) | bit


@part
def _stands_in(own, token):
    return own[_own_slot(own, token)] & 3 if token >= 0 else 0


@part
def _own_slot(own, token):
    """Where a token stands in the table, or would: a token and its bits, 0 where there is none."""
    slot = (np.int64(token) * np.int64(0x9E3779B1) >> 12) & (NUM_OWN_SLOTS - 1)
    while (own[slot] != 0) & (own[slot] >> 2 != np.int64(token) + 1):  # one branch, not two
        slot = (slot + 1) & (NUM_OWN_SLOTS - 1)
    return slot


@part
def on_knots(values, x):
    """A curve, given at COUNT_KNOTS."""
    x = np.float32(x)
    if x >= 1:
        return np.float64(values[values.shape[0] - 1])
    if x < _LOWEST:
        return np.float64(values[0]) * (np.float64(x) / _LOWEST)
    bits = x.view(np.int32)
    k = (bits >> _MANTISSA_BITS) - _FIRST_KNOT
    beyond = (bits & ((1 << _MANTISSA_BITS) - 1)) / float(1 << _MANTISSA_BITS)
    low, high = np.float64(values[k]), np.float64(values[k + 1])
    return low + beyond * (high - low)


@part
def least_product(path_curve, probability):
    """The least product that a curve makes at least this probability of; infinite where there is none."""
    k = 0
    while k < NUM_KNOTS and path_curve[k] < probability:
        k += 1
    if k == NUM_KNOTS:
        return np.inf
    if k == 0:
        return probability / np.float64(path_curve[0]) * _LOWEST
    low, low_knot = np.float64(path_curve[k - 1]), np.float64(COUNT_KNOTS[k - 1])
    beyond = (probability - low) / (np.float64(path_curve[k]) - low)
    return low_knot + beyond * (np.float64(COUNT_KNOTS[k]) - low_knot)
