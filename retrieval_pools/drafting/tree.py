"""The main loop of the compiled part of drafting: from a context to a tree of likely continuations.

A draft asks several *levels* for the next token: the pool at several context lengths, and the sequence's own previous
text, prompt and output, each at the longest context that it knows. Levels are blended from the longest context to the
shortest. Each takes a share of the probability that the longer ones left, which depends on how often it has seen its
context and with how many different next tokens (escape, as in PPM: Cleary and Witten 1984, Witten and Bell 1991). The
most probable path is expanded next, until there are enough nodes or none is likely enough.
`tests/retrieval_pools/slow_drafts.py` is a slow, obvious implementation of the same.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from numba import types

from laserbatch.retrieval_pools.compiled import cached, called, int32s_at, part
from laserbatch.retrieval_pools.drafting import state
from laserbatch.retrieval_pools.drafting.continuations import count_continuations, least_acceptance, push_candidates
from laserbatch.retrieval_pools.drafting.estimate import note_own_tokens
from laserbatch.retrieval_pools.drafting.levels import add_node, add_own_levels, add_pool_levels
from laserbatch.retrieval_pools.drafting.state import DEPTH_DISCOUNT, PLACE, WEIGHT


@cached(error_model="numpy", _nrt=False)
def draft_trees(
    places, weights, block, contexts, previous, sequences, use_output, use_prompt, max_nodes, min_acceptance, is_chain,
    outputs,
):  # fmt: skip
    """Write the likeliest continuations of each sequence, best first, to `outputs`: (sequence, OUT_ constant, node).

    With `is_chain` it searches `max_nodes` nodes and writes the best path, of at most the sequence's MAX_DEPTH tokens.

    `places` and `weights` are those of a `PoolHandle`; `block` is a `new_scratch` that no other thread uses meanwhile.
    `sequences` has a row for each sequence, with the columns of `state`; its column NUM_NODES is written. Callers get
    this function from `compiled_draft_trees`.
    """
    index, estimates = state.index_at(places), state.estimates_at(places)
    max_match = places[PLACE.max_match]
    options = state.Options(
        places[PLACE.num_context_lengths],
        weights[WEIGHT.pool_escape], weights[WEIGHT.previous_escape], weights[WEIGHT.local_escape],
        use_output, use_prompt, max_nodes, min_acceptance, is_chain,
    )  # fmt: skip
    scratch = state.scratch_at(np.int64(block.ctypes.data))
    # These arrays are not indexed below 0 either; see `compiled`.
    contexts = int32s_at(np.int64(contexts.ctypes.data), contexts.shape[0])
    previous = int32s_at(np.int64(previous.ctypes.data), previous.shape[0])
    float_outputs = outputs.view(np.float32)
    for i in range(sequences.shape[0]):
        row = sequences[i]
        context = state.Context(
            contexts[row[state.CONTEXT_BEGIN] : row[state.CONTEXT_END]], row[state.NUM_PROMPT],
            previous[row[state.PREVIOUS_BEGIN] : row[state.PREVIOUS_END]], max_match, places[PLACE.max_local_tokens],
        )  # fmt: skip
        row[state.NUM_NODES] = draft_tree(
            scratch, index, preference_of(row[state.GROUP], places, weights), context, options, row[state.MAX_DEPTH],
            estimates, outputs[i], float_outputs[i],
        )  # fmt: skip


@cache
def compiled_draft_trees() -> Callable:
    """`draft_trees`, compiled for one signature; numba would compile it again for arrays that are not read-only.

    This takes seconds the first time on a machine, later milliseconds from numba's cache.
    """
    tokens = types.Array(types.int32, 1, "C", readonly=True)
    sequences, outputs = types.int64[:, ::1], types.int32[:, :, ::1]
    pool, block = (types.int64[::1], types.float64[::1]), types.uint8[::1]
    options = types.boolean, types.boolean, types.int64, types.float64, types.boolean
    draft_trees.compile((*pool, block, tokens, tokens, sequences, *options, outputs))
    draft_trees.disable_compile()
    return draft_trees


@part
def preference_of(group, places, weights):
    """The weights of occurrences for a sequence; `group` is a group's code, state.NO_GROUP or state.UNKNOWN."""
    inside = outside = 1.0
    if group == state.UNKNOWN:
        inside = outside = weights[WEIGHT.outside]
    elif group != state.NO_GROUP:
        inside, outside = weights[WEIGHT.inside], weights[WEIGHT.outside]
    return state.Preference(group, inside, outside, places[PLACE.num_samples])


