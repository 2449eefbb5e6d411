"""The oracle: what each night must leave. It follows README.md and docs/, and knows the tables but not the code."""

import datetime
import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from soak_world import SIDES, World

EVIDENCE = "evidence"
FUTURE_WORD = "zukunft"  # in titles of items that are created after all nights
NOBODY_FITS = 16  # a max_prompt_tokens that no entity fits: the instruction alone has more
KNOWLEDGE = {
    "side": "string", "framework": "string", "template": "string", "text": "string", "fields_json": "string",
    "token_ids": "list<element: int32>", "fingerprint": "string", "run_id": "string", "model_id": "string",
    "pool_version": "string", "decoding_json": "string", "num_tokens": "int32", "finish_reason": "string",
    "is_stale": "bool",
}  # fmt: skip
RUN_NAMES = {"knowledge", "features", "quarantine", "plan", "shards", "manifest.json", "events.jsonl", "report.html",
             "_SUCCESS"}  # fmt: skip
WORKSPACE_NAMES = {"published.json", "published-copy.json", "runs", "pools", "step-costs", "forgotten",
                   "workspace.json", "LOCK"}  # fmt: skip
Waiting = dict[object, str]  # postponed entity -> reason


def pool_folder(workspace: Path, version: str) -> Path:
    """The folder of a pool version: the newest rebuild of it (`<version>@<n>`), otherwise the version itself."""
    later = sorted((workspace / "pools").glob(f"{version}@*"), key=lambda path: (len(path.name), path.name))
    return [workspace / "pools" / version, *later][-1]


@dataclass
class Run:
    """The facts about a finished run that later nights depend on."""

    run_id: str
    settings: str
    order: int  # num_commands when the run was finished
    keys: dict[str, dict[object, str]]  # by side and entity: everything that its text depends on
    encoder: str
    previous: str | None
    ancestors: tuple[str, ...]  # `previous`, the run it was built on, and so on; some may be deleted
    since: dict[str, dict[object, str]]  # by side and entity without a text: the date since which it waits
    files: dict[Path, tuple[int, int]] = field(default_factory=dict)

    @property
    def date(self) -> str:
        return self.run_id[:10]


