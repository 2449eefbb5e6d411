"""Compares variants of prompts and settings: their runs of one date, the lift of CTR models by their texts, the cost.

A variant is a run with the settings by which CTR models use its texts. Nothing is written.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from laserbatch.ctr.feature_set import read_feature_set
from laserbatch.ctr.settings import AdaptorName, CtrOptions, CtrSettings
from laserbatch.jobs.console import progress, say
from laserbatch.jobs.formatting import ratio
from laserbatch.jobs.gates import gate_sentence
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages.budgets import at_usual_context, known_step_cost
from laserbatch.jobs.stages.night import Night, means, open_run
from laserbatch.pipeline.budget.choice import known_batch_size
from laserbatch.pipeline.encoding.versions import feature_versions
from laserbatch.pipeline.errors import ConfigError, WorkspaceError
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.manifest import RunManifest, settings_hash
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.schema import TABLE_NAMES
from laserbatch.pipeline.tables.streamed import open_tables
from laserbatch.retrieval_pools.step_cost import StepCost


@dataclass(frozen=True)
class Variant:
    """A run, and the settings by which CTR models use its texts."""

    name: str
    night: Night
    ctr: CtrSettings


def of_frameworks(settings: Settings, frameworks: Sequence[str]) -> list[Variant]:
    """The newest runs of one date with texts of these frameworks, in a workspace and its experiments.

    Raises WorkspaceError if a framework has no run, or the frameworks have no date and tables in common.
    """
    opened = Workspace.open(settings.workspace, create=False)
    runs_of: dict[str | None, list[RunFolder]] = {}
    for workspace in (opened, *(other for folder in opened.experiments() for other in Workspace(folder).within())):
        for run in workspace.finished_runs(include_held=True):
            runs_of.setdefault(framework_of(run), []).append(run)
    for runs in runs_of.values():
        runs.sort(key=lambda run: run.date)
    for name in frameworks:
        if name not in runs_of:
            frameworks_there = ", ".join(sorted(filter(None, runs_of))) or "none"
            raise WorkspaceError(
                f"no run of {settings.workspace} has texts of the framework {name!r} on both sides (found: "
                f"{frameworks_there}; runs whose manifests name no framework are not counted). Run a night "
                f"with its templates, or `laserbatch experiment --framework {' --framework '.join(frameworks)}`"
            )
    chosen = _of_one_date({name: runs_of[name] for name in frameworks}).items()
    within = {name: settings.model_copy(update={"workspace": run.workspace}) for name, run in chosen}
    return [_variant(name, within[name], run.run_id, adaptor=name) for name, run in chosen]


def of_configs(configs: Mapping[str, Settings]) -> list[Variant]:
    """The newest runs of several configurations, of one date; raises WorkspaceError as `of_frameworks` does."""
    runs_of = {}
    for name, settings in configs.items():
        workspace, alike = Workspace.open(settings.workspace, create=False), settings_hash(settings.identity())
        runs = [run for run in workspace.finished_runs(include_held=True) if alike.startswith(run.settings_hash)]
        if not runs:
            raise WorkspaceError(
                f"{settings.workspace} has no finished run of the configuration {name} as it is now; "
                "`laserbatch nightly --config ...` makes one, `laserbatch experiment --config ...` tries it on a sample"
            )
        runs_of[name] = runs
    return [_variant(name, configs[name], run.run_id) for name, run in _of_one_date(runs_of).items()]


def framework_of(run: RunFolder) -> str | None:
    """The framework of both sides of a run; None if they differ or the manifest does not record it."""
    manifest = unless_damaged(run.load_manifest)
    frameworks = {prompt.framework for prompt in manifest.origin.prompts.values()} if manifest else set()
    return frameworks.pop() if len(frameworks) == 1 else None


def with_adaptor(options: CtrOptions, framework: str | None) -> CtrOptions:
    """The options with the adaptor of a framework, if it has one."""
    return options.model_copy(update={"adaptor": framework}) if framework in get_args(AdaptorName) else options


def _variant(name: str, settings: Settings, run_id: str, adaptor: str | None = None) -> Variant:
    night = open_run(settings, run_id)
    return Variant(name, night, CtrSettings.of(with_adaptor(night.settings.ctr, adaptor)))


def _of_one_date(runs_of: Mapping[str, Sequence[RunFolder]]) -> dict[str, RunFolder]:
    """The newest run of each name for the newest date and tables that all names share; WorkspaceError without them."""
    by_place: dict[tuple[str, ...], dict[str, RunFolder]] = {}
    for name, runs in runs_of.items():
        for run in runs:  # the newest last
            if (manifest := unless_damaged(run.load_manifest)) is not None:
                by_place.setdefault(_place(manifest), {})[name] = run
    shared = [place for place, of_place in by_place.items() if len(of_place) == len(runs_of)]
    if shared:
        return {name: by_place[max(shared)][name] for name in runs_of}
    newest = ", ".join(f"{name}: {runs[-1].date} in {runs[-1].workspace}" for name, runs in runs_of.items())
    dates = set.intersection(*({run.date for run in runs} for runs in runs_of.values()))
    wrong = f"their tables differ in what was known on {max(dates)}" if dates else "they have no date in common"
    raise WorkspaceError(
        f"these runs cannot be judged on the same rows: {wrong} (newest: {newest}). Run the night of one date with "
        "each, on the same tables (`laserbatch nightly --date D`), or try them on a sample: `laserbatch experiment`"
    )


def _place(manifest: RunManifest) -> tuple[str, ...]:
    """A run's date and digests of its tables on that date; runs must share them to be judged on the same rows."""
    inputs = (manifest.origin.inputs.get(name, {}) for name in TABLE_NAMES)
    return (str(manifest.date), *(str(facts.get("known_sha256", facts.get("sha256"))) for facts in inputs))


def compare_variants(variants: Sequence[Variant], tables: Path | str) -> dict[str, Any]:
    """The lift and the cost of each variant (`_variant_figures`) as plain values, the most lift per hour first.

    `tables` include interactions after the date. Raises CtrError as `train_ways` does, ConfigError if variants read
    them differently.
    """
    from laserbatch.ctr.lift import Way, num_trainings, train_ways  # with torch and scikit-learn

    keeps = {variant.name: variant.night.settings.tables.keep_duplicates for variant in variants}
    if len(set(keeps.values())) > 1:
        raise ConfigError(f"tables.keep_duplicates differs, so variants would read other rows: {keeps}; set one value")
    with ExitStack() as opened:
        ways = {}
        for variant in variants:
            run, versions = variant.night.run, None
            if variant.ctr.history == "asof":
                versions = opened.enter_context(feature_versions(variant.night.workspace.runs_up_to(run)))
            run.require_features(variant.night.manifest.features, compare_bytes=True)
            if not any(of_side.num_generated for of_side in variant.night.manifest.generation.sides.values()):
                say(f"WARNING: run {run.run_id} of {variant.name} wrote no text: all texts are those of an earlier run")
            ways[variant.name] = Way(read_feature_set(run.features_path("user").parent), variant.ctr, versions)
        bar = opened.enter_context(progress("train CTR models", num_trainings(ways)))
        lifts = train_ways(
            open_tables(tables, *set(keeps.values())), ways, variants[0].night.date,
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
