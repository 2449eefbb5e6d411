"""From a context to a tree of likely continuations: the compiled part of drafting, as a whole.

A draft asks several *levels* what comes next: the pool at several context lengths, and the sequence's own previous
text, prompt and output at the longest context each knows. They are blended from the longest context to the shortest,
each taking a share of the probability that the longer ones left over, by how often it has seen its context and with
how many different next tokens (escape, as in PPM: Cleary and Witten 1984, Witten and Bell 1991). The most probable path
is expanded next, until there are enough nodes or none is likely enough. `retrieval_pools/reference.py` says the same
slowly.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numba import boolean, float64, int64, njit, types

from retrieval_pools import calibration_table, sources
from retrieval_pools.drafting.continuations import count_continuations, push_candidates
from retrieval_pools.drafting.estimate import least_product, on_knots
from retrieval_pools.drafting.frontier import least_probability
from retrieval_pools.drafting.levels import add_own_levels, add_pool_levels, enter_node
from retrieval_pools.drafting.state import (
    END,
    MIN_PROBABILITY,
    NUM_OUTPUTS,
    OUT_LOG_ACCEPTANCE,
    OUT_MATCH_LENGTH,
    OUT_NUM_SEEN,
    OUT_PARENT,
    OUT_RELATIVE_COUNT,
    OUT_SOURCE,
    OUT_TOKEN,
    Context,
    Index,
    Preference,
    new_candidates,
    new_frontier,
    new_levels,
    new_runs,
)

_int32s = types.Array(types.int32, 1, "C", readonly=True)
_uint8s = types.Array(types.uint8, 1, "C", readonly=True)
_codes = {8: _uint8s, 16: types.Array(types.uint16, 1, "C", readonly=True)}
_table = types.Array(types.float32, 5, "C", readonly=True)
_bounds = types.Array(types.float32, 1, "C", readonly=True)
_path_curves = types.Array(types.float32, 2, "C", readonly=True)
_preference_types = (int64, float64, float64, int64, int64)
_context_types = (_int32s, int64, _int32s, int64, int64)
_escape_types, _switch_types = (float64, float64, float64), (boolean, boolean, boolean)
_option_types = (int64, *_escape_types, float64, _table, _bounds, _path_curves, *_switch_types, int64, float64, int64)


class Variant(NamedTuple):
    """What the arrays of a pool are: each kind has machine code of its own, which knows nothing of the others."""

    has_support: bool = False
    num_code_bits: Literal[8, 16] = 8
    has_alternatives: bool = False


def compile_draft_tree(variant: Variant = Variant()) -> Callable:
    """`draft_tree` in machine code: seconds the first time on a machine, milliseconds from numba's cache later."""
    support = _uint8s if variant.has_support else types.none
    alternatives = _int32s if variant.has_alternatives else types.none
    index_types = (_int32s, _int32s, _codes[variant.num_code_bits], _int32s, support, alternatives, int64)
    signature = (*index_types, *_preference_types, *_context_types, *_option_types)
    return njit(signature, cache=True, nogil=True, error_model="numpy")(_draft_tree_of(_stamp_of_this_folder()))


def _stamp_of_this_folder() -> int:
    """Changes with any file here, which `draft_tree` closes over: else numba's cache would look at this file alone."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(sources.__file__), Path(calibration_table.__file__)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files))
    return int.from_bytes(digest.digest()[:7], "big")


def _draft_tree_of(stamp: int) -> Callable:
    def draft_tree(
        tokens, order, group_codes, starts, support, alternatives, depth,
        group, inside, outside, num_samples, num_group_samples,
        context_tokens, num_prompt, previous, max_match, max_local_tokens,
        num_context_lengths, pool_escape, previous_escape, local_escape, alternative_weight, table, bounds,
        path_curves,
        use_previous, use_output, use_prompt, max_nodes, min_probability, end_token_id,
    ):  # fmt: skip
        """The most probable continuations, best first. Flat arguments: unpacking tuples would cost microseconds.

        Returns
        -------
        int32 (NUM_OUTPUTS, n), a row for each of the OUT_ constants; one array, since each would cost half a
        microsecond. Log acceptance and relative count are the bits of float32s.
        """
        index = Index(tokens, order, group_codes, starts, support, alternatives, depth)
        preference = Preference(group, inside, outside, num_samples, num_group_samples)
        context = Context(context_tokens, num_prompt, previous, max_match, max_local_tokens)
        levels, frontier = new_levels(max_nodes), new_frontier(max_nodes)
        candidates, runs = new_candidates(), new_runs()
        found = np.empty((NUM_OUTPUTS, max_nodes), np.int32)
        found_floats = found.view(np.float32)
        depths = np.zeros(max_nodes + 1, np.int32)
        path_curve = path_curves[1 if use_previous else 0]  # products are compared, and said as what they are worth
        min_probability = max(least_product(path_curve, min_probability), MIN_PROBABILITY)
        draft_end = end_token_id >= 0
        _ = stamp  # see _stamp_of_this_folder

        num_levels = add_pool_levels(levels, index, preference, context, num_context_lengths, pool_escape)
        num_levels = add_own_levels(
            levels, num_levels, context, use_previous, use_output, use_prompt, previous_escape, local_escape
        )
        node, probability, size, num_nodes = 0, 1.0, 0, 0  # node 0 is the root, node n the n-th drafted
        is_end = False
        while num_nodes < max_nodes:
            if not is_end:
                num_candidates = count_continuations(
                    candidates, runs, levels, num_levels, node, depths[node], probability,
                    least_probability(frontier, size, min_probability), alternative_weight, index, preference, context,
                )  # fmt: skip
                size = push_candidates(
                    frontier, size, candidates, num_candidates, node, depths[node], probability, min_probability,
                    table, bounds, draft_end,
                )  # fmt: skip
            if size == num_nodes:
                break
            probability, slot = frontier.probability[num_nodes], frontier.slots[num_nodes]
            token, parent = frontier.token[slot], frontier.parent[slot]
            is_end = token == END
            found[OUT_TOKEN, num_nodes], found[OUT_PARENT, num_nodes] = end_token_id if is_end else token, parent - 1
            found_floats[OUT_LOG_ACCEPTANCE, num_nodes] = np.log(on_knots(path_curve, probability))
            found[OUT_SOURCE, num_nodes] = frontier.source[slot]
            found[OUT_NUM_SEEN, num_nodes] = frontier.num_seen[slot]
            found[OUT_MATCH_LENGTH, num_nodes] = frontier.length[slot]
            found_floats[OUT_RELATIVE_COUNT, num_nodes] = frontier.relative_count[slot]
            num_nodes += 1
            node = num_nodes
            depths[node] = depths[parent] + 1
            if not is_end and num_nodes < max_nodes:
                enter_node(levels, num_levels, node, parent, depths[node], token, index, context)
        return found[:, :num_nodes]

    return draft_tree
