"""The result of a check of `laserbatch doctor`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckResult:
    about: str
    level: Literal["ok", "warning", "fault"]
    found: str
    hint: str | None = None
