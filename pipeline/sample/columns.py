"""Arrays of the sample world as Arrow columns, and its clock."""

import datetime

import numpy as np
import pyarrow as pa

LAST_DATE = datetime.date(2025, 3, 1)  # the last day of the period; the future begins after it
DAY_S = 86_400
SIGN_UP_S = 6 * 3_600  # users and items appear before six in the morning, ratings come after


def first_second(days: int) -> int:
    """Unix time at which a period of `days` days begins, in seconds."""
    first = datetime.datetime.combine(LAST_DATE, datetime.time(), datetime.UTC) - datetime.timedelta(days=days - 1)
    return int(first.timestamp())


def words(vocabulary: tuple[str, ...] | list[str], indices: np.ndarray) -> pa.Array:
    """Words by index, string[n]."""
    return pa.array(list(vocabulary), pa.string()).take(pa.array(indices))


def ids(prefix: str, numbers: np.ndarray) -> pa.Array:
    """Ids such as u0000012, string[n]."""
    return pa.array([f"{prefix}{number:07d}" for number in numbers.tolist()], pa.string())
