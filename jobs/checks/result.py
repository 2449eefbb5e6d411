"""What a check of `laserbatch doctor` finds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from laserbatch.jobs.settings import Settings


@dataclass(frozen=True)
class CheckResult:
    about: str
    level: Literal["ok", "warning", "fault"]
    found: str
    hint: str | None = None


Check = Callable[[Settings], Iterator[CheckResult]]
