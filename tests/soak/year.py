"""A simulated year of ordinary nights by the command line, each checked by the oracle.

    python tests/soak/year.py --nights 365 --json year.json

Nights are real except that texts are written in this process instead of by Ray's actors, and that the models are tiny.
Models stay in this process, so its memory grows by some MB with each night that writes, and not with others. The events
of a day are drawn from the seed and the day alone.
"""

import argparse
import contextlib
import datetime
import gc
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as pytest does
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "jobs"))
from night_world import write_encoder, write_here
from soak_days import Stopped, live
from soak_models import ENCODERS, MODELS, write_model
from soak_oracle import Oracle, contents, pool_folder
from soak_world import NUMBER_TYPES, PATH_TYPES, WORD_TYPES, Event, World

from laserbatch.jobs.cli import main as laserbatch
from laserbatch.retrieval_pools.settings import KEEP_VERSIONS

HISTORY = {"columns": [], "line": "- {rating}: {title}", "line_unrated": "- {title}"}
INSTRUCTION = (
    "Describe whom, or what, the following is about: what is liked, and what is avoided."  # at least 16 tokens
)
HEAD = {"version": 1, "framework": "kar", "parser": "free", "instruction": INSTRUCTION}
TEMPLATES = {
    name: HEAD | {"name": name} | template
    for name, template in {
        "brief_user": {"side": "user", "history": HISTORY},
        "curt_user": {"side": "user", "history": HISTORY | {"max_events": 3}, "request": "Be curt."},
        "full_user": {"side": "user", "history": {"line": "- {rating}: {title} | {attributes}"}},
        "brief_item": {"side": "item", "attributes": {"max_value_chars": 5000}},
        "sober_item": {"side": "item", "attributes": {"max_value_chars": 5000}, "request": "Be sober."},
    }.items()
}
DEFAULTS = yaml.safe_load((Path(__file__).resolve().parents[2] / "configs" / "default.yaml").read_text())
FIRST_DAY = datetime.date(2025, 3, 1)
LATER = ("2027-06-01", "2027-06-02", "2027-06-03", "2027-06-04")  # after all nights, for judging CTR models


@dataclass(frozen=True)
class Done:
    """The exit code and the output of a command."""

    code: int
    out: str
    output: str


def first_world() -> World:
    """Eight users and six items. Two users exist before any item; another item is created after the year."""
    world = World(
        {"user": {"mood": WORD_TYPES[0], "age": NUMBER_TYPES[0]},
         "item": {"title": WORD_TYPES[0], "category": PATH_TYPES[0], "pages": NUMBER_TYPES[0]}},
        {"user": {}, "item": {}},
    )  # fmt: skip
    for number in range(8):
        created_at = "2025-01-10" if number < 2 else "2025-02-25"
        world.rows["user"][str(100 + number)] = {"mood": ("calm", "loud")[number % 2], "age": 20 + number,
                                                "created_at": created_at}  # fmt: skip
    for number, title in enumerate(("Harbour Lights", "The Pier", "Night Signal", "Salt", "Quiet Radio", "Gulls")):
        world.rows["item"][f"i{number}"] = {"title": title, "category": ["Radio", "Play"], "pages": 100 + number,
                                           "created_at": "2025-02-20"}  # fmt: skip
    world.rows["item"]["later"] = {"title": "Zukunft", "category": ["Zukunft"], "pages": 1, "created_at": LATER[0]}
    rng = random.Random("first world")
    for day in ("2025-02-26", "2025-02-27", *LATER):
        for user in world.rows["user"]:
            for item in rng.sample(list(world.rows["item"]), 2):
                if item != "later" or day in LATER:
                    world.events.append(Event(user, item, day, 1000 + len(world.events), rng.choice((1, 5))))
    return world


