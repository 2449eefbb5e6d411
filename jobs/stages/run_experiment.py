"""An experiment tries variants on a sample of entities, each by an ordinary night in a separate workspace.

All files are in `<workspace>/experiments/<name>`: published runs and runs that later nights build on do not change.
"""

import datetime
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.settings import AdaptorName, CtrOptions, CtrSettings
from laserbatch.jobs.console import say
from laserbatch.jobs.formatting import counted, percent
from laserbatch.jobs.gates import gate_sentence
from laserbatch.jobs.settings import MetricsSettings, Settings
from laserbatch.jobs.stages.attempt import newest_edition
from laserbatch.jobs.stages.inputs import check_inputs, require_plain_words, require_template_columns
from laserbatch.jobs.stages.night import open_run
from laserbatch.jobs.stages.run_night import run_night
from laserbatch.jobs.stages.variants import Variant, compare_variants
from laserbatch.pipeline.errors import ClusterFailed, ConfigError, EndpointGone, RunFailed, RunHeld, WorkspaceError
from laserbatch.pipeline.knowledge.templates import SHIPPED_TEMPLATES, load_template
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.storage import atomic
from laserbatch.pipeline.storage.atomic import read_json, remove_folder
from laserbatch.pipeline.storage.lock import hold_lock
from laserbatch.pipeline.storage.manifest import changed_settings, make_run_id, settings_hash
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.check import require_sound
from laserbatch.pipeline.tables.read import describe
from laserbatch.pipeline.tables.sampled import write_sample
from laserbatch.pipeline.tables.streamed import open_tables

RECORD = "experiment.json"  # in the experiment's folder
SHARE_BEFORE = 0.8  # the default date is the one by which this share of all interactions has happened


@dataclass(frozen=True)
class Experiment:
    """The settings of an experiment's variants, which share their tables, the date, and the size of the sample."""

    settings: Mapping[str, Settings]
    date: datetime.date
    num_users: int
    num_items: int

    @cached_property
    def spec(self) -> dict[str, Any]:
        """Everything that decides the texts except the tables, as plain values."""
        variants = {}
        for name, of_variant in self.settings.items():
            knowledge = of_variant.knowledge
            templates = [load_template(knowledge.template_of(side), knowledge.template_dir) for side in SIDES]
            prompts = settings_hash({"templates": [template.model_dump(mode="json") for template in templates]})
            variants[name] = of_variant.identity() | {"prompts": prompts[:16]}
            del variants[name]["ctr"]  # it decides how the same texts are judged
        sizes = {"num_users": self.num_users, "num_items": self.num_items}
        return {"date": self.date.isoformat(), **sizes, "variants": variants}

    @property
    def default_name(self) -> str:
        """A name that depends on the specification."""
        return f"{self.date}-{settings_hash(self.spec)[:8]}"


def settings_of_framework(settings: Settings, framework: str) -> Settings:
    """The settings with the templates and the adaptor of a framework.

    Among several templates the configured one is taken, then `<framework>_<side>`; otherwise raises ConfigError.
    """
    knowledge, folder = settings.knowledge, settings.knowledge.template_dir
    stems = {path.stem for place in filter(None, (folder, SHIPPED_TEMPLATES)) for path in place.glob("*.yaml")}
    templates = [load_template(stem, folder) for stem in sorted(stems)]
    frameworks = sorted({template.framework for template in templates})
    names = {}
    for side in SIDES:
        matching = [template.name for template in templates if (template.framework, template.side) == (framework, side)]
        first = [knowledge.template_of(side), f"{framework}_{side}"]
        matching = [name for name in first if name in matching] or matching
        if not matching:
            raise ConfigError(
                f"no prompt template for {side}s has the framework {framework!r}; found {', '.join(frameworks)}. "
                "Put your own templates into knowledge.template_dir, and name the framework in each as `framework`"
            )
        if len(matching) > 1 and matching[0] not in first:
            raise ConfigError(
                f"several prompt templates for {side}s have the framework {framework!r}: {', '.join(matching)}. Name "
                "one of them in each configuration, and give configurations instead: --config A --config B"
            )
        names[f"{side}_template"] = matching[0]
    adaptor = {"adaptor": framework} if framework in get_args(AdaptorName) else {}
    updated = {"knowledge": knowledge.model_copy(update=names), "ctr": settings.ctr.model_copy(update=adaptor)}
    return settings.model_copy(update=updated)


def run_experiment(workspace: Workspace, name: str, experiment: Experiment) -> dict[str, Any]:
    """Sample the tables, run each variant, and return the result of `compare_variants` with sample and failures.

    Finished runs are not run again, so after a kill the same call goes on. A variant most of whose first texts cannot
    be kept is recorded in `failed`, and the other variants still run. Raises ConfigError if another experiment has the
    name, CtrError if the sample cannot judge, RunFailed if every variant failed, EndpointGone or ClusterFailed if a
    night may be tried again.
    """
    folder = workspace.experiment(name)
    folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder):
        atomic.remove_leftovers(folder)
        sample = _sampled(folder, experiment)
        variants, failed = [], {}
        for number, (variant, of_variant) in enumerate(experiment.settings.items(), 1):
            say(f"variant {number} of {len(experiment.settings)}: {variant}")
            try:
                variants.append(_tried(folder, variant, of_variant, experiment.date))
            except (EndpointGone, ClusterFailed):
                raise  # the same command continues
            except RunFailed as error:
                say(f"{variant} failed, the other variants continue: {error}")
                failed[variant] = str(error)
        if not variants:
            raise RunFailed(f"every variant failed: {'; '.join(f'{name}: {why}' for name, why in failed.items())}")
        result = folder / "comparison.json"
        compared = {
            "runs": {variant.name: variant.night.run.run_id for variant in variants},
            "ctr": {variant.name: variant.ctr.model_dump(mode="json") for variant in variants},
        }
        comparison = read_json(result) if result.exists() else {}
        if comparison | compared != comparison:
            keep_duplicates = variants[0].night.settings.tables.keep_duplicates  # variants share the section `tables`
            comparison = compared | compare_variants(variants, open_tables(folder / "tables", keep_duplicates))
            atomic.write_json(comparison, result)
        return {"experiment": name, "folder": str(folder), "sample": sample, **comparison, "failed": failed}


