"""The events of a day and the night after it. Everything is drawn from the seed and the day alone."""

import datetime
import errno
import fcntl
import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from soak_models import ENCODERS, MODELS
from soak_oracle import NOBODY_FITS, pool_folder
from soak_world import NUMBER_TYPES, PATH_TYPES, RATING_TYPES, TIME_TYPES, WORD_TYPES, Event

WORDS = ("harbour", "radio", "gulls", "salt", "pier", "night", "signal", "rope", "lamp", "quiet", "tide", "storm")
FIRST_DATE = "2025-03-01"
FEW, MANY = 5, 14  # number of entities of a side
DAY = datetime.timedelta(days=1)


class Stopped:
    """Raises at the n-th `os.replace` of a command: KeyboardInterrupt, or "no space left" if `full`."""

    def __init__(self, stop_at: int, full: bool) -> None:
        self.stop_at, self.num_done, self.happened, self._replace = stop_at, 0, False, os.replace
        self.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if full else KeyboardInterrupt()

    def __enter__(self) -> "Stopped":
        os.replace = self._counted
        return self

    def __exit__(self, *_: object) -> None:
        os.replace = self._replace

    def _counted(self, *arguments, **options) -> None:
        self.num_done += 1
        if self.num_done == self.stop_at:
            self.happened = True
            raise self.error
        self._replace(*arguments, **options)


# ---- the world


def _somebody(year, rng, side: str) -> object:
    return rng.choice([key for key in year.world.rows[side] if key != "later"])


def _a_side(rng) -> str:
    return rng.choice(("user", "item"))


def _row(year, rng, side: str, day: str) -> dict:
    row = {"created_at": day}
    for name, kind in year.world.columns[side].items():
        row[name] = _value(rng, name, kind)
    return row


def _value(rng, name: str, kind: pa.DataType) -> object:
    if name == "title":
        return " ".join(rng.sample(WORDS, 2)).title()
    if kind in PATH_TYPES:
        return ["Radio", rng.choice(("Play", "News"))]
    if name in ("age", "pages") or name.startswith("count"):
        return rng.randint(1, 900)
    return None if rng.random() < 0.1 else rng.choice(WORDS)


def _add(year, rng, day, side):
    keys = year.world.rows[side]
    if len(keys) >= MANY:
        return False
    number = year.next_number = getattr(year, "next_number", 200) + 1
    key = f"i{number}" if side == "item" else number if isinstance(next(iter(keys)), int) else str(number)
    keys[key] = _row(year, rng, side, day)


def new_user(year, rng, day):
    return _add(year, rng, day, "user")


def new_item(year, rng, day):
    return _add(year, rng, day, "item")


def interactions(year, rng, day):
    for _ in range(rng.randint(1, 3)):
        year.num_events = getattr(year, "num_events", 5000) + 1
        user, item = _somebody(year, rng, "user"), _somebody(year, rng, "item")
        year.world.events.append(Event(user, item, day, year.num_events % 80_000, rng.randint(1, 5)))


def changed(year, rng, day):
    side = _a_side(rng)
    row, columns = year.world.rows[side][_somebody(year, rng, side)], year.world.columns[side]
    name = rng.choice([name for name in columns if name != "note"])
    row[name] = _value(rng, name, columns[name])


def deleted(year, rng, day):
    side = _a_side(rng)
    if len(year.world.rows[side]) <= FEW:
        return False
    key = _somebody(year, rng, side)
    if len(year.world.left_behind()) < len(year.world.events) / 4 and rng.random() < 0.5:
        year.gone.append((side, key, year.world.rows[side].pop(key), []))  # the log keeps their events
    else:
        year.gone.append((side, key, *year.world.remove(side, key)))


def returned(year, rng, day):
    if not year.gone:
        return False
    side, key, row, events = year.gone.pop(0)
    if len(year.world.rows[side]) >= MANY or type(key) is not type(_somebody(year, rng, side)):
        return False
    year.world.restore(side, key, row, events)


def renamed(year, rng, day):
    side = _a_side(rng)
    key = _somebody(year, rng, side)
    number = year.next_number = getattr(year, "next_number", 200) + 1
    other = f"i{number}" if side == "item" else type(key)(number)
    row, events = year.world.remove(side, key)
    year.world.restore(side, other, row, [replace(event, **{side: other}) for event in events])


