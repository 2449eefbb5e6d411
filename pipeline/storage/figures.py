"""The counts and measurements of a run: the figures of its manifest, which stages make and reports show."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.stats import DecodingStats


def _inside(path: str) -> str:
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ValueError(f"{path!r} is not inside the folder of its run")
    return path


# A path of a file of a run, relative to the run's folder; checked, since the JSON may have been changed on disk.
Inside = Annotated[str, AfterValidator(_inside)]


@dataclass(frozen=True)
class PoolFigures:
    """A pool that a run drafts from; `groups` has the numbers of texts and tokens of each group."""

    version: str
    num_texts: int
    num_tokens: int
    groups: Mapping[str, Mapping[str, object]]  # as in the manifest of the pool


@dataclass(frozen=True)
class PoolBuilt(PoolFigures):
    """A pool that was built from a run's texts."""

    incremental: bool  # whether it was merged with an earlier version's pool
    num_texts_changed: int  # number of texts that had to be sorted
    build_s: float
    is_calibrated: bool | None = None  # None in manifests of earlier versions


@dataclass(frozen=True)
class PoolsUsed:
    """The pools that a run drafts from: chosen when it begins, and the same for every later attempt."""

    version: str | None = None
    user: PoolFigures | None = None
    item: PoolFigures | None = None


@dataclass(frozen=True)
class PromptRef:
    """The framework and the template of a side's prompts."""

    framework: str
    template: str  # name@version


@dataclass(frozen=True)
class ModelFigures:
    id: str
    dtype: str
    device: str
    num_parameters: int
    dtype_reason: str = ""


@dataclass(frozen=True)
class WorkerFigures:
    """The number of workers that wrote in parallel, and their resources."""

    num_workers: int
    num_threads: int
    device: str
    price_per_hour: float | None = None  # of the whole cluster, in any currency
    num_gpus: int = 0  # GPUs of all workers; several workers may share one

    @property
    def num_billed(self) -> int:
        """The number of GPUs, or on CPUs of workers."""
        return self.num_gpus if self.num_gpus else self.num_workers


@dataclass(frozen=True)
class EndpointFigures:
    """The server that wrote a run's texts, and the counts of its answers, over all attempts."""

    url: str
    model: str  # the server's name for the model
    api: str
    num_requests: int  # answered requests
    num_retries: int
    num_prompt_tokens: int  # including cached tokens
    num_cached_tokens: int
    num_completion_tokens: int
    answered_by: dict[str, int]  # what the server said it is -> number of answers
    cost: float | None = None  # in any currency; None without a price

    @property
    def changes(self) -> str | None:
        """A warning if more than one server, or more than one version of it, answered; otherwise None."""
        if len(self.answered_by) < 2:
            return None
        parts = "; ".join(f"{name}: {num} answers" for name, num in self.answered_by.items())
        return f"the server changed during the night, so texts may be of different models: {parts}"


@dataclass(frozen=True)
class ExternalCorpusFigures:
    """The texts of earlier nights that a server drafted from, in the last attempt that wrote texts."""

    num_texts: int  # uploaded texts
    num_left_out: int  # texts for which the server has no room, or that another model wrote
    num_tokens: int  # tokens that the server loaded
    problem: str = ""  # why there was no corpus, or why it is still on the server


@dataclass(frozen=True)
class ShardInfo:
    """The plan, model and number of workers that a shard's texts were written with, and the counts."""

    planned_sha256: str
    group: str
    stats: DecodingStats
    model: ModelFigures
    num_workers: int


@dataclass(frozen=True)
class ShardRecord:
    """The record of a finished shard in its JSON file; the failed rows are in a file next to that."""

    name: Inside  # name of the files, without suffix: "00000"
    file: Inside  # the knowledge file, relative to the run folder
    num_rows: int
    sha256: str  # checksum of the knowledge file
    num_quarantined: int = 0
    quarantine_sha256: str | None = None
    info: ShardInfo | None = None  # None if no model wrote its texts

    @property
    def written_by(self) -> ShardInfo:
        """`info`. Raises WorkspaceError if no model wrote the texts."""
        if self.info is None:
            raise WorkspaceError(f"the record of shard {self.file} does not say which model wrote its texts")
        return self.info


@dataclass(frozen=True)
class SampleSpan:
    """A part of a text, and the name of the source that it was drafted from."""

    text: str
    source: str


@dataclass(frozen=True)
class SampleText:
    entity_id: str | int
    group: str | None
    prompt: str
    text: str
    spans: list[SampleSpan]
    tokens_per_step: float | None


@dataclass(frozen=True)
class BudgetForecast:
    """The forecast by which a budget was chosen; values are None if nothing was replayed."""

    reason: str  # how it was chosen, in a sentence
    step_cost: str | None = None  # the name of the step cost; None if it did not matter
    batch_size: int | None = None
    tokens_per_step: float | None = None  # bonus token included
    mean_drafted: float | None = None
    speed_up: float | None = None  # tokens per second over plain decoding in full batches, prompts not counted


@dataclass(frozen=True)
class BudgetFigures:
    """The draft budget of a side, and the reason for it."""

    max_draft_tokens: int
    min_acceptance: float
    forecast: BudgetForecast
    is_by_step: bool = False  # whether each step drafts only the tokens of the budget that pay


