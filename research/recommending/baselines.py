"""The baselines of a recommender: the list of the most popular items, and neighbours of the user's items."""

from collections.abc import Sequence

import numpy as np
import scipy.sparse as sp


def popular_list(histories: Sequence[np.ndarray], num_items: int, size: int) -> np.ndarray:
    """The items with the most events, int64[size]; histories hold rows of a catalogue of `num_items` items."""
    counts = np.bincount(np.concatenate(histories), minlength=num_items)
    return np.argsort(-counts, kind="stable")[:size]


def neighbour_lists(
    histories: Sequence[np.ndarray], num_items: int, queries: Sequence[np.ndarray], size: int
) -> list[np.ndarray]:
    """For each query, a history, items that occur together with its items in `histories`, best first, int64[<= size].

    The score is the cosine between columns of the user-item matrix (Sarwar et al., WWW 2001), summed over the query's
    items; these are left out.
    """

    def matrix(rows_of_items: Sequence[np.ndarray]) -> sp.csr_matrix:
        rows = np.repeat(np.arange(len(rows_of_items)), [len(row) for row in rows_of_items])
        items = np.concatenate(rows_of_items)
        counts = sp.csr_matrix((np.ones(len(rows), np.float32), (rows, items)), (len(rows_of_items), num_items))
        counts.data[:] = 1.0  # repeated events count once
        return counts

    by_user, by_query = matrix(histories), matrix(queries)
    lengths = sp.diags(1 / np.sqrt(np.maximum(1, np.asarray(by_user.sum(0)).ravel())))
    scores = ((by_query @ lengths) @ by_user.T @ by_user @ lengths).tocsr()
    lists = []
    for row, query in enumerate(queries):
        of_row = slice(scores.indptr[row], scores.indptr[row + 1])
        items, values = scores.indices[of_row], scores.data[of_row]
        other = ~np.isin(items, query)
        items, values = items[other], values[other]
        lists.append(items[np.lexsort((items, -values))][:size].astype(np.int64))
    return lists
