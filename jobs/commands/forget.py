"""`laserbatch forget`: remove users or items from everything that a workspace holds, and write a receipt.

The receipt is written before anything is removed, and lists what will be removed. A killed command can thus go on where
it stopped, with a complete receipt. The receipt holds neither texts nor ids: ids are written as digests.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pyarrow.compute as pc
import typer

from laserbatch.jobs.commands.id_file import read_ids
from laserbatch.jobs.console import ExitCode, say, summary
from laserbatch.jobs.events import read_events
from laserbatch.jobs.formatting import counted
from laserbatch.jobs.receipt import Receipt, digest, opened_receipt, unfinished
from laserbatch.jobs.settings import CONFIG, DRY_RUN, JSON, WORKSPACE, Settings, load_settings
from laserbatch.jobs.stages.publishing import delivery_uri, draw_report, forget_delivered
from laserbatch.pipeline.errors import LaserbatchError, WorkspaceError
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.atomic import remove_folder, remove_leftovers, write_text
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.delivery import deliveries
from laserbatch.pipeline.storage.forgetting import RECEIPTS, Ids, forget_in_run, is_of, leave_clusters, rows_of
from laserbatch.pipeline.storage.lock import hold_lock
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.scratch import remove_dead_scratch
from laserbatch.pipeline.storage.workspace import EXPERIMENTS, Workspace
from laserbatch.pipeline.tables.part_columns import open_parts
from laserbatch.pipeline.tables.parts import tables_folder
from laserbatch.pipeline.tables.schema import TABLE_NAMES
from laserbatch.retrieval_pools.index.store import PoolStore


def forget(
    user: list[str] = typer.Option([], "--user", help="Id of a user; may be given several times."),
    item: list[str] = typer.Option([], "--item", help="Id of an item; may be given several times."),
    ids: Path | None = typer.Option(
        None, "--ids", help="A file of users' ids: one per line, or the column user_id of a CSV."
    ),
    dry_run: bool = DRY_RUN,
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    as_json: bool = JSON,
) -> None:
    """Remove users or items from every run and pool of a workspace, and write a receipt of what was removed.

    Their texts, vectors, plans, quarantined rows and report samples are removed from every run. Pools that held them
    are rebuilt or dropped; unfinished runs and experiments that hold them are removed. The same command continues if
    it was killed. Remove the ids from your input tables first, or the next night writes about them again. The exit
    code is 4 if an id is neither in the workspace, nor in the input tables, nor in an earlier receipt.

    Example: `laserbatch forget --config laserbatch.yaml --user u123 --user u456`
    """
    settings = load_settings(config, {"workspace": workspace})
    users = {*user, *(read_ids(ids, say) if ids is not None else ())}
    requested: Ids = {"user": frozenset(users), "item": frozenset(item)}
    if not any(requested.values()) or "" in users | requested["item"]:
        raise typer.BadParameter("give --user ID, --item ID or --ids FILE with at least one id; none is empty")
    if not_text := [key for key in (*user, *item) if key != key.encode(errors="replace").decode()]:
        raise typer.BadParameter(
            f"{not_text[0]!r} is not UTF-8, but ids are; check the terminal's encoding, or give --ids"
        )
    opened = Workspace.open(settings.workspace, create=False)
    with opened.lock(), ExitStack() as others:
        for other in (*opened.experiments(), *(extension.root for extension in opened.within())):
            others.enter_context(hold_lock(other))
        receipt = opened_receipt(opened, requested)
        _scan(opened, requested, receipt)
        receipt.not_reached = _places_not_reached(opened, settings, receipt.not_reached)
        in_tables = _in_tables(settings, requested)
        unknown: dict[Side, list[str]] = {
            side: [key for key in sorted(keys) if not receipt.ids[side][digest(side, key)]]
            for side, keys in requested.items()
        }
        nowhere = _nowhere(opened, unknown, in_tables or {})
        receipt.nowhere = {side: [digest(side, key) for key in keys] for side, keys in nowhere.items() if keys}
        if not dry_run:
            receipt.save()
            _remove(opened, settings, requested, receipt)
    still_in_tables: dict[str, list[str]] = {}
    for of_side in (in_tables or {}).values():
        for table, keys in of_side.items():
            still_in_tables[table] = sorted({*still_in_tables.get(table, []), *keys})
    if as_json:
        payload = receipt.as_json() | {"receipt": str(receipt.path), "dry_run": dry_run, "nowhere": nowhere}
        payload |= {"unknown": unknown, "still_in_tables": None if in_tables is None else still_in_tables}
        summary(payload, as_json=True)
    else:
        _print_removed(receipt, dry_run)
    for side, keys in unknown.items():
        if keys:
            say(f"{counted(len(keys), side)} not found in {opened.root}: {_first(keys)}")
    if in_tables is None:
        say("the input tables were not read: if they still hold these ids, the next night writes about them again")
    _warn(requested, still_in_tables, receipt.not_reached, nowhere)
    if any(nowhere.values()):
        raise typer.Exit(ExitCode.RUN_FAILED)


def _print_removed(receipt: Receipt, dry_run: bool) -> None:
    removed: dict[str, int | str] = {f"rows of {run}": sum(files.values()) for run, files in receipt.rows.items()}
    removed |= dict.fromkeys(receipt.removed_runs, "unfinished; the night's command starts it anew")
    experiments = [f"experiment {name}" for name in receipt.removed_experiments]
    removed |= dict.fromkeys(experiments, "all of it; its command, given again, takes a new sample")
    outcome = {
        "would be removed" if dry_run else "removed": removed,
        "pools": receipt.pools,
        "delivered": receipt.delivered,
        "receipt": None if dry_run else str(receipt.path),
    }
    summary(outcome, as_json=False)


def _scan(workspace: Workspace, requested: Ids, receipt: Receipt) -> None:
    """Add to the receipt every run, experiment and pool that holds the ids now."""

    def rows_in(folder: Path) -> dict[str, int]:
        num_rows, seen = rows_of(folder, requested)
        for side in SIDES:
            receipt.ids[side] |= {digest(side, key): True for key in seen[side]}
        return num_rows

    holders = set()
    for name, run in _runs(workspace).items():
        if not (num_rows := rows_in(run.root)):
            continue
        holders.add(name)
        if run.is_finished or run.is_held:
            receipt.rows[name] = receipt.rows.get(name, {}) | num_rows
        elif name not in receipt.removed_runs:
            receipt.removed_runs.append(name)
    for experiment in workspace.experiments():
        if rows_in(experiment) and experiment.name not in receipt.removed_experiments:
            receipt.removed_experiments.append(experiment.name)
    store = PoolStore(workspace.pools_folder)
    runs = {run.run_id for run in workspace.runs()}
    # Pools that a killed command for other ids had yet to remove; their runs no longer hold those ids.
    pools_left = [other.pools.items() for other in unfinished(workspace)]
    left = {version for pools in pools_left for version, what in pools if what in ("rebuild", "drop")}
    for entry in store.list():
        in_router = rows_of(entry.folder, requested)[0]
        if entry.version in holders | left or entry.version not in runs or in_router:
            is_rebuilt = entry.is_current and entry.version in runs and entry.version not in receipt.removed_runs
            receipt.pools[entry.version] = "rebuild" if is_rebuilt else "drop"


def _places_not_reached(workspace: Workspace, settings: Settings, recorded: Sequence[str]) -> list[str]:
    """The places to which runs, also of extensions and experiments, were delivered and that are not cleaned now.

    Call it before anything is removed: only files of an experiment, or events of a run, name their places. `recorded`
    are the places in the receipt of a killed command.
    """
    reached, places = [workspace, *workspace.within()], {*recorded}
    variants = [Workspace(path.parent) for path in workspace.root.glob(f"{EXPERIMENTS}/*/*/workspace.json")]
    for other in (*reached, *variants):
        places |= deliveries(other.root).keys()
        for run in other.runs():  # earlier versions recorded places only as events
            places |= {event["to"] for event in read_events(run.events_path) if event["event"] == "delivered"}
    uris = [delivery_uri(other, settings.deliver_to) for other in reached]
    return sorted({place.rstrip("/") for place in places} - {uri.rstrip("/") for uri in uris if uri})


def _runs(workspace: Workspace) -> dict[str, RunFolder]:
    """All runs by name; the name of an extension's run begins with the extension's folder."""
    runs = {run.run_id: run for run in workspace.runs()}
    return runs | {f"{other.root.name}/{run.run_id}": run for other in workspace.within() for run in other.runs()}


def _remove(workspace: Workspace, settings: Settings, requested: Ids, receipt: Receipt) -> None:
    receipt.num_leftovers += remove_leftovers(workspace.root) + remove_dead_scratch(
        on_wait=lambda seconds: say(f"waiting {seconds:.0f} s: only then is it known whose a new temporary folder is")
    )
    runs = _runs(workspace)
    for name in receipt.removed_runs:
        if name in runs:
            remove_folder(runs[name].root)
    for name in receipt.removed_experiments:
        if (folder := workspace.experiment(name)).is_dir():
            remove_folder(folder)
    holders = [runs[name] for name in receipt.rows.keys() & runs.keys()]
    whole = [run for run in reversed(runs.values()) if run.is_finished or run.is_held]
    leave_clusters(whole, holders, requested)
    names_one = _finder(requested)
    for run in runs.values():  # events may name entities without a row in the run
        _forget_in_events(run.events_path, names_one)
    for name, files in receipt.rows.items():
        if (run := runs.get(name)) is None:
            continue
        receipt.num_samples += forget_in_run(run, files, requested)
        try:
            draw_report(run, run.load_manifest())
        except WorkspaceError as error:  # the manifest of another version cannot be drawn
            run.report_path.unlink(missing_ok=True)
            say(f"the report of {name} is removed, because it cannot be drawn again: {error}")
        receipt.save()
    for name, what in receipt.pools.items():
        if what in ("rebuild", "drop"):
            is_rebuilt = what == "rebuild" and _rebuilt(settings, name, requested)
            if not is_rebuilt:
                PoolStore(workspace.pools_folder).drop(name)
            receipt.pools[name] = "rebuilt" if is_rebuilt else "dropped"
            receipt.save()
    receipt.num_leftovers += remove_leftovers(workspace.root)
    if left := rows_of(workspace.root, requested)[0]:
        raise WorkspaceError(f"{workspace.root} still holds rows of the ids to forget: {left}; remove these files")
    for other in (workspace, *workspace.within()):
        receipt.delivered |= forget_delivered(other, delivery_uri(other, settings.deliver_to))
    receipt.is_done = True
    receipt.save()


def _rebuilt(settings: Settings, name: str, requested: Ids) -> bool:
    """Rebuild the pools of a run without some entities; print a message and return False if that fails."""
    from laserbatch.jobs.stages.build_pools import build_pools
    from laserbatch.jobs.stages.night import open_run

    try:
        night = open_run(settings, name)
        tables = {name: getattr(night.tables, name) for name in TABLE_NAMES}
        for side in SIDES:
            for table in (f"{side}s", "interactions"):
                tables[table] = tables[table].filter(pc.invert(is_of(tables[table][f"{side}_id"], requested[side])))
        night.tables = type(night.tables)(**tables)
        build_pools(night, anew=True)  # routers too: they hold ids
    except (LaserbatchError, OSError) as error:
        say(f"the pools {name} cannot be rebuilt and are dropped, so the next night drafts without pools: {error}")
        return False
    return True


def _finder(requested: Ids) -> Callable[[str], bool]:
    """A function that returns whether a text names an id, in a time that does not grow with the number of ids."""
    keys = {form for ids in requested.values() for key in ids for form in (key, repr(key)[1:-1])}
    # Each pattern finds all parts of one length that begin and end where words do; they may overlap.
    parts = [re.compile(rf"(?s)(?<!\w)(?=(.{{{length}}})(?!\w))") for length in {*map(len, keys)}]
    return lambda text: any(not keys.isdisjoint(of_length.findall(text)) for of_length in parts)


def _forget_in_events(path: Path, names_one: Callable[[str], bool]) -> None:
    """Remove the events whose printed line or error names an id; other events hold no ids."""
    lines = path.read_text("utf-8", errors="replace").split("\n") if path.exists() else []
    remaining = [line for line in lines if not names_one(_said_in(line))]
    if remaining != lines:
        write_text("\n".join(remaining), path)


def _said_in(line: str) -> str:
    """The printed line or the error of an event, without JSON's escapes; of an incomplete event, all of it."""
    try:
        event = json.loads(line)
        return f"{event.get('line', '')}\n{event.get('error', '')}"
    except (ValueError, AttributeError):
        return line


