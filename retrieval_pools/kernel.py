"""From a context to a tree of likely continuations: the compiled part of drafting.

A draft asks several *levels* what comes next: the pool at several context lengths, and the sequence's own previous
text, prompt and output at the longest context each knows. They are blended from the longest context to the shortest,
each taking a share of the probability that the longer ones left over, by how often it has seen its context (escape, as
in PPM: Cleary and Witten 1984). The most probable path is expanded next, until there are enough nodes or none is
likely enough. `reference.py` says the same slowly.

Everything here is one compiled function and its inlined parts, without the GIL and without state. Keep the parts in
this file: numba's cache on disk looks at the file of the outermost function only. Knows no Python objects.
"""

from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int64, njit, types

from retrieval_pools.sources import NUM_SOURCES, SOURCE_OUTPUT, SOURCE_POOL, SOURCE_PREVIOUS, SOURCE_PROMPT

MAX_NODES = 64
MIN_PROBABILITY = 1 / 2048  # the paths not yet drafted exclude each other, so no more than 2048 of them are as likely
END = -1  # the separator: the text ends here
NUM_LOCAL_POSITIONS = 16  # occurrences of a context followed in each of the sequence's own texts, the latest ones
MAX_LEVELS = 12
_NUM_CANDIDATES = 1024
_NUM_SLOTS = 4096  # of the hash table from token to candidate; a power of two
_FRONTIER_SIZE = 2048 + _NUM_CANDIDATES


class Index(NamedTuple):
    """The arrays of a pool: `group_codes[k]` belongs to the text of position `order[k]`; see `suffix_order`."""

    tokens: np.ndarray
    order: np.ndarray
    group_codes: np.ndarray
    starts: np.ndarray
    depth: int


class Preference(NamedTuple):
    """How much an occurrence counts in the pool: `inside` texts of the group, `outside` them."""

    group: int
    inside: float
    outside: float
    num_samples: int
    num_group_samples: int


class Context(NamedTuple):
    """The sequence: `tokens[:num_prompt]` is the prompt, the rest the output; `previous` an earlier night's text."""

    tokens: np.ndarray
    num_prompt: int
    previous: np.ndarray
    max_match: int
    max_tokens: int


class Levels(NamedTuple):
    """Who is asked, longest context first, and where each stands at every node of the tree (node 0: the root).

    `first` and `last`, (MAX_NODES + 1, MAX_LEVELS): the interval of the pool's order that begins with context and path;
    for the sequence's own texts 0 and the number of `positions`, (MAX_NODES + 1, NUM_SOURCES, NUM_LOCAL_POSITIONS),
    where the next token would stand.
    """

    source: np.ndarray
    length: np.ndarray
    escape: np.ndarray
    first: np.ndarray
    last: np.ndarray
    positions: np.ndarray


class Candidates(NamedTuple):
    """Possible next tokens of a node: `share[c, source]` is what a source adds to the probability of `token[c]`.

    `slots` is a hash table from token to c + 1, `slot_of[c]` the place of c in it.
    """

    token: np.ndarray
    share: np.ndarray
    slots: np.ndarray
    slot_of: np.ndarray


class Frontier(NamedTuple):
    """A heap of the paths that may be drafted next, the most probable on top."""

    probability: np.ndarray
    token: np.ndarray
    parent: np.ndarray
    source: np.ndarray


# --- the pool: intervals of its order ---------------------------------------------------------------------------------


@njit
def _compare(index, position, context, length):
    """Sign of the tokens at `position` less the last `length` of `context`; the first of both are known to be equal."""
    begin = context.shape[0] - length
    for i in range(1, length):
        difference = index.tokens[position + i] - context[begin + i]
        if difference != 0:
            return difference
    return np.int32(0)


@njit
def _find(index, context, length):
    """Interval of the positions that begin with the last `length` tokens of `context`."""
    first_token = context[context.shape[0] - length]
    if first_token + 2 >= index.starts.shape[0]:
        return 0, 0
    first, last = index.starts[first_token + 1], index.starts[first_token + 2]
    if length == 1:
        return first, last
    low, high = first, last
    while low < high:
        middle = (low + high) >> 1
        if _compare(index, index.order[middle], context, length) < 0:
            low = middle + 1
        else:
            high = middle
    first = low
    high = last
    while low < high:
        middle = (low + high) >> 1
        if _compare(index, index.order[middle], context, length) <= 0:
            low = middle + 1
        else:
            high = middle
    return first, low


