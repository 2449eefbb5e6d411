"""Options of the CTR models and of their training."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.labels import LabelRule

ModelName = Literal["din", "dcnv2", "gbdt"]
History = Literal["latest", "asof", "split"]
AdaptorName = Literal["linear", "kar", "once", "trawl", "rlmrec", "rlmrec_gen"]


def _is_rule(text: str) -> str:
    try:
        LabelRule.parse(text)
    except CtrError as error:
        raise ValueError(str(error).removeprefix("ctr.label: ")) from None  # validation names the key
    return text


class CtrOptions(BaseModel):
    """The CTR models that judge texts: data split, features and training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: tuple[ModelName, ...] = Field(
        default=("din", "dcnv2", "gbdt"), min_length=1, description="The comparison trains these models."
    )
    num_seeds: int = Field(
        default=3,
        ge=1,
        description="Each model is trained this many times on each variant of the texts. More trainings narrow the "
        "intervals of the AUC differences.",
    )
    label: Annotated[str, AfterValidator(_is_rule)] = Field(
        default="rating >= 4",
        description="This rule says which interactions are positives: `rating >= 4`, `clicked`, `event == 'buy'`, "
        "`rating is not null`, or `all`, with 4 sampled negatives for each positive. Rows without a value are left "
        "out.",
    )
    history: History = Field(
        default="latest",
        description="This says which texts training rows see. latest: the texts of the run, which may have seen the "
        "labels; asof: the newest texts that are older than the row; split: the texts of the run, but only rows "
        "after its date are trained on.",
    )
    adaptor: AdaptorName = Field(
        default="linear",
        description="This adaptor brings texts into din and dcnv2. linear: linear layers over both vectors, and over "
        "the item's times the user's and times the mean of the items that the user liked; the others follow the "
        "frameworks of that name (rlmrec: contrastive, rlmrec_gen: generative). gbdt takes vectors as they are.",
    )
    equivalence_margin: float = Field(
        default=0.002,
        gt=0,
        le=1,
        description="Two kinds of texts count as equally good if their AUC differs by less than this.",
    )


class CtrSettings(CtrOptions):
    """`CtrOptions`, and the settings that are fixed in every comparison.

    The networks are small, because the tables of one night are. `benchmarks/ctr.py` and the table of adaptors in
    `benchmarks/README.md` were measured with these layers, dropout, L2 and learning rate.
    """

    seed: int = 0  # seed of the first training (each further one adds 1) and of sampled negatives
    negatives_per_positive: int = Field(default=4, ge=1)  # with `label: all`, sampled items that the user did not meet
    validation_share: float = Field(default=0.3, gt=0, lt=1)  # earliest share of rows after training; the rest is test
    cold_max_interactions: int = Field(default=5, ge=1)  # a user with fewer training rows is cold
    min_id_interactions: int = Field(default=3, ge=1)  # ids with fewer training rows share one embedding
    max_history: int = Field(default=20, ge=1)  # a row sees at most this many of the user's newest positives
    embedding_dim: int = Field(default=8, ge=1)  # width of the embedding of an id or attribute value
    hidden_sizes: tuple[int, ...] = Field(default=(64, 32), min_length=1)  # sizes of the deep layers of din and dcnv2
    vector_dim: int = Field(default=32, ge=2)  # width of reduced knowledge vectors
    dropout: float = Field(default=0.3, ge=0, lt=1)
    learning_rate: float = Field(default=3e-3, gt=0)
    weight_decay: float = Field(default=1e-3, ge=0)  # for Adam; a smaller value lets id embeddings memorise more
    max_epochs: int = Field(default=15, ge=1)
    patience: int = Field(default=2, ge=1)  # epochs without a better validation AUC after which a training ends
    confidence: float = Field(default=0.95, gt=0.5, lt=1)  # confidence of the interval that decides the verdict

    @classmethod
    def of(cls, options: CtrOptions) -> "CtrSettings":
        return cls.model_validate(options.model_dump())
