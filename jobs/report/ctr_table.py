"""The CTR comparison: what knowledge adds to each model, and whether the run's texts are as good as plain ones.

Variants are compared by lift, the figures of their texts, and the cost of a million texts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laserbatch.jobs.formatting import MISSING, count, counted, decimal, percent, rate
from laserbatch.jobs.gates import age_of_judged
from laserbatch.jobs.report.audit import audit_row
from laserbatch.jobs.report.blocks import Note, Section, Table
from laserbatch.pipeline.storage.figures import CtrFigures, CtrScores, CtrVerdict

VARIANTS = ("none", "plain")  # any other variant is the run's own knowledge, named after its verifier
ALL_MODELS = "all"
POWER_ENOUGH = 0.8
NO_INTERVAL = "One seed, or too few test rows, give no interval"
WORDS = {"equivalent": "as good", "undecided": "?"}  # shorter or clearer words for verdicts
THOUSANDTHS = 1000  # the lift per hour is small and is shown in thousandths of AUC


@dataclass(frozen=True)
class Gain:
    """The gain in mean AUC by knowledge; `is_shown` if, with several seeds, it exceeds the sum of both spreads."""

    auc: float
    is_shown: bool


def ctr_rows(figures: CtrFigures) -> list[CtrScores]:
    """The table's rows, model by model; the row without knowledge comes first."""
    models = list(dict.fromkeys(row.model for row in figures.rows))
    return sorted(figures.rows, key=lambda row: (models.index(row.model), (*VARIANTS, row.variant).index(row.variant)))


def gain_of(rows: Sequence[CtrScores], row: CtrScores) -> Gain | None:
    """The gain of a variant over the same model without knowledge; None if either AUC is missing."""
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
    """The sizes of the split, and the shares of test rows of unseen and cold users, and of users of one label."""
    split = figures.split
    parts = ", ".join(f"{count(split[name])} {name}" for name in ("train", "validation", "test") if name in split)
    seeds = counted(max(row.num_seeds for row in figures.rows), "seed")
    reason = f"This run cannot be judged yet; these figures are of {age_of_judged(figures)}. "
    lead = reason if figures.judged_run_id else ""
    lead += f"Each model was trained with {seeds}, on interactions split by time ({parts})."
    one_label = "users with only positives or only negatives, whom AUC counts and GAUC does not"
    kinds = {"test_unseen": "users unseen in training", "test_cold": "cold users", "test_one_label": one_label}
    counts = {users: split[name] for name, users in kinds.items() if name in split and split.get("test")}
    shares = [f"{percent(number / split['test'], 1)} are of {users}" for users, number in counts.items()]
    return lead + (f" Of the test rows, {'; '.join(shares)}." if shares else "")


def ctr_table(figures: CtrFigures) -> Table:
    """A table for pages and terminals: each model and variant, compared with no knowledge and with plain texts."""
    scores, compared = ctr_rows(figures), figures.equivalence
    rows = []
    for score in scores:
        verdict, gain = None if score.variant in VARIANTS else compared.get(score.model), gain_of(scores, score)
        auc = decimal(score.auc, 4) + ("" if score.auc_std is None else f" ± {decimal(score.auc_std, 4)}")
        row = {
            "Model": score.model,
            "Knowledge": score.variant,
            "AUC": auc,
            "LogLoss (nats)": decimal(score.logloss, 4),
            "GAUC": decimal(score.gauc, 4),
            "Mean prediction − base rate": decimal(score.calibration, 3, signed=True),
            "AUC, cold users": decimal(score.auc_cold, 4),
            "AUC vs none": decimal(gain.auc, 4, signed=True) if gain else MISSING,
        }
        rows.append(row | _against_plain(verdict))
    strong = [number for number, score in enumerate(scores) if score.variant not in VARIANTS]
    if ALL_MODELS in compared:
        strong.append(len(rows))
        head = dict.fromkeys(rows[-1], MISSING) | {"Model": "All models", "Knowledge": scores[-1].variant}
        rows.append(head | _against_plain(compared[ALL_MODELS]))
    caption = f"Means over seeds, on the test period; AUC ± its standard deviation over seeds. {_how_judged(compared)}"
    return Table("AUC and LogLoss by model and knowledge", rows, ("Model", "Knowledge", "Verdict"), caption, strong)


def _how_judged(compared: Mapping[str, CtrVerdict]) -> str:
    if not compared:
        return "No verdict: models were not trained on both plain texts and the run's texts."
    judged = compared.get(ALL_MODELS) or next(iter(compared.values()))
    return (
        "AUC vs plain: mean of the paired differences to plain texts (all models: weighted by inverse "
        f"variance), with its {percent(judged.confidence)} interval over new users and new seeds. "
        f"“As good”: the interval lies within ±{decimal(judged.margin, 4)}; “worse” or “better”: beyond it; "
        f"“undecided”: neither. {_power(judged)}"
    ).rstrip()


