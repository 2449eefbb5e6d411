"""Several ways of asking beside each other: what each adds to CTR models, what its texts are, what a million cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from laserbatch.jobs.formatting import MISSING, count, decimal, percent, rate
from laserbatch.jobs.report.audit import audit_row
from laserbatch.jobs.report.blocks import Table

WORDS = {"equivalent": "as good", "undecided": "?"}  # for verdicts that are no words of their own, or long ones
THOUSANDTHS = 1000  # of AUC: lifts an hour are small


def variant_table(comparison: Mapping[str, Any]) -> Table:
    """A row a variant of what `compare_variants` tells, in its order; cells of several lines."""
    variants, rows = comparison["variants"], []
    for variant in variants:
        per_hour = variant["lift_per_hour"]
        money, num_texts, num_failed = variant["money_per_million"], variant["num_texts"], variant["num_quarantined"]
        tokens = (f"{side} {decimal(mean, 0)}" for side, mean in variant["tokens_per_text"].items())
        rows.append(
            {"Variant": variant["variant"]}
            | {"All" if model == "all" else model: _verdict(verdict) for model, verdict in variant["lift"].items()}
            | {
                "Tokens a text": "\n".join(tokens) or MISSING,
                "Texts": f"{count(sum(num_texts.values()))}\n{count(sum(num_failed.values()))} failed",
                "A million": f"{count(variant['seconds_per_million'])} s" + (f"\n{rate(money)}" if money else ""),
                "Lift an hour": rate(None if per_hour is None else THOUSANDTHS * per_hour),
            }
        )
    return Table("Which is worth it", rows, ("Variant",), _caption(comparison), [0])


def audit_table(variants: Sequence[Mapping[str, Any]]) -> Table | None:
    """Texts of each variant beside plain ones of the same prompts; None where none were compared."""
    rows = [
        {"Variant": variant["variant"], "Side": side} | audit_row(figures, digits=0)
        for variant in variants
        for side, figures in variant["audit"].items()
    ]
    caption = "Means, and of plain texts in parentheses, as in the report of a night."
    return Table("Texts beside plain ones", rows, ("Variant", "Side"), caption) if rows else None


def between_line(comparison: Mapping[str, Any]) -> str | None:
    """Whether the first is better than the others, in a sentence; None of one alone."""
    first = comparison["variants"][0]["variant"]
    against = [verdict for verdict in comparison["between"] if verdict["variant"] == first]
    parts = [f"{verdict['over']} {_verdict(verdict, ' ').replace('?', 'undecided')}" for verdict in against]
    if not parts:
        return None
    unsure = all(variant["lift"]["all"]["verdict"] == "undecided" for variant in comparison["variants"])
    advice = ". No lift is sure yet: more users, or more seeds, narrow the intervals" if unsure else ""
    return f"{first}, with all models, against {'; '.join(parts)}{advice}"


def _caption(comparison: Mapping[str, Any]) -> str:
    first = comparison["variants"][0]
    judged, rows = next(iter(first["lift"].values())), comparison["rows"]
    hours = {"GPU": "GPU-hour", "worker": "worker-hour"}
    kinds = " or ".join(dict.fromkeys(hours[variant["hours_of"]] for variant in comparison["variants"]))
    lines = [
        f"AUC over the same models without texts, on {count(rows['test'])} test rows after {comparison['date']}: "
        f"mean, half its {percent(judged['confidence'])} interval over new users and new seeds, verdict "
        f"(“as good”: within ±{decimal(judged['margin'], 4)}; “?”: undecided).",
    ]
    if judged["low"] is None:
        lines.append("One seed has no interval: train with more (--seeds, ctr.num_seeds).")
    lines.append(
        "A million: seconds of the whole cluster for so many new texts, users and items as in the run, "
        + ("by the clock" if any(variant["priced_by"] == "wall time" for variant in comparison["variants"]) else
           "by their steps and what a step was measured to cost here, whatever else ran")
        + (", and money." if any(variant["money_per_million"] for variant in comparison["variants"]) else
           "; set cluster.price_per_hour to see money.")
    )  # fmt: skip
    lines.append(f"Lift an hour: thousandths of AUC, of all models, for each {kinds} that a million texts take.")
    return " ".join(lines)


def _verdict(figures: Mapping[str, Any], between: str = "\n") -> str:
    parts = [decimal(figures["mean_difference"], 4, signed=True)]
    if figures["low"] is not None:
        parts.append(f"±{decimal(figures['high'] - figures['mean_difference'], 4)}")
    verdict: str = figures["verdict"]
    return between.join([*parts, WORDS.get(verdict, verdict)])
