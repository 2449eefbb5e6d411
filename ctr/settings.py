"""Options of the CTR models and of their training."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.labels import LabelRule

ModelName = Literal["din", "dcnv2", "gbdt"]
AdaptorName = Literal["linear", "kar", "once", "trawl", "rlmrec", "rlmrec_gen"]


def _is_rule(text: str) -> str:
    try:
        LabelRule.parse(text)
    except CtrError as error:
        raise ValueError(str(error)) from None
    return text


class CtrSettings(BaseModel):
    """Split, features, models and their training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, data: Any) -> Any:
        """`positive_rating`, as manifests and configurations of before say it, is a rule of `label`."""
        if not isinstance(data, dict) or "positive_rating" not in data:
            return data
        raw = dict(data)
        rating = raw.pop("positive_rating")
        return {"label": f"rating >= {rating:g}" if isinstance(rating, int | float) else rating} | raw

    models: tuple[ModelName, ...] = Field(
        ("din", "dcnv2", "gbdt"), min_length=1, description="Which models are trained."
    )
    num_seeds: int = Field(3, ge=1, description="Trainings of each model and variant.")
    seed: int = Field(0, description="The first seed.")

    label: Annotated[str, AfterValidator(_is_rule)] = Field(
        "rating >= 4",
        description="Which interactions are positives: `rating >= 4`, `clicked`, `event == 'buy'`, `rating is not "
        "null`, or `all`, for which negatives are sampled. Rows without a value are left out.",
    )
    negatives_per_positive: int = Field(4, ge=1, description="Of `label: all`: items that the user never met.")
    negatives_by: Literal["uniform", "popularity"] = Field(
        "uniform", description="How sampled negatives are drawn; by popularity: as often as items occur."
    )
    history: Literal["latest", "asof", "split"] = Field(
        "latest",
        description="Which texts training rows see: latest, the run's, which saw their labels; asof, the newest "
        "that are older than the row; split, the run's, and only rows after its date train.",
    )
    validation_share: float = Field(
        0.3, gt=0, lt=1, description="First part of what comes after training; the rest is test."
    )
    cold_max_interactions: int = Field(5, ge=1, description="A user with fewer interactions up to the date is cold.")

    min_id_interactions: int = Field(3, ge=1, description="Ids seen less often in training share a bucket.")
    max_history: int = Field(20, ge=1, description="Newest positives of the user that a row sees.")

    embedding_dim: int = Field(8, ge=1)
    hidden_sizes: tuple[int, ...] = Field((64, 32), min_length=1)
    vector_dim: int = Field(32, ge=2, description="Knowledge vectors are reduced to this, on training entities, once.")
    adaptor: AdaptorName = Field(
        "linear",
        description="How din and dcnv2 use texts: a framework's own way (rlmrec is its contrastive one, rlmrec_gen its "
        "generative), or linear, of both vectors and their product; gbdt takes vectors as they are.",
    )
    dropout: float = Field(0.3, ge=0, lt=1)
    dcnv2_structure: Literal["parallel", "stacked"] = Field("parallel", description="Deep beside, or after, the cross.")
    dcnv2_rank: int | None = Field(
        None, ge=1, description="Rank of the cross layers, as a mixture of 4 experts; null: full matrices."
    )

    learning_rate: float = Field(3e-3, gt=0)
    weight_decay: float = Field(1e-3, ge=0, description="L2 through Adam; ids remember what this makes them forget.")
    max_epochs: int = Field(15, ge=1)
    patience: int = Field(2, ge=1, description="Epochs without a better validation AUC before training stops.")

    equivalence_margin: float = Field(0.002, gt=0, description="AUC difference below which two texts are as good.")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="Of the interval that the verdict rests on.")