def _power(judged: CtrVerdict) -> str:
    """The power of this comparison, and the number of seeds or test rows that would give enough power."""
    if judged.power is None:
        return f"{NO_INTERVAL}: raise ctr.num_seeds, or use an earlier date."
    sentence = f"If the texts are equally good, {percent(judged.power)} of such comparisons find them “as good”"
    ways = [] if judged.seeds_needed is None else [f"{judged.seeds_needed} seeds (ctr.num_seeds)"]
    if judged.rows_needed is not None:
        ways.append(f"{count(judged.rows_needed)} test rows, from more users (an earlier date has more)")
    if judged.power >= POWER_ENOUGH:
        return f"{sentence}."
    if not ways:
        return f"{sentence}; more seeds or test rows alone are not enough: set a wider ctr.equivalence_margin."
    return f"{sentence}; to reach {percent(POWER_ENOUGH)}, use {' or '.join(ways)}."


def _against_plain(verdict: CtrVerdict | None) -> dict[str, str]:
    if verdict is None:
        return {"AUC vs plain": MISSING, "Verdict": ""}
    mean, low, high = (decimal(value, 4, signed=True) for value in (verdict.mean_difference, verdict.low, verdict.high))
    interval = "" if verdict.low is None else f" [{low}, {high}]"
    return {"AUC vs plain": mean + interval, "Verdict": verdict.verdict.replace("equivalent", "as good")}


def variant_table(comparison: Mapping[str, Any]) -> Table:
    """A table of the result of `compare_variants`, one row per variant, in its order; cells may have several lines."""
    variants, rows = comparison["variants"], []
    for variant in variants:
        per_hour = variant["lift_per_hour"]
        money, num_texts, num_failed = variant["money_per_million"], variant["num_texts"], variant["num_quarantined"]
        tokens = (f"{side} {decimal(mean, 0)}" for side, mean in variant["tokens_per_text"].items())
        row, lifts = {"Variant": variant["variant"]}, variant["lift"].items()
        row |= {"All" if model == "all" else model: _verdict(verdict) for model, verdict in lifts}
        row["Tokens/text"] = "\n".join(tokens) or MISSING
        row["Texts"] = f"{count(sum(num_texts.values()))}\n{count(sum(num_failed.values()))} failed"
        row["Per million"] = f"{count(variant['seconds_per_million'])} s" + (f"\n{rate(money)}" if money else "")
        rows.append(row | {"Lift/hour": rate(None if per_hour is None else THOUSANDTHS * per_hour)})
    return Table("Lift and cost by variant", rows, ("Variant",), _caption(comparison), [0])


def audit_table(variants: Sequence[Mapping[str, Any]]) -> Table | None:
    """A table that compares each variant's texts with plain texts of the same prompts; None if none were compared."""
    rows = [{"Variant": variant["variant"], "Side": side} | audit_row(figures, digits=0)
            for variant in variants for side, figures in variant["audit"].items()]  # fmt: skip
    caption = "Means; those of plain texts in parentheses. The report of a night explains the columns."
    return Table("Texts compared with plain texts", rows, ("Variant", "Side"), caption) if rows else None


def between_line(comparison: Mapping[str, Any]) -> str | None:
    """A sentence that compares the first variant with the others; None if there are no others."""
    first = comparison["variants"][0]["variant"]
    against = [verdict for verdict in comparison["between"] if verdict["variant"] == first]
    parts = [f"{verdict['over']} {_verdict(verdict, ' ').replace('?', 'undecided')}" for verdict in against]
    if not parts:
        return None
    unsure = all(variant["lift"]["all"]["verdict"] == "undecided" for variant in comparison["variants"])
    advice = ". No lift is certain yet: more users or seeds narrow the intervals" if unsure else ""
    return f"{first} (all models) compared with {'; '.join(parts)}{advice}"


def _caption(comparison: Mapping[str, Any]) -> str:
    first = comparison["variants"][0]
    judged, rows = next(iter(first["lift"].values())), comparison["rows"]
    hours = {"GPU": "GPU-hour", "worker": "worker-hour"}
    kinds = " or ".join(dict.fromkeys(hours[variant["hours_of"]] for variant in comparison["variants"]))
    lines = [
        f"AUC gain over the same models without texts, on {count(rows['test'])} test rows after {comparison['date']}: "
        f"mean, ± half its {percent(judged['confidence'])} interval over new users and new seeds, verdict "
        f"(“as good”: within ±{decimal(judged['margin'], 4)}; “?”: undecided)."
    ]
    if judged["low"] is None:
        lines.append(f"{NO_INTERVAL}: use more seeds (ctr.num_seeds), an earlier date or more users.")
    lines.append(
        "Per million: seconds of the whole cluster for a million new texts, with users and items as in the run, "
        + ("by wall time" if any(variant["priced_by"] == "wall time" for variant in comparison["variants"]) else
           "by the number of steps and the cost of a step measured here, whatever else ran")
        + (", and money." if any(variant["money_per_million"] for variant in comparison["variants"]) else
           "; set cluster.price_per_hour to see money.")
    )  # fmt: skip
    lines.append(f"Lift/hour: thousandths of AUC (all models) per {kinds} of a million texts.")
    return " ".join(lines)


def _verdict(figures: Mapping[str, Any], between: str = "\n") -> str:
    parts = [decimal(figures["mean_difference"], 4, signed=True)]
    if figures["low"] is not None:
        parts.append(f"±{decimal(figures['high'] - figures['mean_difference'], 4)}")
    verdict: str = figures["verdict"]
    return between.join([*parts, WORDS.get(verdict, verdict)])
