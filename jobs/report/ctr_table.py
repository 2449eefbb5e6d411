"""The CTR comparison: what knowledge adds to each model, and whether the run's texts are as good as plain ones.

Shows what the CTR package measured and decided; decides nothing itself.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from laserbatch.jobs.formatting import MISSING, count, counted, decimal, finite, percent, whole
from laserbatch.jobs.report.blocks import Block, Figure, LegendEntry, Note, Section, Table
from laserbatch.jobs.report.palette import TONIGHT, VARIANT_COLOURS
from laserbatch.jobs.report.plots import Spread, spreads
from laserbatch.jobs.report.reading import mapping, sequence

VARIANT_LABELS = {"none": "no knowledge", "plain": "plain texts"}  # any other: the run's own, by its verifier
MODEL_LABELS = {"din": "DIN", "dcnv2": "DCNv2", "gbdt": "LightGBM"}
VERDICT_LABELS = {
    "equivalent": "as good",
    "better": "better",
    "worse": "worse",
    "undecided": "undecided",
}
SPLIT_LABELS = {"train": "train", "validation": "validation", "test": "test", "test_cold": "of these of cold users"}
ALL_MODELS = "all"


@dataclass(frozen=True)
class Result:
    """One model with one variant of the features: means over seeds and their standard deviations."""

    model: str
    variant: str
    num_seeds: int
    auc: float | None
    auc_std: float | None
    logloss: float | None
    logloss_std: float | None
    auc_cold: float | None
    auc_cold_std: float | None

    @property
    def is_own(self) -> bool:
        """Whether the features are of the run's own texts."""
        return self.variant not in VARIANT_LABELS


@dataclass(frozen=True)
class Comparison:
    """The run's own against plain texts, for one model or for all: paired differences of AUC over seeds.

    `low` and `high` bound the confidence interval of the mean difference; None when there were too few seeds.
    """

    model: str
    mean: float
    low: float | None
    high: float | None
    verdict: str


def ctr_results(manifest: Mapping) -> list[Result]:
    """The rows of the manifest that have an AUC, model by model, without knowledge first."""
    rows = [mapping(row) for row in sequence(mapping(manifest.get("ctr")).get("rows"))]
    numbers = ("auc", "auc_std", "logloss", "logloss_std", "auc_cold", "auc_cold_std")
    results = [
        Result(
            model=_model_label(row.get("model")),
            variant=str(row.get("variant")),
            num_seeds=whole(row.get("num_seeds")),
            **{name: finite(row.get(name)) for name in numbers},
        )
        for row in rows
    ]
    models = list(dict.fromkeys(result.model for result in results))
    known = list(VARIANT_LABELS)
    order = {variant: place for place, variant in enumerate(known)}
    return sorted(results, key=lambda result: (models.index(result.model), order.get(result.variant, len(known))))


@dataclass(frozen=True)
class Gain:
    """A variant of knowledge against none, for one model: difference of mean AUC, and whether that shows anything."""

    model: str
    auc: float
    doubt: str  # why it shows no gain; empty where it does


def gain_of(results: Sequence[Result], result: Result) -> Gain | None:
    """What a variant adds to its model without knowledge; None when either AUC is missing.

    A gain is shown by more seeds than one, beyond the spread of both, and not contradicted by LogLoss.
    """
    none = next((other for other in results if (other.model, other.variant) == (result.model, "none")), None)
    if none is None or none is result or none.auc is None or result.auc is None:
        return None
    auc, spread, doubt = result.auc - none.auc, (result.auc_std or 0.0) + (none.auc_std or 0.0), ""
    if min(result.num_seeds, none.num_seeds) < 2:
        doubt = "one seed cannot tell it from chance"
    elif auc <= spread:
        doubt = f"no more than the spread of seeds with {result.model}"
    elif (result.logloss or 0.0) > (none.logloss or math.inf):
        doubt = f"LogLoss rose from {decimal(none.logloss, 3)} to {decimal(result.logloss, 3)} with {result.model}"
    return Gain(result.model, auc, doubt)


def own_gains(results: Sequence[Result]) -> list[Gain]:
    """What the run's own knowledge adds, model by model."""
    gains = [gain_of(results, result) for result in results if result.is_own]
    return [gain for gain in gains if gain is not None]


def comparisons(manifest: Mapping) -> dict[str, Comparison]:
    """The run's own against plain texts by model, and for `ALL_MODELS` together; empty where one is missing."""
    found = {}
    for name, data in mapping(mapping(manifest.get("ctr")).get("equivalence")).items():
        data = mapping(data)
        mean = finite(data.get("mean_difference"))
        if mean is not None:
            model = _model_label(name)
            verdict = str(data.get("verdict"))
            found[model] = Comparison(model, mean, finite(data.get("low")), finite(data.get("high")), verdict)
    return found


def model_names(results: Sequence[Result]) -> list[str]:
    """Models in the order of the table."""
    return list(dict.fromkeys(result.model for result in results))