class Oracle:
    """All finished runs of a workspace, and the expected outcome of the next one."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.runs: dict[str, Run] = {}
        self.held: set[str] = set()
        self.seen: list[str] = []  # published runs, latest publication first: readers see the first
        self.rolled_back: set[str] = set()
        self.is_pointer_lost = False
        self.gone: str | None = None  # the run that the pointer names although it was deleted
        self.unusable_pools: set[str] = set()
        self.fingerprints: dict[str, str] = {}
        self.asked: dict[str, str] = {}
        self.min_support: dict[str, int] = {}  # by pool version
        self.vectors: dict[tuple[str, str], bytes] = {}
        self.model_ids: dict[str, str] = {}

    @property
    def published(self) -> str | None:
        return self.seen[0] if self.seen else None

    def publishes(self, date: str, run_id: str | None = None) -> bool:
        """Whether a night of `date` publishes its run by itself. `run_id`: the run, if it was finished before."""
        return run_id not in self.rolled_back and (self.published is None or self.published[:10] <= date)

    def publish(self, run_id: str) -> None:
        self.seen = [run_id, *(other for other in self.seen if other != run_id)]
        self.rolled_back.discard(run_id)

    def mended(self) -> None:
        """Note that a command has rewritten the published pointer."""
        self.is_pointer_lost, self.gone = False, None

    def take_back(self) -> str:
        self.rolled_back.add(taken_back := self.seen.pop(0))
        return taken_back

    @property
    def not_built_on(self) -> set[str]:
        """Runs that were rolled back, and the runs built on them that were never published."""
        run_ids = set(self.rolled_back)
        for run in sorted(self.runs.values(), key=lambda run: run.order):
            chain = [*takewhile(lambda run_id: run_id not in self.seen, (run.run_id, *run.ancestors))]
            run_ids.update(chain[: max((place for place, run_id in enumerate(chain) if run_id in run_ids), default=0)])
        return run_ids

    def run_of(self, date: str, settings: str) -> Run | None:
        """The newest finished run of a date and settings, or None if a night would write that date anew."""
        there = [run for run in self.runs.values() if (run.date, run.settings) == (date, settings)]
        newest = max(there, key=lambda run: run.order, default=None)
        return None if newest and newest.run_id in self.not_built_on - self.rolled_back else newest

    def previous(self, date: str, settings: str) -> Run | None:
        """The run that a night of `date` builds on: the newest usable run that is not later.

        Of one date, the run with the same settings is preferred, then the one that was finished last. Runs after the
        newest one with the same settings do not count unless they follow it.
        """
        older = [run for run in self.runs.values() if run.date <= date and run.run_id not in self.not_built_on]
        older.sort(key=lambda run: (run.date, run.settings == settings, run.order))
        own = [number for number, run in enumerate(older, 1) if run.settings == settings]
        if own:
            newest = older[own[-1] - 1].run_id
            older = older[: own[-1]] + [run for run in older[own[-1] :] if _follows(run, newest)]
        return older[-1] if older else None

    def refused(self, world: World, side: str, key: object, limit: int) -> str | None:
        """The reason why no prompt can be made for an entity, or None."""
        row = world.rows[side][key]
        if side == "item" and not row["title"].strip():
            return "no-title"
        return "too-long" if limit == NOBODY_FITS or len(str(row.get("note") or "")) > 6 * limit else None

    def asked_for(self, world: World, side: str, key: object, date: str, settings: dict, templates: dict) -> str:
        """Everything that decides a text: the template, the data it shows, the model, and decoding settings."""
        template = templates[settings["knowledge"][f"{side}_template"]]
        row = world.rows[side][key]
        shown = _shown(row, world.columns[side])
        events = []
        if side == "user":
            options = template["history"]
            newest = world.history(key, date)[-options.get("max_events", 40) :]
            for event in newest:
                item = world.rows["item"][event.item]
                of_item = [] if options.get("columns") == [] else _shown(item, world.columns["item"])
                rating = None if world.rating_type is None else event.rating
                events.append([item["title"].strip(), rating, [pair for pair in of_item if pair[0] != "title"]])
        decoding = {name: settings["decoding"].get(name) for name in ("model", "verifier", "max_new_tokens")}
        limit = settings["knowledge"]["max_prompt_tokens"]
        is_rated = side == "user" and world.rating_type is not None  # the lines of the template depend on it
        return json.dumps([side, template, is_rated, limit, decoding, shown, events], sort_keys=True)

    def pools_to_use(self, date: str, min_support: int, previous: Run | None, settings: str) -> str | None:
        """The version of the pools that a run may draft from: the current one, or the newest other that fits.

        If the current one is that of the published run, of other settings, the pools of `previous` come first.
        """
        pointer = self.workspace / "pools" / "CURRENT"
        there = {path.name.partition("@")[0] for path in (self.workspace / "pools").glob("2*") if path.is_dir()}
        version = pointer.read_text().strip() if pointer.exists() else None
        if version is not None and version not in there:
            return None
        published = self.runs.get(self.published)
        is_of_other = published is not None and published.run_id == version and published.settings != settings
        if is_of_other and previous is not None and previous.run_id in there:
            version = previous.run_id
        not_used = self.not_built_on | self.held
        older = sorted(there & self.runs.keys(), reverse=True) if version is not None else []
        fitting = (name for name in (version, *older) if name is not None and name[:10] <= date)
        return next((name for name in fitting if name not in not_used and self._usable(name, min_support)), None)

    def pools_of(self, run_id: str, min_support: int) -> str | None:
        """The pools of a run, if they can be used."""
        return self._usable(run_id if pool_folder(self.workspace, run_id).is_dir() else None, min_support)

    def _usable(self, version: str | None, min_support: int) -> str | None:
        if version is None or version in self.unusable_pools or self.min_support[version] < min_support:
            return None
        return version

    def check(self, year, summary: dict, previous: Run | None, pools: str | None, force: bool, is_whole: bool) -> Run:
        """Check everything that a night must have left in its folder; returns and remembers the run.

        Parameters
        ----------
        previous, pools : the run that it built on, and the version of the pools that it may draft from.
        is_whole : one command wrote it, so its pools are known.
        """
        date = summary["run_id"][:10]
        world, settings, templates = year.world, year.settings, year.templates
        run = self.workspace / "runs" / summary["run_id"]
        assert run.name[:10] == date and (run / "_SUCCESS").exists()
        manifest = json.loads((run / "manifest.json").read_text())
        assert manifest["status"] == "success" and manifest["previous_run_id"] == (previous and previous.run_id)
        known_names = RUN_NAMES | ({"plain"} if settings["night"]["compare_with_plain"] else set())
        known_names |= {"postponed"} & {path.name for path in run.iterdir()}
        extra = {path.name for path in run.iterdir()} ^ known_names
        assert not extra, f"{run.name} has, or lacks, {extra}"
        later = [FUTURE_WORD in (run / name).read_text() for name in ("manifest.json", "report.html")]
        assert not any(later), "something later than the date was seen"
        keys: dict[str, dict[object, str]] = {}
        since: dict[str, dict[object, str]] = {}
        for side in SIDES:
            known = world.known(side, date)
            fingerprints = {key: self.asked_for(world, side, key, date, settings, templates) for key in known}
            before = {} if previous is None else previous.keys[side]
            carried = set() if force else {key for key in known if before.get(key) == fingerprints[key]}
            limit = settings["knowledge"]["max_prompt_tokens"]
            refused = {key: reason for key in known if (reason := self.refused(world, side, key, limit))}
            without_title = {key for key, reason in refused.items() if reason == "no-title"}
            carried -= without_title
            waiting, since[side] = self._waiting(
                year, run, side, date, fingerprints, carried, without_title, previous, force
            )
            carried -= waiting.keys()
            failed = {key: reason for key, reason in refused.items() if key not in carried | waiting.keys()}
            failed |= self._came_to_nothing(run, side, known.keys() - carried - failed.keys() - waiting.keys())
            written = known.keys() - carried - failed.keys() - waiting.keys()
            stale = before.keys() & (failed.keys() | {key for key, reason in waiting.items() if reason != EVIDENCE})
            rows = self._check_side(run, side, settings, templates, written, carried, stale, failed)
            counts = summary[f"{side}s"]
            counted = tuple(counts[f"num_{name}"] for name in ("entities", "generated", "carried_over", "quarantined"))
            lengths = len(known), len(written), len(carried), len(failed)
            assert counted == lengths, (side, counted, written, carried, failed)
            assert counts.get("postponed", {}) == Counter(waiting.values()), (side, counts, waiting)
            assert len(known) == sum(not row["is_stale"] for row in rows.values()) + len(failed) + len(waiting)
            keys[side] = {key: fingerprints[key] if key not in stale else before[key] for key in rows}
            for key in written | carried:
                self._check_fingerprint(fingerprints[key], rows[key]["fingerprint"])
            for key in written:
                self._check_provenance(world, side, key, date, rows[key], settings, pools, is_whole)
            self._check_carried(run, previous, side, rows, settings, carried, stale)
            year.num_written += len(written)
        ancestors = (previous.run_id, *previous.ancestors) if previous else ()
        this = Run(run.name, year.settings_key(), year.num_commands, keys, self._encoder(settings),
                   previous and previous.run_id, ancestors, since)  # fmt: skip
        self.min_support[run.name] = settings["pools"]["min_support"]
        self.runs[run.name] = this
        self.held.discard(run.name)
        self.unusable_pools.discard(run.name)
        this.files = contents(run)
        return this

    def _waiting(self, year, run: Path, side: str, date: str, fingerprints: dict[object, str], carried: set,
                 without_title: set, previous: Run | None,
                 force: bool) -> tuple[Waiting, dict[object, str]]:  # fmt: skip
        """Postponed entities by reason, and the date since which those without a text wait.

        docs/nights.md, "Which texts are rewritten tonight". Entities beyond the budget must have the lowest scores.
        """
        policy, world = {"min_interactions": 0, "min_new_interactions": 0} | year.settings["refresh"], year.world
        path = run / "postponed" / f"{side}.parquet"
        postponed = {row["entity_id"]: row for row in pq.read_table(path).to_pylist()} if path.exists() else {}
        num = {key: world.num_interactions(side, key, date) for key in fingerprints}
        waiting = {key: EVIDENCE for key in fingerprints if side == "user" and num[key] < policy["min_interactions"]}
        texts = {} if previous is None else year.texts(previous.run_id, side)
        scores, due = {}, set()
        for key in fingerprints.keys() - carried - without_title - waiting.keys() if not force else ():
            text = texts.get(key)
            seen = num[key] if text is None or side == "item" else text["num_history"] + text["num_history_dropped"]
            then = (
                (previous.since[side].get(key) if previous else None) or date if text is None else text["run_id"][:10]
            )
            is_otherwise = text is None or _but_history(fingerprints[key]) != _but_history(previous.keys[side][key])
            age = (datetime.date.fromisoformat(date) - datetime.date.fromisoformat(then)).days
            share = 1.0 if is_otherwise else abs(num[key] - seen) / max(num[key], seen, 1)
            scores[key] = math.log2(2 + num[key]) * share + age / 7
            is_new = abs(num[key] - seen) >= policy["min_new_interactions"]
            if is_otherwise or is_new or age >= policy.get("max_age_days", math.inf):
                due.add(key)
            else:
                waiting[key] = "not-due"
        beyond = {key for key, row in postponed.items() if row["reason"] == "budget"}
        is_limited = "max_tokens" in policy
        assert beyond <= due and (not beyond or is_limited), (side, beyond, due)
        left = min((scores[key] for key in due - beyond), default=math.inf)
        assert all(scores[key] <= left + 1e-9 for key in beyond), (side, beyond, scores)
        waiting |= dict.fromkeys(beyond, "budget")
        assert {key: row["reason"] for key, row in postponed.items()} == waiting, (side, postponed, waiting)
        assert all(abs(row["score"] - scores[key]) < 1e-9 for key, row in postponed.items() if key in scores), (
            postponed,
            scores,
        )
        known = dict.fromkeys(fingerprints, date) | (previous.since[side] if previous else {})
        return waiting, {key: known[key] for key in waiting if key not in texts}

    def _came_to_nothing(self, run: Path, side: str, fingerprints: set) -> dict[object, str]:
        """Entities whose text is empty: a model may end at once."""
        rows = pq.read_table(run / "quarantine" / f"{side}.parquet").to_pylist()
        empty = [row for row in rows if row["reason"].startswith("unparsable") and not row["text"].strip()]
        return {row["entity_id"]: "unparsable" for row in empty if row["entity_id"] in fingerprints}

    def _check_side(self, run, side, settings, templates, written, carried, stale, failed) -> dict[object, dict]:
        table = pq.read_table(run / "knowledge" / side)
        schema = {name: str(table.schema.field(name).type) for name in KNOWLEDGE}
        assert schema == KNOWLEDGE, schema
        rows = {row["entity_id"]: row for row in table.to_pylist()}
        assert len(rows) == table.num_rows, "somebody is there twice"
        quarantine = pq.read_table(run / "quarantine" / f"{side}.parquet").to_pylist()
        reasons = {row["entity_id"]: row["reason"].split(":")[0] for row in quarantine}
        assert reasons == failed, (side, reasons, failed)
        assert rows.keys() == written | carried | stale, (side, rows.keys() ^ (written | carried | stale))
        assert {key for key, row in rows.items() if row["is_stale"]} == stale
        made_now = {key for key, row in rows.items() if row["run_id"] == run.name}
        assert made_now == written, (side, "written", made_now, "expected", written)
        assert all(row["run_id"][:10] <= run.name[:10] for row in rows.values())
        assert all(FUTURE_WORD not in row["text"].lower() for row in rows.values())
        return rows

    def _check_fingerprint(self, expected: str, fingerprint: str) -> None:
        """Check that entities have the same fingerprint exactly when their texts depend on the same things."""
        assert self.fingerprints.setdefault(expected, fingerprint) == fingerprint, f"another fingerprint for {expected}"
        assert self.asked.setdefault(fingerprint, expected) == expected, f"one fingerprint for {expected} and another"

    def _check_provenance(self, world, side, key, date, row, settings, pools, is_whole) -> None:
        assert row["side"] == side and row["framework"] == "kar" and row["num_tokens"] == len(row["token_ids"]) > 0
        assert row["template"] == f"{settings['knowledge'][f'{side}_template']}@1"
        assert json.loads(row["decoding_json"])["verifier"] in (settings["decoding"]["verifier"], "greedy")
        model = settings["decoding"]["model"]
        assert self.model_ids.setdefault(model, row["model_id"]) == row["model_id"]
        assert list(self.model_ids.values()).count(row["model_id"]) == 1, "two models of one name"
        num_events = len(world.history(key, date)) if side == "user" else 0
        assert row["num_history"] + row["num_history_dropped"] == num_events, (key, num_events, row["num_history"])
        version = row["pool_version"]
        assert version is None or version[:10] <= date
        if is_whole and (pool_folder(self.workspace, str(pools)) / side).is_dir():
            assert (version or "")[:10] == pools[:10], (key, version, pools)
        if is_whole and pools is None:
            assert version is None, (key, version)

    def _check_carried(self, run, previous, side, rows, settings, carried, stale) -> None:
        """A text that was not written again is unchanged except for `is_stale`, and so are its vector and clusters."""
        features = {row[f"{side}_id"]: row for row in pq.read_table(run / "features" / side).to_pylist()}
        assert {key: (row["run_id"], row["fingerprint"]) for key, row in features.items()} == {
            key: (row["run_id"], row["fingerprint"]) for key, row in rows.items()
        }
        levels = pq.read_table(run / "features" / f"{side}-centroids.parquet")["level"].to_pylist()
        encoder = self._encoder(settings)
        for key, row in features.items():
            for level in ("cluster_id", "residual_id"):
                assert 0 <= row[level] < max(1, levels.count(level)) <= 2 * settings["encoding"]["num_clusters"]
            vector = pa.array(row["vector"], pa.float32()).to_numpy().tobytes()
            assert self.vectors.setdefault((encoder, rows[key]["text"]), vector) == vector, f"another vector of {key}"
        if previous is None:
            assert not carried and not stale
            return
        before = self.workspace / "runs" / previous.run_id
        texts = {row["entity_id"]: row for row in pq.read_table(before / "knowledge" / side).to_pylist()}
        for key in carried | stale:
            assert rows[key] | {"is_stale": None} == texts[key] | {"is_stale": None}, f"{key}'s text changed"
        old = {row[f"{side}_id"]: row for row in pq.read_table(before / "features" / side).to_pylist()}
        books = {
            pq.read_schema(folder / "features" / f"{side}-centroids.parquet").metadata[b"laserbatch.codebook"]
            for folder in (before, run)
        }
        if previous.encoder == encoder and len(books) == 1:
            for level in ("cluster_id", "residual_id"):
                assert {key: old[key][level] for key in carried} == {key: features[key][level] for key in carried}

    def _encoder(self, settings: dict) -> str:
        return json.dumps(settings["encoding"]["encoder"])

    def check_pointers(self, run: Run, keep_versions: int, is_new: bool) -> None:
        """Check after a night: the published run, the current pools, and the number of pool versions."""
        self.mended()
        self.check_published()
        pools = self.workspace / "pools"
        if is_new:
            for side in SIDES:
                built = [path for path in pools.glob(f"{run.run_id}*/{side}") if path.is_dir()]  # `@2`: a rebuild
                assert bool(built) == bool(run.keys[side]), (run.run_id, side)
        if is_new and self.published == run.run_id:
            assert (pools / "CURRENT").read_text().strip() == run.run_id
        unfinished = sum(not (path / "_SUCCESS").exists() for path in (self.workspace / "runs").iterdir())
        there = [path.name for path in pools.glob("2*")]
        assert len(there) <= keep_versions + unfinished + 2, there
        self.check_no_leftovers()

    def check_published(self) -> None:
        """Check that the expected run is published and complete, unless the pointer is lost and not yet rewritten."""
        if self.published is None or self.is_pointer_lost or self.gone:
            return
        pointer = json.loads((self.workspace / "published.json").read_text())
        assert pointer["run_id"] == self.published, (pointer, self.published)
        assert (self.workspace / "runs" / self.published / "_SUCCESS").exists()

    def check_no_leftovers(self) -> None:
        assert {path.name for path in self.workspace.iterdir()} <= WORKSPACE_NAMES
        left = [path for path in self.workspace.rglob("*") if path.name.endswith(".tmp")]
        assert not left, left

    def check_unchanged(self, newest: int | None = None) -> None:
        """Check that the files of finished runs are unchanged."""
        for run in list(self.runs.values())[-newest if newest else None :]:
            assert contents(self.workspace / "runs" / run.run_id) == run.files, f"{run.run_id} was changed"

    def forget(self, run_id: str) -> None:
        """Note that a run was deleted by hand."""
        del self.runs[run_id]
        self.seen = [other for other in self.seen if other != run_id]

    def kept_by_gc(self, keep: int) -> set[str]:
        """The runs that `runs gc --keep N` must leave."""
        done = sorted({*self.runs, *self.held})
        usable = [run for run in self.runs.values() if run.run_id not in self.not_built_on]
        newest = max((run.date for run in usable), default=None)  # the next night builds on one of these
        seen, built_on = self.seen[:1], None  # runs that readers see now or after a rollback
        if self.published and not self.gone:
            seen, built_on = self.seen[:2], self.runs[self.published].previous
        needed = {*done[-keep:], *seen, built_on, *(run.run_id for run in usable if run.date == newest)}
        last = {run_id[11:19]: run_id for run_id in sorted(run.run_id for run in usable)}
        needed |= {last.get(run_id[11:19]) for run_id in done[-keep:]}
        return needed & {*done}


def contents(folder: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of every file below a folder."""
    return {path: (stat.st_size, stat.st_mtime_ns) for path in sorted(folder.rglob("*"))
            if path.is_file() and (stat := path.stat())}  # fmt: skip


def _follows(run: Run, earlier: str) -> bool:
    chain = [run.run_id, *run.ancestors]
    return earlier in run.ancestors and chain[run.ancestors.index(earlier)][:10] > earlier[:10]


def _but_history(fingerprint: str) -> list:
    return json.loads(fingerprint)[:-1]


def _shown(row: dict, columns: dict[str, pa.DataType]) -> list[tuple[str, str]]:
    """Attributes as a prompt shows them: in the order of their names, those that are null left out."""
    of = defaultdict(lambda: None, row)
    return [(name, ", ".join(sorted(of[name])) if isinstance(of[name], list) else str(of[name]).strip())
            for name in sorted(columns) if of[name] is not None and str(of[name]).strip()]  # fmt: skip
