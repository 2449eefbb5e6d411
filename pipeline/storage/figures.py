"""What is counted and measured of a run: the figures of its manifest, which stages make and reports show."""

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
        raise ValueError(f"{path!r} leaves the folder of its run")
    return path


# Of a file that a run wrote down, relative to its folder: what is read from a disk may have been changed there.
Inside = Annotated[str, AfterValidator(_inside)]


@dataclass(frozen=True)
class PoolFigures:
    """A pool that a run drafts from; `groups` has the numbers of texts and tokens of each."""

    version: str
    num_texts: int
    num_tokens: int
    groups: Mapping[str, Mapping[str, object]]  # as in the manifest of the pool


@dataclass(frozen=True)
class PoolBuilt(PoolFigures):
    """A pool that was built from a run's texts."""

    incremental: bool  # whether it was merged from an earlier version's
    num_texts_changed: int  # that had to be sorted
    build_s: float
    calibration_error: float | None  # expected, on texts that estimates were not fitted to; None without replays


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
    """How many workers wrote side by side, and on what."""

    num_workers: int
    num_threads: int
    device: str
    price_per_hour: float | None = None  # of the whole cluster, in whatever currency
    num_gpus: int = 0  # of all workers; several may share one

    @property
    def num_billed(self) -> int:
        """GPUs that they hold, or on CPUs workers."""
        return self.num_gpus if self.num_gpus else self.num_workers


@dataclass(frozen=True)
class EndpointFigures:
    """The server that wrote a run's texts, and what its answers took, over all attempts."""

    url: str
    model: str  # as the server calls it
    api: str
    num_requests: int  # that were answered
    num_retries: int
    num_prompt_tokens: int  # cached ones included
    num_cached_tokens: int
    num_completion_tokens: int
    answered_by: dict[str, int]  # what the server said it is -> answers
    cost: float | None = None  # in whatever currency; None without a price

    @property
    def changes(self) -> str | None:
        """A warning where more than one server, or more than one version of it, answered; None where one did."""
        if len(self.answered_by) < 2:
            return None
        parts = "; ".join(f"{name}: {num} answers" for name, num in self.answered_by.items())
        return f"the server changed during the night, so texts may be of different models: {parts}"


@dataclass(frozen=True)
class ExternalCorpusFigures:
    """The texts of earlier nights that a server drafted from, in the last attempt that wrote texts."""

    num_texts: int  # that were uploaded
    num_left_out: int  # for which the server has no room, or that another model wrote
    num_tokens: int  # that the server loaded
    problem: str = ""  # why there was no corpus, or why it is still on the server


