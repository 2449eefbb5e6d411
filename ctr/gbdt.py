"""The LightGBM baseline: the same rows, fields, histories and knowledge, as one flat matrix.

A tree cannot multiply, so products that the networks can form are given to it ready-made: how alike the target is to
the user's history and to the user's knowledge. Rates before the row stand for the embeddings of ids.
"""

import numpy as np

from laserbatch.ctr.dataset import CtrData, Knowledge, keys_by_moment
from laserbatch.ctr.settings import CtrError, CtrSettings

NUM_COMPONENTS = 16  # leading principal components of the knowledge vectors that become columns
MAX_ROUNDS, PATIENCE_ROUNDS = 400, 40


def gbdt_matrix(data: CtrData, knowledge: Knowledge | None) -> tuple[np.ndarray, list[int]]:
    """Every row's columns, float32 (n, num_columns), and the numbers of those that are categories."""
    columns: list[np.ndarray] = []
    categorical: list[int] = []
    for fields, numbers in ((data.user_fields, data.users), (data.item_fields, data.items)):
        for field in fields[1:]:  # the id itself has too many values for a tree; its rates come below
            categorical += range(len(columns), len(columns) + field.codes.shape[1])
            columns += list(field.codes[numbers].T)
    for numbers in (data.users, data.items):
        columns += _rates_before(numbers, data)
    columns.append((data.history < data.num_items).sum(axis=1))
    columns += [_share_of_history_alike(field.codes, data) for field in data.item_fields[1:]]
    if knowledge is not None:
        for side, numbers in ((knowledge.user, data.users), (knowledge.item, data.items)):
            categorical.append(len(columns))
            columns.append(side.cluster_codes[numbers])
            columns += list(side.vectors[:, :NUM_COMPONENTS].T[:, numbers])
        padded = np.vstack([knowledge.item.vectors, np.zeros_like(knowledge.item.vectors[:1])])
        liked = sum(padded[data.history[:, back]] for back in range(data.history.shape[1]))
        columns.append(_cosine(liked, padded[data.items]))
        columns.append(_cosine(knowledge.user.vectors[data.users], knowledge.item.vectors[data.items]))
    return np.column_stack(columns).astype(np.float32), categorical


def fit_gbdt(matrix: np.ndarray, categorical: list[int], data: CtrData, settings: CtrSettings, seed: int):
    """A booster trained on the training rows; its `best_iteration` is the round that validation chose by AUC.

    Raises
    ------
    CtrError
        LightGBM, or the system library that it needs, is not installed.
    """
    try:
        import lightgbm
    except (ImportError, OSError) as error:  # OSError: libgomp is missing
        raise CtrError(
            f"LightGBM cannot be loaded ({error}); `pip install lightgbm` and the system library libgomp1 provide it, "
            "or leave gbdt out of ctr.models"
        ) from error
    parameters = {
        "objective": "binary",
        "metric": "auc",
        "learning_rate": 0.05,
        "num_leaves": 15,
        "min_data_in_leaf": 20,
        "feature_fraction": 0.7,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "max_cat_to_onehot": 8,
        "cat_smooth": 20.0,
        "seed": seed,
        "deterministic": True,
        "force_row_wise": True,
        "verbosity": -1,
    }
    train = lightgbm.Dataset(matrix[data.train], data.labels[data.train], categorical_feature=categorical)
    validation = train.create_valid(matrix[data.validation], data.labels[data.validation])
    stop = lightgbm.early_stopping(PATIENCE_ROUNDS, verbose=False)
    return lightgbm.train(parameters, train, MAX_ROUNDS, valid_sets=[validation], callbacks=[stop])


def _rates_before(numbers: np.ndarray, data: CtrData) -> list[np.ndarray]:
    """Count, and smoothed share of positives, of an entity's rows strictly before each row's moment."""
    keys, moments = keys_by_moment(numbers, data.times_us)
    order = np.argsort(keys, kind="stable")
    positives = np.concatenate([[0.0], np.cumsum(data.labels[order], dtype=np.float64)])
    ends = np.searchsorted(keys[order], keys, side="left")
    starts = np.searchsorted(keys[order], keys - moments, side="left")  # the entity's first row
    counts = ends - starts
    prior = float(data.labels[data.train].mean())
    return [counts, (positives[ends] - positives[starts] + 5 * prior) / (counts + 5)]


def _share_of_history_alike(codes: np.ndarray, data: CtrData) -> np.ndarray:
    """Mean share of the target's values of one field that an item of the history has too."""
    padded = np.vstack([codes, np.zeros_like(codes[:1])])
    target = padded[data.items]  # (n, num_slots)
    num_alike = np.zeros(len(target))
    for back in range(data.history.shape[1]):
        liked = padded[data.history[:, back]]
        alike = (liked[:, :, None] == target[:, None, :]) & (liked[:, :, None] > 0)
        num_alike += alike.any(axis=1).sum(axis=1) / np.maximum((target > 0).sum(axis=1), 1)
    return num_alike / np.maximum((data.history < data.num_items).sum(axis=1), 1)


def _cosine(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return (left * right).sum(axis=1) / np.maximum(norms, 1e-9)
