"""The options of the drafter `trained`, the kinds of drafters that are trained, and how much they learn from."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from laserbatch.pipeline.validation import Strict

Kind = Literal["medusa", "medusa2", "eagle", "hass", "small"]
NUM_TEXTS, EPOCHS = 2000, 6


class TrainedOptions(Strict):
    """`decoding.drafter_options.trained`."""

    models: tuple[Path, ...] = Field(
        default=(), description="The small models in these folders draft; they need the tokenizer of the model."
    )
    head: Path | None = Field(
        default=None, description="The head in this folder drafts; `laserbatch drafter train` trains one for the model."
    )
    width: int = Field(
        default=1, ge=1, le=64, description="Each of them drafts this many alternative tokens at each depth."
    )
    length: int = Field(
        default=5,
        ge=1,
        le=64,
        description="Each of them drafts this many tokens ahead; each costs one forward pass of the draft model.",
    )
    branching: tuple[int, ...] = Field(
        default=(),
        description="With verifier rsd, a draft has this many tokens after each node of depth 0, 1, ... (RSD-C), in "
        "place of width and length.",
    )

    @property
    def num_models(self) -> int:
        return len(self.models) + (self.head is not None)