@njit
def _narrow(index, first, last, offset, token):
    """The part of an interval whose next token, `offset` tokens on, is `token`."""
    low, high = first, last
    while low < high:
        middle = (low + high) >> 1
        if index.tokens[index.order[middle] + offset] < token:
            low = middle + 1
        else:
            high = middle
    first = low
    step = 1
    while low + step <= last and index.tokens[index.order[low + step - 1] + offset] == token:  # gallop to the end
        low += step
        step <<= 1
    high = min(low + step - 1, last)
    while low < high:
        middle = (low + high) >> 1
        if index.tokens[index.order[middle] + offset] == token:
            low = middle + 1
        else:
            high = middle
    return first, low


@njit
def _sample(k, num_samples, first, size):
    """The k-th of `num_samples` places spread evenly over an interval; each of them if there are no more."""
    return first + k if num_samples >= size else first + ((2 * k + 1) * size) // (2 * num_samples)


@njit
def _num_inside(index, preference, first, last):
    """Occurrences in texts of the group; estimated when there are many."""
    size = last - first
    if size <= 0:
        return 0.0
    num_samples = min(size, preference.num_group_samples)
    num_inside = 0
    for k in range(num_samples):
        if index.group_codes[_sample(k, num_samples, first, size)] == preference.group:
            num_inside += 1
    return num_inside * (size / num_samples)


@njit
def _num_seen(index, preference, first, last):
    """Occurrences that count at all: the evidence, whose group does not make it more."""
    if preference.outside > 0:
        return float(last - first)
    return _num_inside(index, preference, first, last) if preference.inside > 0 else 0.0


@njit
def _weight(index, preference, first, last):
    """How much the occurrences of an interval count together."""
    weight = preference.outside * (last - first)
    if preference.inside != preference.outside:
        weight += (preference.inside - preference.outside) * _num_inside(index, preference, first, last)
    return weight


@njit
def _longest_match(index, preference, recent):
    """Length of the longest end of `recent` that occurs in the pool: doubled while it does, then bisected."""
    known, unknown = 0, recent.shape[0] + 1
    length = 1
    while length < unknown:
        first, last = _find(index, recent, length)
        if _num_seen(index, preference, first, last) > 0:
            known = length
            length = min(2 * length, recent.shape[0]) if length < recent.shape[0] else unknown
        else:
            unknown = length
    while unknown - known > 1:
        length = (known + unknown) >> 1
        first, last = _find(index, recent, length)
        if _num_seen(index, preference, first, last) > 0:
            known = length
        else:
            unknown = length
    return known


@njit
def _shorter(length):
    return length - 1 if length <= 4 else (2 * length) // 3


@njit
def _add_pool_levels(levels, index, preference, recent, num_context_lengths, escape):
    """The longest match, then shorter contexts seen at least twice as often as the last one taken."""
    length = _longest_match(index, preference, recent)
    num_levels = 0
    before = 0.0
    while length >= 1 and num_levels < num_context_lengths:
        first, last = _find(index, recent, length)
        num_seen = _num_seen(index, preference, first, last)
        if num_seen >= 2 * before or (length == 1 and num_seen > before):
            levels.source[num_levels], levels.length[num_levels] = SOURCE_POOL, length
            levels.escape[num_levels] = escape
            levels.first[0, num_levels], levels.last[0, num_levels] = first, last
            num_levels += 1
            before = num_seen
        length = _shorter(length)
    return num_levels


# --- the sequence's own texts -----------------------------------------------------------------------------------------


@njit
def _match_own_text(text, begin, end, is_whole_text, context, positions):
    """Where the longest end of the output occurs in `text[begin:end]`: length, number, and the latest in `positions`.

    In a whole text (the previous one) what begins it matches what begins the output, and its end is known.
    """
    tokens, num_prompt = context.tokens, context.num_prompt
    num_tokens = tokens.shape[0]
    if num_tokens == num_prompt:  # nothing written yet: only a whole text has a start
        positions[0] = begin
        return (1, 1) if is_whole_text else (0, 0)
    longest, count = 0, 0
    last_token = tokens[num_tokens - 1]
    for j in range(end - 1 if is_whole_text else end - 2, begin - 1, -1):
        if text[j] != last_token:
            continue
        length = 1
        while length < context.max_match and j - length >= begin and num_tokens - 1 - length >= num_prompt:
            if text[j - length] != tokens[num_tokens - 1 - length]:
                break
            length += 1
        if is_whole_text and length < context.max_match and length == j + 1 and num_tokens - length == num_prompt:
            length += 1  # both begin here
        if length > longest:
            longest, count = length, 0
        if length == longest and count < NUM_LOCAL_POSITIONS:
            positions[count] = j + 1
            count += 1
    return longest, count


