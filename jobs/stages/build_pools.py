"""Builds pools for the next night from a run's knowledge: fits routers, builds indexes, publishes one version.

All texts of the run go in, carried-over ones too, so a version has the newest text of every entity. Texts that the
current version has already are merged, not sorted again; the resulting files are the same. Only tables as of the run's
date are read.

Last night's routers are reused if little has changed, and all its files if nothing has. A reused router knows the
entities that it was fitted on; later entities get the groups of their attributes.

If there are many texts, a task of the night's Ray cluster builds the pools and so uses the memory of a worker's
machine. The task reads the run and the tables from their files, and compares the tables with those of the night.
"""

import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from laserbatch.jobs.console import say
from laserbatch.jobs.events import lines_said
from laserbatch.jobs.formatting import counted
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages.inputs import require_same_tables
from laserbatch.jobs.stages.night import Night
from laserbatch.jobs.stages.pool_texts import calibrate_side, read_run_texts
from laserbatch.pipeline.errors import ClusterFailed, WorkspaceError
from laserbatch.pipeline.knowledge.templates import PromptTemplate
from laserbatch.pipeline.planning.planner import side_routes
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.atomic import link_file, read_json, write_json
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.figures import PoolBuilt
from laserbatch.pipeline.storage.manifest import RunManifest
from laserbatch.pipeline.storage.parquet import parquet_files
from laserbatch.pipeline.storage.uris import is_uri
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.schema import TABLE_NAMES
from laserbatch.retrieval_pools.errors import LaserbatchError, PoolError
from laserbatch.retrieval_pools.ids import rows_among
from laserbatch.retrieval_pools.index.build import build_pool
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.index.store import GcResult, PoolStore
from laserbatch.retrieval_pools.routing.embeddings import id_column
from laserbatch.retrieval_pools.routing.router import Router, fit_routers
from laserbatch.retrieval_pools.settings import RoutingSettings

if TYPE_CHECKING:
    from laserbatch.pipeline.distributed.cluster import WorkerLayout

SCRATCH_NAME = "scratch"
FIT_NAME = "fit.json"
MAX_SHARE_DRIFTED = 0.05  # share of the rows that routers were fitted on, and of the entities with groups
MIN_TEXTS_OF_TASK = 200_000  # with fewer texts, building here takes less time than a task takes to read the tables


def build_pools(night: Night, make_current: bool = True, anew: bool = False) -> dict[Side, PoolBuilt]:
    """Build and publish the pools of a run, and return them by side. `prepare_pools` describes the arguments."""
    return prepare_pools(night, make_current, anew)()


def prepare_pools(
    night: Night,
    make_current: bool = True,
    anew: bool = False,
    start_cluster: "Callable[[], WorkerLayout] | None" = None,
) -> Callable[[], dict[Side, PoolBuilt]]:
    """Return a function that builds, publishes and returns a run's pools; the next run uses them if `make_current`.

    The routers of the version that the run drafted from are reused if `reused_routers` returns them, and its files if
    nothing at all has changed; neither with `anew`. Routers are fitted here, in the calling thread: their last bits
    depend on the number of threads of libraries, which other code may limit while another thread builds the pools.

    With many texts, `start_cluster` is called and a task of that cluster begins to build the pools at once. If it is
    None, this process builds them.
    """
    drafted_from = None if anew else night.manifest.generation.pools.version
    if drafted_from is not None and (before := unchanged_pools(night, drafted_from)):
        return partial(_link_pools, night, drafted_from, before, make_current)
    num_texts = sum(figures.num_entities for figures in night.manifest.generation.sides.values())
    is_fetched = is_uri(night.settings.tables.required_path)  # to this machine alone
    if start_cluster is not None and num_texts >= MIN_TEXTS_OF_TASK and not is_fetched:
        return _built_by_task(night, make_current, start_cluster())
    fit = describe_fit(night)
    reused = None if drafted_from is None else reused_routers(night, drafted_from, fit)
    if reused is None:
        tables, settings = night.tables, night.settings
        routing = RoutingSettings.of(settings.routing)
        all_tables = tables.users, tables.items, tables.interactions
        routers = fit_routers(*all_tables, routing, settings.seed, tables.scratch.folder)
    else:
        routers, fit = reused
    return partial(_build_pools, night, routers, fit, make_current)


