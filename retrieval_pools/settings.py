"""The options of pools: indexing, drafting, building, retention, and putting entities into groups."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_MATCH_TOKENS = 32
MAX_CONTEXT_LENGTHS = 8
KEEP_VERSIONS = 3  # number of the newest pool versions that a night keeps, besides those in use
BUILT_SETTINGS = ("index_depth", "min_support")  # the settings that a pool's files depend on
Scheme = Literal["router", "collaborative", "attribute", "random", "global"]


class Frozen(BaseModel):
    """An immutable model that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PoolSettings(Frozen):
    """The settings for drafting from pools.

    `scope` "side" drafts from every text of the side, and texts of the sequence's own group count 3 times; "group"
    drafts only from the group's texts (the separate pools of the LASER paper).

    With `min_support` m above 1 the pool drafts a token only if texts of at least m entities hold its n-gram: the
    matched context, the path down the draft tree, and the token. The rule holds separately for every context length
    that is blended. The start and the end of a text are tokens of its n-grams; n-grams longer than `index_depth` are
    never drafted. All texts of the pool are counted, whatever the scope; several texts of one entity count once.
    Occurrences that may not be drafted remain evidence: their share of the probability goes to shorter contexts. An
    entity's own previous text, prompt and output are not restricted. A text that follows several drafts one after
    another may hold longer n-grams that fewer entities have.
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
    """`PoolSettings` and the settings that are in no configuration; a pool's manifest keeps those it was built with.

    A context that was seen n times with u different next tokens takes n / (n + escape u) of the probability that longer
    contexts left (Witten and Bell 1991 have an escape of 1). For the sequence's own texts the escape is divided by the
    length of the context. A lower escape trusts the source more.
    """

    group_weight: float = Field(default=3.0, ge=1, le=1000)  # `scope` "side": weight of a text of the entity's group
    index_depth: Literal[16, 32, 64] = 64  # number of tokens by which the index is sorted: longest match plus draft
    max_match_tokens: int = Field(default=16, ge=1, le=MAX_MATCH_TOKENS)  # length of the longest context looked up
    num_context_lengths: int = Field(default=4, ge=1, le=MAX_CONTEXT_LENGTHS)  # context lengths blended in a draft
    # Occurrences of a context that are counted at the root of a draft; more are sampled evenly. At a node the number is
    # multiplied by the probability of its path, but is at least a 16th.
    num_samples: int = Field(default=256, ge=1)
    # Escape of the pool for each different next token; None: the one with the most accepted tokens in replays, or 1.
    pool_escape_per_token: float | None = Field(default=None, gt=0)
    local_escape: float = Field(default=2.2, gt=0)  # escape of prompt and output
    previous_escape: float = Field(default=0.5, gt=0)  # escape of the entity's own previous text
    max_local_tokens: int = Field(default=4096, ge=1)  # tokens that are searched in each of the sequence's own texts

    @classmethod
    def of(cls, settings: PoolSettings | None) -> "DraftSettings":
        """The settings of a configuration, and defaults for the rest; None: the defaults."""
        return cls() if settings is None else cls.model_validate(settings.model_dump())


class RoutingOptions(Frozen):
    """The options for putting the entities of one side into groups. Every option has a default that works.

    `scheme` is "router" (collaborative where interactions suffice, otherwise by attributes) or a baseline of the LASER
    paper: "collaborative", "attribute", "random" (RRP) or "global" (GRP, ReSD).
    """

    scheme: Scheme = Field(
        default="router",
        description="This says how groups are made. router: from interactions where there are enough, otherwise from "
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
        """The columns by which `side` ("user" or "item") is split into groups; None: they are guessed."""
        return self.user_attributes if side == "user" else self.item_attributes

    def embeddings_of(self, side: str) -> Path | None:
        """The file of your own vectors of `side`; None: LightGCN is trained."""
        return self.user_embeddings if side == "user" else self.item_embeddings


class RoutingSettings(RoutingOptions):
    """`RoutingOptions` and the settings that are in no configuration."""

    min_interactions: int = Field(default=5, ge=1)  # interactions from which on an entity gets a collaborative group
    # Number of collaborative or random groups; None: half the square root of the number of entities.
    num_groups: int | None = Field(default=None, ge=1)

    @classmethod
    def of(cls, options: RoutingOptions) -> "RoutingSettings":
        """The options of a configuration, and defaults for the rest."""
        return cls.model_validate(options.model_dump())