@njit
def _own_token(context, source, position):
    """The token of an own text, END behind the previous one."""
    if source == SOURCE_PREVIOUS:
        return context.previous[position] if position < context.previous.shape[0] else np.int32(END)
    return context.tokens[position]


@njit
def _last_position(context, source):
    """The last position at which a next token is known."""
    if source == SOURCE_PREVIOUS:
        return context.previous.shape[0]
    return context.num_prompt - 1 if source == SOURCE_PROMPT else context.tokens.shape[0] - 1


@njit
def _insert_own_level(levels, num_levels, source, length, count, escape):
    """Keep longer contexts first; an own text before the pool at equal length."""
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


@njit
def _add_own_levels(levels, num_levels, context, use_previous, use_output, use_prompt, previous_escape, local_escape):
    num_prompt, num_tokens = context.num_prompt, context.tokens.shape[0]
    if use_previous:
        end = min(context.previous.shape[0], context.max_tokens)
        positions = levels.positions[0, SOURCE_PREVIOUS]
        length, count = _match_own_text(context.previous, 0, end, True, context, positions)
        if count > 0:
            num_levels = _insert_own_level(levels, num_levels, SOURCE_PREVIOUS, length, count, previous_escape)
    if use_output:
        begin = max(num_prompt, num_tokens - context.max_tokens)
        positions = levels.positions[0, SOURCE_OUTPUT]
        length, count = _match_own_text(context.tokens, begin, num_tokens, False, context, positions)
        if count > 0:
            num_levels = _insert_own_level(levels, num_levels, SOURCE_OUTPUT, length, count, local_escape)
    if use_prompt:
        begin = max(0, num_prompt - context.max_tokens)
        positions = levels.positions[0, SOURCE_PROMPT]
        length, count = _match_own_text(context.tokens, begin, num_prompt, False, context, positions)
        if count > 0:
            num_levels = _insert_own_level(levels, num_levels, SOURCE_PROMPT, length, count, local_escape)
    return num_levels


# --- the next tokens of one node --------------------------------------------------------------------------------------


@njit
def _candidate(candidates, num_candidates, token):
    """Place of a token among the candidates, and their number with it; place -1 when there is no room."""
    slot = (token * np.int64(0x9E3779B1) >> 12) & (_NUM_SLOTS - 1)
    while candidates.slots[slot] > 0:
        c = candidates.slots[slot] - 1
        if candidates.token[c] == token:
            return c, num_candidates
        slot = (slot + 1) & (_NUM_SLOTS - 1)
    if num_candidates == _NUM_CANDIDATES:
        return -1, num_candidates
    candidates.slots[slot] = num_candidates + 1
    candidates.slot_of[num_candidates] = slot
    candidates.token[num_candidates] = token
    candidates.share[num_candidates, :] = 0.0
    return num_candidates, num_candidates + 1


@njit
def _count_pool(candidates, num_candidates, index, preference, first, last, offset, only_group, share):
    """Add `share` for each occurrence (those of the group only, or all), sampled and weighted when they are many."""
    size = last - first
    num_samples = min(size, preference.num_group_samples if only_group else preference.num_samples)
    share *= size / num_samples
    before, c = np.int32(END - 1), -1
    for k in range(num_samples):
        place = _sample(k, num_samples, first, size)
        if only_group and index.group_codes[place] != preference.group:
            continue
        token = index.tokens[index.order[place] + offset]
        if token != before:  # occurrences come sorted by what follows
            c, num_candidates = _candidate(candidates, num_candidates, token)
            before = token
        if c >= 0:
            candidates.share[c, SOURCE_POOL] += share
    return num_candidates


