"""The paths that may be drafted next: a heap whose order leaves nothing to chance."""

from retrieval_pools.drafting.state import part


@part
def _comes_before(frontier, k, probability, token, parent):
    """Whether place k holds a path to be drafted before this one: more probable, smaller token, earlier parent."""
    if frontier.probability[k] != probability:
        return frontier.probability[k] > probability
    if frontier.token[k] != token:
        return frontier.token[k] < token
    return frontier.parent[k] < parent


@part
def _set(frontier, k, probability, token, parent, source):
    frontier.probability[k], frontier.token[k] = probability, token
    frontier.parent[k], frontier.source[k] = parent, source


@part
def _move(frontier, k, to):
    _set(frontier, to, frontier.probability[k], frontier.token[k], frontier.parent[k], frontier.source[k])


@part
def push_path(frontier, size, probability, token, parent, source):
    """Add a path to a heap of `size` paths."""
    k = size
    while k > 0:
        above = (k - 1) >> 1
        if _comes_before(frontier, above, probability, token, parent):
            break
        _move(frontier, above, k)
        k = above
    _set(frontier, k, probability, token, parent, source)


@part
def remove_top(frontier, size):
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
