"""The options of nightly lists of items, and the specification of their workers."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from laserbatch.pipeline.distributed.spec import WorkerSpec
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.validation import Strict

CodeMaker = Literal["kmeans", "rqvae"]
DraftLoss = Literal["sft", "wordkd", "tvdkd", "seqkd", "atspeed_s", "atspeed_r"]


class RecommendingSettings(Strict):
    """Lists of items for every user, by a recommender over item codes (`laserbatch recommend`)."""

    model: Path | None = Field(
        default=None,
        description="The recommender in this folder makes the lists; `laserbatch recommender train` makes one.",
    )
    draft_model: Path | None = Field(
        default=None,
        description="The small model in this folder drafts for the recommender. null: the lists of the last night "
        "draft.",
    )
    num_items: int = Field(default=20, ge=1, description="A user's list has this many items.")
    list_again: bool = Field(
        default=False,
        description="Lists may hold items that the user already interacted with, which suits songs or food. Otherwise "
        "they never do, and a user who had nearly all items gets a shorter list.",
    )
    num_drafted: int | None = Field(
        default=None, ge=0,
        description="This many paths, or listed items, are drafted for a user. null: the fastest number, measured each "
        "night.",
    )  # fmt: skip
    batch_size: int = Field(default=32, ge=1, description="One worker makes the lists of this many users at once.")
    keep_runs: int = Field(
        default=7, ge=1, description="This many of the newest runs of lists are kept besides the published one."
    )

    @property
    def required_model(self) -> Path:
        """`model`. Raises ConfigError if it is not set."""
        if self.model is None:
            raise ConfigError("extensions.recommending.model is not set; `laserbatch recommender train` makes a model")
        return self.model


@dataclass(frozen=True, kw_only=True)
class ListSpec(WorkerSpec):
    """`model_dir` is the folder of a recommender; `plan/catalogue.parquet` of the run has the items to list."""

    options: RecommendingSettings
    worker: ClassVar[str] = "laserbatch.research.recommending.list_worker:ListWorker"
