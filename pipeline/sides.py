"""The two sides, user and item, that knowledge texts are written about."""

from typing import Literal

Side = Literal["user", "item"]
SIDES: tuple[Side, ...] = ("user", "item")
