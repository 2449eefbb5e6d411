"""The options of drafters that nights train."""

from typing import Literal

from pydantic import Field

from laserbatch.pipeline.validation import Strict

Kind = Literal["medusa", "medusa2", "eagle", "hass", "small"]
NightlyKind = Literal["medusa", "eagle", "hass", "small"]  # medusa2 would change every text


class DrafterTrainingSettings(Strict):
    """Drafters that nights train on their own texts, for later nights."""

    kind: NightlyKind | None = Field(
        None,
        description="Nights train a drafter of this kind. medusa, eagle, hass: a head on the model's hidden states; "
        "small: a model of two layers. Held-back texts are written to measure it, and it is used only "
        "while nights are faster with it. null: no drafter is trained.",
    )
    every_nights: int = Field(7, ge=1, description="A drafter is trained once in this many nights.")
    num_texts: int = Field(2000, ge=40, description="The training reads this many of the newest texts.")
    epochs: int = Field(6, ge=1, description="The training reads each text this many times.")
