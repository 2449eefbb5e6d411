"""`laserbatch runs ...`: list, show, compare, publish, roll back and remove runs."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from laserbatch.jobs.console import print_table, say, summary
from laserbatch.jobs.formatting import count, counted
from laserbatch.jobs.report.blocks import Table
from laserbatch.jobs.settings import CONFIG, DRY_RUN, JSON, WORKSPACE, load_settings, open_workspace
from laserbatch.jobs.stages.publishing import deliver, delivery_uri, force_publish, remove_delivered, use_pools_of
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.storage.atomic import freed_bytes, leftovers, remove_folder, remove_leftovers, size_bytes
from laserbatch.pipeline.storage.lock import hold_lock
from laserbatch.pipeline.storage.manifest import changed_settings
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.workspace import EXPERIMENTS, Workspace

app = typer.Typer(no_args_is_help=True, add_completion=False)
COUNTED = ("generated", "carried_over", "quarantined")


@app.command(name="list")
def list_runs(config: Path | None = CONFIG, workspace: Path | None = WORKSPACE, as_json: bool = JSON) -> None:
    """List the runs: date, state, whether published, counts and size.

    Example: `laserbatch runs list --workspace workspace`
    """
    opened = open_workspace(config, workspace)
    described = [_described(opened, run) for run in opened.runs()]
    if as_json:
        summary({"runs": described}, as_json=True)
    elif not described:
        say(f"no runs in {opened.root} yet; `laserbatch nightly` makes one")
    else:
        caption = "* marks the published run; users and items: written / carried over / failed"
        rows = [_row(row) for row in described]
        columns = [name for name in rows[0] if any(row[name] for row in rows)]  # runs of item lists have no items side
        rows = [{name: row[name] for name in columns} for row in rows]
        print_table(Table("Runs", rows, ("", "run", "state"), caption))
        for row in described:
            if row["failure"]:
                say(f"{row['run_id']}: {row['failure']}")


@app.command()
def show(
    run: str | None = typer.Argument(None, show_default="the published run", help="A run id."),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    as_json: bool = JSON,
) -> None:
    """Show a run: what it was built on, what it did, and where its files are.

    Example: `laserbatch runs show 2025-03-01-1a2b3c4d`
    """
    opened = open_workspace(config, workspace)
    folder = opened.chosen_run(run)
    manifest = folder.load_manifest()
    facts = {
        "built_on": manifest.origin.previous_run_id,
        "drafted_from": manifest.generation.pools.version,
        "model": manifest.generation.model.id if manifest.generation.model else None,
        "laserbatch": manifest.origin.laserbatch_version,
        "stages_s": {name: round(wall_s, 1) for name, wall_s in manifest.stages.items()},
        "knowledge": {side: folder.knowledge_folder(side) for side in SIDES},
        "features": {side: folder.features_path(side) for side in manifest.features},
        "report": folder.report_path if folder.report_path.exists() else None,
    }
    summary(_described(opened, folder) | facts, as_json)


@app.command()
def diff(
    before: str | None = typer.Argument(None, show_default="the run that AFTER was built on", help="A run id."),
    after: str | None = typer.Argument(None, show_default="the published run", help="A run id."),
    limit: int = typer.Option(20, min=0, help="Number of entities to name of each kind."),
    texts: bool = typer.Option(False, "--texts", help="Show the texts that changed, before and after."),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    as_json: bool = JSON,
) -> None:
    """Name the entities whose text changed between two runs, with the reason, and entities added or removed.

    Example: `laserbatch runs diff 2025-03-01-1a2b3c4d 2025-03-02-1a2b3c4d --limit 5`
    """
    from laserbatch.jobs.commands.diff_runs import diff_side

    opened = open_workspace(config, workspace)
    new = opened.chosen_run(after)
    before = before or new.load_manifest().origin.previous_run_id
    if before is None:
        raise WorkspaceError(f"run {new.run_id} was not built on another run; name the run to compare it with")
    old = opened.existing_run(before)
    for run in (old, new):
        run.require_whole(compare_bytes=True)
    sides = {side: diff_side(old, new, side, limit) for side in SIDES}
    settings = changed_settings(old.load_manifest().origin.settings, new.load_manifest().origin.settings)
    if as_json:
        payload = {f"{side}s": asdict(diff) for side, diff in sides.items()}
        return summary({"before": old.run_id, "after": new.run_id, "settings": settings, **payload}, as_json=True)
    names, rows = ("unchanged", "regenerated_same", "changed", "added", "removed"), []
    for side, diff in sides.items():
        rows.append({"side": side} | {name.replace("_", " "): count(getattr(diff, f"num_{name}")) for name in names})
    print_table(Table(f"From {old.run_id} to {new.run_id}", rows, ("side",)))
    for key, (then, now) in settings.items():
        say(f"setting {key}: {then} -> {now}")
    for side, diff in sides.items():
        for reason, number in diff.reasons.items():
            say(f"{counted(number, f'{side} text')} changed: {reason}")
        for kind in ("changed", "added", "removed"):
            for entity in getattr(diff, kind):
                say(f"{side} {entity.entity_id} {kind}: {entity.reason}")
                if texts and kind == "changed":
                    say(f"  - {entity.before}\n  + {entity.after}")


@app.command()
def publish(
    run: str = typer.Argument(..., help="A finished run that `laserbatch runs list` shows."),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    as_json: bool = JSON,
) -> None:
    """Publish a run, whatever its date; the next night drafts from its pools.

    Example: `laserbatch runs publish 2025-03-01-1a2b3c4d`
    """
    settings = load_settings(config, {"workspace": workspace})
    opened = Workspace.open(settings.workspace, create=False)
    with opened.lock():
        before = opened.publication.run_id()
        folder = opened.existing_run(run)
        if not (folder.is_finished or folder.is_held):
            raise WorkspaceError(f"run {run} is not finished; `laserbatch nightly --date {folder.date}` finishes it")
        folder.require_whole(compare_bytes=True)
        force_publish(opened, folder.run_id)
        deliver(opened, delivery_uri(opened, settings.deliver_to), force=True)
    summary({"published": folder.run_id, "published_before": before}, as_json)


@app.command()
def rollback(config: Path | None = CONFIG, workspace: Path | None = WORKSPACE, as_json: bool = JSON) -> None:
    """Publish the previously published run again; no later night builds on the run that is rolled back.

    Example: `laserbatch runs rollback`
    """
    settings = load_settings(config, {"workspace": workspace})
    opened = Workspace.open(settings.workspace, create=False)
    with opened.lock():
        rolled_back = opened.publication.run_id()
        if rolled_back is None:
            raise WorkspaceError(f"{opened.root} has no published run, so there is nothing to roll back")
        for run in opened.publication.earlier_runs()[:1]:
            run.require_whole(compare_bytes=True)
        published = opened.publication.roll_back()
        use_pools_of(opened, published)
        deliver(opened, delivery_uri(opened, settings.deliver_to), force=True)
    summary({"published": published, "rolled_back": rolled_back}, as_json)


@app.command()
def gc(
    keep: int = typer.Option(7, min=1, help="Number of the newest finished runs to keep."),
    unfinished: bool = typer.Option(
        False, "--unfinished", help="Also remove unfinished runs that are older than every kept run."
    ),
    experiments: bool = typer.Option(False, "--experiments", help="Also remove all folders of experiments."),
    dry_run: bool = DRY_RUN,
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    as_json: bool = JSON,
) -> None:
    """Remove old runs, except the published and the previously published run, unfinished runs, and runs in use.

    A run is in use if an unfinished run, the published run or the next night is built on it.

    Example: `laserbatch runs gc --keep 14 --dry-run`
    """
    settings = load_settings(config, {"workspace": workspace})
    opened = Workspace.open(settings.workspace, create=False)
    tried = opened.experiments()
    with opened.lock(), ExitStack() as locked:
        for experiment in tried if experiments else ():
            locked.enter_context(hold_lock(experiment))
        bytes_tried = sum(map(size_bytes, tried))
        retained = kept_runs(opened, keep, unfinished)
        old = [run for run in opened.runs() if run.run_id not in retained]
        swept = [opened.root / name for name in ("runs", EXPERIMENTS)[: 1 + experiments]]
        remains = [path for folder in swept for path in leftovers(folder)]
        num_bytes = freed_bytes([*(run.root for run in old), *remains])
        if not dry_run:
            uri = delivery_uri(opened, settings.deliver_to)
            if uri and old:
                deliver(opened, uri)
                remove_delivered(opened, uri, [run.run_id for run in old])
            for folder in [*(run.root for run in old), *(tried if experiments else ())]:
                remove_folder(folder)
            for folder in swept:
                remove_leftovers(folder)
    removed, names = [run.run_id for run in old], [experiment.name for experiment in tried]
    if as_json:
        payload = {
            "removed": removed,
            "num_leftovers": len(remains),
            "num_bytes": num_bytes,
            "experiments": names,
            "removed_experiments": names if experiments else [],
            "bytes_tried": bytes_tried,
            "kept": retained,
        }
        return summary(payload | {"dry_run": dry_run}, as_json=True)
    verb = "would remove" if dry_run else "removed"
    say(f"{verb} {counted(len(old), 'run')} ({num_bytes / 1e6:,.1f} MB){': ' if old else ''}{', '.join(removed)}")
    if tried:
        size = f"{counted(len(tried), 'experiment')} ({bytes_tried / 1e6:,.1f} MB): {', '.join(names)}"
        say(f"{verb} {size}" if experiments else f"kept {size}; --experiments removes them")
    for run_id, reason in retained.items():
        say(f"kept {run_id}: {reason}")


def kept_runs(workspace: Workspace, keep: int, also_unfinished: bool = False) -> dict[str, str]:
    """The ids of the runs that `gc` keeps, oldest first, each with the reason.

    These are the `keep` newest finished runs, rolled back or not; the published run and the one before it; the runs
    that the next night of their configurations may build on; unfinished runs, with `also_unfinished` only those newer
    than the oldest kept run; and the runs that an unfinished run or the published run was built on.
    """
    runs = {run.run_id: run for run in workspace.runs()}
    finished = [run_id for run_id, run in runs.items() if run.is_finished or run.is_held]
    reasons = {run_id: f"among the newest {keep}" for run_id in finished[-keep:]}
    not_built_on = workspace.publication.not_built_on()
    usable = [run_id for run_id in finished if runs[run_id].is_finished and run_id not in not_built_on]
    newest = [run_id for run_id in usable if runs[run_id].date == runs[usable[-1]].date]  # its settings decide which
    recent = {runs[run_id].settings_hash for run_id in reasons}
    last = {runs[run_id].settings_hash: run_id for run_id in usable}
    newest += [run_id for settings, run_id in last.items() if settings in recent]
    reasons |= dict.fromkeys(newest, "the next night builds on it")
    for run in workspace.publication.earlier_runs()[:1]:
        reasons[run.run_id] = "a rollback publishes it"
    oldest = min(reasons, default="")
    unfinished = [run_id for run_id in runs if run_id not in finished and not (also_unfinished and run_id < oldest)]
    reasons |= dict.fromkeys(unfinished, "not finished")
    published = workspace.publication.run_id()
    reasons |= {published: "published"} if published in runs else {}
    for run_id in {*unfinished, published} & runs.keys():
        built_on = runs[run_id].previous_run_id
        if built_on in runs:
            reasons.setdefault(built_on, f"run {run_id} is built on it")
    return dict(sorted(reasons.items()))


def _described(workspace: Workspace, run: RunFolder) -> dict[str, Any]:
    publication = workspace.publication
    described: dict[str, Any] = {
        "run_id": run.run_id,
        "date": run.date,
        "state": "unfinished",
        "failure": None,
        "published": run.run_id == publication.run_id(),
        "num_bytes": size_bytes(run.root),
    }
    described["rolled_back"] = run.run_id in publication.rolled_back()
    try:
        manifest = run.load_manifest()
    except WorkspaceError as error:
        return described | {"state": "damaged", "failure": str(error)}
    described["failure"] = manifest.failure
    state = "finished" if run.is_finished else "held" if run.is_held else "unfinished"
    described["state"] = "failed" if manifest.status == "failed" else state
    described["prompts"] = {side: asdict(prompt) for side, prompt in manifest.origin.prompts.items()}
    for side, figures in manifest.generation.sides.items():
        described[f"{side}s"] = {f"num_{name}": getattr(figures, f"num_{name}") for name in ("entities", *COUNTED)}
    return described


def _row(described: dict[str, Any]) -> dict[str, str]:
    row = {
        "": "*" if described["published"] else "",
        "run": described["run_id"],
        "state": "rolled back" if described["rolled_back"] else described["state"],
        "framework": ", ".join(dict.fromkeys(prompt["framework"] for prompt in described.get("prompts", {}).values())),
    }
    for side in SIDES:
        figures = described.get(f"{side}s", {})
        row[f"{side}s"] = " / ".join(count(figures[f"num_{name}"]) for name in COUNTED if figures)
    return row | {"MB": f"{described['num_bytes'] / 1e6:,.1f}"}