@njit
def _count_continuations(
    candidates, levels, num_levels, node, depth, probability, min_probability, index, preference, context
):
    """Ask the levels in turn; each takes its share of what the longer contexts left. Returns the number of candidates.

    A level that has seen its context n times, m tokens long, takes n / (n + escape / m) of it.
    """
    num_candidates = 0
    left = 1.0
    for level in range(num_levels):
        if left * probability < min_probability:
            break
        first, last = levels.first[node, level], levels.last[node, level]
        source, length = levels.source[level], levels.length[level] + depth
        num_seen = _num_seen(index, preference, first, last) if source == SOURCE_POOL else float(last)
        if num_seen <= 0:
            continue
        confidence = num_seen / (num_seen + levels.escape[level] / length)
        taken = left * confidence
        left *= 1 - confidence
        if source != SOURCE_POOL:
            share = taken / num_seen
            for k in range(last):
                token = _own_token(context, source, levels.positions[node, source, k])
                c, num_candidates = _candidate(candidates, num_candidates, token)
                if c >= 0:
                    candidates.share[c, source] += share
            continue
        share = taken / _weight(index, preference, first, last)
        if preference.outside > 0:
            num_candidates = _count_pool(
                candidates, num_candidates, index, preference, first, last, length, False, share * preference.outside
            )
        if preference.inside != preference.outside:
            extra = share * (preference.inside - preference.outside)
            num_candidates = _count_pool(
                candidates, num_candidates, index, preference, first, last, length, True, extra
            )
    return num_candidates


@njit
def _push_candidates(frontier, num_waiting, candidates, num_candidates, node, probability, min_probability, draft_end):
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
        if total * probability >= min_probability and num_waiting < _FRONTIER_SIZE:
            _push(frontier, num_waiting, total * probability, token, node, source)
            num_waiting += 1
    return num_waiting


# --- the frontier -----------------------------------------------------------------------------------------------------


@njit
def _comes_before(frontier, k, probability, token, parent):
    """Whether place k holds a path to be drafted before this one: more probable, smaller token, earlier parent."""
    if frontier.probability[k] != probability:
        return frontier.probability[k] > probability
    if frontier.token[k] != token:
        return frontier.token[k] < token
    return frontier.parent[k] < parent


@njit
def _set(frontier, k, probability, token, parent, source):
    frontier.probability[k], frontier.token[k] = probability, token
    frontier.parent[k], frontier.source[k] = parent, source


@njit
def _move(frontier, k, to):
    _set(frontier, to, frontier.probability[k], frontier.token[k], frontier.parent[k], frontier.source[k])


@njit
def _push(frontier, size, probability, token, parent, source):
    k = size
    while k > 0:
        above = (k - 1) >> 1
        if _comes_before(frontier, above, probability, token, parent):
            break
        _move(frontier, above, k)
        k = above
    _set(frontier, k, probability, token, parent, source)


@njit
def _remove_top(frontier, size):
    """Take the top away from a heap of `size` paths."""
    last = size - 1
    probability, token, parent = frontier.probability[last], frontier.token[last], frontier.parent[last]
    source = frontier.source[last]
    k = 0
    while 2 * k + 1 < last:
        below = 2 * k + 1
        right = below + 1
        if right < last and _comes_before(
            frontier, right, frontier.probability[below], frontier.token[below], frontier.parent[below]
        ):
            below = right
        if not _comes_before(frontier, below, probability, token, parent):
            break
        _move(frontier, below, k)
        k = below
    _set(frontier, k, probability, token, parent, source)


# --- the tree ---------------------------------------------------------------------------------------------------------


@njit
def _enter(levels, num_levels, node, parent, depth, token, index, context):
    """Where every level stands at a new node, at `depth`, reached from `parent` by `token`."""
    for level in range(num_levels):
        first, last = levels.first[parent, level], levels.last[parent, level]
        source, offset = levels.source[level], levels.length[level] + depth - 1
        if source == SOURCE_POOL:
            if offset + 1 >= index.depth:  # the order is sorted no deeper
                last = first
            elif last > first:
                first, last = _narrow(index, first, last, offset, token)
        else:
            count = 0
            end = _last_position(context, source)
            for k in range(last):
                position = levels.positions[parent, source, k]
                if position < end and _own_token(context, source, position) == token:
                    levels.positions[node, source, count] = position + 1
                    count += 1
            last = count
        levels.first[node, level], levels.last[node, level] = first, last


@njit
def _recent_tokens(context):
    """The end of the output, and before it the separator when all of it is there: what is looked up in the pool."""
    num_tokens = context.tokens.shape[0]
    longest = min(context.max_match, num_tokens - context.num_prompt)
    length = 0  # up to an id below 0, which is no token
    while length < longest and context.tokens[num_tokens - 1 - length] >= 0:
        length += 1
    with_start = length < context.max_match and length == num_tokens - context.num_prompt
    recent = np.full(length + with_start, END, np.int32)
    for i in range(length):
        recent[i + with_start] = context.tokens[num_tokens - length + i]
    return recent


