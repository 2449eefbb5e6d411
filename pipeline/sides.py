"""What knowledge is written about."""

from typing import Literal

Side = Literal["user", "item"]
SIDES: tuple[Side, ...] = ("user", "item")
