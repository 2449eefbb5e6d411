"""The next tokens of one node: every level is asked in turn, and the counts are blended to a relative count per token.

Tokens that may be drafted go to the frontier, a short list of paths in a total, deterministic order. Drafted paths stay
at its head. The list never grows beyond the size of the tree, so paths below the last one of a full list are skipped.
"""

import numpy as np

from laserbatch.retrieval_pools.compiled import part
from laserbatch.retrieval_pools.drafting.estimate import acceptance, kind_of, most_acceptance
from laserbatch.retrieval_pools.drafting.intervals import num_samples_behind
from laserbatch.retrieval_pools.drafting.levels import advance_level
from laserbatch.retrieval_pools.drafting.runs import list_own_runs, list_pool_runs
from laserbatch.retrieval_pools.drafting.state import MAX_LEVELS, MIN_SHARE_LEFT, NUM_CANDIDATES, NUM_SLOTS
from laserbatch.retrieval_pools.sources import SOURCE_POOL


@part
def count_continuations(
    candidates, runs, levels, num_levels, frontier, node, depth, probability, least_acceptance, index, preference,
    context,
):  # fmt: skip
    """Ask the levels in turn; each takes its share of what the longer contexts left. Returns the number of candidates.

    A level that has seen its context n times, with u different next tokens, takes n / (n + escape * u) of the rest. The
    share of tokens that it may not draft, because too few entities have them, is left to the shorter contexts, which
    may know the same token from more entities.
    """
    num_candidates = 0
    if probability < least_acceptance:  # no path is more probable than its parent
        return num_candidates
    num_samples = num_samples_behind(preference, probability)
    left = 1.0
    levels.counted[node] = 0
    for level in range(num_levels):
        if left < MIN_SHARE_LEFT:
            break
        if levels.may_match[node] >> level & 1 == 0:
            continue
        advance_level(levels, level, node, frontier, index, preference, context)
        first, last = np.int64(levels.first[node, level]), np.int64(levels.last[node, level])
        if first >= last:
            levels.may_match[node] &= ~(1 << level)
            continue
        source, length = levels.source[level], levels.length[level] + depth
        if source == SOURCE_POOL:
            num_runs, num_seen, is_counted = list_pool_runs(runs, index, preference, num_samples, first, last, length)
            if is_counted:
                levels.counted[node] |= 1 << level
            escape = levels.escape[level]
        else:
            num_runs = list_own_runs(runs, context, source, levels.positions[node, source], last)
            num_seen, escape = float(last), levels.escape[level] / length
        if num_runs == 0:
            continue
        weight = 0.0
        for run in range(num_runs):
            weight += runs.weight[run]
        confidence = num_seen / (num_seen + escape * num_runs)
        share = left * confidence / weight
        left *= 1 - confidence
        for run in range(num_runs):
            if not runs.is_drafted[run]:
                left += share * runs.weight[run]
                continue
            c, num_candidates = _candidate(candidates, num_candidates, runs.token[run], num_seen)
            if c < 0:
                continue
            added = share * runs.weight[run]
            candidates.total[c] += added
            if source == SOURCE_POOL:
                candidates.pool[c] += added
                if runs.begin[run] < runs.end[run]:
                    candidates.runs[c, level, 0], candidates.runs[c, level, 1] = runs.begin[run], runs.end[run]
                    candidates.has_run[c] |= 1 << level
            elif added > candidates.own[c] or (added == candidates.own[c] and source < candidates.own_source[c]):
                candidates.own[c], candidates.own_source[c] = added, source
    return num_candidates