def _built_by_task(night: Night, make_current: bool, layout: "WorkerLayout") -> Callable[[], dict[Side, PoolBuilt]]:
    """Start a task that builds a run's pools; return a function that waits for it and prints the lines it printed.

    If the task's machine does not see the run's files, or the tables have changed, this process builds the pools. If
    the cluster has room for only one task, wait for it here: other tasks would wait for it without a message.
    """
    from laserbatch.pipeline.distributed.tasks import result_of, start_task, wait_for

    tables = night.settings.tables.model_copy(update={"path": Path(night.settings.tables.required_path).resolve()})
    settings = night.settings.model_copy(update={"workspace": night.workspace.root.resolve(), "tables": tables})
    templates = {side: night.template(side) for side in SIDES}
    files = [file for side in SIDES for file in parquet_files(night.run.knowledge_folder(side).resolve())]
    task = start_task(layout, 0, _build_in_task, settings, night.manifest, templates, files, make_current)
    if layout.num_workers == 1:
        wait_for(task)

    def built() -> dict[Side, PoolBuilt]:
        try:
            pools, lines = result_of(task)
        except ClusterFailed as error:
            raise ClusterFailed(f"building pools: {error}; give the same command again to continue") from None
        except LaserbatchError as error:
            say(f"this process builds the pools, because a task could not: {error}")
            return build_pools(night, make_current)
        for line in lines:
            say(line)
        return pools

    return built


def _build_in_task(
    settings: Settings,
    manifest: RunManifest,
    templates: Mapping[Side, PromptTemplate],
    files: Sequence[Path],
    make_current: bool,
) -> tuple[dict[Side, PoolBuilt], list[str]]:
    """Build the pools in a task; return them and the lines that were printed meanwhile.

    Raises TableError if the tables changed since the night read them, ConfigError if a file of `files` is not visible.
    """
    from laserbatch.pipeline.distributed.tasks import require_visible

    require_visible(files)
    workspace = Workspace(settings.workspace)
    night = Night(settings, workspace, manifest.date, workspace.run(manifest.run_id), manifest, templates=templates)
    require_same_tables(night.tables, manifest.origin.inputs)
    with lines_said() as lines:
        return build_pools(night, make_current), lines


def describe_fit(night: Night) -> dict[str, Any]:
    """Describe the inputs of a router fit: numbers of rows, which may drift, and values that must not change."""
    tables, inputs = night.tables, night.manifest.origin.inputs
    return {
        "num_rows": {name: getattr(tables, name).num_rows for name in TABLE_NAMES},
        "routing": RoutingSettings.of(night.settings.routing).model_dump(mode="json"),
        "seed": night.settings.seed,
        "columns": {side: str(tables.entities(side).schema.remove_metadata()) for side in SIDES},
        "embeddings": {key: facts["sha256"] for key, facts in inputs.items() if key not in TABLE_NAMES},
    }


def reused_routers(night: Night, version: str, now: dict[str, Any]) -> tuple[dict[str, Router], dict[str, Any]] | None:
    """The routers of a version and the inputs of their fit; None if routers must be fitted again.

    This is so if settings, columns or embeddings differ, if the number of rows of a table changed by more than
    `MAX_SHARE_DRIFTED` since the fit, or if more than that share of the entities with a collaborative group is gone.
    """
    try:
        folder = night.pools.folder(version) / "router"
        fit = read_json(folder / FIT_NAME)
        routers = {side: Router.load(folder / side) for side in SIDES}
    except (WorkspaceError, PoolError, OSError):
        return None
    then = fit["num_rows"]
    if {**fit, "num_rows": None} != {**now, "num_rows": None} or then.keys() != now["num_rows"].keys():
        return None
    is_near = all(abs(now["num_rows"][name] - count) <= MAX_SHARE_DRIFTED * count for name, count in then.items())
    is_near = is_near and all(_knows(routers[side], night.tables.entities(side)) for side in SIDES)
    return (routers, fit) if is_near else None


def _knows(router: Router, entities: pa.Table) -> bool:
    fitted_ids, ids = router.collaborative.ids, id_column(entities, f"{router.side}_id", "entities")
    return not len(fitted_ids) or (rows_among(fitted_ids, ids) >= 0).mean() >= 1 - MAX_SHARE_DRIFTED


