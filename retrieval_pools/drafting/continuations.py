"""The next tokens of one node: every level asked in turn, its counts blended into one relative count a token."""

import numpy as np

from retrieval_pools.drafting.estimate import conditional_acceptance
from retrieval_pools.drafting.frontier import push_path
from retrieval_pools.drafting.intervals import count_seen, is_supported, sample_place, sample_stride, total_weight
from retrieval_pools.drafting.own_texts import own_token
from retrieval_pools.drafting.runs import end_of_run, token_at
from retrieval_pools.drafting.state import END, NUM_CANDIDATES, NUM_SLOTS, part
from retrieval_pools.sources import NUM_SOURCES, SOURCE_POOL


@part
def count_continuations(
    candidates, levels, num_levels, node, depth, probability, least_probability, discount, index, preference, context
):
    """Ask the levels in turn; each takes its share of what the longer contexts left. Returns the number of candidates.

    A level that has seen its context n times, m tokens long, takes n / (n + escape / m) of it. Of what a pool level
    takes, each of its different tokens gives up `discount` of one occurrence to the shorter contexts, and so does what
    it may not draft for want of support: shorter ones may know the same token from more entities.
    """
    num_candidates = 0
    left = 1.0
    for level in range(num_levels):
        if left * probability < least_probability:
            break
        first, last = np.int64(levels.first[node, level]), np.int64(levels.last[node, level])
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
                c, num_candidates = _candidate(candidates, num_candidates, token, length)
                if c >= 0:
                    candidates.share[c, source] += share
            continue
        share = taken / total_weight(index, preference, first, last)
        if preference.outside > 0:
            num_candidates, given_up = _count_runs(
                candidates, num_candidates, index, preference, first, last, length, share * preference.outside, discount
            )
            left += given_up
        if preference.inside != preference.outside:
            extra = share * (preference.inside - preference.outside)
            of_group = discount if preference.outside <= 0 else 0.0
            num_candidates, given_up = _count_group(
                candidates, num_candidates, index, preference, first, last, length, extra, of_group
            )
            left += given_up
    return num_candidates


@part
def _count_runs(candidates, num_candidates, index, preference, first, last, length, share, discount):
    """Add `share` for each occurrence, sampled and weighted when they are many, run by run of the same next token.

    Returns the number of candidates, and what the runs gave up.
    """
    size = last - first
    num_samples = min(size, preference.num_samples)
    share *= size / num_samples
    stride = sample_stride(num_samples, size)
    token = token_at(index, first, stride, 0, length)
    last_token = token_at(index, first, stride, num_samples - 1, length)
    given_up = 0.0
    begin = 0
    while begin < num_samples:
        end, next_token = end_of_run(index, first, stride, begin, num_samples, length, token, last_token)
        if not is_supported(index, sample_place(first, stride, begin), length + 1):
            given_up += share * (end - begin)
        else:
            c, num_candidates = _candidate(candidates, num_candidates, token, length)
            given_up += share * discount
            if c >= 0:
                candidates.share[c, SOURCE_POOL] += share * ((end - begin) - discount)
        begin, token = end, next_token
    return num_candidates, given_up


@part
def _count_group(candidates, num_candidates, index, preference, first, last, length, share, discount):
    """Likewise, but one occurrence after the other: those of the group alone."""
    size = last - first
    num_samples = min(size, preference.num_group_samples)
    share *= size / num_samples
    stride = sample_stride(num_samples, size)
    before, c = np.int32(END - 1), -1
    given_up = 0.0
    for k in range(num_samples):
        place = sample_place(first, stride, k)
        if index.group_codes[place] != preference.group:
            continue
        if not is_supported(index, place, length + 1):
            given_up += share
            continue
        token = index.tokens[index.order[place] + length]
        if token != before:  # occurrences come sorted by what follows
            c, num_candidates = _candidate(candidates, num_candidates, token, length)
            before = token
            given_up += share * discount
            if c >= 0:
                candidates.share[c, SOURCE_POOL] -= share * discount
        if c >= 0:
            candidates.share[c, SOURCE_POOL] += share
    return num_candidates, given_up


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
    candidates.share[num_candidates, :] = 0.0
    return num_candidates, num_candidates + 1


@part
def push_candidates(
    frontier, size, candidates, num_candidates, node, depth, probability, min_probability, table, draft_end
):
    """Put the likely candidates of a node on the frontier, and clear them away for the next node.

    Returns the frontier's new size.
    """
    for c in range(num_candidates):
        candidates.slots[candidates.slot_of[c]] = 0
        token = candidates.token[c]
        if token == END and not draft_end:
            continue
        relative_count, source = 0.0, 0
        for s in range(NUM_SOURCES):
            relative_count += candidates.share[c, s]
            if candidates.share[c, s] > candidates.share[c, source]:
                source = s
        length = candidates.length[c]
        path = probability * conditional_acceptance(table, source, length, depth + 1, relative_count)
        if path >= min_probability:
            size = push_path(frontier, size, path, token, node, source, length, relative_count)
    return size
