"""The CTR comparison: what knowledge adds to each model, and whether the run's texts are as good as plain ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from laserbatch.jobs.formatting import MISSING, count, counted, decimal, percent
from laserbatch.jobs.gates import age_of_judged
from laserbatch.jobs.report.blocks import Note, Section, Table
from laserbatch.pipeline.storage.figures import CtrFigures, CtrScores, CtrVerdict

VARIANTS = ("none", "plain")  # any other: the run's own knowledge, by its verifier
ALL_MODELS = "all"
POWER_ENOUGH = 0.8


@dataclass(frozen=True)
class Gain:
    """The gain of a model's mean AUC by knowledge; `is_shown` with several seeds, if it exceeds both spreads."""

    auc: float
    is_shown: bool


def ctr_rows(figures: CtrFigures) -> list[CtrScores]:
    """The table's rows, model by model, without knowledge first."""
    models = list(dict.fromkeys(row.model for row in figures.rows))
    return sorted(figures.rows, key=lambda row: (models.index(row.model), (*VARIANTS, row.variant).index(row.variant)))


def gain_of(rows: Sequence[CtrScores], row: CtrScores) -> Gain | None:
    """The gain of a variant over its model without knowledge; None if either AUC is missing."""
    none = next((other for other in rows if (other.model, other.variant) == (row.model, "none")), None)
    if none is None or none is row or none.auc is None or row.auc is None:
        return None
    gain = row.auc - none.auc
    return Gain(gain, min(row.num_seeds, none.num_seeds) > 1 and gain > (row.auc_std or 0) + (none.auc_std or 0))


def own_gains(figures: CtrFigures) -> list[Gain]:
    """The gains of the run's own knowledge, by model."""
    rows = ctr_rows(figures)
    return [gain for row in rows if row.variant not in VARIANTS and (gain := gain_of(rows, row)) is not None]


def ctr_section(figures: CtrFigures) -> Section:
    if not figures.rows:
        reason = f": {figures.skipped.removesuffix('.')}." if figures.skipped else " in this run."
        return Section("ctr", "CTR models", [Note(f"No CTR model was trained{reason}")])
    return Section("ctr", "CTR models", [ctr_table(figures)], ctr_lead(figures))


def ctr_lead(figures: CtrFigures) -> str:
    """The sizes of the split, and the shares of test rows of unseen and cold users."""
    split = figures.split
    parts = ", ".join(f"{count(split[name])} {name}" for name in ("train", "validation", "test") if name in split)
    seeds = counted(max(row.num_seeds for row in figures.rows), "seed")
    reason = f"Nothing can judge this run yet: these are the features of {age_of_judged(figures)}. "
    lead = reason if figures.judged_run_id else ""
    lead += f"Trained on interactions split by time ({parts}), {seeds} each."
    shares = [
        f"{percent(split[name] / split['test'], 1)} of {entities}"
        for name, entities in (("test_unseen", "users unseen in training"), ("test_cold", "cold users"))
        if name in split and split.get("test")
    ]
    return lead + (f" Of the test rows {' and '.join(shares)}." if shares else "")


def ctr_table(figures: CtrFigures) -> Table:
    """Every model with every variant of knowledge, against none and against plain texts; for pages and terminals."""
    scores, compared = ctr_rows(figures), figures.equivalence
    rows = []
    for score in scores:
        verdict, gain = None if score.variant in VARIANTS else compared.get(score.model), gain_of(scores, score)
        rows.append(
            {
                "Model": score.model,
                "Knowledge": score.variant,
                "AUC": decimal(score.auc, 4) + ("" if score.auc_std is None else f" ± {decimal(score.auc_std, 4)}"),
                "LogLoss (nats)": decimal(score.logloss, 4),
                "GAUC": decimal(score.gauc, 4),
                "Mean prediction over base rate": decimal(score.calibration, 3, signed=True),
                "AUC, cold users": decimal(score.auc_cold, 4),
                "AUC vs none": decimal(gain.auc, 4, signed=True) if gain else MISSING,
                **_against_plain(verdict),
            }
        )
    strong = [number for number, score in enumerate(scores) if score.variant not in VARIANTS]
    if ALL_MODELS in compared:
        strong.append(len(rows))
        head = dict.fromkeys(rows[-1], MISSING) | {"Model": "All models", "Knowledge": scores[-1].variant}
        rows.append(head | _against_plain(compared[ALL_MODELS]))
    caption = f"Test period only; means over seeds, of AUC ± their standard deviation. {_how_judged(compared)}"
    return Table("AUC and LogLoss by model and knowledge", rows, ("Model", "Knowledge", "Verdict"), caption, strong)


def _how_judged(compared: Mapping[str, CtrVerdict]) -> str:
    if not compared:
        return "No verdict: models were not trained on both plain texts and the run's own."
    judged = compared.get(ALL_MODELS) or next(iter(compared.values()))
    return (
        "The run's own texts against plain ones: mean of the paired differences (of all models: weighted by their "
        f"variance), with its {percent(judged.confidence)} interval over new users and new seeds. "
        f"“As good”: the interval lies within ±{decimal(judged.margin, 4)}; “worse” or “better”: beyond it; "
        f"“undecided”: neither. {_power(judged)}"
    ).rstrip()


def _power(judged: CtrVerdict) -> str:
    """The power of this comparison, and the size of one that would be enough."""
    if judged.power is None:
        return "One seed has no interval: train with more (ctr.num_seeds)."
    sentence = f"Texts that are equal would have been called as good in {percent(judged.power)} of such comparisons"
    ways = []
    if judged.seeds_needed is not None:
        ways.append(f"{judged.seeds_needed} seeds (ctr.num_seeds)")
    if judged.rows_needed is not None:
        ways.append(f"{count(judged.rows_needed)} test rows of more such users (a date that more follows)")
    if judged.power >= POWER_ENOUGH:
        return f"{sentence}."
    if not ways:
        return f"{sentence}; more seeds or test rows alone would not do: set a wider ctr.equivalence_margin."
    return f"{sentence}; it takes {' or '.join(ways)} for {percent(POWER_ENOUGH)}."


def _against_plain(verdict: CtrVerdict | None) -> dict[str, str]:
    if verdict is None:
        return {"AUC vs plain": MISSING, "Verdict": ""}
    mean, low, high = (decimal(value, 4, signed=True) for value in (verdict.mean_difference, verdict.low, verdict.high))
    interval = "" if verdict.low is None else f" [{low}, {high}]"
    return {
        "AUC vs plain": mean + interval,
        "Verdict": "as good" if verdict.verdict == "equivalent" else verdict.verdict,
    }
