"""The options of grouping and routing."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Scheme = Literal["router", "collaborative", "attribute", "random", "global"]
AttributeGrouping = Literal["path", "leaves"]


class LightGCNSettings(BaseModel):
    """How the embeddings behind the collaborative groups are trained: short, because they only feed k-means."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dim: int = Field(64, ge=2, le=1024, description="Length of an embedding.")
    num_layers: int = Field(3, ge=1, le=8, description="Propagation layers, K of He et al. 2020.")
    max_steps: int = Field(40, ge=1, description="Bound of optimiser steps, each over the whole graph.")
    learning_rate: float = Field(0.03, gt=0)
    l2: float = Field(0.02, ge=0, description="Weight of the mean squared layer-0 embedding in the loss.")
    min_improvement: float = Field(
        0.02, ge=0, lt=1, description="Stop when five steps lower the mean loss by less than this share."
    )


class RoutingSettings(BaseModel):
    """How the entities of one side are put into groups. Every option has a default that works.

    `scheme` is "router" (collaborative where interactions suffice, else attributes) or a baseline of the LASER
    paper: "collaborative", "attribute", "random" (RRP) or "global" (GRP, ReSD).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    scheme: Scheme = "router"
    min_interactions: int = Field(5, ge=1, description="Interactions an entity needs for a collaborative group.")
    min_age_days: float | None = Field(
        None,
        ge=0,
        description="Days since created_at that it needs too; null: age does not matter. No created_at is old enough.",
    )
    num_groups: int | None = Field(
        None,
        ge=1,
        description="Collaborative groups, random groups or leaves; unset: half the square root of the entities.",
    )
    user_embeddings: Path | None = Field(
        None,
        description="Parquet file of your own vectors of users, in place of LightGCN's: columns user_id and vector (a "
        "list of floats). Users without a vector are grouped by attributes.",
    )
    item_embeddings: Path | None = Field(None, description="The same for items: columns item_id and vector.")
    attribute_grouping: AttributeGrouping = Field(
        "path",
        description="path: attributes split one after the other, found again by the longest known prefix; leaves: of "
        "one tree that predicts from attributes which texts are alike.",
    )
    user_attributes: tuple[str, ...] | None = Field(None, description="Columns to split users by; unset: guessed.")
    item_attributes: tuple[str, ...] | None = Field(None, description="Columns to split items by; unset: guessed.")
    max_group_size: int | None = Field(
        None, ge=1, description="A larger group by path is split; unset: four square roots of the entities."
    )
    min_group_size: int | None = Field(
        None,
        ge=1,
        description="A smaller group by path joins its parent, a leaf has this many texts; unset: a tenth of "
        "max_group_size.",
    )
    num_bins: int = Field(4, ge=2, le=64, description="Quantile bins of a numeric attribute.")
    lightgcn: LightGCNSettings = LightGCNSettings()

    @model_validator(mode="after")
    def _sizes_in_order(self) -> "RoutingSettings":
        smallest, largest = self.min_group_size, self.max_group_size
        if smallest is not None and largest is not None and smallest > largest:
            raise ValueError(f"min_group_size {smallest} is above max_group_size {largest}; lower the first")
        return self

    def attributes_of(self, side: str) -> tuple[str, ...] | None:
        """Columns that `side` ("user" or "item") is to be split by, or None for "guess them"."""
        return self.user_attributes if side == "user" else self.item_attributes

    def embeddings_of(self, side: str) -> Path | None:
        """File of the user's own vectors of `side`, or None for "train LightGCN"."""
        return self.user_embeddings if side == "user" else self.item_embeddings