def column_added(year, rng, day):
    side = _a_side(rng)
    if len(year.world.columns[side]) > 5:
        return False
    number = year.next_number = getattr(year, "next_number", 200) + 1
    name, kinds = rng.choice(((f"count_{number}", NUMBER_TYPES), (f"word_{number}", WORD_TYPES)))
    year.world.columns[side][name] = kinds[0]
    for row in year.world.rows[side].values():
        row[name] = _value(rng, name, kinds[0])


def column_dropped(year, rng, day):
    side = _a_side(rng)
    free = [name for name in year.world.columns[side] if name not in ("title", "note")]
    if len(free) < 2:
        return False
    name = rng.choice(free)
    del year.world.columns[side][name]
    for row in year.world.rows[side].values():
        row.pop(name, None)


def column_retyped(year, rng, day):
    side = _a_side(rng)
    columns = year.world.columns[side]
    name = rng.choice(list(columns))
    is_number = name in ("age", "pages") or name.startswith("count")
    columns[name] = rng.choice(PATH_TYPES if columns[name] in PATH_TYPES else NUMBER_TYPES if is_number else WORD_TYPES)


def columns_moved(year, rng, day):
    columns = year.world.columns[_a_side(rng)]
    first = next(iter(columns))
    columns[first] = columns.pop(first)


def times_retyped(year, rng, day):
    year.world.time_type = rng.choice(TIME_TYPES)


def ratings_retyped(year, rng, day):
    year.world.rating_type = rng.choice((*RATING_TYPES, None))


def ids_retyped(year, rng, day):
    world = year.world
    kind = str if isinstance(next(iter(world.rows["user"])), int) else int
    world.rows["user"] = {kind(key): row for key, row in world.rows["user"].items()}
    world.events = [replace(event, user=kind(event.user)) for event in world.events]
    year.gone = [entry for entry in year.gone if entry[0] == "item"]
    year.gone = [(side, key, row, [replace(event, user=kind(event.user)) for event in events])
                 for side, key, row, events in year.gone]  # fmt: skip


def files_split(year, rng, day):
    year.world.num_files = rng.choice((1, 1, 2, 3))


def rows_turned(year, rng, day):
    year.world.is_reversed = not year.world.is_reversed


def title_lost(year, rng, day):
    for row in year.world.rows["item"].values():
        if not row["title"].strip():
            row["title"] = "Found Again"
            return
    year.world.rows["item"][_somebody(year, rng, "item")]["title"] = " "


def note_too_long(year, rng, day):
    columns = year.world.columns["item"]
    if "note" in columns:
        del columns["note"]
        for row in year.world.rows["item"].values():
            row.pop("note", None)
        return
    columns["note"] = WORD_TYPES[0]
    year.world.rows["item"][_somebody(year, rng, "item")]["note"] = "lights " * 300


# ---- the configuration


def _set(section, key, *values):
    def change(year, rng, day):
        year.settings[section][key] = rng.choice(values)

    change.__name__ = f"{section}.{key}"
    return change


def _refresh_off(year, rng, day):
    year.settings["refresh"] = {}


SETTINGS = [
    _set("knowledge", "user_template", "brief_user", "curt_user", "full_user"),
    _set("knowledge", "item_template", "brief_item", "sober_item"),
    _set("decoding", "model", *MODELS),
    _set("decoding", "verifier", "greedy", "relaxed", "top_k"),
    _set("decoding", "drafters", ["previous", "prompt", "output", "pool"], ["pool"], ["prompt"], []),
    _set("decoding", "batch_size", 8, 3),
    _set("decoding", "max_new_tokens", 12, 9),
    _set("pools", "min_support", 1, 2),
    _set("pools", "scope", "side", "group"),
    _set("routing", "scheme", "router", "random", "attribute", "global"),
    _set("encoding", "encoder", *ENCODERS),
    _set("encoding", "num_clusters", 2, 3),
    _set("refresh", "min_new_interactions", 0, 2),
    _set("refresh", "max_age_days", 3, 10),
    _set("refresh", "min_interactions", 0, 1, 2),
    _set("refresh", "max_tokens", 20, 60, 10_000),
    _refresh_off,
    _set("night", "compare_with_plain", True, False, False),
    _set("night", "train_ctr", True, False, False),
    _set("night", "shard_size", None, 3),
]
EVERY_DAY = [(interactions, 9), (new_user, 3), (new_item, 3), (changed, 4), (deleted, 3), (returned, 3), (renamed, 2)]
EVERY_DAY += [(column_added, 1), (column_dropped, 1), (column_retyped, 3), (columns_moved, 1), (times_retyped, 1)]
EVERY_DAY += [(ratings_retyped, 1), (ids_retyped, 0.5), (files_split, 1), (rows_turned, 1), (title_lost, 1)]
EVERY_DAY += [(note_too_long, 1)]


