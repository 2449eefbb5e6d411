"""The options of nightly lists of items."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from laserbatch.pipeline.validation import Strict

CodeMaker = Literal["kmeans", "rqvae"]
DraftLoss = Literal["sft", "wordkd", "tvdkd", "seqkd", "atspeed_s", "atspeed_r"]


class RecommendingSettings(Strict):
    """Lists of items for every user, by a recommender over item codes (`laserbatch recommend`)."""

    model: Path | None = Field(None, description="Folder of a recommender: `laserbatch recommender train` makes one.")
    draft_model: Path | None = Field(
        None, description="Folder of a small one that drafts for it. null: last night's lists draft."
    )
    num_items: int = Field(20, ge=1, description="Items a user gets.")
    list_again: bool = Field(
        False,
        description="Whether what a user has had may be listed: songs, food. Otherwise it never is, and who has had "
        "nearly everything gets a shorter list.",
    )
    num_drafted: int | None = Field(
        None,
        ge=0,
        description="Paths, or listed items, drafted for a user. null: what is fastest here, tried each night.",
    )
    batch_size: int = Field(32, ge=1, description="Users side by side.")
    keep_runs: int = Field(7, ge=1, description="Newest runs that stay; the published one stays too.")
