"""`laserbatch pools ...`: build, look into, query, choose and remove the retrieval pools of a workspace.

What is drawn is in `pools_view.py`; how pools are built from a run in `build_pools.py`; simulating is `simulate.py`.
"""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import typer

from laserbatch.jobs.commands.pools_view import (
    calibrated_on,
    calibration_line,
    draft_nodes,
    draft_tree,
    groups_table,
    version_data,
    versions_table,
)
from laserbatch.jobs.console import LazyCommand, lazy_app, say, stdout, summary
from laserbatch.jobs.settings import CONFIG, JSON, WORKSPACE, Settings, load_settings
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.store import PoolStore, PoolVersion

NUM_GROUPS = 20  # shown a side, the largest first
LAZY_COMMANDS = {
    "simulate": LazyCommand(
        "simulate:simulate",
        "Predict from a night's texts what drafting will gain: budgets, groups, pool sizes. Runs no model.",
    ),
}

app = lazy_app(LAZY_COMMANDS, add_completion=False, help="Build, list, inspect, query and simulate retrieval pools.")

RUN = typer.Option(None, "--run", help="Run whose texts become the pools; without it the published one.")


@app.command()
def rebuild(
    config: Path | None = CONFIG, workspace: Path | None = WORKSPACE, run: str | None = RUN, as_json: bool = JSON
) -> None:
    """Build the pools of a run, again if they are there; the next run drafts from them if that run is finished.

    Example: `laserbatch pools rebuild --config laserbatch.yaml`
    """
    from laserbatch.jobs.stages.build_pools import build_pools
    from laserbatch.jobs.stages.night import open_run

    settings = load_settings(config, {"workspace": workspace})
    with Workspace.open(settings.workspace, create=False).lock():
        night = open_run(settings, run)
        name, is_finished = night.run.run_id, night.run.is_finished
        build_pools(night, make_current=is_finished, anew=True)
        if not is_finished:
            say(
                f"run {name} is not finished, so the next run does not draft from its pools; finish it with "
                f"`laserbatch nightly --date {night.date}`, or choose them with `laserbatch pools use {name}`"
            )
    built = _version(_store(settings), name)
    if as_json:
        summary(version_data(built), as_json=True)
    else:
        stdout.print(versions_table([built]))


@app.command(name="list")
def list_versions(config: Path | None = CONFIG, workspace: Path | None = WORKSPACE, as_json: bool = JSON) -> None:
    """List the versions; the one marked is what the next run opens.

    Example: `laserbatch pools list --config laserbatch.yaml`
    """
    store = _store(load_settings(config, {"workspace": workspace}))
    versions = store.list()
    if as_json:
        summary({"versions": [version_data(version) for version in versions]}, as_json=True)
    elif not versions:
        say(f"no pools in {store.root} yet; `laserbatch nightly` builds them, or `laserbatch pools rebuild`")
    else:
        stdout.print(versions_table(versions))
        for version in versions:
            if version.problem is not None:
                say(f"{version.version}: {version.problem}")


@app.command()
def show(
    version: str | None = typer.Argument(None, help="The version; without it the current one."),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    verify: bool = typer.Option(False, help="Compare every file with its checksum."),
    as_json: bool = JSON,
) -> None:
    """Show a version: its pools, their settings and their groups.

    Example: `laserbatch pools show --config laserbatch.yaml --verify`
    """
    store = _store(load_settings(config, {"workspace": workspace}))
    chosen = _version(store, version)
    if verify:
        store.verify(chosen.version)
    if chosen.problem is not None:
        raise PoolError(chosen.problem)
    if as_json:
        summary(version_data(chosen), as_json=True)
        return
    stdout.print(versions_table([chosen]))
    for side, manifest in chosen.pools.items():
        stdout.print(groups_table(side, manifest, NUM_GROUPS))
        stdout.print(calibration_line(side, manifest))
    if verify:
        say("every file has the checksum that its manifest says")