# ---- damage to the workspace; the night after it must succeed all the same


def pools_lost(year, rng):
    shutil.rmtree(year.workspace / "pools", ignore_errors=True)


def pools_older(year, rng):
    for path in sorted((year.workspace / "pools").glob("2*"))[:1]:
        (year.workspace / "pools" / "CURRENT").write_text(path.name.partition("@")[0])


def pools_damaged(year, rng):
    pointer = year.workspace / "pools" / "CURRENT"
    version = pointer.read_text().strip() if pointer.exists() else "none"
    for side in ("user", "item"):
        folder = pool_folder(year.workspace, version) / side
        files = sorted(folder.glob("*.bin")) or sorted(path for path in folder.rglob("*") if path.is_file())
        if files:
            path = max(files, key=lambda path: path.stat().st_size)
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 0xFF
            damaged = path.with_name(f"{path.name}.damaged")  # another version may share the file
            damaged.write_bytes(bytes(data))
            damaged.replace(path)
            year.oracle.unusable_pools.add(version)


def pool_pointer_damaged(year, rng):
    (year.workspace / "pools").mkdir(exist_ok=True)
    (year.workspace / "pools" / "CURRENT").write_text("nobody\n")


def published_run_deleted(year, rng):
    if year.oracle.published is not None:
        year.oracle.gone = year.oracle.published
        shutil.rmtree(year.workspace / "runs" / year.oracle.gone)
        year.oracle.forget(year.oracle.gone)


def pointer_damaged(year, rng):
    (year.workspace / "published.json").write_text(rng.choice(('{"run_id', "[]", "{}", "")))
    year.oracle.is_pointer_lost = True


def pointer_lost(year, rng):
    (year.workspace / "published.json").unlink(missing_ok=True)
    year.oracle.is_pointer_lost = True


ACCIDENTS = [pools_lost, pools_older, pools_damaged, pool_pointer_damaged, published_run_deleted, pointer_damaged,
             pointer_lost]  # fmt: skip


def of_another_version(year):
    """Rewrite the manifest of an interrupted run as an older version of the program would have written it."""
    for path in (year.workspace / "runs").glob("*/manifest.json"):
        if not (path.parent / "_SUCCESS").exists():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"laserbatch_version": "0.0.9"}))


# ---- commands that a user gives; the result of each is checked at once


def rolled_back(year, rng):
    """`runs rollback`, or its refusal if no earlier run was published."""
    year.world.write(year.folder / "tables")
    done = year.command("runs", "rollback", writes_tables=False)
    oracle = year.oracle
    if len(oracle.seen) < (1 if oracle.gone else 2):
        assert done.code == 3, (done.code, done.output)
        return
    taken_back = oracle.gone or oracle.take_back()
    oracle.rolled_back.add(taken_back)
    assert done.code == 0, done.output
    assert json.loads(done.out) == {"published": oracle.published, "rolled_back": taken_back}
    oracle.mended()
    oracle.check_published()


def published_by_name(year, rng):
    """`runs publish` of any finished run, possibly one that was rolled back."""
    before, run_id = year.oracle.gone or year.oracle.published, rng.choice(sorted(year.oracle.runs))
    printed, _, _ = year.done("runs", "publish", run_id)
    assert printed == {"published": run_id, "published_before": before}, printed
    year.oracle.publish(run_id)
    year.oracle.mended()
    year.oracle.check_published()