def _nowhere(
    workspace: Workspace, unknown: Mapping[Side, list[str]], in_tables: Mapping[Side, Mapping[str, set[str]]]
) -> dict[Side, list[str]]:
    """The unknown ids that are neither in an input table nor listed as removed in a receipt."""
    known = {side: set() for side in SIDES}
    for path in (workspace.root / RECEIPTS).glob("*.json"):
        earlier = unless_damaged(partial(Receipt.load, path))
        for side, ids in earlier.ids.items() if earlier is not None else ():
            known[side] |= {key for key, was_removed in ids.items() if was_removed}
    for side, of_side in in_tables.items():
        known[side] |= {digest(side, key) for keys in of_side.values() for key in keys}
    return {side: [key for key in keys if digest(side, key) not in known[side]] for side, keys in unknown.items()}


def _in_tables(settings: Settings, requested: Ids) -> dict[Side, dict[str, set[str]]] | None:
    """The requested ids in input tables, by side and table; None if the tables are not set or cannot be read."""
    if settings.tables.path is None:
        return None
    remaining: dict[Side, dict[str, set[str]]] = {side: {} for side in SIDES}
    try:
        folder = tables_folder(settings.tables.path)
        for side, keys in requested.items():
            for table in (f"{side}s", "interactions") if keys else ():
                for part in open_parts(folder, table):
                    for rows in part.batches([f"{side}_id"]):
                        ids = rows[f"{side}_id"]
                        if found := ids.filter(is_of(ids, keys)).unique().to_pylist():
                            remaining[side].setdefault(table, set()).update(map(str, found))
    except LaserbatchError as error:
        say(f"the input tables could not be read: {error}")
        return None
    return remaining