@called
def draft_tree(scratch, index, preference, context, options, max_depth, estimates, outputs, float_outputs):
    """Draft the most probable continuations of one sequence, best first. Returns their number.

    `outputs`, int32 (NUM_OUTPUTS, max_nodes), gets a row for each of the OUT_ constants; log acceptance and relative
    count are float32s, written through `float_outputs`.

    A chain's worth is the sum of the probabilities of the paths to its tokens, weighted by DEPTH_DISCOUNT ** depth. No
    path is more probable than its beginning, so paths that cannot become worth more than the best chain are skipped.
    """
    lookup, levels, candidates, runs, frontier = scratch
    max_nodes, min_acceptance = options.max_nodes, max(options.min_acceptance, state.MIN_ACCEPTANCE)
    num_levels = add_pool_levels(levels, lookup, index, preference, context, options)
    num_levels = add_own_levels(levels, num_levels, context, options)
    is_first = context.tokens.shape[0] == context.num_prompt and context.previous.shape[0] == 0
    # Whether the prompt has a token says less about that token at the beginning of a text than later.
    note_own_tokens(lookup.own, context, options.use_prompt and not is_first, options.use_output)
    node, probability, size, num_nodes = 0, 1.0, 0, 0  # node 0 is the root, node n the n-th drafted
    best_node, levels.worth[0], levels.depth[0] = 0, 0.0, 0
    levels.matched[0] = levels.may_match[0] = (1 << num_levels) - 1  # all levels are known at the root
    while num_nodes < max_nodes:
        depth = levels.depth[node]
        if depth < max_depth:
            enough = min_acceptance
            if options.is_chain:
                remaining_worth = (DEPTH_DISCOUNT**depth - DEPTH_DISCOUNT**max_depth) / (1 - DEPTH_DISCOUNT)
                enough = max(enough, (levels.worth[best_node] - levels.worth[node]) / remaining_worth)
            least = least_acceptance(frontier, size, max_nodes, enough)
            num_candidates = count_continuations(
                candidates, runs, levels, num_levels, frontier, node, depth, probability, least, index, preference,
                context,
            )  # fmt: skip
            size = push_candidates(
                frontier, size, candidates, num_candidates, node, depth, probability, max_nodes, enough, estimates,
                lookup.own,
            )  # fmt: skip
        if size == num_nodes:
            break
        probability, slot = frontier.probability[num_nodes], frontier.slots[num_nodes]
        token, parent = frontier.token[slot], frontier.parent[slot]
        outputs[state.OUT_TOKEN, num_nodes] = token
        outputs[state.OUT_PARENT, num_nodes] = parent - 1
        float_outputs[state.OUT_LOG_ACCEPTANCE, num_nodes] = np.log(probability)
        outputs[state.OUT_SOURCE, num_nodes] = frontier.source[slot]
        float_outputs[state.OUT_RELATIVE_COUNT, num_nodes] = frontier.relative_count[slot]
        outputs[state.OUT_KIND, num_nodes] = frontier.kind[slot]
        num_nodes += 1
        node = num_nodes
        add_node(levels, node, parent, frontier.has_run[slot])
        if options.is_chain:
            levels.worth[node] = levels.worth[parent] + probability * DEPTH_DISCOUNT ** levels.depth[parent]
            if levels.worth[node] > levels.worth[best_node]:
                best_node = node
    return keep_path(outputs, levels.path, best_node, levels.depth[best_node]) if options.is_chain else num_nodes


@called
def keep_path(outputs, path, node, length):
    """Keep only the path of `length` nodes that ends at `node`, in its order, in the outputs. Returns `length`."""
    for place in range(length - 1, -1, -1):
        path[place] = node - 1
        node = outputs[state.OUT_PARENT, node - 1] + 1
    for place in range(length):  # nodes of the path only move towards the front, so none is overwritten too early
        for output in range(state.NUM_OUTPUTS):
            outputs[output, place] = outputs[output, path[place]]
        outputs[state.OUT_PARENT, place] = place - 1
    return length
