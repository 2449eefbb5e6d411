"""The CTR comparison: what knowledge adds to each model, and whether the run's texts are as good as plain ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from laserbatch.jobs.formatting import MISSING, count, counted, decimal, percent
from laserbatch.jobs.report.blocks import OTHER, TONIGHT, Block, Figure, Note, Section, Table
from laserbatch.jobs.report.charts import Series, dots
from laserbatch.pipeline.storage.manifest import CtrFigures, CtrScores, CtrVerdict

VARIANT_LABELS = {"none": "no knowledge", "plain": "plain texts"}  # any other: the run's own, by its verifier
VARIANT_COLOURS = {"none": OTHER, "plain": "#e69f00"}  # the run's own: TONIGHT
VERDICT_LABELS = {"equivalent": "as good"}
SPLIT_LABELS = {"train": "train", "validation": "validation", "test": "test", "test_cold": "of these of cold users"}
ALL_MODELS = "all"


@dataclass(frozen=True)
class Gain:
    """A variant of knowledge against none, for one model: difference of mean AUC, and whether that shows anything."""

    model: str
    auc: float
    doubt: str  # why it shows no gain; empty where it does


def ctr_rows(figures: CtrFigures) -> list[CtrScores]:
    """The table's rows, model by model, without knowledge first."""
    models, variants = _names(figures.rows, "model"), list(VARIANT_LABELS)

    def place(row: CtrScores) -> tuple[int, int]:
        own = row.variant not in variants
        return models.index(row.model), len(variants) if own else variants.index(row.variant)

    return sorted(figures.rows, key=place)


def is_own(row: CtrScores) -> bool:
    """Whether the knowledge is the run's own."""
    return row.variant not in VARIANT_LABELS


def gain_of(rows: Sequence[CtrScores], row: CtrScores) -> Gain | None:
    """What a variant adds to its model without knowledge; None when either AUC is missing.

    A gain is shown by more seeds than one, beyond the spread of both, and not contradicted by LogLoss.
    """
    none = next((other for other in rows if (other.model, other.variant) == (row.model, "none")), None)
    if none is None or none is row or none.auc is None or row.auc is None:
        return None
    auc, spread, doubt = row.auc - none.auc, (row.auc_std or 0.0) + (none.auc_std or 0.0), ""
    if min(row.num_seeds, none.num_seeds) < 2:
        doubt = "one seed cannot tell it from chance"
    elif auc <= spread:
        doubt = f"no more than the spread of seeds with {row.model}"
    elif (row.logloss or 0.0) > (none.logloss or math.inf):
        logloss = f"from {decimal(none.logloss, 3)} to {decimal(row.logloss, 3)}"
        doubt = f"LogLoss rose {logloss} with {row.model}"
    return Gain(row.model, auc, doubt)


def own_gains(rows: Sequence[CtrScores]) -> list[Gain]:
    """What the run's own knowledge adds, model by model."""
    return [gain for row in rows if is_own(row) and (gain := gain_of(rows, row)) is not None]


def ctr_section(figures: CtrFigures) -> Section:
    """The section "CTR models"."""
    rows = ctr_rows(figures)
    if not any(row.auc is not None for row in rows):
        reason = f": {figures.skipped.removesuffix('.')}." if figures.skipped else " in this run."
        return Section("ctr", "CTR models", "", [Note(f"No CTR model was trained{reason}")])
    has_cold = any(row.auc_cold is not None for row in rows)
    blocks: list[Block] = [
        _figure(rows, "auc", "AUC of all users"),
        _figure(rows, "auc_cold", "AUC of cold users")
        if has_cold
        else Note("No AUC of cold users was measured.", wide=False),
        ctr_table(figures),
    ]
    return Section("ctr", "CTR models", _lead(figures), blocks)


def _lead(figures: CtrFigures) -> str:
    parts = [f"{count(figures.split[key])} {name}" for key, name in SPLIT_LABELS.items() if key in figures.split]
    seeds = counted(max(row.num_seeds for row in figures.rows), "seed")
    by_time = f" on interactions split by time ({', '.join(parts)})" if parts else ""
    return f"{counted(len(_names(figures.rows, 'model')), 'model')} trained{by_time}, {seeds} each."


def _figure(rows: Sequence[CtrScores], metric: str, title: str) -> Figure:
    models = _names(rows, "model")
    series = []
    for variant in _names(rows, "variant"):
        of_model = {row.model: row for row in rows if row.variant == variant}
        values, stds = (
            [getattr(of_model.get(model), name, None) for model in models] for name in (metric, f"{metric}_std")
        )
        errors = [None if std is None else (std, std) for std in stds]
        series.append(Series(_label(variant), values, VARIANT_COLOURS.get(variant, TONIGHT), errors=errors))
    caption = "Points are means over seeds, lines one standard deviation to each side."
    return dots(title, models, series, "AUC on the test period, higher is better", caption)


def ctr_table(figures: CtrFigures) -> Table:
    """Every model with every variant of knowledge, against none and against plain texts; for pages and terminals."""
    rows, compared = ctr_rows(figures), figures.equivalence
    lines, strong = [], set()
    for row in rows:
        found = compared.get(row.model) if is_own(row) else None
        if is_own(row):
            strong.add(len(lines))
        gain = gain_of(rows, row)
        lines.append(
            [
                row.model,
                row.variant,
                *(_spread(row, name) for name in ("auc", "logloss", "auc_cold")),
                decimal(gain.auc, 4, signed=True) if gain else MISSING,
                _interval(found) if found else MISSING,
                _verdict(found) if found else "",
            ]
        )
    if ALL_MODELS in compared:
        found = compared[ALL_MODELS]
        strong.add(len(lines))
        lines.append(["All models", rows[-1].variant, *[MISSING] * 4, _interval(found), _verdict(found)])
    words = "Model, Knowledge, AUC, LogLoss (nats), AUC; cold users, AUC vs none, AUC vs plain, Verdict"
    return Table(
        "AUC and LogLoss by model and knowledge",
        [word.replace(";", ",") for word in words.split(", ")],
        lines,
        caption=f"Test period only; mean ± standard deviation over seeds. {_how_judged(compared)}",
        left=frozenset({0, 1, 7}),
        strong_rows=frozenset(strong),
    )


def _how_judged(compared: Mapping[str, CtrVerdict]) -> str:
    if not compared:
        return "No verdict: models were not trained on both plain texts and the run's own."
    judged = next(iter(compared.values()))
    margin = decimal(judged.margin, 4)
    return (
        "The run's own texts against plain ones: mean of the paired differences over seeds, "
        f"with its {percent(judged.confidence)} interval. “As good”: the interval lies "
        f"within ±{margin}; “worse” or “better”: beyond it; “undecided”: neither."
    )


def _interval(found: CtrVerdict) -> str:
    mean = decimal(found.mean_difference, 4, signed=True)
    if found.low is None or found.high is None:
        return mean
    return f"{mean} [{decimal(found.low, 4, signed=True)}, {decimal(found.high, 4, signed=True)}]"


def _spread(row: CtrScores, name: str) -> str:
    mean, std = getattr(row, name), getattr(row, f"{name}_std")
    return decimal(mean, 4) + (f" ± {decimal(std, 4)}" if std is not None and mean is not None else "")


def _verdict(found: CtrVerdict) -> str:
    return VERDICT_LABELS.get(found.verdict, found.verdict)


def _label(variant: str) -> str:
    return VARIANT_LABELS.get(variant, f"{variant.replace('_', '-')} texts")


def _names(rows: Sequence[CtrScores], key: str) -> list[str]:
    return list(dict.fromkeys(getattr(row, key) for row in rows))