@dataclass(frozen=True)
class SideFigures:
    """The work done for a side; counts are of entities. For plain decoding there are neither budget nor samples."""

    num_entities: int
    num_generated: int
    num_carried_over: int
    num_quarantined: int
    num_stale: int  # entities in quarantine that keep the stale text of an earlier night
    quarantine_reasons: dict[str, int]
    routes: dict[str, int]  # routing scheme -> number of entities
    shards: list[ShardRecord]
    stats: DecodingStats
    budget: BudgetFigures | None = None
    samples: list[SampleText] = field(default_factory=list)
    num_waiting: int = 0  # entities that keep the text of an earlier prompt: a new one is not due, or over the budget
    num_without_text: int = 0  # postponed entities without a text: too few interactions, or over the budget
    postponed: dict[str, int] = field(default_factory=dict)  # reason -> number of entities, of both kinds
    stats_of_tonight: DecodingStats | None = None  # plain decoding only: stats of the entities that the night wrote

    @property
    def forecast_acceptance(self) -> float:
        """The acceptance length that the budget was chosen for; 0 if nothing was drafted or forecast."""
        if self.budget is None or self.budget.max_draft_tokens == 0:
            return 0.0
        return (self.budget.forecast.tokens_per_step or 1.0) - 1  # without the bonus token


@dataclass(frozen=True)
class FeatureFile:
    file: Inside
    num_rows: int
    sha256: str


@dataclass(frozen=True)
class FeatureFigures:
    """A side's feature files, in the order of ids, and its codebook; counts are of texts."""

    parts: tuple[FeatureFile, ...]
    dim: int
    centroids: Inside
    num_clusters: int  # clusters with at least one entity
    num_encoded: int  # texts whose vectors were not known
    num_truncated: int  # encoded texts that were cut at the limit
    encoder: str
    codebook: str  # cluster ids of runs can be compared if it is the same
    fields: tuple[str, ...] | None = None  # parts of answers that were encoded; empty: whole texts; None: not recorded
    centroids_sha256: str | None = None  # None: not recorded

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)


@dataclass(frozen=True)
class CtrScores:
    """The scores of a CTR model with a variant of knowledge on the test part: means and deviations over seeds."""

    model: str
    variant: str  # "none", "plain", or the verifier of the run's own texts
    num_seeds: int
    auc: float | None
    logloss: float | None
    auc_cold: float | None
    auc_std: float | None = None
    logloss_std: float | None = None
    auc_cold_std: float | None = None
    gauc: float | None = None  # mean AUC within users, weighted by rows
    calibration: float | None = None  # mean prediction minus share of positives


@dataclass(frozen=True)
class CtrVerdict:
    """Whether the run's own texts are as good as plain ones, as `ctr` judges their paired AUC."""

    num_pairs: int
    mean_difference: float
    low: float | None
    high: float | None
    margin: float
    confidence: float
    verdict: str
    power: float | None = None  # probability that texts without a true difference are called equivalent
    seeds_needed: int | None = None  # seeds for a power of 0.8, on the same test rows; None: no number is enough
    rows_needed: int | None = None  # test rows for a power of 0.8, with the same seeds; None: no number is enough


@dataclass(frozen=True)
class CtrFigures:
    """The CTR comparison, or why there is none; `equivalence` is by model or "all", `seeds` has one per training."""

    skipped: str | None = None
    split: dict[str, int] = field(default_factory=dict)
    rows: list[CtrScores] = field(default_factory=list)
    equivalence: dict[str, CtrVerdict] = field(default_factory=dict)
    seeds: list[dict[str, Any]] = field(default_factory=list)
    judged_run_id: str | None = None  # the earlier run whose features were judged, if the run's own cannot be judged
    judged_age_days: int = 0  # days between that run and this one


@dataclass(frozen=True)
class GateFigures:
    """The value that a gate measured, for a side or for the whole run, and its verdict."""

    gate: str
    side: Side | None = None
    value: float | None = None  # None: there was too little to judge by
    limit: float | None = None
    verdict: Literal["passes", "warns", "blocks"] = "passes"
    reason: str = ""  # why there is no value, or why it only warns
    can_block: bool = True  # whether a value beyond its limit blocks the publication; otherwise it warns


@dataclass(frozen=True)
class AuditedText:
    """A text of the night compared with the text of plain decoding for the same prompt."""

    entity_id: str | int
    text: str
    plain_text: str
    length_ratio: float  # of tokens
    cosine: float
    added_repetition: float  # share of repeated n-grams, minus that of the plain text
    lost_fields: float  # the plain text's share of the requested fields, minus this text's
    names: list[str]  # names that are in neither the prompt, the catalogue nor the plain text


@dataclass(frozen=True)
class AuditedMean:
    """Means over the texts of the night and over the plain texts."""

    own: float
    plain: float
    surely_worse: float  # the mean difference minus two standard errors, at least 0


@dataclass(frozen=True)
class SideAudit:
    """Texts of a side compared with plain texts of the same prompts."""

    num_pairs: int
    num_identical: int
    length_ratio: float  # of all tokens
    cosine: float  # mean
    repetition: AuditedMean  # shares of repeated n-grams
    fields: AuditedMean  # shares of the requested fields; 1 if the template requests none by name
    names: AuditedMean  # names per text that are in neither the prompt nor the catalogue
    cases: list[AuditedText] = field(default_factory=list)  # the worst texts, which the report shows


@dataclass(frozen=True)
class AuditFigures:
    """Texts of the night compared with plain ones, or why there is no comparison."""

    skipped: str | None = None
    sides: dict[Side, SideAudit] = field(default_factory=dict)
    skipped_sides: dict[Side, str] = field(default_factory=dict)  # why a side is not compared, if the other one is


@dataclass(frozen=True)
class PreviousNight:
    """The run that a run was built on, and its figures that are compared with the later run's."""

    run_id: str
    sides: dict[Side, DecodingStats]