@app.command()
def query(
    text: str = typer.Argument(..., help="The beginning of a text; an empty one asks how texts begin."),
    side: str = typer.Option("item", help="Whose texts: user or item."),
    group: str | None = typer.Option(None, help="Draft for an entity of this group; without it texts count the same."),
    version: str | None = typer.Option(None, help="The version; without it the current one."),
    max_nodes: int = typer.Option(16, min=1, max=64, help="At most this many tokens are drafted."),
    min_acceptance: float = typer.Option(0.02, min=0, max=1, help="Less likely paths are not drafted."),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    as_json: bool = JSON,
) -> None:
    """Draft what follows a text, from a pool alone, and print the tree with its estimated acceptance.

    Example: `laserbatch pools query "The book is" --side item --max-nodes 12`
    """
    from laserbatch.pipeline.decoding.model.folder import load_tokenizer, tokenizer_hash
    from laserbatch.retrieval_pools.draft import draft

    if side not in ("user", "item"):
        raise typer.BadParameter(f"--side is user or item, not {side!r}")
    settings = load_settings(config, {"workspace": workspace})
    store = _store(settings)
    chosen = _version(store, version)
    pool = store.open(chosen.version, side, tokenizer_hash(settings.model_dir), verify=True)
    if pool is None:
        raise PoolError(f"the pools {chosen.version} have none of the {side} side; give --side")
    if group is not None and group not in pool.manifest.groups:
        names = list(pool.manifest.groups)
        raise PoolError(f"the pool has no group {group!r}; it has {len(names)}: {', '.join(map(repr, names[:5]))}, ...")
    tokenizer = load_tokenizer(settings.model_dir)
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] if text else []
    context = np.array(ids, np.int32)
    found = draft(pool, context, 0, None, group, max_nodes=max_nodes, min_acceptance=min_acceptance,
                  use_prompt=False, use_output=False)  # fmt: skip
    nodes, known = draft_nodes(tokenizer, context, found), pool.manifest.calibration
    if as_json:
        described = {"version": chosen.version, "side": side, "group": group, "text": text}
        counts = {"num_context_tokens": len(context), "num_calibration_texts": 0 if known is None else known.num_texts}
        expected = {"expected_num_accepted": sum(node["acceptance"] for node in nodes)}
        summary(described | counts | expected | {"nodes": nodes}, as_json=True)
    else:
        whose = f"{pool.manifest.num_texts:,} {side} texts of pools {chosen.version}"
        in_group = f", group {group}" if group is not None else ""
        stdout.print(draft_tree(nodes, text, f"{whose}{in_group}, {calibrated_on(pool.manifest)}"))


@app.command()
def use(
    version: str = typer.Argument(..., help="A version that `laserbatch pools list` shows."),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    as_json: bool = JSON,
) -> None:
    """Let the next run draft from an earlier version. A run that is under way keeps its own.

    Example: `laserbatch pools use 2025-03-01-1a2b3c4d`
    """
    settings = load_settings(config, {"workspace": workspace})
    with Workspace.open(settings.workspace, create=False).lock():
        _store(settings).use(version)
    summary({"current": version}, as_json)


@app.command()
def gc(
    keep: int | None = typer.Option(
        None, min=1, help="Newest versions that stay, the current one among them; without it pool_building's."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Remove nothing; say what would be."),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    as_json: bool = JSON,
) -> None:
    """Remove old versions, but none that an unfinished run drafts from, and what dead builders left.

    Example: `laserbatch pools gc --keep 3 --dry-run`
    """
    from laserbatch.jobs.stages.build_pools import collect_pools
    from laserbatch.jobs.stages.night import pools_in_use

    settings = load_settings(config, {"workspace": workspace})
    opened = Workspace.open(settings.workspace, create=False)
    with opened.lock():
        keep = settings.pool_building.keep_versions if keep is None else keep
        collected = collect_pools(_store(settings), keep, pools_in_use(opened), dry_run)
    if as_json:
        summary({**asdict(collected), "dry_run": dry_run}, as_json=True)
    elif not collected.versions and not collected.num_leftovers:
        say("nothing to remove")


def _version(store: PoolStore, version: str | None) -> PoolVersion:
    name = store.current_version() if version is None else version
    if name is None:
        raise PoolError(f"no pools in {store.root} yet; run `laserbatch nightly` or `laserbatch pools rebuild`")
    store.folder(name)  # refuses one that is not there
    return next(known for known in store.list() if known.version == name)


def _store(settings: Settings) -> PoolStore:
    return PoolStore(Workspace.open(settings.workspace, create=False).pools_folder)
