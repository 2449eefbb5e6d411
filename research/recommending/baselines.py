"""The baselines of a recommender: the list of the most popular items, and neighbours of the user's items."""

from collections.abc import Sequence

import numpy as np
import scipy.sparse as sp


def popular_list(histories: Sequence[np.ndarray], num_items: int, size: int) -> np.ndarray:
    """The items with the most events, int64[size]; histories are rows of a catalogue of `num_items`."""
    counts = np.bincount(np.concatenate(histories), minlength=num_items)
    return np.argsort(-counts, kind="stable")[:size]


def neighbour_lists(
    histories: Sequence[np.ndarray], num_items: int, asked: Sequence[np.ndarray], size: int
) -> list[np.ndarray]:
    """The items that occur with the items of each asked history in other histories, best first, int64[<= size].

    The score is the cosine between columns of the user-item matrix (Sarwar et al., WWW 2001), summed over the history's
    items; these are left out.
    """

    def matrix(some: Sequence[np.ndarray]) -> sp.csr_matrix:
        rows = np.repeat(np.arange(len(some)), [len(one) for one in some])
        items = np.concatenate(some)
        found = sp.csr_matrix((np.ones(len(rows), np.float32), (rows, items)), (len(some), num_items))
        found.data[:] = 1.0  # repeated events were added up
        return found

    known, wanted = matrix(histories), matrix(asked)
    lengths = sp.diags(1 / np.sqrt(np.maximum(1, np.asarray(known.sum(0)).ravel())))
    scores = ((wanted @ lengths) @ known.T @ known @ lengths).tocsr()
    lists = []
    for row, own in enumerate(asked):
        found = slice(scores.indptr[row], scores.indptr[row + 1])
        items, values = scores.indices[found], scores.data[found]
        other = ~np.isin(items, own)
        items, values = items[other], values[other]
        lists.append(items[np.lexsort((items, -values))][:size].astype(np.int64))
    return lists
