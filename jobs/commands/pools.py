"""`laserbatch pools ...`: build, list, choose and remove the retrieval pools of a workspace."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from laserbatch.jobs.console import print_table, say, summary
from laserbatch.jobs.formatting import count
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
    built = next(entry for entry in PoolStore(opened.pools_folder).list() if entry.version == name)
    if as_json:
        summary(_data(built), as_json=True)
    else:
        print_table(_versions_table([built]))


@app.command(name="list")
def list_versions(config: Path | None = CONFIG, workspace: Path | None = WORKSPACE, as_json: bool = JSON) -> None:
    """List the versions; the marked one is the current one. With --json their settings and groups too.

    Example: `laserbatch pools list --config laserbatch.yaml`
    """
    store = PoolStore(open_workspace(config, workspace).pools_folder)
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


def _versions_table(versions: list[PoolVersion]) -> Table:
    rows = []
    for version in versions:
        row = {"": "*" if version.is_current else "", "version": version.version}
        sides = [_row(side, manifest) for side, manifest in version.pools.items()] or [_row("no pool", None)]
        if version.problem is not None:
            sides = [_row("other format" if version.is_other_format else "damaged", None)]
        rows += [row | side for side in sides]
    return Table("Pools", rows, ("", "version", "side", "scope", "model"), "* marks the current pools")


def _row(side: str, manifest: PoolManifest | None) -> dict[str, str]:
    row = {"side": side} | dict.fromkeys(("texts", "tokens", "groups", "MB", "min support", "scope", "model"), "")
    if manifest is not None:
        counts = {"texts": manifest.num_texts, "tokens": manifest.num_tokens, "groups": len(manifest.groups)}
        row |= {name: count(number) for name, number in counts.items()}
        row |= {"MB": f"{manifest.size_bytes / 1e6:,.1f}", "min support": count(manifest.settings.min_support)}
        row |= {"scope": manifest.settings.scope, "model": manifest.model_id}
    return row


def _data(version: PoolVersion) -> dict[str, Any]:
    pools = {side: manifest.model_dump(mode="json") for side, manifest in version.pools.items()}
    return {"version": version.version, "folder": str(version.folder), "is_current": version.is_current,
            "problem": version.problem, "pools": pools}  # fmt: skip
