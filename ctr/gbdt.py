"""The LightGBM baseline: the same rows, fields, histories and knowledge, as columns that are built block by block.

A tree cannot multiply, so it gets the products that networks can form as columns: the similarity of the target to the
user's history and to the user's knowledge. Rates before the row replace the embeddings of ids.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from laserbatch.ctr.dataset import CtrData, ModelRows
from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.knowledge import Knowledge

NUM_COMPONENTS = 16  # leading principal components of the knowledge vectors that become columns
MAX_ROUNDS, PATIENCE_ROUNDS = 400, 40
BLOCK_ROWS = 65_536


class GbdtColumns:
    """The columns of a data set's rows, built on demand; LightGBM stores one byte per value."""

    def __init__(self, data: ModelRows, knowledge: Knowledge | None) -> None:
        self._data, self._knowledge = data, knowledge
        self._sides = (data.user_fields[1:], data.users), (data.item_fields[1:], data.items)  # rates replace ids

    @property
    def categorical(self) -> list[int]:
        """The numbers of the columns that are categories."""
        are_categories = [[is_category] * part.shape[1] for part, is_category in self._parts(np.empty(0, np.int64))]
        return np.flatnonzero(np.concatenate(are_categories)).tolist()

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """The columns of some rows, float32 (len(rows), num_columns); callers pass at most BLOCK_ROWS rows."""
        return np.hstack([part for part, _ in self._parts(rows)], dtype=np.float32, casting="unsafe")

    def _parts(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, bool]]:
        """Yield groups of neighbouring columns (len(rows), any), and whether they are categories."""
        data = self._data
        for fields, numbers in self._sides:
            for field in fields:
                yield field.codes[:, : field.tree_slots][numbers[rows]], True
        yield data.past[rows], False
        items, starts = data.items[rows], data.starts[rows]
        lengths = data.ends[rows] - starts
        row_of_liked = np.repeat(np.arange(len(rows)), lengths)
        liked = data.liked[np.arange(len(row_of_liked)) + np.repeat(starts - np.cumsum(lengths) + lengths, lengths)]
        for field in self._sides[1][0]:
            yield _share_of_history_alike(field.codes, items, liked, row_of_liked)[:, None], False
        if self._knowledge is not None:
            users, (user, item) = data.users[rows], (self._knowledge.user, self._knowledge.item)
            for side, numbers in ((user, users), (item, items)):
                yield side.codes[numbers], True
                yield side.vectors[numbers, :NUM_COMPONENTS], False
            of_history = np.zeros((len(rows), item.vectors.shape[1]), np.float32)
            np.add.at(of_history, row_of_liked, item.vectors[liked])
            yield _cosine(of_history, item.vectors[items])[:, None], False
            yield _cosine(user.vectors[users], item.vectors[items])[:, None], False


def fit_gbdt(columns: GbdtColumns, data: CtrData, seed: int):
    """Train a booster on the training rows; its `best_iteration` is the round with the best validation AUC.

    Raises CtrError if LightGBM, or the system library that it needs, is not installed.
    """
    lightgbm = _lightgbm()

    class Blocks(lightgbm.Sequence):
        """Rows of one part for LightGBM, which first reads some rows one by one, in order, to choose bins, then all."""

        batch_size = BLOCK_ROWS

        def __init__(self, rows: np.ndarray) -> None:
            self._rows, self._start, self._block = rows, 0, np.empty((0, 0))

        def __len__(self) -> int:
            return len(self._rows)

        def __getitem__(self, index) -> np.ndarray:  # an int or a slice
            if isinstance(index, slice):
                return columns(self._rows[index])
            if not self._start <= index < self._start + len(self._block):
                self._start = index - index % BLOCK_ROWS
                self._block = columns(self._rows[self._start : self._start + BLOCK_ROWS])
            return self._block[index - self._start].astype(np.float64)  # the type that LightGBM expects

    parameters = {
        "objective": "binary", "metric": "auc", "learning_rate": 0.05, "num_leaves": 15, "min_data_in_leaf": 20,
        "feature_fraction": 0.7, "bagging_fraction": 0.8, "bagging_freq": 1, "max_cat_to_onehot": 8,
        "cat_smooth": 20.0, "seed": seed, "deterministic": True, "force_row_wise": True, "verbosity": -1,
    }  # fmt: skip
    train = lightgbm.Dataset(
        Blocks(data.train), data.labels[data.train], categorical_feature=columns.categorical, params=parameters
    )
    validation = train.create_valid(Blocks(data.validation), data.labels[data.validation])
    stop = lightgbm.early_stopping(PATIENCE_ROUNDS, verbose=False)
    return lightgbm.train(parameters, train, MAX_ROUNDS, valid_sets=[validation], callbacks=[stop])


def _lightgbm():
    try:
        import lightgbm
    except (ImportError, OSError) as error:  # OSError: libgomp is missing
        raise CtrError(
            f"LightGBM cannot be loaded ({error}); run `pip install lightgbm` and install the system library libgomp1, "
            "or leave gbdt out of ctr.models"
        ) from error
    return lightgbm


def load_gbdt(path: Path):
    """Load a booster from a file in LightGBM's text format."""
    return _lightgbm().Booster(model_file=path)


def predict_gbdt(booster, columns: GbdtColumns, rows: np.ndarray) -> np.ndarray:
    """Predict the probabilities of rows: float64 (len(rows),)."""
    starts = range(0, len(rows), BLOCK_ROWS)
    parts = [booster.predict(columns(rows[start : start + BLOCK_ROWS])) for start in starts]
    return np.concatenate(parts) if parts else np.zeros(0)


def _share_of_history_alike(
    codes: np.ndarray, items: np.ndarray, liked: np.ndarray, row_of_liked: np.ndarray
) -> np.ndarray:
    """The share of the target's values of a field that a history item has too, averaged over the history."""
    target = codes[items]  # (n, num_slots)
    of_target, of_liked = target[row_of_liked], codes[liked]
    num_alike = np.zeros(len(liked))
    for slot in range(codes.shape[1]):
        target_value = of_target[:, slot, None]
        num_alike += ((of_liked == target_value) & (target_value > 0)).any(axis=1)
    num_alike /= np.maximum((of_target > 0).sum(axis=1), 1)
    lengths = np.bincount(row_of_liked, minlength=len(items))
    return np.bincount(row_of_liked, num_alike, minlength=len(items)) / np.maximum(lengths, 1)


def _cosine(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return (left * right).sum(axis=1) / np.maximum(norms, 1e-9)
