"""A fortnight of ordinary nights in one workspace, by the command line, and what the README says each must leave.

The oracle knows the tables, as it wrote them, and the documents; nothing of how a night is done. Texts are written in
this process instead of by Ray's actors, which would load Python and torch again each night.
"""

import datetime
import functools
import json
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from manifest_fixture import Undrawn
from night_world import run_here, write_here

from laserbatch.jobs.report import blocks
from laserbatch.pipeline.encoding.encoder import TextEncoder
from laserbatch.pipeline.knowledge.records import knowledge_schema

pytestmark = pytest.mark.slow

TEMPLATES = {
    "brief_user": {"side": "user", "history": {"columns": [], "line": "- {rating}: {title}"}},
    "curt_user": {"side": "user", "history": {"columns": [], "line": "- {rating}: {title}"}, "request": "Be curt."},
    "brief_item": {"side": "item", "attributes": {"max_value_chars": 5000}},
}
TITLES = ("Harbour Lights", "The Pier", "Night Signal")


@dataclass
class World:
    """The tables, as their owner knows them; `write` puts them where the nights read them."""

    users: dict[str, dict] = field(default_factory=dict)
    items: dict[str, dict] = field(default_factory=dict)
    events: list[tuple[str, str, str, float]] = field(default_factory=list)  # user, item, day, rating

    def known(self, side: str, date: str) -> set[str]:
        rows = self.users if side == "user" else self.items
        return {key for key, row in rows.items() if row["created_at"] <= date}

    def write(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for name, key, rows in (("users", "user_id", self.users), ("items", "item_id", self.items)):
            made = [{key: entity} | row | {"created_at": _noon(row["created_at"])} for entity, row in rows.items()]
            pq.write_table(pa.Table.from_pylist(made), folder / f"{name}.parquet")
        there = [event for event in self.events if event[0] in self.users and event[1] in self.items]
        rows = [
            {"user_id": user, "item_id": item, "timestamp": _noon(day), "rating": rating}
            for user, item, day, rating in there
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / "interactions.parquet")


def knowledge_of(run: Path, side: str) -> pa.Table:
    return pq.read_table(run / "knowledge" / side)


def _noon(day: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(f"{day}T12:00:00+00:00")


def first_world() -> World:
    """Four users and three items; u0 and u1 were there before any item; u2 and u3 rated i2. April is for judging."""
    world = World()
    for number in range(4):
        created_at = "2025-02-10" if number < 2 else "2025-02-25"
        world.users[f"u{number}"] = {"mood": ("calm", "loud")[number % 2], "created_at": created_at}
    for number, title in enumerate(TITLES):
        world.items[f"i{number}"] = {"title": title, "category": ["Radio", "Play"], "created_at": "2025-02-20"}
    for day in ("2025-02-26", "2025-02-27", "2025-04-01", "2025-04-02", "2025-04-03", "2025-04-04"):
        world.events += [("u0", "i0", day, 5.0), ("u0", "i1", day, 1.0), ("u1", "i1", day, 5.0), ("u1", "i0", day, 2.0)]
        world.events += [("u2", "i2", day, 4.0), ("u2", "i0", day, 1.0), ("u3", "i1", day, 4.0), ("u3", "i2", day, 1.0)]
    return world


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A configuration and templates; workers in this process, the encoder loaded once, charts not drawn."""
    (tmp_path / "prompts").mkdir()
    for name, template in TEMPLATES.items():
        head = {"name": name, "version": 1, "framework": "kar", "parser": "free", "instruction": "Describe."}
        (tmp_path / "prompts" / f"{name}.yaml").write_text(yaml.safe_dump(head | template))

    write_here(monkeypatch)
    monkeypatch.setattr(TextEncoder, "load", functools.cache(TextEncoder.load))
    monkeypatch.setattr(blocks, "_Chart", Undrawn)
    return tmp_path


class Fortnight:
    """Nights one after another, and the oracle."""

    def __init__(self, folder: Path, capfd) -> None:
        self.folder, self.capfd, self.world = folder, capfd, first_world()
        self.workspace = folder / "workspace"
        self.settings = {
            "workspace": "workspace",
            "tables": {"path": "tables"},
            "knowledge": {"template_dir": "prompts", "user_template": "brief_user", "item_template": "brief_item",
                          "max_prompt_tokens": 200},
            "decoding": {"max_new_tokens": 12, "batch_size": 8, "max_draft_tokens": 4, "min_acceptance": 0.1},
            "gates": {"max_failed_share": 0.5},
            "night": {"num_report_samples": 1, "compare_with_plain": True},
            "encoding": {"num_clusters": 2, "max_batch_tokens": 512},  # a forward pads to as many
            "ctr": {"models": ["gbdt"], "num_seeds": 1},
        }  # fmt: skip
        self.published: str | None = None

    def write_config(self) -> None:
        self.world.write(self.folder / "tables")
        self.config = self.folder / "laserbatch.yaml"
        self.config.write_text(yaml.safe_dump(self.settings))

    def command(self, name: str, date: str, *options: str):
        self.write_config()
        done = run_here(self.capfd, name, "--config", str(self.config), "--date", date, "--json", *options)
        assert done.returncode == 0, f"{date}: {done.stderr}"
        return json.loads(done.stdout), done.stderr

    def night(self, date, users, items, *options, is_published=True, failed=(), over=None) -> Path:
        """A night, and what it must leave.

        Parameters
        ----------
        users, items : ids of those that it must write; everybody else's text is last night's.
        failed : ids that must be in quarantine, beside the text that they had.
        over : the run that it builds on, "" is none; None is the published one.
        """
        previous, self.failed = self.published if over is None else over, set(failed)
        summary, said = self.command("nightly", date, *options)
        run = self.workspace / "runs" / summary["run_id"]
        self.check_pointers(run.name if is_published else self.published, summary)
        assert ("not published" in said) == (not is_published)
        manifest = json.loads((run / "manifest.json").read_text())
        assert (run / "_SUCCESS").exists() and "<html" in (run / "report.html").read_text()
        for side, written in (("user", users), ("item", items)):
            knowledge = self.check_side(run, side, date, set(written), {key for key in failed if key[0] == side[0]})
            counts = summary[f"{side}s"]
            assert counts["num_entities"] == len(self.world.known(side, date))
            assert counts["num_generated"] == len(written)
            num_stale = sum(row["is_stale"] for row in knowledge.values())
            assert counts["num_carried_over"] == len(knowledge) - len(written) - num_stale
            self.check_carried(run, previous, side, knowledge)
            if self.settings["night"]["compare_with_plain"]:
                assert set(knowledge_of(run / "plain", side)["entity_id"].to_pylist()) == knowledge.keys()
        assert bool(manifest["ctr"]["skipped"]) == (date < "2025-02-26"), manifest["ctr"]
        return run

    def held_night(self, date: str, side: str, option: str) -> Path:
        """A night that a gate holds back: done, and nobody sees it."""
        self.write_config()
        self.carried_from, before = self.published, set((self.workspace / "runs").iterdir())
        done = run_here(self.capfd, "nightly", "--config", str(self.config), "--date", date, "--json")
        assert done.returncode == 4, done.stderr
        (run,) = set((self.workspace / "runs").iterdir()) - before
        error = json.loads(done.stdout)
        assert error["kind"] == "RunHeld" and f"{side}s: " in error["error"] and option in error["error"]
        assert f"laserbatch runs publish {run.name}" in error["error"]
        assert (run / "_HELD").exists() and not (run / "_SUCCESS").exists()
        assert json.loads((run / "manifest.json").read_text())["status"] == "held"
        self.check_pointers(self.published, {"published": self.published})
        return run

    def check_pointers(self, run_id: str, summary: dict) -> None:
        self.published = run_id
        assert json.loads((self.workspace / "published.json").read_text())["run_id"] == run_id == summary["published"]
        assert (self.workspace / "pools" / "CURRENT").read_text().strip() == run_id
        for side in ("user", "item"):
            has_texts = knowledge_of(self.workspace / "runs" / run_id, side).num_rows > 0
            assert (self.workspace / "pools" / run_id / side).is_dir() == has_texts

    def check_side(self, run: Path, side: str, date: str, written: set[str], failed: set[str]) -> dict[str, dict]:
        knowledge = knowledge_of(run, side)
        assert knowledge.schema.equals(knowledge_schema(pa.string())), f"{date}: {knowledge.schema}"
        rows = {row["entity_id"]: row for row in knowledge.to_pylist()}
        quarantined = set(pq.read_table(run / "quarantine" / f"{side}.parquet")["entity_id"].to_pylist())
        assert len(rows) == knowledge.num_rows and quarantined == failed
        stale = {key for key, row in rows.items() if row["is_stale"]}
        assert rows.keys() | quarantined == self.world.known(side, date) and rows.keys() & quarantined == stale
        assert {key for key, row in rows.items() if row["run_id"] == run.name} == written, date
        assert all(row["run_id"][:10] <= date for row in rows.values())
        features = pq.read_table(run / "features" / f"{side}.parquet").to_pylist()
        origin = {row[f"{side}_id"]: (row["run_id"], row["fingerprint"]) for row in features}
        assert origin == {key: (row["run_id"], row["fingerprint"]) for key, row in rows.items()}
        assert all(len(row["vector"]) == 384 for row in features)
        return rows

    def check_carried(self, run: Path, previous: str | None, side: str, rows: dict[str, dict]) -> None:
        """Texts that were not written are those of the run before, with their vectors and cluster ids."""
        if not previous:
            assert all(row["run_id"] == run.name for row in rows.values())
            return
        before = self.workspace / "runs" / previous
        texts = {row["entity_id"]: row for row in knowledge_of(before, side).to_pylist()}
        carried = {key for key, row in rows.items() if row["run_id"] != run.name}
        assert {key: rows[key] | {"is_stale": texts[key]["is_stale"]} for key in carried} == {
            key: texts[key] for key in carried
        }
        assert all(rows[key]["is_stale"] for key in texts.keys() & self.failed)
        features = [
            {row[f"{side}_id"]: row for row in pq.read_table(night / "features" / f"{side}.parquet").to_pylist()}
            for night in (before, run)
        ]
        assert {key: features[0][key] for key in carried} == {key: features[1][key] for key in carried}

    def contents(self) -> dict[Path, tuple[bytes, int]]:
        files = [path for path in (self.workspace / "runs").rglob("*") if path.is_file()]
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_fortnight_of_ordinary_nights(folder, capfd):
    nights = Fortnight(folder, capfd)
    world, night = nights.world, nights.night
    all_users, all_items = ["u0", "u1", "u2", "u3"], ["i0", "i1", "i2"]

    night("2025-03-01", all_users, all_items)  # the first
    night("2025-03-02", [], [])  # nothing changed

    nights.settings["night"]["compare_with_plain"] = False
    world.users["u4"] = {"mood": "calm", "created_at": "2025-03-03"}  # a new user, no new item
    night("2025-03-03", ["u4"], [])

    world.users["u1"]["mood"] = "stern"  # a user changed
    night("2025-03-04", ["u1"], [])

    gone = world.users.pop("u4"), world.items.pop("i2")  # a user and an item gone; u2 and u3 had rated the item
    night("2025-03-05", ["u2", "u3"], [])

    world.users["u4"], world.items["i2"] = gone  # both returned
    night("2025-03-06", ["u2", "u3", "u4"], ["i2"])

    for item in world.items.values():  # a column added
        item["era"] = "new"
    night("2025-03-07", [], all_items)

    for item in world.items.values():  # a column dropped
        del item["era"]
    eighth = night("2025-03-08", [], all_items)

    world.events.append(("u0", "i2", "2025-03-10", 5.0))  # two dates skipped, one new interaction
    night("2025-03-11", ["u0"], [])

    # A skipped date, later: it does not see the 10th, and readers do not see it.
    skipped = night("2025-03-09", [], [], is_published=False, over=eighth.name)
    # A date before any item and any interaction was known.
    oldest = night("2025-02-15", ["u0", "u1"], [], is_published=False, over="")
    assert knowledge_of(oldest, "item").num_rows == 0
    # Readers' date again: nothing to do, nothing touched; nor for `generate`, nor for an older date.
    before = nights.contents()
    for name, date in (("nightly", "2025-03-11"), ("generate", "2025-03-11"), ("nightly", skipped.name[:10])):
        summary, said = nights.command(name, date)
        assert "finished already" in said and "changed since" not in said
        assert "changed_since" not in summary
    nights.check_pointers(nights.published, summary)

    world.events.append(("u3", "i0", "2025-03-02", 5.0))  # late data
    summary, said = nights.command("nightly", "2025-03-11")
    assert summary["changed_since"] == ["interactions"] and "--redo" in said
    assert nights.contents() == before
    assert night("2025-03-11", ["u3"], [], "--redo").name == f"{summary['run_id']}-2"

    nights.settings["knowledge"]["user_template"] = "curt_user"  # another template
    night("2025-03-12", ["u0", "u1", "u2", "u3", "u4"], [])

    world.items["i0"]["note"] = "lights " * 300  # too long to be asked about; the others have no note
    night("2025-03-13", [], [], failed=["i0"])

    del world.items["i0"]["note"]
    nights.settings["knowledge"]["max_prompt_tokens"] = 16  # nobody can be asked
    held = nights.held_night("2025-03-14", "user", "gates.max_failed_share")
    nights.settings["knowledge"]["max_prompt_tokens"] = 200
    night("2025-03-15", [], [])  # built on the night that passed

    nights.settings["knowledge"]["max_prompt_tokens"] = 16
    nights.settings["gates"]["max_failed_share"] = 1.0  # judged anew, and nothing is done again
    thirteenth = nights.workspace / "runs" / nights.carried_from
    everybody = [*world.users, *world.items]
    again = night("2025-03-14", [], [], failed=everybody, is_published=False, over=thirteenth.name)
    assert again == held and not (held / "_HELD").exists()

    night("2025-03-16", [], [], failed=everybody)
    nights.settings["knowledge"]["max_prompt_tokens"] = 200
    night("2025-03-17", [], [])  # everybody's text is one of this prompt, and stale no more
