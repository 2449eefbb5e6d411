"""`laserbatch pools ...`: build, show, choose and remove the retrieval pools of a workspace."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from laserbatch.jobs.console import print_table, say, summary
from laserbatch.jobs.formatting import count, counted
from laserbatch.jobs.report.blocks import Table
from laserbatch.jobs.settings import CONFIG, DRY_RUN, JSON, WORKSPACE, load_settings, open_workspace
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.manifest import PoolManifest
from laserbatch.retrieval_pools.index.store import PoolStore, PoolVersion
from laserbatch.retrieval_pools.settings import KEEP_VERSIONS

app = typer.Typer(no_args_is_help=True, add_completion=False)

RUN = typer.Option(None, "--run", show_default="the published run", help="Run whose texts become the pools.")


@app.command()
def rebuild(
    config: Path | None = CONFIG, workspace: Path | None = WORKSPACE, run: str | None = RUN, as_json: bool = JSON
) -> None:
    """Build the pools of a run, or rebuild them; the next run drafts from them if their run is finished.

    Example: `laserbatch pools rebuild --config laserbatch.yaml`
    """
    from laserbatch.jobs.stages.build_pools import build_pools
    from laserbatch.jobs.stages.night import open_run

    settings = load_settings(config, {"workspace": workspace})
    opened = Workspace.open(settings.workspace, create=False)
    with opened.lock():
        night = open_run(settings, run)
        night.run.require_whole(compare_bytes=True)
        name, is_finished = night.run.run_id, night.run.is_finished
        build_pools(night, make_current=is_finished, anew=True)
        if not is_finished:
            say(
                f"run {name} is not finished, so the next run does not draft from its pools; finish it with "
                f"`laserbatch nightly --date {night.date}`, or choose them with `laserbatch pools use {name}`"
            )
    built = _version(PoolStore(opened.pools_folder), name)
    if as_json:
        summary(_data(built), as_json=True)
    else:
        print_table(_versions_table([built]))


@app.command(name="list")
def list_versions(config: Path | None = CONFIG, workspace: Path | None = WORKSPACE, as_json: bool = JSON) -> None:
    """List the versions; the next run drafts from the marked one.

    Example: `laserbatch pools list --config laserbatch.yaml`
    """
    store = _store(config, workspace)
    versions = store.list()
    if as_json:
        summary({"versions": [_data(version) for version in versions]}, as_json=True)
    elif not versions:
        say(f"no pools in {store.root} yet; `laserbatch nightly` builds them, or `laserbatch pools rebuild`")
    else:
        print_table(_versions_table(versions))
        for version in versions:
            if version.problem is not None:
                say(f"{version.version}: {version.problem}")
    try:
        store.current_version()
    except PoolError as error:
        say(str(error))


@app.command()
def show(
    version: str | None = typer.Argument(
        None, show_default="the current version", help="A version that `laserbatch pools list` shows."
    ),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    verify: bool = typer.Option(False, help="Compare every file with its checksum."),
    as_json: bool = JSON,
) -> None:
    """Show a version: its pools and their settings; with --json their groups too.

    Example: `laserbatch pools show --config laserbatch.yaml --verify`
    """
    store = _store(config, workspace)
    chosen = _version(store, version)
    if verify:
        store.verify(chosen.version)
    if chosen.problem is not None:
        raise PoolError(chosen.problem)
    if as_json:
        summary(_data(chosen), as_json=True)
        return
    calibrations = (f"{side}: {_calibration(manifest)}" for side, manifest in chosen.pools.items())
    print_table(_versions_table([chosen], "\n".join(calibrations)))
    if verify:
        say("every file has the checksum that its manifest says")


@app.command()
def use(
    version: str = typer.Argument(..., help="A version that `laserbatch pools list` shows."),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    as_json: bool = JSON,
) -> None:
    """Make the next run draft from a chosen version; a run that is under way does not change.

    Example: `laserbatch pools use 2025-03-01-1a2b3c4d`
    """
    opened = open_workspace(config, workspace)
    with opened.lock():
        PoolStore(opened.pools_folder).use(version)
    summary({"current": version}, as_json)


@app.command()
def gc(
    keep: int = typer.Option(
        KEEP_VERSIONS, min=1, help="Number of the newest versions to keep, the current one included."
    ),
    dry_run: bool = DRY_RUN,
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    as_json: bool = JSON,
) -> None:
    """Remove old versions, except those that unfinished runs draft from, and leftovers of builds that were killed.

    Example: `laserbatch pools gc --keep 3 --dry-run`
    """
    from laserbatch.jobs.stages.build_pools import collect_pools
    from laserbatch.jobs.stages.night import pools_in_use

    opened = open_workspace(config, workspace)
    with opened.lock():
        collected = collect_pools(PoolStore(opened.pools_folder), keep, pools_in_use(opened), dry_run)
    if as_json:
        summary({**asdict(collected), "dry_run": dry_run}, as_json=True)
    elif not collected.versions and not collected.num_leftovers:
        say("nothing to remove")


def _version(store: PoolStore, version: str | None) -> PoolVersion:
    name = store.current_version() if version is None else version
    if name is None:
        raise PoolError(f"no pools in {store.root} yet; run `laserbatch nightly` or `laserbatch pools rebuild`")
    store.folder(name)  # raises if the version does not exist
    return next(entry for entry in store.list() if entry.version == name)


def _store(config: Path | None, workspace: Path | None) -> PoolStore:
    return PoolStore(open_workspace(config, workspace).pools_folder)


def _versions_table(versions: list[PoolVersion], caption: str = "* marks the pools of the next run") -> Table:
    rows = []
    for version in versions:
        row = {"": "*" if version.is_current else "", "version": version.version}
        sides = [_row(side, manifest) for side, manifest in version.pools.items()] or [_row("no pool", None)]
        rows += [row | side for side in (sides if version.problem is None else [_row("damaged", None)])]
    return Table("Pools", rows, ("", "version", "side", "scope", "model"), caption)


def _calibration(manifest: PoolManifest) -> str:
    """The number of texts that a pool's acceptance estimates come from, in words."""
    if (calibration := manifest.calibration) is None:
        return "not calibrated"
    return f"calibrated on {counted(calibration.num_texts, 'text')}"


def _row(side: str, manifest: PoolManifest | None) -> dict[str, str]:
    row = {"side": side} | dict.fromkeys(("texts", "tokens", "groups", "MB", "min support", "scope", "model"), "")
    if manifest is not None:
        counts = {"texts": manifest.num_texts, "tokens": manifest.num_tokens, "groups": len(manifest.groups)}
        row |= {name: count(number) for name, number in counts.items()}
        row |= {"MB": f"{manifest.size_bytes / 1e6:,.1f}", "min support": count(manifest.settings.min_support)}
        row |= {"scope": manifest.settings.scope, "model": manifest.model_id}
    return row


def _data(version: PoolVersion) -> dict[str, Any]:
    return {
        "version": version.version,
        "folder": str(version.folder),
        "is_current": version.is_current,
        "problem": version.problem,
        "pools": {side: manifest.model_dump(mode="json") for side, manifest in version.pools.items()},
    }