def collected(year, rng):
    year.collected(rng.choice((1, 3, 7)))


def forgotten(year, rng):
    """One or two users are removed from the tables and forgotten; the command may be interrupted and given again."""
    for _ in range(rng.choice((1, 1, 2))):
        if len(year.world.rows["user"]) > FEW:
            year.world.remove("user", _somebody(year, rng, "user"))
    removed = {key for run in year.oracle.runs.values() for key in run.keys["user"]} - year.world.rows["user"].keys()
    kind = type(_somebody(year, rng, "user"))
    users = [key for key in sorted(removed, key=str) if type(key) is kind][:2]
    year.gone = [entry for entry in year.gone if entry[1] not in users]
    year.world.events = [event for event in year.world.events if event.user not in users]  # events that the log kept
    if users:
        year.forget(users, rng.choice((None, rng.randint(1, 40))))


def rebuilt(year, rng):
    """`pools rebuild`, possibly interrupted, unless the published run was deleted."""
    if year.oracle.published and not year.oracle.gone:
        year.rebuilt(rng.choice((None, rng.randint(1, 12))))


def busy(year, rng):
    """While the lock of the workspace is held, every command that would write is refused."""
    with (year.workspace / "LOCK").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for command in (("nightly", "--date", FIRST_DATE), ("runs", "gc"), ("forget", "--user", "nobody")):
            done = year.command(*command, writes_tables=False)
            assert done.code == json.loads(done.out)["exit_code"] == 5, (command, done)


DEEDS = [rolled_back, published_by_name, collected, forgotten, forgotten, rebuilt, busy]


# ---- input that no night may begin with: each damages a table and returns the words of the expected error


def _table(year, name: str) -> Path:
    path = year.folder / "tables" / f"{name}.parquet"
    return path if path.exists() else sorted((year.folder / "tables" / name).glob("*.parquet"))[0]


def table_missing(year, rng):
    name = rng.choice(("users", "items", "interactions"))
    path = _table(year, name)
    shutil.rmtree(path.parent) if path.parent.name == name else path.unlink()
    return name, "missing"


def table_cut(year, rng):
    name = rng.choice(("users", "items", "interactions"))
    path = _table(year, name)
    path.write_bytes(path.read_bytes()[:-20])
    return name, path.name, "cannot be read"


def table_empty(year, rng):
    name = rng.choice(("users", "items", "interactions"))
    path = _table(year, name)
    empty = pq.read_table(path).slice(0, 0)
    for other in path.parent.glob("*.parquet") if path.parent.name == name else ():
        other.unlink()
    pq.write_table(empty, path)
    return name, "has no rows"


def id_twice(year, rng):
    path = _table(year, "items")
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table, table.slice(0, 1)]), path)
    return "items.item_id", "the id is there already", repr(table["item_id"][0].as_py())


def users_of_others(year, rng):
    for path in (year.folder / "tables").glob("users*"):
        for file in [path] if path.is_file() else sorted(path.glob("*.parquet")):
            table = pq.read_table(file)
            others = pa.array([type(key)(1_000_000 + int(key)) for key in table["user_id"].to_pylist()])
            pq.write_table(table.set_column(0, "user_id", others), file)
    return "interactions.user_id", "users has no such user_id"


FAULTS = [table_missing, table_cut, table_empty, id_twice, users_of_others]


# ---- a day


