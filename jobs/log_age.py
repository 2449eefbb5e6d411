"""The age of a night's newest interaction, compared with the usual gap between days with interactions."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

ROWS_AT_ONCE = 64 * 1024
DAY_US = 24 * 3600 * 10**6


@dataclass(frozen=True)
class LogAge:
    """The age of a log on a date; a manifest has it as `age` in `inputs.interactions`."""

    date: str  # date of the night, in ISO 8601
    newest: str  # day (UTC) of the newest interaction known on `date`
    age_days: int  # days from `newest` to `date`
    usual_gap_days: float | None  # median gap between days with interactions; None if there is only one such day

    @property
    def is_stale(self) -> bool:
        """Whether the newest interaction is older than twice the usual gap."""
        return self.usual_gap_days is not None and self.age_days > 2 * self.usual_gap_days

    def __str__(self) -> str:
        gap, newest = self.usual_gap_days, f"the newest interaction known on {self.date} is from {self.newest}"
        usual = "" if gap is None else f"; days with interactions are usually {gap:g} day{'s' * (gap != 1)} apart"
        return f"{newest}, {self.age_days:,} days before{usual}. Check that interactions are still exported"


def log_age(times: pa.ChunkedArray, date: datetime.date) -> LogAge | None:
    """The age of a log on a date; `times` are timestamp[us, UTC] of the rows known at its end. None without rows."""
    days_of_parts: list[np.ndarray] = []
    for start in range(0, len(times), ROWS_AT_ONCE):
        part = times.slice(start, ROWS_AT_ONCE).drop_null().cast(pa.int64()).to_numpy()
        days_of_parts.append(np.unique(part // DAY_US))
    days = np.unique(np.concatenate(days_of_parts)) if days_of_parts else np.zeros(0, np.int64)
    if not len(days):
        return None
    newest = datetime.date(1970, 1, 1) + datetime.timedelta(days=int(days[-1]))
    gap = float(np.median(np.diff(days))) if len(days) > 1 else None
    return LogAge(str(date), str(newest), (date - newest).days, gap)


def recorded_age(inputs: Mapping[str, Mapping[str, Any]]) -> LogAge | None:
    """The age that is recorded in a manifest's `inputs`; None if there is none."""
    age = inputs.get("interactions", {}).get("age")
    return LogAge(**age) if age else None
