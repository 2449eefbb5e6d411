"""`laserbatch experiment`: try templates, models or frameworks on a sample of entities, apart from published runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from laserbatch.jobs.console import ExitCode, print_table, say, stdout, summary
from laserbatch.jobs.report.ctr_table import audit_table, between_line, variant_table
from laserbatch.jobs.settings import IF_HERE, JSON, WORKSPACE, config_here, load_settings
from laserbatch.jobs.stages import run_experiment as experiments
from laserbatch.jobs.stages.night import parse_date
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.sampled import day_of_share
from laserbatch.pipeline.tables.streamed import open_tables

ITEMS_A_USER = 4  # default maximum of items in the sample, per user


def experiment(
    config: list[Path] = typer.Option(
        [], "--config", show_default=IF_HERE, help="Configuration file; several are compared with each other."
    ),
    framework: list[str] = typer.Option(
        [], "--framework", help="A framework of prompts, such as kar; may be repeated."
    ),
    workspace: Path | None = WORKSPACE,
    users: int = typer.Option(200, min=1, help="Number of users in the sample: users with the lowest hashes of ids."),
    items: int | None = typer.Option(
        None, min=1, show_default="4 per user", help="Maximum number of items; items that users met most come first."
    ),
    date: str | None = typer.Option(
        None,
        show_default="the last day by whose end at most 80 % of the interactions happened",
        help="Date of the night to try.",
    ),
    name: str | None = typer.Option(
        None, show_default="made from the date and the settings", help="Name of the experiment's folder."
    ),
    ray_address: str | None = typer.Option(
        None, show_default="a local cluster for each variant", help="Address of a Ray cluster to use."
    ),
    as_json: bool = JSON,
) -> None:
    """Try templates, models or frameworks on a sample of entities; published runs do not change.

    Each variant is a framework of one configuration, or a configuration, and runs its night in
    `<workspace>/experiments/<name>`. Interactions after the date then judge all variants: one table shows lift, cost
    and audit. The same command continues an experiment that was killed; after a change of the section `ctr` it only
    trains again. With `--name`, further variants join an experiment.
    `laserbatch runs gc --experiments` removes the folders.

    Example: `laserbatch experiment --framework kar --framework rlmrec --users 200`

    Example: `laserbatch experiment --config now.yaml --config shorter.yaml`
    """
    overrides = {"workspace": workspace, "cluster.ray_address": ray_address}
    loaded = [load_settings(path, overrides) for path in config or [config_here()]]
    names = _variant_names(config, framework)
    if framework:
        loaded = [experiments.settings_of_framework(loaded[0], framework_name) for framework_name in names]
    settings, first = dict(zip(names, loaded, strict=True)), loaded[0]
    for variant, of_variant in settings.items():
        if of_variant.tables != first.tables:
            raise ConfigError(
                f"{variant} has `tables` with {of_variant.tables}, but {names[0]} with {first.tables}; "
                "variants are tried on one sample, so give them the same section `tables`"
            )
    opened = Workspace.open(first.workspace)
    folder = opened.experiment(name) if name else None
    if date is not None:
        day = parse_date(date)
    elif folder is not None and (folder / experiments.RECORD).exists():
        day = parse_date(experiments.read_record(folder)["spec"]["date"])
    else:
        day = day_of_share(
            open_tables(first.tables.required_path, first.tables.keep_duplicates), experiments.SHARE_BEFORE
        )
    experiment = experiments.Experiment(settings, day, users, items or ITEMS_A_USER * users)
    comparison = experiments.run_experiment(opened, name or experiment.default_name, experiment)
    if as_json:
        summary(comparison, as_json=True)
    else:
        _show(comparison)
    if comparison["failed"]:
        raise typer.Exit(ExitCode.RUN_FAILED)


def _variant_names(configs: Sequence[Path], frameworks: Sequence[str]) -> list[str]:
    """The names of the variants: the frameworks, or the configuration files' names without suffix.

    Raises BadParameter if frameworks and several files are given, fewer than two variants, or a name twice.
    """
    if frameworks and len(configs) > 1:
        raise typer.BadParameter("give frameworks of one configuration, or several configurations, not both")
    names = list(frameworks) or [path.stem for path in configs]
    if len(names) < 2:
        problem = f"{names[0]!r} is only one variant" if names else "nothing to compare is given"
        raise typer.BadParameter(f"{problem}; give --framework, or --config, twice or more")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise typer.BadParameter(f"{', '.join(twice)} is given twice; configuration files need different names")
    return names


def _show(comparison: dict[str, Any]) -> None:
    print_table(variant_table(comparison))
    if line := between_line(comparison):
        stdout.print(line, markup=False, soft_wrap=True)
    audit = audit_table(comparison["variants"])
    if audit is None:
        say("no text was compared with a plain one: variants wrote too few, decode plainly, or compare none")
    else:
        print_table(audit)
    for variant in comparison["variants"]:
        for sentence in variant["gates"]:
            say(f"{variant['variant']}: {sentence}")
    for name, why in comparison["failed"].items():
        say(f"{name} failed: {why}")
    say(f"all files are in {comparison['folder']}; each variant has a workspace with report and texts")
