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
    """The CTR models that judge texts: data split, features and training."""

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
        ("din", "dcnv2", "gbdt"), min_length=1, description="The comparison trains these models."
    )
    num_seeds: int = Field(
        3,
        ge=1,
        description="Each model is trained this many times on each variant of the texts. More trainings narrow the "
        "interval and take longer.",
    )
    seed: int = Field(
        0,
        description="The first training has this seed, each further one the next number. It also seeds the sampling "
        "of negatives.",
    )

    label: Annotated[str, AfterValidator(_is_rule)] = Field(
        "rating >= 4",
        description="This rule says which interactions are positives: `rating >= 4`, `clicked`, `event == 'buy'`, "
        "`rating is not null`, or `all`, for which negatives are sampled. Rows without a value are left "
        "out.",
    )
    negatives_per_positive: int = Field(
        4, ge=1, description="With `label: all`, this many items that the user never met are sampled for each positive."
    )
    negatives_by: Literal["uniform", "popularity"] = Field(
        "uniform",
        description="This says how negatives are sampled. uniform: every item alike; popularity: in proportion to its"
        " interactions.",
    )
    history: Literal["latest", "asof", "split"] = Field(
        "latest",
        description="This says which texts training rows see. latest: those of the run, which may have seen the "
        "labels; asof: the newest that are older than the row; split: those of the run, and only rows "
        "after its date train.",
    )
    validation_share: float = Field(
        0.3,
        gt=0,
        lt=1,
        description="This share of the interactions after the training period, the earliest, is for validation; the "
        "others are for the test.",
    )
    cold_max_interactions: int = Field(
        5, ge=1, description="A user with fewer interactions up to the date counts as cold."
    )

    min_id_interactions: int = Field(3, ge=1, description="Ids that training sees less often share one embedding.")
    max_history: int = Field(20, ge=1, description="A row sees this many of the user's newest positives.")

    embedding_dim: int = Field(
        8, ge=1, description="Each id and each attribute value has an embedding of this many dimensions."
    )
    hidden_sizes: tuple[int, ...] = Field(
        (64, 32), min_length=1, description="The deep layers of din and dcnv2 have these widths."
    )
    vector_dim: int = Field(
        32,
        ge=2,
        description="Knowledge vectors are reduced to this many dimensions by a projection that is fitted once, on "
        "the training entities.",
    )
    adaptor: AdaptorName = Field(
        "linear",
        description="This adaptor brings texts into din and dcnv2. linear: a linear layer over both vectors and their"
        " product; the others are those of the frameworks of that name (rlmrec: contrastive, rlmrec_gen: "
        "generative). gbdt takes vectors as they are.",
    )
    dropout: float = Field(0.3, ge=0, lt=1, description="This share of the hidden units is dropped in training.")
    dcnv2_structure: Literal["parallel", "stacked"] = Field(
        "parallel",
        description="This places the deep layers of dcnv2. parallel: beside the cross layers; stacked: after them.",
    )
    dcnv2_rank: int | None = Field(
        None,
        ge=1,
        description="The matrices of the cross layers have this rank, in a mixture of 4 experts. null: full matrices.",
    )

    learning_rate: float = Field(3e-3, gt=0, description="Adam trains with this learning rate.")
    weight_decay: float = Field(
        1e-3, ge=0, description="Adam trains with this L2 penalty; a smaller one lets embeddings of ids memorise more."
    )
    max_epochs: int = Field(15, ge=1, description="A training ends after this many epochs at the latest.")
    patience: int = Field(
        2, ge=1, description="A training ends after this many epochs without a better validation AUC."
    )

    equivalence_margin: float = Field(
        0.002, gt=0, description="Two kinds of texts count as equally good if their AUC differs by less than this."
    )
    confidence: float = Field(
        0.95, gt=0.5, lt=1, description="The verdict rests on an interval of the AUC difference with this confidence."
    )
