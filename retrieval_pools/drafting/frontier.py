"""The paths that may be drafted next: a short sorted list whose order leaves nothing to chance.

What is drafted stays at the head of the list, and the list never grows beyond the size of the tree, so that the last
path says what is not worth looking at.
"""

from laserbatch.retrieval_pools.compiled import part
from laserbatch.retrieval_pools.drafting.state import MAX_LEVELS


@part
def _comes_before(frontier, k, probability, token, parent):
    """Whether place k holds a path to be drafted before this one: more probable, smaller token, earlier parent."""
    if frontier.probability[k] != probability:
        return frontier.probability[k] > probability
    slot = frontier.slots[k]
    if frontier.token[slot] != token:
        return frontier.token[slot] < token
    return frontier.parent[slot] < parent


@part
def least_acceptance(frontier, size, min_acceptance):
    """What a path must reach to be drafted, as far as is known: less than the last one of a full list never is."""
    if size < frontier.slots.shape[0]:
        return min_acceptance
    return max(min_acceptance, frontier.probability[size - 1])


@part
def push_path(frontier, num_drafted, size, probability, parent, source, kind, candidates, c):
    """Put a path to candidate c in its place in a list of `size`; the last one falls out of a full one.

    A node that is drafted stays where it is, even if the path beyond it is as probable and its token smaller. Returns
    the new size.
    """
    k, slot, token = size, size, candidates.token[c]
    if size == frontier.slots.shape[0]:
        k -= 1
        if _comes_before(frontier, k, probability, token, parent):
            return size
        slot = frontier.slots[k]
    else:
        size += 1
    while k > num_drafted and not _comes_before(frontier, k - 1, probability, token, parent):
        frontier.probability[k], frontier.slots[k] = frontier.probability[k - 1], frontier.slots[k - 1]
        k -= 1
    frontier.probability[k], frontier.slots[k] = probability, slot
    frontier.token[slot], frontier.parent[slot] = token, parent
    frontier.source[slot], frontier.kind[slot], frontier.relative_count[slot] = source, kind, candidates.total[c]
    frontier.has_run[slot] = candidates.has_run[c]
    for level in range(MAX_LEVELS):  # those that mean nothing too: faster than a look at which they are
        frontier.runs[slot, level, 0] = candidates.runs[c, level, 0]
        frontier.runs[slot, level, 1] = candidates.runs[c, level, 1]
    return size
