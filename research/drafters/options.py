"""The options of the drafter `trained`, and the kinds of trained drafters with the defaults of their training."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from laserbatch.pipeline.validation import Strict

Kind = Literal["medusa", "medusa2", "eagle", "hass", "small"]
NUM_TEXTS, EPOCHS = 2000, 6
MAX_TREE = 64  # maximum number of tokens of a draft tree


class TrainedOptions(Strict):
    """The options `decoding.drafter_options.trained`."""

    models: tuple[Path, ...] = Field(
        default=(), description="The small models in these folders draft; they need the tokenizer of the model."
    )
    head: Path | None = Field(
        default=None, description="The head in this folder drafts; `laserbatch drafter train` trains one for the model."
    )
    width: int = Field(
        default=1, ge=1, le=MAX_TREE,
        description="Each model or head drafts this many alternative tokens at each depth. "
        "Width times length is at most max_draft_tokens.",
    )  # fmt: skip
    length: int = Field(
        default=5,
        ge=1,
        le=MAX_TREE,
        description="Each model or head drafts this many tokens ahead; each costs one forward pass of the draft model.",
    )
    branching: tuple[Annotated[int, Field(ge=1, le=MAX_TREE)], ...] = Field(
        default=(),
        description="With verifier rsd, a draft has this many tokens after each node of depth 0, 1, ... (RSD-C). This "
        "replaces width and length.",
    )

    @property
    def num_models(self) -> int:
        return len(self.models) + (self.head is not None)
