"""The options of drafters that nights train."""

from typing import Literal

from pydantic import Field

from laserbatch.pipeline.validation import Strict

Kind = Literal["medusa", "medusa2", "eagle", "hass", "small"]
NightlyKind = Literal["medusa", "eagle", "hass", "small"]  # medusa2 would change every text


class DrafterTrainingSettings(Strict):
    """Whether nights train a drafter on their own texts, for the nights after them."""

    kind: NightlyKind | None = Field(
        None,
        description="medusa, eagle, hass: a head on the model's own states; small: a model of two layers. It is kept "
        "while nights are faster with it, which held-back texts are written to find out. null: none is trained.",
    )
    every_nights: int = Field(7, ge=1, description="Nights from one training to the next.")
    num_texts: int = Field(2000, ge=40, description="Newest texts that it learns from.")
    epochs: int = Field(6, ge=1, description="How often it sees each of them.")