@dataclass(frozen=True)
class ShardInfo:
    """How a shard's texts were written: by which plan, model and number of workers, and what was counted."""

    planned_sha256: str
    group: str
    stats: DecodingStats
    model: ModelFigures
    num_workers: int


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard, as its JSON file says; the rows that failed lie beside it."""

    name: Inside  # of the files, without suffix: "00000"
    file: Inside  # of its knowledge, relative to the run folder
    num_rows: int
    sha256: str  # of the knowledge file
    num_quarantined: int = 0
    quarantine_sha256: str | None = None
    info: ShardInfo | None = None  # None where its texts needed no model

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
    """What a budget was chosen for; None where nothing was replayed."""

    reason: str  # how it was chosen, in a sentence
    step_cost: str | None = None  # the name of the step cost; None where it did not matter
    batch_size: int | None = None
    tokens_per_step: float | None = None  # bonus token included
    mean_drafted: float | None = None
    speed_up: float | None = None  # tokens per second over plain decoding in full batches, prompts not counted


@dataclass(frozen=True)
class BudgetFigures:
    """How much of a side is drafted, and why."""

    max_draft_tokens: int
    min_acceptance: float
    forecast: BudgetForecast
    is_by_step: bool = False  # each step gets what pays of it


@dataclass(frozen=True)
class SideFigures:
    """What was done of a side; counts are of entities. Of plain decoding there are neither budget nor samples."""

    num_entities: int
    num_generated: int
    num_carried_over: int
    num_quarantined: int
    num_stale: int  # entities in quarantine that keep the stale text of an earlier night
    quarantine_reasons: dict[str, int]
    routes: dict[str, int]  # scheme -> entities
    shards: list[ShardRecord]
    stats: DecodingStats
    budget: BudgetFigures | None = None
    samples: list[SampleText] = field(default_factory=list)
    num_waiting: int = 0  # that keep the text of an earlier prompt: a new one is not due, or is over the budget
    num_without_text: int = 0  # without a text, for want of interactions or of a place in the budget
    postponed: dict[str, int] = field(default_factory=dict)  # reason -> entities, of both
    stats_of_tonight: DecodingStats | None = None  # of plain decoding: of the entities that the night wrote about

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
    num_clusters: int  # that somebody is in
    num_encoded: int  # whose vectors were not known
    num_truncated: int  # of those, texts that lost their end
    encoder: str
    codebook: str  # cluster ids of runs compare where it is the same
    fields: tuple[str, ...] | None = None  # parts of answers that were encoded, none: whole texts; None: not recorded

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)


@dataclass(frozen=True)
class CtrScores:
    """A CTR model with a variant of knowledge, on the test part: means over seeds, and their standard deviations."""

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
    power: float | None = None  # how probably two texts of no true difference would be called equivalent
    seeds_needed: int | None = None  # for a power of 0.8, on the same test rows; None: no number is enough
    rows_needed: int | None = None  # test rows for that, with the same seeds; None likewise


@dataclass(frozen=True)
class CtrFigures:
    """The CTR comparison, or why there is none; `equivalence` is by model and of "all", `seeds` every training."""

    skipped: str | None = None
    split: dict[str, int] = field(default_factory=dict)
    rows: list[CtrScores] = field(default_factory=list)
    equivalence: dict[str, CtrVerdict] = field(default_factory=dict)
    seeds: list[dict[str, Any]] = field(default_factory=list)
    judged_run_id: str | None = None  # the earlier run whose features these are, where nothing can judge the run's own
    judged_age_days: int = 0  # how much older than the run it is


@dataclass(frozen=True)
class GateFigures:
    """What a gate measured, of a side or of the whole run, and its verdict."""

    gate: str
    side: Side | None = None
    value: float | None = None  # None: there was too little to judge by
    limit: float | None = None
    verdict: Literal["passes", "warns", "blocks"] = "passes"
    reason: str = ""  # why there is no value, or why it only warns
    can_block: bool = True  # whether a value beyond its limit blocks the publication, else it warns


@dataclass(frozen=True)
class AuditedText:
    """A text of the night beside what plain decoding wrote of the same prompt."""

    entity_id: str | int
    text: str
    plain_text: str
    length_ratio: float  # of tokens
    cosine: float
    added_repetition: float  # share of n-grams that stood in the text before, less that of the plain text
    lost_fields: float  # share of the fields asked for that it has, taken from that of the plain text
    names: list[str]  # that stand in neither prompt nor catalogue, nor in the plain text


@dataclass(frozen=True)
class AuditedMean:
    """Means over the texts of the night and over the plain ones."""

    own: float
    plain: float
    surely_worse: float  # by how much: the mean difference less two standard errors, never below 0


@dataclass(frozen=True)
class SideAudit:
    """Texts of a side beside plain ones of the same prompts."""

    num_pairs: int
    num_identical: int
    length_ratio: float  # of all tokens
    cosine: float  # mean
    repetition: AuditedMean  # shares of n-grams that stood in the text before
    fields: AuditedMean  # shares of the fields asked for; 1 where the template asks for none by name
    names: AuditedMean  # a text, that stand in neither prompt nor catalogue
    cases: list[AuditedText] = field(default_factory=list)  # the worst, which the report shows


@dataclass(frozen=True)
class AuditFigures:
    """Texts of the night beside plain ones, or why there are none."""

    skipped: str | None = None
    sides: dict[Side, SideAudit] = field(default_factory=dict)


@dataclass(frozen=True)
class PreviousNight:
    """The run that a run was built on, and what of it is compared with the night after."""

    run_id: str
    sides: dict[Side, DecodingStats]
