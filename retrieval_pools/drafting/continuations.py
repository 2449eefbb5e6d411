"""The next tokens of one node: every level asked in turn, its counts blended into one relative count a token."""

import numpy as np

from retrieval_pools.drafting.estimate import conditional_acceptance
from retrieval_pools.drafting.frontier import least_probability, push_path
from retrieval_pools.drafting.runs import list_own_runs, list_pool_runs
from retrieval_pools.drafting.state import END, NUM_CANDIDATES, NUM_SLOTS, part
from retrieval_pools.sources import SOURCE_POOL


@part
def count_continuations(
    candidates, runs, levels, num_levels, node, depth, probability, least_probability, index, preference, context
):
    """Ask the levels in turn; each takes its share of what the longer contexts left. Returns the number of candidates.

    A level that has seen its context n times, with u different next tokens, takes n / (n + escape * u) of it. What it
    may not draft for want of support it leaves to the shorter contexts, which may know the same token from more
    entities.
    """
    num_candidates = 0
    left = 1.0
    for level in range(num_levels):
        if left * probability < least_probability:
            break
        first, last = np.int64(levels.first[node, level]), np.int64(levels.last[node, level])
        if first >= last:
            continue
        source, length = levels.source[level], levels.length[level] + depth
        if source == SOURCE_POOL:
            num_runs, num_seen = list_pool_runs(runs, index, preference, first, last, length)
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
            c, num_candidates = _candidate(candidates, num_candidates, runs.token[run], length)
            if c >= 0:
                _add_share(candidates, c, source, share * runs.weight[run])
    return num_candidates


@part
def _candidate(candidates, num_candidates, token, length):
    """Place of a token among the candidates, and their number with it; place -1 when there is no room."""
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
    candidates.length[num_candidates] = length
    candidates.total[num_candidates] = candidates.pool[num_candidates] = candidates.own[num_candidates] = 0.0
    return num_candidates, num_candidates + 1


@part
def _add_share(candidates, c, source, share):
    candidates.total[c] += share
    if source == SOURCE_POOL:
        candidates.pool[c] += share
    elif share > candidates.own[c] or (share == candidates.own[c] and source < candidates.own_source[c]):
        candidates.own[c], candidates.own_source[c] = share, source


@part
def push_candidates(
    frontier, size, candidates, num_candidates, node, depth, probability, min_probability, table, most_gained, draft_end
):
    """Put the likely candidates of the node drafted last on the frontier, and clear them away for the next node.

    No probability in the table is more than `most_gained` times the relative count that it stands for. Returns the
    frontier's new size.
    """
    most = probability * most_gained
    for c in range(num_candidates):
        candidates.slots[candidates.slot_of[c]] = 0
        relative_count = candidates.total[c]
        if relative_count * most < least_probability(frontier, size, min_probability):
            continue
        token = candidates.token[c]
        if token == END and not draft_end:
            continue
        source = candidates.own_source[c] if candidates.own[c] >= candidates.pool[c] else SOURCE_POOL
        length = candidates.length[c]
        path = probability * conditional_acceptance(table, source, length, depth + 1, relative_count)
        if path >= min_probability:
            size = push_path(frontier, node, size, path, token, node, source, length, relative_count)
    return size