def ctr_section(manifest: Mapping) -> Section:
    """The section "Does it help the CTR models?"."""
    results = ctr_results(manifest)
    if not any(result.auc is not None for result in results):
        reason = mapping(manifest.get("ctr")).get("skipped")
        text = f"No CTR model was trained: {reason}." if reason else "No CTR model was trained in this run."
        return Section("ctr", "CTR models", "", [Note(text.replace("..", "."))])
    blocks: list[Block] = [_figure(results, "auc", "AUC of all users")]
    cold = [result for result in results if result.auc_cold is not None]
    blocks.append(
        _figure(cold, "auc_cold", "AUC of cold users") if cold else Note("No AUC of cold users was measured.", False)
    )
    blocks.append(_table(manifest, results))
    return Section("ctr", "CTR models", _lead(manifest, results), blocks)


def _lead(manifest: Mapping, results: Sequence[Result]) -> str:
    split = mapping(mapping(manifest.get("ctr")).get("split"))
    parts = [f"{count(split[key])} {name}" for key, name in SPLIT_LABELS.items() if finite(split.get(key)) is not None]
    seeds = max(result.num_seeds for result in results)
    rows = f" on interactions split by time ({', '.join(parts)})" if parts else ""
    return f"{counted(len(model_names(results)), 'model')} trained{rows}, {counted(seeds, 'seed')} each."


def _figure(results: Sequence[Result], metric: str, title: str) -> Figure:
    groups = []
    for model in model_names(results):
        items = [
            Spread(
                result.variant,
                getattr(result, metric),
                getattr(result, f"{metric}_std"),
                VARIANT_COLOURS.get(result.variant, TONIGHT),
                square=result.is_own,
            )
            for result in results
            if result.model == model and getattr(result, metric) is not None
        ]
        groups.append((model, items))
    variants = dict.fromkeys(result.variant for result in results)
    return Figure(
        title,
        spreads([(name, items) for name, items in groups if items], "AUC on the test period, higher is better"),
        caption="Points are means over seeds, lines one standard deviation to each side.",
        legend=[LegendEntry(_label(name), VARIANT_COLOURS.get(name, TONIGHT)) for name in variants],
    )


def _table(manifest: Mapping, results: Sequence[Result]) -> Table:
    compared = comparisons(manifest)
    rows, strong = [], set()
    for result in results:
        found = compared.get(result.model) if result.is_own else None
        if result.is_own:
            strong.add(len(rows))
        rows.append(
            [
                result.model,
                result.variant,
                _spread(result.auc, result.auc_std),
                _spread(result.logloss, result.logloss_std),
                _spread(result.auc_cold, result.auc_cold_std),
                decimal(gain.auc, 4, signed=True) if (gain := gain_of(results, result)) else MISSING,
                _interval(found) if found else MISSING,
                VERDICT_LABELS.get(found.verdict, found.verdict) if found else "",
            ]
        )
    if ALL_MODELS in compared:
        found = compared[ALL_MODELS]
        verdict = VERDICT_LABELS.get(found.verdict, found.verdict)
        strong.add(len(rows))
        rows.append(["All models", results[-1].variant, *[MISSING] * 4, _interval(found), verdict])
    columns = [
        "Model",
        "Knowledge",
        "AUC",
        "LogLoss (nats)",
        "AUC, cold users",
        "AUC vs none",
        "AUC vs plain",
        "Verdict",
    ]
    return Table(
        "AUC and LogLoss by model and knowledge",
        columns,
        rows,
        caption=f"Test period only; mean ± standard deviation over seeds. {_how_judged(manifest)}",
        left=frozenset({0, 1, 7}),
        strong_rows=frozenset(strong),
    )


def _how_judged(manifest: Mapping) -> str:
    judged = next((mapping(data) for data in mapping(mapping(manifest.get("ctr")).get("equivalence")).values()), None)
    if judged is None:
        return "No verdict: models were not trained on both plain texts and the run's own."
    margin = decimal(judged.get("margin"), 4)
    return (
        "The run's own texts against plain ones: mean of the paired differences over seeds, "
        f"with its {percent(judged.get('confidence'))} interval. “As good”: the interval lies "
        f"within ±{margin}; “worse” or “better”: beyond it; “undecided”: neither."
    )


def _interval(found: Comparison) -> str:
    mean = decimal(found.mean, 4, signed=True)
    if found.low is None or found.high is None:
        return mean
    return f"{mean} [{decimal(found.low, 4, signed=True)}, {decimal(found.high, 4, signed=True)}]"


def _spread(mean: float | None, std: float | None) -> str:
    if mean is None:
        return MISSING
    return decimal(mean, 4) + (f" ± {decimal(std, 4)}" if std is not None else "")


def _label(variant: str) -> str:
    return VARIANT_LABELS.get(variant, f"{variant.replace('_', '-')} texts")


def _model_label(name: object) -> str:
    return MODEL_LABELS.get(str(name).lower(), str(name))