class Year:
    """A workspace with its tables, its configuration and its oracle."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.seed = folder, seed
        self.workspace = folder / "workspace"
        self.world, self.oracle = first_world(), Oracle(self.workspace)
        self.templates = TEMPLATES
        self.gone: list[tuple[str, object, dict, list[Event]]] = []  # side, id, row and events of removed entities
        self.num_written, self.num_commands, self.counts = 0, 0, Counter()
        self.num_replaces = 40
        (folder / "prompts").mkdir()
        for name, template in TEMPLATES.items():
            (folder / "prompts" / f"{name}.yaml").write_text(yaml.safe_dump(template))
        for name in MODELS:
            write_model(folder / name)
        for seed, name in enumerate(ENCODERS):
            (folder / name).mkdir()
            write_encoder(folder / name, seed)
        self.settings = {
            "workspace": "workspace",
            "tables": {"path": "tables"},
            "knowledge": {"template_dir": "prompts", "user_template": "brief_user", "item_template": "brief_item",
                          "max_prompt_tokens": 200},
            "decoding": {"model": MODELS[0], "max_new_tokens": 12, "batch_size": 8, "max_draft_tokens": 4,
                         "min_acceptance": 0.1, "verifier": "relaxed"},
            "pools": {"min_support": 1},
            "routing": {},
            "gates": {"max_failed_share": 0.5},
            "night": {"compare_with_plain": False,
                      "train_ctr": False},
            "encoding": {"encoder": ENCODERS[0], "num_clusters": 2},
            "ctr": {"models": ["gbdt"], "num_seeds": 1},
            "refresh": {},
        }  # fmt: skip

    def settings_key(self) -> str:
        """The settings that decide the name of a run's folder, besides its date."""
        named = {key: value for key, value in self.settings.items() if key not in ("workspace", "gates")}
        for section, values in named.items():  # a default that is written down changes nothing
            named[section] = DEFAULTS[section] | values
        return json.dumps(named, sort_keys=True)

    def command(self, *arguments: str, writes_tables: bool = True) -> Done:
        """`laserbatch ... --config CONFIG --json` in this process: the entry that the shell would call."""
        if writes_tables:
            self.world.write(self.folder / "tables")
        config = self.folder / "laserbatch.yaml"
        config.write_text(yaml.safe_dump(self.settings))
        argv = ["laserbatch", *arguments, "--config", str(config), "--json"]
        out, errors, earlier_argv = io.StringIO(), io.StringIO(), sys.argv
        sys.argv, code = argv, 0
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
                laserbatch()
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            sys.argv = earlier_argv
        self.num_commands += 1
        return Done(code, out.getvalue(), errors.getvalue())

    def done(
        self, *arguments: str, stop_at: int | None = None, between=None, full: bool = False
    ) -> tuple[dict, str, bool]:
        """Run a command that must succeed; returns its summary, its output, and whether it was not interrupted.

        Parameters
        ----------
        stop_at : the write at which it is interrupted; the same command then finishes the work.
        between : a change of the workspace between the interruption and the second command.
        full : that write fails because the disk is full, instead of by Ctrl-C.
        """
        is_whole = True
        if stop_at is not None:
            with Stopped(stop_at, full) as stopped:
                done = self.command(*arguments)
            if stopped.happened and not (full and done.code == 0):  # a comparison that fails stops no night
                is_whole, code = False, 3 if full else 130
                assert done.code == code == json.loads(done.out)["exit_code"], (done.code, done.output)
                if between is not None:
                    between()
                done = self.command(*arguments, writes_tables=False)
        else:
            done = self.command(*arguments)
        assert done.code == 0, f"{arguments}: exit code {done.code}\n{done.output}"
        return json.loads(done.out), done.output, is_whole

    def night(self, date: str, *options: str, **stop) -> str:
        """Run one night and check it; returns the run's id. `stop` are options of `done`."""
        oracle, settings = self.oracle, self.settings_key()
        is_again = oracle.run_of(date, settings) is not None
        options += ("--redo",) if is_again and not options else ()
        previous = oracle.previous(date, settings)
        pools = oracle.pools_to_use(date, self.settings["pools"]["min_support"], previous, settings)
        summary, output, is_whole = self.done("nightly", "--date", date, *options, **stop)
        run_id = summary["run_id"]
        is_published = oracle.publishes(date, run_id)
        assert ("not published" in output) == (not is_published), output
        is_new = run_id not in oracle.runs
        if not is_new:
            assert is_again and "finished already" in output and "changed since" not in output
        else:
            oracle.check(self, summary, previous, pools, "--force" in options, is_whole)
        if is_published:
            oracle.publish(run_id)
        assert summary["published"] == oracle.published
        oracle.check_pointers(oracle.runs[run_id], KEEP_VERSIONS, is_new)
        return run_id

    def backfill(self, first: str, last: str, publish: bool, stop_at: int | None = None) -> None:
        """`backfill`: each night builds on the one before it; finished runs are not changed."""
        oracle, settings, before = self.oracle, self.settings_key(), None
        options = ("backfill", "--from", first, "--to", last, *(("--publish",) if publish else ()))
        printed, _, is_whole = self.done(*options, stop_at=stop_at)
        nights = [
            str(datetime.date.fromisoformat(first) + datetime.timedelta(days=n)) for n in range(len(printed["nights"]))
        ]
        assert [night["date"] for night in printed["nights"]] == nights and nights[-1] == last
        for row in printed["nights"]:
            date, run_id = row["date"], row["run_id"]
            if (known := oracle.run_of(date, settings)) is not None:
                assert run_id == known.run_id, (run_id, known.run_id)
                before = before if run_id in oracle.not_built_on else known
                continue
            previous = before or oracle.previous(date, settings)
            min_support = self.settings["pools"]["min_support"]
            pools = oracle.pools_of(before.run_id, min_support) if before else None
            before = oracle.check(self, self.summary_of(run_id), previous, pools, False, is_whole and pools is not None)
        if publish and run_id not in oracle.not_built_on:
            oracle.publish(run_id)
        assert printed["published"] == oracle.published
        before = oracle.runs[run_id]
        is_new = before.order == self.num_commands
        oracle.check_pointers(before, KEEP_VERSIONS + 1, is_new)

    def summary_of(self, run_id: str) -> dict:
        """A run's counts in the form of a night's summary."""
        sides = json.loads((self.workspace / "runs" / run_id / "manifest.json").read_text())["sides"]
        return {"run_id": run_id, **{f"{side}s": figures for side, figures in sides.items()}}

    def texts(self, run_id: str, side: str) -> dict[object, dict]:
        """A run's knowledge rows of a side, by entity."""
        table = pq.read_table(self.workspace / "runs" / run_id / "knowledge" / side)
        return {row["entity_id"]: row for row in table.to_pylist()}

    def forget(self, users: list, stop_at: int | None) -> None:
        """`forget` removes users who are no longer in the tables from every run; all other rows are unchanged."""
        oracle, ids = self.oracle, [part for user in users for part in ("--user", str(user))]
        before = {run_id: {side: self.texts(run_id, side) for side in ("user", "item")} for run_id in oracle.runs}
        printed, _, _ = self.done("forget", *ids, stop_at=stop_at)
        assert printed["is_done"] and not printed["still_in_tables"], printed
        for run_id, run in oracle.runs.items():
            folder = self.workspace / "runs" / run_id
            assert (folder / "_SUCCESS").exists()
            for known in (run.keys["user"], run.since["user"], before[run_id]["user"]):
                for key in [key for key in known if str(key) in map(str, users)]:  # ids may have been of another type
                    del known[key]
            assert {side: self.texts(run_id, side) for side in ("user", "item")} == before[run_id], run_id
            features = {row["user_id"] for row in pq.read_table(folder / "features" / "user").to_pylist()}
            assert features == before[run_id]["user"].keys(), run_id
            run.files = contents(folder)
        oracle.unusable_pools -= {version for version, what in printed["pools"].items() if what == "rebuilt"}
        oracle.check_published()
        oracle.check_no_leftovers()

    def collected(self, keep: int) -> None:
        """`runs gc` keeps the `keep` newest runs and every run that is needed."""
        retained = self.oracle.kept_by_gc(keep)
        printed, _, _ = self.done("runs", "gc", "--keep", str(keep))
        there = {path.name for path in (self.workspace / "runs").iterdir()}
        assert there == retained == printed["kept"].keys(), (there ^ retained, printed)
        for run_id in self.oracle.runs.keys() - retained:
            self.oracle.forget(run_id)
        self.oracle.held &= retained
        self.oracle.check_published()

    def rebuilt(self, stop_at: int | None) -> None:
        """`pools rebuild`, possibly interrupted: the next night drafts from the published run's pools."""
        oracle, run_id = self.oracle, self.oracle.published
        self.done("pools", "rebuild", "--run", run_id, stop_at=stop_at)
        assert (self.workspace / "pools" / "CURRENT").read_text().strip() == run_id
        for side in ("user", "item"):
            is_there = (pool_folder(self.workspace, run_id) / side).is_dir()
            assert is_there == bool(oracle.runs[run_id].keys[side]), run_id
        oracle.unusable_pools.discard(run_id)  # the next night removes the remains of an interrupted build

    def planned(self, date: str) -> dict:
        """`nightly --dry-run` changes no file."""
        before = contents(self.workspace)
        plan, _, _ = self.done("nightly", "--date", date, "--dry-run")
        assert contents(self.workspace) == before
        return plan

    def compared(self, run_id: str) -> None:
        """`runs diff` with the previous run counts the differences of their texts."""
        previous = self.oracle.runs[run_id].previous
        if previous not in self.oracle.runs:
            return
        diff, _, _ = self.done("runs", "diff", previous, run_id)
        for side in ("user", "item"):
            old, new = ({str(key): row for key, row in self.texts(run, side).items()} for run in (previous, run_id))
            changed = sum(old[key]["text"] != row["text"] for key, row in new.items() if key in old)
            counted = tuple(diff[f"{side}s"][f"num_{name}"] for name in ("changed", "added", "removed"))
            assert counted == (changed, len(new.keys() - old.keys()), len(old.keys() - new.keys())), (side, diff)
            assert sum(diff[f"{side}s"]["reasons"].values()) == changed

    def refused(self, date: str, code: int, *words: str, writes_tables: bool = True) -> None:
        """A night that must be refused: check its exit code, its error, and that no file was changed."""
        before = contents(self.workspace) if self.workspace.exists() else {}
        done = self.command("nightly", "--date", date, writes_tables=writes_tables)
        assert done.code == code, f"{date}: exit code {done.code}, expected {code}\n{done.output}"
        printed = json.loads(done.out)
        assert printed["exit_code"] == code and all(word in printed["error"] for word in words), printed
        assert "Traceback" not in done.output
        now = contents(self.workspace) if self.workspace.exists() else {}
        now.pop(self.workspace / "LOCK", None), before.pop(self.workspace / "LOCK", None)
        assert now == before, f"a refused night touched {now.items() ^ before.items()}"

    def held(self, date: str, before: set[Path]) -> None:
        """A night whose run a gate holds back: it is not published, and the error says how to publish it."""
        done = self.command("nightly", "--date", date)
        printed = json.loads(done.out)
        assert done.code == printed["exit_code"] == 4 and printed["kind"] == "RunHeld", (done.code, done.output)
        (run,) = set((self.workspace / "runs").iterdir()) - before
        assert "gates.max_failed_share" in printed["error"] and f"runs publish {run.name}" in printed["error"], printed
        assert (run / "_HELD").exists() and not (run / "_SUCCESS").exists()
        self.oracle.held.add(run.name)
        self.oracle.mended()
        self.oracle.min_support[run.name] = self.settings["pools"]["min_support"]
        self.oracle.check_published()

    def repeated(self, date: str, *words: str) -> None:
        """The same command for a finished night writes nothing."""
        before = contents(self.workspace / "runs")
        done = self.command("nightly", "--date", date)
        assert done.code == 0 and all(word in done.output for word in ("finished already", *words)), done
        assert contents(self.workspace / "runs") == before
        run_id = json.loads(done.out)["run_id"]
        if self.oracle.publishes(date, run_id):
            self.oracle.publish(run_id)
        self.oracle.mended()
        self.oracle.check_published()


