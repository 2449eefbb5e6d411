"""Labels interactions as positives by a rule of one comparison, which is never run as code, and samples negatives."""

import logging
import re
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.ctr.errors import CtrError

ALL = "all"
COMPARISONS = {
    ">=": pc.greater_equal, "<=": pc.less_equal, "==": pc.equal, "!=": pc.not_equal, ">": pc.greater, "<": pc.less,
}  # fmt: skip
IS_VALUED = "is not null"
RULE = re.compile(rf"\s*([\w.]+)\s*(?:({IS_VALUED})|({'|'.join(COMPARISONS)})\s*(\S.*?))?\s*")
NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")
NUM_ROUNDS = 30  # maximum number of draws until a sampled negative is not one of the user's items

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LabelRule:
    """A rule such as `rating >= 4`, `clicked`, `event == 'buy'`, `rating is not null`, or `all` (all are positives)."""

    text: str
    column: str | None  # None: every interaction is a positive
    comparison: str | None = None  # None: the column itself, true or not 0
    value: float | bool | str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a rule. Raises CtrError if `text` is not a rule."""
        match = RULE.fullmatch(text)
        if match is None:
            raise CtrError(
                f"ctr.label: {text!r} is not a rule; expected `COLUMN`, `COLUMN >= NUMBER` (also >, <=, <, ==, !=), "
                f"`COLUMN == 'TEXT'`, `COLUMN {IS_VALUED}`, or `{ALL}`"
            )
        column, is_valued, comparison, value = match.groups()
        if column == ALL and not (is_valued or comparison):
            return cls(text, None)
        return cls(text, column, is_valued or comparison, None if value is None else _value(value, text))

    def labels(self, column: pa.Array) -> pa.Array:
        """Whether each row is a positive: bool (n,); null if the value is null, unless the rule is about null.

        Raises CtrError if the rule does not fit the column's type.
        """
        if self.comparison == IS_VALUED:
            return pc.is_valid(column)
        try:
            if self.comparison is None:
                return column if pt.is_boolean(column.type) else pc.not_equal(column.cast(pa.float64(), safe=False), 0)
            if isinstance(self.value, float):  # decimals and unsigned integers too
                column = column.cast(pa.float64(), safe=False)
            elif isinstance(self.value, str):
                column = column.cast(pa.string())
            return COMPARISONS[self.comparison](column, pa.scalar(self.value))
        except (pa.ArrowException, TypeError):
            raise CtrError(
                f"ctr.label: {self.text!r} does not fit the column {self.column}, which is of type {column.type}; "
                f"expected numbers, or true and false; compare texts as in `{self.column} == 'TEXT'`"
            ) from None

    @property
    def least_rating(self) -> float | None:
        """The lowest positive rating if the rule is `rating >= NUMBER`, otherwise None."""
        is_limit = self.column == "rating" and self.comparison == ">="
        return float(self.value) if is_limit and isinstance(self.value, (int, float)) else None


def _value(text: str, rule: str) -> float | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if NUMBER.fullmatch(text):
        if text.lstrip("+-").isdigit() and abs(float(text)) >= 2**53:
            raise CtrError(f"ctr.label: {rule!r}: integers from 2**53 on are not exact; compare texts: == '{text}'")
        return float(text)
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    raise CtrError(f"ctr.label: {rule!r} compares with {text}; expected a number, true, false, or a text in quotes")


def sample_negatives(
    users: np.ndarray, items: np.ndarray, num_train: int, num_items: int, per_positive: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sample items that a positive's user did not meet, as negatives of the same moment.

    Training rows, the first `num_train`, know only each other: if items that a user meets later were spared, training
    would see the future. Candidates for later rows are all items of the log that the user never meets, neither before
    nor after the row. RecBole's sampler does so for test rows; for validation rows it spares no items of test rows,
    which are spared here. No model is trained on later rows, and all variants score the same ones, so comparisons are
    fair. But the AUC says how well models tell items that are met from items that are never met, not from all items
    that were not met yet. All candidates are equally likely. A user who met nearly all items may get fewer negatives.

    Returns for each negative the row of its positive, int64 (m,) ascending, and its item, int32 (m,).
    """
    rng = np.random.default_rng(seed)
    rows_of_parts, items_of_parts = [], []
    for first, end, num_visible in ((0, num_train, num_train), (num_train, len(users), len(users))):
        met = np.unique(users[:num_visible].astype(np.int64) * num_items + items[:num_visible])
        counts = np.bincount(items[:num_visible], minlength=num_items)
        weights = np.cumsum(counts > 0)
        rows = np.repeat(np.arange(first, end), per_positive)
        drawn = np.zeros(len(rows), np.int32)
        open_rows = np.arange(len(rows))
        for _ in range(NUM_ROUNDS):
            drawn[open_rows] = np.searchsorted(weights, rng.integers(weights[-1], size=len(open_rows)), side="right")
            keys = users[rows[open_rows]].astype(np.int64) * num_items + drawn[open_rows]
            nearest = met[np.minimum(np.searchsorted(met, keys), len(met) - 1)]
            open_rows = open_rows[nearest == keys]
            if not len(open_rows):
                break
        is_drawn = np.ones(len(rows), bool)
        is_drawn[open_rows] = False
        rows_of_parts.append(rows[is_drawn])
        items_of_parts.append(drawn[is_drawn])
    num_lost = len(users) * per_positive - sum(map(len, rows_of_parts))
    if num_lost:
        logger.warning(
            "%d of %d negatives were not sampled, because their users met nearly every item: most rows of these users "
            "are positives, which raises AUC, since a model need only know the users. Judge by GAUC instead",
            num_lost, len(users) * per_positive,
        )  # fmt: skip
    return np.concatenate(rows_of_parts), np.concatenate(items_of_parts)
