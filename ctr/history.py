"""What a user had liked just before each row: the sequence that DIN attends over. Knows no items' attributes."""

import numpy as np


def histories(
    users: np.ndarray, items: np.ndarray, times_us: np.ndarray, labels: np.ndarray, max_history: int = 20
) -> np.ndarray:
    """The user's newest positives strictly before each row's moment.

    A row sees neither itself nor anything of its own moment or later, whatever part of the split those rows are in.

    Parameters
    ----------
    users, items : int64 (n,) entity numbers from 0.
    times_us : int64 (n,).
    labels : (n,), 1 for a positive.

    Returns
    -------
    int64 (n, max_history): item numbers, newest first, -1 where there are no more.
    """
    moments = np.unique(times_us, return_inverse=True)[1]  # dense, so that (user, moment) fits one int64
    keys = users.astype(np.int64) * (int(moments.max(initial=0)) + 1) + moments
    positives = np.flatnonzero(labels == 1)
    positives = positives[np.argsort(keys[positives], kind="stable")]
    positive_users, positive_items = users[positives], items[positives]
    ends = np.searchsorted(keys[positives], keys, side="left")  # positives of earlier users, or earlier moments
    result = np.full((len(users), max_history), -1, np.int64)
    for back in range(max_history):
        candidates = ends - 1 - back
        is_own = candidates >= 0
        is_own[is_own] = positive_users[candidates[is_own]] == users[is_own]
        result[is_own, back] = positive_items[candidates[is_own]]
    return result