def unchanged_pools(night: Night, version: str) -> dict[Side, PoolBuilt]:
    """The pools of a version if tonight's pools would have the same files; empty if they may differ.

    The files are the same if the version belongs to the run before, settings and tables are the same, and tonight
    carries over all of that run's texts.
    """
    previous = night.previous
    if previous is None or previous.run_id != version or previous.settings_hash != night.run.settings_hash:
        return {}
    if (before := unless_damaged(previous.load_manifest)) is None:
        return {}
    inputs, now = (
        {name: facts.get("known_sha256") for name, facts in manifest.origin.inputs.items()}
        for manifest in (before, night.manifest)
    )
    is_same = inputs == now and now.keys() == set(TABLE_NAMES) and None not in now.values()
    for side in SIDES:
        then, tonight = before.generation.sides.get(side), night.manifest.generation.sides.get(side)
        if then is None or tonight is None or tonight.num_generated:
            return {}
        is_same &= then.num_entities == tonight.num_entities
    return before.pools_built if is_same else {}


def _link_pools(
    night: Night, drafted_from: str, before: dict[Side, PoolBuilt], make_current: bool
) -> dict[Side, PoolBuilt]:
    start_s = time.perf_counter()
    with night.pools.publish(night.run.run_id, make_current) as folder:
        drafted = night.pools.folder(drafted_from)
        for file in sorted(path for path in drafted.rglob("*") if path.is_file()):
            link_file(file, folder / file.relative_to(drafted))
    same = {"version": night.run.run_id, "incremental": True, "num_texts_changed": 0}
    return {side: replace(pool, **same, build_s=time.perf_counter() - start_s) for side, pool in before.items()}


def _build_pools(
    night: Night, routers: dict[str, Router], fit: dict[str, Any], make_current: bool
) -> dict[Side, PoolBuilt]:
    built: dict[Side, PoolBuilt] = {}
    version = night.run.run_id
    with night.pools.publish(version, make_current) as folder:
        (folder / "router").mkdir()
        write_json(fit, folder / "router" / FIT_NAME)
        for side in SIDES:
            routers[side].save(folder / "router" / side)
            scratch = folder / SCRATCH_NAME
            scratch.mkdir()
            if (of_side := _build(night, side, routers[side], folder / side, scratch)) is None:
                say(f"no {side} pool is built, because the run has no {side} texts of its model's tokenizer")
            else:
                built[side] = of_side
            shutil.rmtree(scratch)  # NFS would refuse to if any of its files were still mapped
    return built


def collect_pools(store: PoolStore, keep: int, in_use: Collection[str], dry_run: bool = False) -> GcResult:
    """Remove the pools that `PoolStore.collect` selects, under the workspace's lock; with `dry_run` only print them."""
    collected = store.collect(keep, in_use, dry_run)
    parts = [f"pools {', '.join(collected.versions)}"] * bool(collected.versions)
    parts += [f"{counted(collected.num_leftovers, 'leftover')} of dead processes"] * bool(collected.num_leftovers)
    if parts:
        verb = "would remove" if dry_run else "removed"
        say(f"{verb} {' and '.join(parts)} ({collected.num_bytes / 1e6:,.1f} MB)")
    return collected


def _build(night: Night, side: Side, router: Router, folder: Path, scratch: Path) -> PoolBuilt | None:
    """Build the pool of a side; None if it has no texts."""
    start_s = time.perf_counter()
    if (run_texts := read_run_texts(night, side, scratch)) is None:
        return None
    previous = _previous_pool(night, side)
    routes = side_routes(router, night.tables, side)
    calibration = calibrate_side(night, side, run_texts, routes)
    pool = build_pool(
        run_texts.pool_texts(night.tables, side, routes),
        folder,
        side=side,
        tokenizer_hash=night.tokenizer_hash,
        model_id=run_texts.model_id,
        settings=night.settings.pools,
        previous=previous,
        calibration=calibration,
    )
    return PoolBuilt(
        version=night.run.run_id,
        num_texts=pool.manifest.num_texts,
        num_tokens=pool.manifest.num_tokens,
        groups=pool.manifest.groups,
        incremental=previous is not None,
        num_texts_changed=pool.num_sorted or 0,
        build_s=time.perf_counter() - start_s,
        is_calibrated=pool.manifest.calibration is not None,
    )


def _previous_pool(night: Night, side: Side) -> Pool | None:
    """The current version's pool if tonight's pool can be merged from it, which only saves time; otherwise None."""
    try:
        current = night.pools.current_version()
        return None if current is None else night.pools.open(current, side, night.tokenizer_hash, verify=True)
    except PoolError as error:
        say(f"the {side} pool is rebuilt from all texts: {error}")
        return None
