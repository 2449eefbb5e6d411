"""The kinds of drafters that are trained, and how much they learn from."""

from typing import Literal

Kind = Literal["medusa", "medusa2", "eagle", "hass", "small"]
NUM_TEXTS, EPOCHS = 2000, 6