def read_record(folder: Path) -> dict[str, Any]:
    """Read an experiment's specification, inputs and sample. Raises WorkspaceError if damaged or of another version."""
    path = folder / RECORD
    record = read_json(path, f", or remove {folder}")
    if "spec" not in record:
        raise WorkspaceError(
            f"{path} has no `spec`, so another version of laserbatch wrote it. Give another --name, or remove {folder}"
        )
    return record


def _sampled(folder: Path, experiment: Experiment) -> dict[str, Any]:
    """The counts of the sample, which is taken once, after all checks that could stop its nights later.

    Variants that the experiment has not had yet are added to its record.
    """
    path, first = folder / RECORD, next(iter(experiment.settings.values()))
    source, spec = first.tables.required_path, experiment.spec
    if path.exists():
        before = read_record(folder)
        known, now = before["spec"]["variants"], spec["variants"]
        spec = spec | {"variants": known | now}
        if changed := changed_settings(before["spec"] | {"variants": now | known}, spec):
            differences = [f"{key} was {then!r} and is now {now_is!r}" for key, (then, now_is) in changed.items()]
            raise ConfigError(
                f"the experiment {folder.name} has other settings: {', '.join(differences[:1])}. Give another --name "
                f"or no --name, or remove {folder}"
            )
        say(f"continuing the experiment {folder.name}")
        if before["inputs"] != describe(source):
            say(f"{source} changed since its sample was taken; the sample stays. Give another --name to take a new one")
        _require_columns(folder / "tables", experiment)
        _require_judges(folder / "tables", experiment)
        atomic.write_json(before | {"spec": spec}, path)
        return before["sample"]
    try:
        require_sound(check_inputs(source, first), source)
        _require_columns(source, experiment)
        with atomic.atomic_folder(folder / "tables", overwrite=True) as made:
            opened = open_tables(source, first.tables.keep_duplicates)
            sample = write_sample(opened, made, experiment.date, experiment.num_users, experiment.num_items)
            _require_judges(made, experiment)
    except BaseException:
        remove_folder(folder)
        raise
    kept, later = percent(sample.share_kept), counted(sample.num_later, "later interaction")
    say(f"the sample has {counted(sample.num_users, 'user')}, {counted(sample.num_items, 'item')}, "
        f"{kept} of these users' interactions up to {experiment.date}, and {later} to judge by")  # fmt: skip
    atomic.write_json({"spec": spec, "inputs": describe(source), "sample": asdict(sample)}, path)
    return asdict(sample)


def _require_columns(tables: Path | str, experiment: Experiment) -> None:
    for of_variant in experiment.settings.values():
        for side in SIDES:
            require_template_columns(tables, of_variant, side)
        require_plain_words(of_variant)


def _require_judges(tables: Path, experiment: Experiment) -> None:
    from laserbatch.ctr.dataset import build_dataset
    from laserbatch.ctr.lift import require_same_judgement  # with torch and scikit-learn, which take seconds to load

    require_same_judgement({name: of_variant.ctr for name, of_variant in experiment.settings.items()})
    for of_variant in experiment.settings.values():
        try:
            opened = open_tables(tables, of_variant.tables.keep_duplicates)
            build_dataset(opened, experiment.date, CtrSettings.of(of_variant.ctr))
        except CtrError as error:
            raise CtrError(
                f"the sample of {experiment.num_users} users cannot judge the variants, so no text was written: "
                f"{error}. More --users may help, too"
            ) from None


def _tried(folder: Path, name: str, settings: Settings, date: datetime.date) -> Variant:
    """Run the night of a variant on the sample, unless an earlier call did. Raises the errors of `run_night`."""
    update = {"workspace": folder / name, "deliver_to": None, "metrics": MetricsSettings()}
    update["tables"] = settings.tables.model_copy(update={"path": folder / "tables"})
    update["refresh"] = settings.refresh.model_copy(update={"max_tokens": None})
    update |= {"night": settings.night.model_copy(update={"train_ctr": False}), "ctr": CtrOptions()}
    apart = settings.model_copy(update=update)
    workspace = Workspace.open(apart.workspace)
    edition = newest_edition(workspace, date, apart.identity())
    run = workspace.run(make_run_id(date, apart.identity(), edition))
    if not (run.is_finished or run.is_held):
        workspace.step_costs_folder.mkdir(exist_ok=True)
        # The step cost of a model is the same for all variants.
        for other in (Workspace(settings.workspace), *Workspace(folder).within()):
            for path in other.step_costs_folder.glob("*.json") if other.root != workspace.root else ():
                atomic.link_file(path, workspace.step_costs_folder / path.name)
        with suppress(RunHeld):
            run_night(apart, date, policy="never")
    night = open_run(apart, run.run_id)
    for gate in night.manifest.judgement.gates:
        if gate.verdict == "blocks":
            say(f"a night with {name} would be held back: {gate_sentence(gate)}")
    # A single night has no earlier texts for training rows to see.
    ctr = CtrSettings.of(settings.ctr)
    return Variant(name, night, ctr.model_copy(update={"history": "latest"}) if ctr.history == "asof" else ctr)