def run_year(folder: Path, num_nights: int, seed: int = 0, tell=lambda line: None) -> dict:
    """Run `num_nights` nights; returns the result. The first failed check ends the year."""
    started_s, year, nights = time.perf_counter(), None, []
    result = {"nights": num_nights, "as_they_must_be": 0, "failed": None}
    with pytest.MonkeyPatch.context() as patched:
        write_here(patched)
        patched.setattr(os, "fsync", lambda descriptor: None)  # no power is lost meanwhile, so syncs are not needed
        year = Year(folder, seed)
        day = FIRST_DAY
        for number in range(num_nights):
            happened: list[str] = []
            begun_s = time.perf_counter()
            try:
                day = live(year, number, day, happened)
                year.oracle.check_unchanged(newest=3)
            except Exception as error:
                result["failed"] = {"night": number, "day": str(day), "events": happened, "error": repr(error)}
                tell(f"{number} {day} {' '.join(happened)}:\n{traceback.format_exc()}")
                break
            year.counts.update(happened)
            if number % 10 == 9:
                gc.collect()
                nights.append((number, _resident_mb(), len(os.listdir("/proc/self/fd"))))
            tell(f"{number} {day} {' '.join(happened)} ({time.perf_counter() - begun_s:.1f} s)")
            result["as_they_must_be"] += 1
        if result["failed"] is None:
            year.oracle.check_unchanged()
    result |= {
        "commands": year.num_commands, "texts_written": year.num_written, "seed": seed,
        "seconds": round(time.perf_counter() - started_s, 1), "events": dict(sorted(year.counts.items())),
        "memory": [{"night": number, "resident_mb": mb, "open_files": files} for number, mb, files in nights],
    }  # fmt: skip
    return result


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=365)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to leave the world and the workspace; else nowhere")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="year-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        result = run_year(folder, options.nights, options.seed, lambda line: print(line, flush=True))
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "memory"}))
    sys.exit(result["failed"] is not None)


if __name__ == "__main__":
    main()
