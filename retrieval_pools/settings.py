"""The options of pools: how they are indexed, drafted from, built and kept, and how entities are put into groups."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_MATCH_TOKENS = 32
MAX_CONTEXT_LENGTHS = 8
KEEP_VERSIONS = 3  # a night keeps so many of the newest pool versions, and all that are in use
BUILT_SETTINGS = ("index_depth", "min_support")  # what a pool's files depend on
Scheme = Literal["router", "collaborative", "attribute", "random", "global"]


class Frozen(BaseModel):
    """A model that cannot be changed, and whose unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PoolSettings(Frozen):
    """How drafts are taken from pools.

    `scope` "side" drafts from every text of the side, those of the sequence's own group counting 3 times; "group"
    drafts from the group's texts alone (the walls of the LASER paper).

    With `min_support` m above 1 the pool drafts a token only if texts of m entities or more hold the n-gram that it
    claims: the matched context, the path down the draft tree, and the token. This is asked of every context length that
    is blended, for itself; the start and the end of a text are tokens of its n-grams; n-grams longer than `index_depth`
    are never drafted. All texts of the pool are counted, whatever the scope, those of one entity once. Occurrences that
    may not be drafted remain evidence: their share of the probability goes to shorter contexts. Nothing is kept from an
    entity's own previous text, prompt and output. What holds of each n-gram need not hold of a text that follows
    several, one draft after another.
    """

    scope: Literal["side", "group"] = Field(
        default="side",
        description="This says which texts a pool drafts from. side: all texts of the side, those of the entity's own"
        " group with more weight; group: only those of the group.",
    )
    min_support: int = Field(
        default=1,
        ge=1,
        description="A pool drafts an n-gram only if the texts of at least this many entities hold it. Raise it if "
        "drafts must not carry what the texts of only a few other entities say. 1: any n-gram.",
    )


class DraftSettings(PoolSettings):
    """The same with what nobody needs to set; a pool keeps in its manifest what it was built with.

    A context that was seen n times with u different next tokens takes n / (n + escape u) of what longer contexts left
    to it (an escape of 1 is that of Witten and Bell 1991); for the own texts the escape is divided by the context's
    length. Lower trusts the source more.
    """

    group_weight: float = Field(default=3.0, ge=1, le=1000)  # `scope` "side": how often a text of the own group counts
    index_depth: Literal[16, 32, 64] = 64  # tokens by which the index is sorted: longest match plus draft
    max_match_tokens: int = Field(default=16, ge=1, le=MAX_MATCH_TOKENS)  # the longest context looked up
    num_context_lengths: int = Field(default=4, ge=1, le=MAX_CONTEXT_LENGTHS)  # blended in a draft
    # Occurrences of a context counted where a draft begins, behind a path as many fewer as it is improbable, down to a
    # 16th; more are sampled evenly.
    num_samples: int = Field(default=256, ge=1)
    # Escape of the pool for each different next token; None: the one that replays accept most with, 1 before any.
    pool_escape_per_token: float | None = Field(default=None, gt=0)
    local_escape: float = Field(default=2.2, gt=0)  # of prompt and output
    previous_escape: float = Field(default=0.5, gt=0)  # of the entity's own previous text
    max_local_tokens: int = Field(default=4096, ge=1)  # searched of each of the own texts

    @classmethod
    def of(cls, settings: PoolSettings | None) -> "DraftSettings":
        """Those of a configuration; None: the defaults."""
        return cls() if settings is None else cls.model_validate(settings.model_dump())


class RoutingOptions(Frozen):
    """How the entities of one side are put into groups. Every option has a default that works.

    `scheme` is "router" (collaborative where interactions suffice, else attributes) or a baseline of the LASER
    paper: "collaborative", "attribute", "random" (RRP) or "global" (GRP, ReSD).
    """

    scheme: Scheme = Field(
        default="router",
        description="This says how groups are made. router: from interactions where there are enough, else from "
        "attributes; collaborative, attribute, random and global (one pool) are the baselines of the "
        "LASER paper.",
    )
    user_embeddings: Path | None = Field(
        default=None,
        description="This Parquet file holds your own vectors of users, in place of LightGCN's: columns user_id and "
        "vector (a list of floats). Users without a vector are grouped by attributes. null: LightGCN is "
        "trained.",
    )
    item_embeddings: Path | None = Field(
        default=None,
        description="This Parquet file holds your own vectors of items: columns item_id and vector. null: LightGCN is"
        " trained.",
    )
    user_attributes: tuple[str, ...] | None = Field(
        default=None, description="Users are grouped by these columns. null: the columns are guessed."
    )
    item_attributes: tuple[str, ...] | None = Field(
        default=None, description="Items are grouped by these columns. null: the columns are guessed."
    )

    def attributes_of(self, side: str) -> tuple[str, ...] | None:
        """Columns that `side` ("user" or "item") is to be split by, or None for "guess them"."""
        return self.user_attributes if side == "user" else self.item_attributes

    def embeddings_of(self, side: str) -> Path | None:
        """File of the user's own vectors of `side`, or None for "train LightGCN"."""
        return self.user_embeddings if side == "user" else self.item_embeddings


class RoutingSettings(RoutingOptions):
    """The same with what is the same in every night."""

    min_interactions: int = Field(default=5, ge=1)  # an entity with at least so many gets a collaborative group
    # Collaborative or random groups; None: half the square root of the number of entities.
    num_groups: int | None = Field(default=None, ge=1)

    @classmethod
    def of(cls, options: RoutingOptions) -> "RoutingSettings":
        """Those of a configuration."""
        return cls.model_validate(options.model_dump())