@part
def _candidate(candidates, num_candidates, token, num_seen):
    """Find or add a token among the candidates. Returns its place, -1 if there is no room, and their number.

    `num_seen`, the occurrences of the context, is kept for a new token: the first context is the longest that knows it.
    """
    slot = (np.int64(token) * np.int64(0x9E3779B1) >> 12) & (NUM_SLOTS - 1)
    while candidates.slots[slot] > 0:
        c = candidates.slots[slot] - 1
        if candidates.token[c] == token:
            return c, num_candidates
        slot = (slot + 1) & (NUM_SLOTS - 1)
    if num_candidates == NUM_CANDIDATES:
        return -1, num_candidates
    candidates.slots[slot] = num_candidates + 1
    candidates.slot_of[num_candidates] = slot
    candidates.token[num_candidates] = token
    candidates.num_seen[num_candidates] = num_seen
    candidates.has_run[num_candidates] = 0
    candidates.total[num_candidates] = candidates.pool[num_candidates] = candidates.own[num_candidates] = 0.0
    return num_candidates, num_candidates + 1


@part
def push_candidates(
    frontier, size, candidates, num_candidates, node, depth, probability, max_nodes, min_acceptance, estimates,
    own_tokens,
):  # fmt: skip
    """Put the likely candidates of the node drafted last on the frontier, and empty their hash table for the next node.

    Upper bounds exclude most candidates without reading their curves. Returns the frontier's new size.
    """
    for c in range(num_candidates):
        candidates.slots[candidates.slot_of[c]] = 0
        relative_count = candidates.total[c]
        least = least_acceptance(frontier, size, max_nodes, min_acceptance)
        if probability * most_acceptance(estimates.bounds, relative_count) < least:
            continue
        token = candidates.token[c]
        if token < 0:  # END, or an id that is not a token: it takes its share of the probability, but is never drafted
            continue
        source = candidates.own_source[c] if candidates.own[c] >= candidates.pool[c] else SOURCE_POOL
        kind = kind_of(own_tokens, estimates.frequencies, token, candidates.num_seen[c], depth)
        path = probability * acceptance(estimates.curves[source, kind], relative_count)
        if path >= min_acceptance:
            size = _push_path(frontier, max_nodes, size, path, node, source, kind, candidates, c)
    return size


@part
def _comes_before(frontier, k, probability, token, parent):
    """Whether the path at place k precedes this one: more probable, then smaller token, then earlier parent."""
    if frontier.probability[k] != probability:
        return frontier.probability[k] > probability
    slot = frontier.slots[k]
    if frontier.token[slot] != token:
        return frontier.token[slot] < token
    return frontier.parent[slot] < parent


@part
def least_acceptance(frontier, size, max_nodes, min_acceptance):
    """The probability below which a path is not drafted: `min_acceptance`, or that of the last path of a full list."""
    if size < max_nodes:
        return min_acceptance
    return max(min_acceptance, frontier.probability[size - 1])


@part
def _push_path(frontier, max_nodes, size, probability, parent, source, kind, candidates, c):
    """Insert the path from the node drafted last to candidate c into a list of `size`; a full list drops its last path.

    Drafted nodes stay where they are, even if a path beyond one is as probable and has a smaller token. Returns the
    new size.
    """
    k, slot, token = size, size, candidates.token[c]
    if size == max_nodes:
        k -= 1
        if _comes_before(frontier, k, probability, token, parent):
            return size
        slot = frontier.slots[k]
    else:
        size += 1
    while k > parent and not _comes_before(frontier, k - 1, probability, token, parent):
        frontier.probability[k], frontier.slots[k] = frontier.probability[k - 1], frontier.slots[k - 1]
        k -= 1
    frontier.probability[k], frontier.slots[k] = probability, slot
    frontier.token[slot], frontier.parent[slot] = token, parent
    frontier.source[slot], frontier.kind[slot], frontier.relative_count[slot] = source, kind, candidates.total[c]
    frontier.has_run[slot] = candidates.has_run[c]
    for level in range(MAX_LEVELS):  # also entries that are not set: copying is faster than checking
        frontier.runs[slot, level, 0] = candidates.runs[c, level, 0]
        frontier.runs[slot, level, 1] = candidates.runs[c, level, 1]
    return size