def live(year, number: int, day: datetime.date, happened: list[str]) -> datetime.date:
    """Live through one day's changes and the night after it; returns the next day. Names of events go to `happened`."""
    rng = random.Random(f"{year.seed} {number}")
    date = str(day)
    if rng.random() > 0.15:  # otherwise nothing has changed
        events, weights = zip(*EVERY_DAY, strict=True)
        for event in rng.choices(events, weights, k=rng.choice((1, 1, 2, 3))):
            if event(year, rng, date) is not False:
                happened.append(event.__name__)
    if number and rng.random() < 0.25:
        change = rng.choice(SETTINGS)
        change(year, rng, date)
        happened.append(change.__name__)
    if number and rng.random() < 0.15:
        accident = rng.choice(ACCIDENTS)
        accident(year, rng)
        happened.append(accident.__name__)
    elif number and rng.random() < 0.15:
        fault = rng.choice(FAULTS)
        year.world.write(year.folder / "tables")
        words = fault(year, rng)
        happened.append(fault.__name__)
        year.refused(date, 3, *words, writes_tables=False)
    if number > 2 and year.oracle.runs and rng.random() < 0.12:
        deed = rng.choice(DEEDS)
        happened.append(deed.__name__)
        deed(year, rng)
    kinds = (ordinary, forced, interrupted, disk_full, backfilled, filled, future, late, held)
    kind = rng.choices(kinds, (14, 1, 3, 1.5, 2, 2, 0.5, 1.5, 1))[0] if number else ordinary
    happened.append(kind.__name__)
    kind(year, rng, day)
    if rng.random() < 0.1:
        happened.append("repeated")
        year.repeated(date)
    return day + DAY * rng.choices((1, 2, 4), (12, 1, 1))[0]


def ordinary(year, rng, day):
    if rng.random() > 0.2 or not year.oracle.runs:
        year.night(str(day))
        return
    planned = year.planned(str(day))
    run_id = year.night(str(day))
    if planned["state"] == "would begin":
        for side, counts in year.summary_of(run_id).items():
            if side != "run_id":
                refused = planned[side]["num_quarantined"]
                assert planned[side]["num_to_write"] == counts["num_generated"] + counts["num_quarantined"] - refused
                assert planned[side]["num_carried_over"] == counts["num_carried_over"]
                assert planned[side].get("postponed", {}) == counts["postponed"]
        year.compared(run_id)


def forced(year, rng, day):
    year.night(str(day), "--force")


def interrupted(year, rng, day):
    between = None
    if rng.random() < 0.5:
        between = lambda: of_another_version(year)  # noqa: E731
    year.night(str(day), stop_at=rng.randint(1, 45), between=between)


def disk_full(year, rng, day):
    """The disk is full at one of the night's files; after space was freed, the same command finishes the night."""
    year.night(str(day), stop_at=rng.randint(1, 45), full=True)


def backfilled(year, rng, day):
    """A night of an earlier date, unless it was done already, and then tonight's."""
    earlier = str(day - DAY * rng.randint(1, 30))
    if not any(run.date == earlier for run in year.oracle.runs.values()):
        year.night(earlier)
    year.night(str(day))


def filled(year, rng, day):
    """`backfill` of a few dates, tonight's perhaps among them; sometimes published, sometimes interrupted."""
    last = day - DAY * rng.choice((0, 1, 1, 3, 20))
    first = last - DAY * rng.randint(0, 3)
    year.backfill(str(first), str(last), rng.random() < 0.3, rng.choice((None, None, rng.randint(1, 90))))
    year.night(str(day))


def future(year, rng, day):
    """A night with a mistyped later date, then tonight's, whose run is not published."""
    year.night(str(day + 3 * DAY))
    year.night(str(day))


def late(year, rng, day):
    """Tonight's interactions change after the night: the command says so, and `--redo` writes the run anew."""
    year.night(str(day))
    interactions(year, rng, str(day))
    year.repeated(str(day), "interactions of that date changed since", "--redo")
    year.night(str(day), "--redo")


def held(year, rng, day):
    """A prompt limit that no entity fits, so that a gate holds the run back until the gate or the limit is relaxed.

    `refresh.max_tokens` is off, since entities beyond a budget would be postponed and not fail.
    """
    before = set((year.workspace / "runs").iterdir())
    max_tokens = year.settings["refresh"].pop("max_tokens", None)
    year.settings["knowledge"]["max_prompt_tokens"] = NOBODY_FITS
    year.held(str(day), before)
    if rng.random() < 0.5:
        year.settings["gates"]["max_failed_share"] = 1.0
        year.night(str(day))
        year.settings["gates"]["max_failed_share"] = 0.5
    year.settings["knowledge"]["max_prompt_tokens"] = 200
    year.settings["refresh"] |= {} if max_tokens is None else {"max_tokens": max_tokens}
    year.night(str(day))