def _warn(
    requested: Ids,
    still_in_tables: Mapping[str, list[str]],
    not_reached: Sequence[str],
    nowhere: Mapping[Side, list[str]],
) -> None:
    for table, keys in still_in_tables.items():
        say(
            f"WARNING: {counted(len(keys), 'id')} still in the input table {table}: {_first(keys)}. The next "
            "night writes about them again: remove their rows from users, items and interactions, then give this "
            "command again"
        )
    if requested["item"]:
        say(
            "the titles of these items stay in plans, samples and texts of users who have them in their history, until "
            "these users' texts are written again"
        )
    say("temporary folders of killed processes are removed on this machine only")
    say(
        "copies elsewhere (exports, backups, snapshots, object versions in a bucket, trained models, files of "
        "batches at a provider) are not removed"
    )
    say("errors that name ids may also be in logs of schedulers and in notifications; they are not removed there")
    for place in not_reached:
        say(
            f"WARNING: runs were also delivered to {place}; deliver_to does not name it, so nothing is removed there. "
            "Delete it, or give this command again with deliver_to set to it"
        )
    for side, keys in nowhere.items():
        if keys:
            say(
                f"WARNING: {counted(len(keys), f'{side} id')} found nowhere, neither here nor in the input tables: "
                f"{_first(keys)}. Nothing was removed for them, and the receipt says so. Check how the tables write "
                f"the ids; give an id that has blanks or quotes at its ends with --{side}"
            )


def _first(keys: Sequence[str]) -> str:
    """The first ids, and how many there are beside them."""
    more = f" and {len(keys) - 5:,} more" if len(keys) > 5 else ""
    return ", ".join(map(repr, keys[:5])) + more
