"""What a check of `laserbatch doctor` finds."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckResult:
    about: str
    level: Literal["ok", "warning", "fault"]
    found: str
    hint: str | None = None
