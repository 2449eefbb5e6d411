"""From a context to a tree of likely continuations: the compiled part of drafting, as a whole.

A draft asks several *levels* what comes next: the pool at several context lengths, and the sequence's own previous
text, prompt and output at the longest context each knows. They are blended from the longest context to the shortest,
each taking a share of the probability that the longer ones left over, by how often it has seen its context (escape, as
in PPM: Cleary and Witten 1984). The most probable path is expanded next, until there are enough nodes or none is
likely enough. `retrieval_pools/reference.py` says the same slowly.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numba import boolean, float64, int64, njit, types

from retrieval_pools import sources
from retrieval_pools.drafting.continuations import count_continuations, push_candidates
from retrieval_pools.drafting.frontier import remove_top
from retrieval_pools.drafting.levels import add_own_levels, add_pool_levels, enter_node
from retrieval_pools.drafting.state import (
    END,
    MIN_PROBABILITY,
    Context,
    Index,
    Preference,
    new_candidates,
    new_frontier,
    new_levels,
)

_int32s = types.Array(types.int32, 1, "C", readonly=True)
_uint16s = types.Array(types.uint16, 1, "C", readonly=True)
_uint8s = types.Array(types.uint8, 1, "C", readonly=True)
_index_types = (_int32s, _int32s, _uint16s, _int32s)  # and the support, and the depth
_preference_types = (int64, float64, float64, int64, int64)
_context_types = (_int32s, int64, _int32s, int64, int64)
_option_types = (int64, float64, float64, float64, boolean, boolean, boolean, int64, float64, int64)
_types_behind_index = (*_preference_types, *_context_types, *_option_types)


def compile_draft_tree(has_support: bool = False) -> Callable:
    """`draft_tree` in machine code: seconds the first time on a machine, milliseconds from numba's cache later.

    Parameters
    ----------
    has_support : for indexes with `support`; those without have machine code that knows nothing of it.
    """
    signature = (*_index_types, _uint8s if has_support else types.none, int64, *_types_behind_index)
    return njit(signature, cache=True, nogil=True, error_model="numpy")(_draft_tree_of(_stamp_of_this_folder()))


def _stamp_of_this_folder() -> int:
    """Changes with any file here, which `draft_tree` closes over: else numba's cache would look at this file alone."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(sources.__file__)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files))
    return int.from_bytes(digest.digest()[:7], "big")


def _draft_tree_of(stamp: int) -> Callable:
    def draft_tree(
        tokens, order, group_codes, starts, support, depth,
        group, inside, outside, num_samples, num_group_samples,
        context_tokens, num_prompt, previous, max_match, max_local_tokens,
        num_context_lengths, pool_escape, previous_escape, local_escape,
        use_previous, use_output, use_prompt, max_nodes, min_probability, end_token_id,
    ):  # fmt: skip
        """The most probable continuations, best first. Flat arguments: unpacking tuples would cost microseconds.

        Returns
        -------
        token_ids int32[n], parents int32[n], log_probability float32[n], source uint8[n]
        """
        index = Index(tokens, order, group_codes, starts, support, depth)
        preference = Preference(group, inside, outside, num_samples, num_group_samples)
        context = Context(context_tokens, num_prompt, previous, max_match, max_local_tokens)
        levels, candidates, frontier = new_levels(max_nodes), new_candidates(), new_frontier()
        token_ids, parents = np.empty(max_nodes, np.int32), np.empty(max_nodes, np.int32)
        log_probability, source_codes = np.empty(max_nodes, np.float32), np.empty(max_nodes, np.uint8)
        depths = np.zeros(max_nodes + 1, np.int64)
        min_probability = max(min_probability, MIN_PROBABILITY)
        draft_end = end_token_id >= 0
        _ = stamp  # see _stamp_of_this_folder

        num_levels = add_pool_levels(levels, index, preference, context, num_context_lengths, pool_escape)
        num_levels = add_own_levels(
            levels, num_levels, context, use_previous, use_output, use_prompt, previous_escape, local_escape
        )
        node, probability, num_waiting, num_nodes = 0, 1.0, 0, 0
        is_end = False
        while num_nodes < max_nodes:
            if not is_end:
                num_candidates = count_continuations(
                    candidates, levels, num_levels, node, depths[node], probability, min_probability,
                    index, preference, context,
                )  # fmt: skip
                num_waiting = push_candidates(
                    frontier, num_waiting, candidates, num_candidates, node, probability, min_probability, draft_end
                )
            if num_waiting == 0:
                break
            token, parent = frontier.token[0], frontier.parent[0]
            probability, source = frontier.probability[0], frontier.source[0]
            remove_top(frontier, num_waiting)
            num_waiting -= 1
            is_end = token == END
            token_ids[num_nodes], parents[num_nodes] = end_token_id if is_end else token, parent - 1
            log_probability[num_nodes], source_codes[num_nodes] = np.log(probability), source
            num_nodes += 1
            node = num_nodes
            depths[node] = depths[parent] + 1
            if not is_end and num_nodes < max_nodes:
                enter_node(levels, num_levels, node, parent, depths[node], token, index, context)
        return token_ids[:num_nodes], parents[:num_nodes], log_probability[:num_nodes], source_codes[:num_nodes]

    return draft_tree