_int32s = types.Array(types.int32, 1, "C", readonly=True)
_uint16s = types.Array(types.uint16, 1, "C", readonly=True)
_index_types = (_int32s, _int32s, _uint16s, _int32s, int64)
_preference_types = (int64, float64, float64, int64, int64)
_context_types = (_int32s, int64, _int32s, int64, int64)
_option_types = (int64, float64, float64, float64, boolean, boolean, boolean, int64, float64, int64)


def draft_tree(
    tokens, order, group_codes, starts, depth,
    group, inside, outside, num_samples, num_group_samples,
    context_tokens, num_prompt, previous, max_match, max_local_tokens,
    num_context_lengths, pool_escape, previous_escape, local_escape,
    use_previous, use_output, use_prompt, max_nodes, min_probability, end_token_id,
):  # fmt: skip
    """The most probable continuations, best first. Flat arguments, since unpacking tuples costs a call microseconds.

    Returns
    -------
    token_ids int32[n], parents int32[n], log_probability float32[n], source uint8[n]
    """
    index = Index(tokens, order, group_codes, starts, depth)
    preference = Preference(group, inside, outside, num_samples, num_group_samples)
    context = Context(context_tokens, num_prompt, previous, max_match, max_local_tokens)
    levels = Levels(
        np.empty(MAX_LEVELS, np.int64),
        np.empty(MAX_LEVELS, np.int64),
        np.empty(MAX_LEVELS, np.float64),
        np.empty((max_nodes + 1, MAX_LEVELS), np.int64),
        np.empty((max_nodes + 1, MAX_LEVELS), np.int64),
        np.empty((max_nodes + 1, NUM_SOURCES, NUM_LOCAL_POSITIONS), np.int64),
    )
    candidates = Candidates(
        np.empty(_NUM_CANDIDATES, np.int32),
        np.empty((_NUM_CANDIDATES, NUM_SOURCES), np.float64),
        np.zeros(_NUM_SLOTS, np.int16),
        np.empty(_NUM_CANDIDATES, np.int64),
    )
    frontier = Frontier(
        np.empty(_FRONTIER_SIZE, np.float64),
        np.empty(_FRONTIER_SIZE, np.int32),
        np.empty(_FRONTIER_SIZE, np.int32),
        np.empty(_FRONTIER_SIZE, np.uint8),
    )
    token_ids, parents = np.empty(max_nodes, np.int32), np.empty(max_nodes, np.int32)
    log_probability, sources = np.empty(max_nodes, np.float32), np.empty(max_nodes, np.uint8)
    depths = np.zeros(max_nodes + 1, np.int64)
    min_probability = max(min_probability, MIN_PROBABILITY)
    draft_end = end_token_id >= 0

    recent = _recent_tokens(context)
    num_levels = _add_pool_levels(levels, index, preference, recent, num_context_lengths, pool_escape)
    num_levels = _add_own_levels(
        levels, num_levels, context, use_previous, use_output, use_prompt, previous_escape, local_escape
    )
    node, probability, num_waiting, num_nodes = 0, 1.0, 0, 0
    is_end = False
    while num_nodes < max_nodes:
        if not is_end:
            num_candidates = _count_continuations(
                candidates, levels, num_levels, node, depths[node], probability, min_probability,
                index, preference, context,
            )  # fmt: skip
            num_waiting = _push_candidates(
                frontier, num_waiting, candidates, num_candidates, node, probability, min_probability, draft_end
            )
        if num_waiting == 0:
            break
        token, parent = frontier.token[0], frontier.parent[0]
        probability, source = frontier.probability[0], frontier.source[0]
        _remove_top(frontier, num_waiting)
        num_waiting -= 1
        is_end = token == END
        token_ids[num_nodes], parents[num_nodes] = end_token_id if is_end else token, parent - 1
        log_probability[num_nodes], sources[num_nodes] = np.log(probability), source
        num_nodes += 1
        node = num_nodes
        depths[node] = depths[parent] + 1
        if not is_end and num_nodes < max_nodes:
            _enter(levels, num_levels, node, parent, depths[node], token, index, context)
    return token_ids[:num_nodes], parents[:num_nodes], log_probability[:num_nodes], sources[:num_nodes]


SIGNATURE = (*_index_types, *_preference_types, *_context_types, *_option_types)
