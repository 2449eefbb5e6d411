"""The levels that are asked for the next token, longest context first, and their occurrences at every draft node."""

import numpy as np

from laserbatch.retrieval_pools.compiled import part
from laserbatch.retrieval_pools.drafting import intervals as pool
from laserbatch.retrieval_pools.drafting.runs import last_position, match_own_text, own_token
from laserbatch.retrieval_pools.drafting.state import END
from laserbatch.retrieval_pools.sources import SOURCE_OUTPUT, SOURCE_POOL, SOURCE_PREVIOUS, SOURCE_PROMPT


@part
def _list_recent(recent, context):
    """Write to `recent` the end of the output, which is looked up in the pool. Returns the number of tokens.

    If the whole output fits, the separator precedes it.
    """
    num_tokens = context.tokens.shape[0]
    longest = min(context.max_match, num_tokens - context.num_prompt)
    length = 0  # up to an id below 0, which is no token
    while length < longest and context.tokens[num_tokens - 1 - length] >= 0:
        length += 1
    with_start = length < context.max_match and length == num_tokens - context.num_prompt
    recent[0] = END
    for i in range(length):
        recent[i + with_start] = context.tokens[num_tokens - length + i]
    return length + with_start


@part
def _longest_match(intervals, index, preference, recent):
    """Length of the longest end of `recent` that the pool can continue, found by quadrupling and then by bisection."""
    matched, unmatched = 0, recent.shape[0] + 1
    length = 1
    while length < unmatched:
        first, last = _find(intervals, index, recent, length)
        if pool.has_next(index, preference, first, last, length):
            matched = length
        else:
            unmatched = length
        if unmatched <= recent.shape[0]:
            length = (matched + unmatched) >> 1 if unmatched - matched > 1 else unmatched
        else:
            length = min(4 * length, recent.shape[0]) if length < recent.shape[0] else unmatched
    return matched


@part
def _find(intervals, index, recent, length):
    """Interval of the last `length` tokens; `intervals`, int64[max length + 1, 2], caches it and has -1 if unknown."""
    if intervals[length, 0] < 0:
        intervals[length, 0], intervals[length, 1] = pool.find_interval(index, recent, length)
    return intervals[length, 0], intervals[length, 1]


@part
def add_pool_levels(levels, lookup, index, preference, context, options):
    """Add the longest match, then shorter contexts that were seen at least twice as often as the last one added.

    Returns the number of levels.
    """
    recent, intervals = lookup.recent[: _list_recent(lookup.recent, context)], lookup.intervals
    intervals[:] = -1
    length = _longest_match(intervals, index, preference, recent)
    num_levels = 0
    before = 0.0
    while length >= 1 and num_levels < options.num_context_lengths:
        first, last = _find(intervals, index, recent, length)
        num_seen = pool.count_seen(index, preference, first, last)
        if num_seen >= 2 * before or (length == 1 and num_seen > before):
            levels.source[num_levels], levels.length[num_levels] = SOURCE_POOL, length
            levels.escape[num_levels] = options.pool_escape
            levels.first[0, num_levels], levels.last[0, num_levels] = first, last
            num_levels += 1
            before = num_seen
        length = length - 1 if length <= 4 else (2 * length) // 3
    return num_levels


@part
def add_own_levels(levels, num_levels, context, options):
    """Add a level for each of the sequence's own texts that has the output's end. Returns the number of levels."""
    num_prompt, num_tokens = context.num_prompt, context.tokens.shape[0]
    if context.previous.shape[0] > 0:
        text, end = context.previous, min(context.previous.shape[0], context.max_tokens)
        num_levels = _add_own_level(levels, num_levels, SOURCE_PREVIOUS, text, 0, end, context, options.previous_escape)
    text, escape = context.tokens, options.local_escape
    if options.use_output:
        begin = max(num_prompt, num_tokens - context.max_tokens)
        num_levels = _add_own_level(levels, num_levels, SOURCE_OUTPUT, text, begin, num_tokens, context, escape)
    if options.use_prompt:
        begin = max(0, num_prompt - context.max_tokens)
        num_levels = _add_own_level(levels, num_levels, SOURCE_PROMPT, text, begin, num_prompt, context, escape)
    return num_levels


