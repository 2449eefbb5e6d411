"""The next tokens of one node: every level asked in turn, its counts blended into one probability a token."""

import numpy as np

from retrieval_pools.drafting.frontier import push_path
from retrieval_pools.drafting.intervals import count_seen, is_supported, sample_place, total_weight
from retrieval_pools.drafting.own_texts import own_token
from retrieval_pools.drafting.state import END, FRONTIER_SIZE, NUM_CANDIDATES, NUM_SLOTS, part
from retrieval_pools.sources import NUM_SOURCES, SOURCE_POOL


@part
def count_continuations(
    candidates, levels, num_levels, node, depth, probability, min_probability, index, preference, context
):
    """Ask the levels in turn; each takes its share of what the longer contexts left. Returns the number of candidates.

    A level that has seen its context n times, m tokens long, takes n / (n + escape / m) of it. What it may not draft
    for want of support it leaves to the shorter ones, which may know the same token from more entities.
    """
    num_candidates = 0
    left = 1.0
    for level in range(num_levels):
        if left * probability < min_probability:
            break
        first, last = levels.first[node, level], levels.last[node, level]
        source, length = levels.source[level], levels.length[level] + depth
        num_seen = count_seen(index, preference, first, last) if source == SOURCE_POOL else float(last)
        if num_seen <= 0:
            continue
        confidence = num_seen / (num_seen + levels.escape[level] / length)
        taken = left * confidence
        left *= 1 - confidence
        if source != SOURCE_POOL:
            share = taken / num_seen
            for k in range(last):
                token = own_token(context, source, levels.positions[node, source, k])
                c, num_candidates = _candidate(candidates, num_candidates, token)
                if c >= 0:
                    candidates.share[c, source] += share
            continue
        share = taken / total_weight(index, preference, first, last)
        if preference.outside > 0:
            num_candidates, withheld = _count_pool(
                candidates, num_candidates, index, preference, first, last, length, False, share * preference.outside
            )
            left += withheld
        if preference.inside != preference.outside:
            extra = share * (preference.inside - preference.outside)
            num_candidates, withheld = _count_pool(
                candidates, num_candidates, index, preference, first, last, length, True, extra
            )
            left += withheld
    return num_candidates


@part
def _count_pool(candidates, num_candidates, index, preference, first, last, offset, only_group, share):
    """Add `share` for each occurrence (those of the group only, or all), sampled and weighted when they are many.

    Returns the number of candidates, and the shares of the occurrences whose next token is not supported.
    """
    size = last - first
    num_samples = min(size, preference.num_group_samples if only_group else preference.num_samples)
    share *= size / num_samples
    before, c = np.int32(END - 1), -1
    withheld = 0.0
    for k in range(num_samples):
        place = sample_place(k, num_samples, first, size)
        if only_group and index.group_codes[place] != preference.group:
            continue
        if not is_supported(index, place, offset + 1):
            withheld += share
            continue
        token = index.tokens[index.order[place] + offset]
        if token != before:  # occurrences come sorted by what follows
            c, num_candidates = _candidate(candidates, num_candidates, token)
            before = token
        if c >= 0:
            candidates.share[c, SOURCE_POOL] += share
    return num_candidates, withheld


@part
def _candidate(candidates, num_candidates, token):
    """Place of a token among the candidates, and their number with it; place -1 when there is no room."""
    slot = (token * np.int64(0x9E3779B1) >> 12) & (NUM_SLOTS - 1)
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
    candidates.share[num_candidates, :] = 0.0
    return num_candidates, num_candidates + 1


@part
def push_candidates(frontier, num_waiting, candidates, num_candidates, node, probability, min_probability, draft_end):
    """Put the likely candidates of a node on the frontier, and clear the table for the next node."""
    for c in range(num_candidates):
        candidates.slots[candidates.slot_of[c]] = 0
        token = candidates.token[c]
        if token == END and not draft_end:
            continue
        total, source = 0.0, 0
        for s in range(NUM_SOURCES):
            total += candidates.share[c, s]
            if candidates.share[c, s] > candidates.share[c, source]:
                source = s
        if total * probability >= min_probability and num_waiting < FRONTIER_SIZE:
            push_path(frontier, num_waiting, total * probability, token, node, source)
            num_waiting += 1
    return num_waiting
