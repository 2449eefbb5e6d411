"""Compares variants of prompts and settings: their runs of one date, the lift of CTR models by their texts, the cost.

A variant is a run with the settings by which CTR models use its texts. Nothing is written.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from laserbatch.ctr.feature_set import read_feature_set
from laserbatch.ctr.log import EntityTables
from laserbatch.ctr.settings import CtrSettings
from laserbatch.jobs.console import progress
from laserbatch.jobs.formatting import ratio
from laserbatch.jobs.gates import gate_sentence
from laserbatch.jobs.stages.budgets import at_usual_context, known_step_cost
from laserbatch.jobs.stages.night import Night, means
from laserbatch.pipeline.budget.choice import known_batch_size
from laserbatch.pipeline.sides import SIDES
from laserbatch.retrieval_pools.step_cost import StepCost


@dataclass(frozen=True)
class Variant:
    """A run, and the settings by which CTR models use its texts."""

    name: str
    night: Night
    ctr: CtrSettings


def compare_variants(variants: Sequence[Variant], tables: EntityTables) -> dict[str, Any]:
    """The lift and the cost of each variant (`_variant_figures`) as plain values, the most lift per hour first.

    `tables` include interactions after the date. Raises CtrError as `train_ways` does.
    """
    from laserbatch.ctr.lift import Way, num_trainings, train_ways  # with torch and scikit-learn

    ways = {}
    for variant in variants:
        run = variant.night.run
        run.require_features(variant.night.manifest.features, compare_bytes=True)
        ways[variant.name] = Way(read_feature_set(run.features_path("user").parent), variant.ctr)
    with progress("train CTR models", num_trainings(ways)) as bar:
        lifts = train_ways(
            tables, ways, variants[0].night.date,
            lambda row: bar.advance(1, f"{row.model}, {row.variant}: AUC {row.auc:.4f}"),
        )  # fmt: skip
    costs = {variant.name: known_step_cost(variant.night) for variant in variants}
    costs = {} if None in costs.values() else costs  # all variants must be priced in the same way
    rows = [
        _variant_figures(variant, costs.get(variant.name))
        | {"lift": {model: asdict(verdict) for model, verdict in lifts.ways[variant.name].over_none.items()},
           "scores": [asdict(row) for row in lifts.ways[variant.name].rows]}
        for variant in variants
    ]  # fmt: skip
    for figures in rows:
        figures["lift_per_hour"] = ratio(figures["lift"]["all"]["mean_difference"], figures["hours_per_million"])
    # The most lift an hour first; variants without hours last, by lift.
    rows.sort(key=lambda row: (row["lift_per_hour"] is None,
                               -(row["lift_per_hour"] or row["lift"]["all"]["mean_difference"])))  # fmt: skip
    between = [{"variant": name, "over": other} | asdict(verdict) for (name, other), verdict in lifts.between.items()]
    data = {"date": variants[0].night.date.isoformat(), "rows": lifts.split, "item_rate": asdict(lifts.item_rate)}
    return data | {"variants": rows, "between": between}


def _variant_figures(variant: Variant, step_cost: StepCost | None) -> dict[str, Any]:
    """The figures of a variant's texts, and the cost of a million texts with the run's shares of users and items.

    Seconds count the time in which all workers write in parallel, not their start or other stages, which a larger
    night has only once. Costs are None if the run wrote no texts of a side.
    """
    night = variant.night
    generation, audit = night.manifest.generation, night.manifest.judgement.audit
    sides, workers = generation.sides, generation.workers
    seconds = cost_of_a_million(night, step_cost)
    hours = None if seconds is None else seconds / 3600
    price = workers.price_per_hour if workers else None
    named = {"variant": variant.name, "run_id": night.run.run_id, "workspace": str(night.workspace.root)}
    return named | {
        "adaptor": variant.ctr.adaptor,
        "templates": {side: night.settings.knowledge.template_of(side) for side in SIDES},
        "tokens_per_text": {side: means(night.run, side, ["num_tokens"])[0] for side in sides},
        "num_texts": {side: of.num_generated + of.num_carried_over for side, of in sides.items()},
        "num_quarantined": {side: of.num_quarantined for side, of in sides.items()},
        "seconds_per_million": seconds,
        "priced_by": "wall time" if step_cost is None else step_cost.name,
        "hours_per_million": None if hours is None or workers is None else hours * workers.num_billed,
        "hours_of": "GPU" if workers and workers.device == "cuda" else "worker",
        "money_per_million": None if hours is None or price is None else hours * price,
        "audit": {
            side: {name: value for name, value in asdict(figures).items() if name != "cases"}
            for side, figures in (audit.sides if audit else {}).items()
        },
        "gates": [gate_sentence(gate) for gate in night.manifest.judgement.gates if gate.verdict != "passes"],
    }


def cost_of_a_million(night: Night, step_cost: StepCost | None = None) -> float | None:
    """The seconds that the run's workers need for a million new texts, from the steps and step cost of its texts.

    Other load on the machine thus does not count. Without a step cost, wall time is used. None without such figures.
    """
    total, num_entities, workers = 0.0, 0, night.manifest.generation.workers
    for side, figures in night.manifest.generation.sides.items():
        if not figures.num_entities:
            continue
        if step_cost is None or workers is None:
            each = ratio(figures.stats.wall_s, figures.stats.num_texts)
        else:
            steps, drafted, prompt = means(night.run, side, ("num_steps", "num_drafted", "num_prompt_tokens"))
            if steps is None or drafted is None or prompt is None:
                return None
            batch_size = known_batch_size(step_cost, night.settings.decoding.batch_size)
            text_s = at_usual_context(step_cost, night.run, side).text_seconds(batch_size, steps, drafted, prompt)
            each = text_s / workers.num_workers
        if each is None:
            return None
        total, num_entities = total + each * figures.num_entities, num_entities + figures.num_entities
    return 1e6 * total / num_entities if num_entities else None