@part
def _add_own_level(levels, num_levels, source, text, begin, end, context, escape):
    """Insert a level, if `text[begin:end]` has the output's end: longer contexts first, own texts before the pool."""
    is_whole_text, positions = source == SOURCE_PREVIOUS, levels.positions[0, source]
    length, count = match_own_text(text, begin, end, is_whole_text, context, positions)
    if count == 0:
        return num_levels
    k = num_levels
    while k > 0:
        is_longer = levels.length[k - 1] > length
        if is_longer or (levels.length[k - 1] == length and levels.source[k - 1] != SOURCE_POOL):
            break
        levels.source[k], levels.length[k] = levels.source[k - 1], levels.length[k - 1]
        levels.escape[k] = levels.escape[k - 1]
        levels.first[0, k], levels.last[0, k] = levels.first[0, k - 1], levels.last[0, k - 1]
        k -= 1
    levels.source[k], levels.length[k], levels.escape[k] = source, length, escape
    levels.first[0, k], levels.last[0, k] = 0, count
    return num_levels + 1


@part
def add_node(levels, node, parent, has_run):
    """Add a drafted node, with no level known yet. A level that counted all of the parent may match only its runs."""
    levels.depth[node] = levels.depth[parent] + 1
    levels.matched[node] = 0
    levels.may_match[node] = levels.may_match[parent] & ~(levels.counted[parent] & ~has_run)


@part
def advance_level(levels, level, node, frontier, index, preference, context):
    """Find a level's interval at a drafted node, if it is unknown, by way of the nodes above.

    A level is followed only when it is asked: most levels are never asked at most nodes.
    """
    bit = 1 << level
    while levels.matched[node] & bit == 0:
        below, parent = node, frontier.parent[frontier.slots[node - 1]]
        while levels.matched[parent] & bit == 0:
            below, parent = parent, frontier.parent[frontier.slots[parent - 1]]
        slot = frontier.slots[below - 1]
        if levels.source[level] == SOURCE_POOL:
            offset = levels.length[level] + levels.depth[below] - 1
            first, last = _next_interval(levels, level, frontier, slot, index, offset, preference)
            if last > first and not pool.is_supported(index, first, offset + 1):  # nor is any longer n-gram
                last = first
        else:
            first, last = 0, _follow_own_text(levels, level, below, frontier, slot, context)
        levels.first[below, level], levels.last[below, level] = first, last
        levels.matched[below] |= bit


@part
def _next_interval(levels, level, frontier, slot, index, offset, preference):
    """The part of the parent's interval that goes on with the path's token, found by the token's run if it has one."""
    parent, token, bit = frontier.parent[slot], frontier.token[slot], 1 << level
    first, last = np.int64(levels.first[parent, level]), np.int64(levels.last[parent, level])
    if first >= last or offset + 1 >= index.depth:  # the order is not sorted by further tokens
        return first, first
    begin, end = np.int64(frontier.runs[slot, level, 0]), np.int64(frontier.runs[slot, level, 1])
    has_run = frontier.has_run[slot] & bit != 0
    if levels.counted[parent] & bit:
        return (first + begin, first + end) if has_run else (first, first)
    if has_run:
        probability = frontier.probability[parent - 1] if parent > 0 else 1.0
        num_samples = min(pool.num_samples_behind(preference, probability), last - first)
        return pool.narrow_to_run(index, first, last, offset, token, num_samples, begin, end)
    return pool.ends_of_run(index, first, last, first, last, offset, token)


@part
def _follow_own_text(levels, level, node, frontier, slot, context):
    """Advance those of the parent's positions that hold the path's token. Returns their number."""
    parent, token, source = frontier.parent[slot], frontier.token[slot], levels.source[level]
    count, end = 0, last_position(context, source)
    for k in range(levels.last[parent, level]):
        position = levels.positions[parent, source, k]
        if position < end and own_token(context, source, position) == token:
            levels.positions[node, source, count] = position + 1
            count += 1
    return count
