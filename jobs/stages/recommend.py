"""The nightly lists: each user's best items by a recommender over codes, in runs of their own beside those of texts.

A run is a folder as any other, in the workspace `recommendations/` within the workspace. Its plan follows from tables,
model and the run before alone, so that a killed run finds its shards again. Who has the same history keeps the list,
unless one of its items has left the catalogue; who has none gets what most others have.
"""

import datetime
import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from laserbatch.jobs.console import progress, say
from laserbatch.jobs.failures import end_at_sigterm
from laserbatch.jobs.gates import gate_sentence, holding, judge
from laserbatch.jobs.report.lists import write_lists_report
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages.night import describe_machine
from laserbatch.jobs.stages.publishing import mend_pointer
from laserbatch.pipeline.distributed.settings import usable_cores
from laserbatch.pipeline.errors import ConfigError, RunHeld
from laserbatch.pipeline.knowledge.histories import Histories
from laserbatch.pipeline.recommending.beams import BeamDrafter, search
from laserbatch.pipeline.recommending.code_trees import CodeTrees
from laserbatch.pipeline.recommending.codes import read_codes
from laserbatch.pipeline.recommending.drafters import ListedItems, ModelBeams
from laserbatch.pipeline.recommending.item_trie import ItemTrie
from laserbatch.pipeline.recommending.lists import ListsBefore, flat_lists, lists_schema
from laserbatch.pipeline.recommending.models import CODES_NAME, load_recommender
from laserbatch.pipeline.storage.atomic import remove_folder
from laserbatch.pipeline.storage.manifest import (
    GateFigures,
    ModelFigures,
    RunManifest,
    SampleSpan,
    SampleText,
    ShardInfo,
    ShardRecord,
    SideFigures,
    make_run_id,
)
from laserbatch.pipeline.storage.parquet import write_parquet
from laserbatch.pipeline.storage.quarantine import QuarantineRow, count_reasons
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.pipeline.storage.workspace import RECOMMENDATIONS, Workspace
from laserbatch.pipeline.tables.read import Tables, describe, read_tables

LISTS_NAME = "lists.parquet"  # user_id, rank from 1, item_id, score
SHARD_BATCHES = 8
CARRIED = "carried"
NUM_SAMPLES = 3


def recommend(settings: Settings, date: datetime.date, force: bool = False) -> RunManifest:
    """The lists of a date, published; a finished run is left as it is, unless `force` asks for another edition.

    Raises ConfigError, ModelError, TableError for what cannot be recommended from, RunHeld where a gate keeps it back.
    """
    tables = read_tables(settings.tables.path, as_of=date)
    job = _Job(settings, date, tables)
    workspace = Workspace.open(Workspace.open(settings.workspace).root / RECOMMENDATIONS)
    with workspace.lock():
        mend_pointer(workspace)
        manifest = job.opened(workspace, force)
        run = workspace.run(manifest.run_id)
        if run.is_finished:
            say(f"run {run.run_id} is finished already; --force makes every list again")
        else:
            job.write(workspace, run, manifest)
        _publish(workspace, run)
        _collect(workspace, settings.recommending.keep_runs)
    return manifest


@dataclass
class _Job:
    settings: Settings
    date: datetime.date
    tables: Tables

    def __post_init__(self) -> None:
        options = self.settings.recommending
        if options.model is None:
            raise ConfigError("recommending.model names no recommender; `laserbatch recommender train` makes one")
        torch.set_num_threads(usable_cores())
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.target = load_recommender(options.model, device)
        self.small = None if options.draft_model is None else load_recommender(options.draft_model, device)
        codes = read_codes(options.model / CODES_NAME)
        self.target.require(codes)
        if self.small is not None:
            self.small.require_drafts_for(self.target)
        item_ids = self.tables.items["item_id"].combine_chunks()
        self.catalogue = codes.of_catalogue(item_ids)
        if num_unknown := len(item_ids) - len(self.catalogue):
            say(f"{num_unknown} items that came since the recommender was trained are not listed: they have no codes")
        if options.num_items > len(self.catalogue):
            raise ConfigError(
                f"recommending.num_items {options.num_items} is more than the {len(self.catalogue)} items of the "
                "catalogue that have codes: ask for fewer"
            )
        self.trie = ItemTrie.of(self.catalogue)
        self._catalogue_row = self.catalogue.rows_of(item_ids)  # of each row of the item table

    @property
    def user_ids(self) -> pa.Array:
        return self.tables.users["user_id"].combine_chunks()

    @cached_property
    def histories(self) -> list[np.ndarray]:
        """Catalogue rows of what each user has done, the oldest first, as many as the model is shown."""
        known = Histories(self.tables)
        places, starts = known.newest(np.arange(len(self.user_ids)), len(self.tables.interactions))
        rows = self._catalogue_row[known.items(places)]
        found = [rows[start:stop] for start, stop in pairwise(starts)]
        return [one[one >= 0][-self.target.card.history :] for one in found]

    @cached_property
    def popular(self) -> tuple[np.ndarray, np.ndarray]:
        """Catalogue rows of the items that most histories have, the most of all first, and how many have each."""
        listed = np.concatenate([np.empty(0, np.int64), *(np.unique(one) for one in self.histories)])
        counts = np.bincount(listed, minlength=len(self.catalogue))
        rows = np.argsort(-counts, kind="stable")[: self.settings.recommending.num_items]
        return rows, counts[rows].astype(float)

    @cached_property
    def fingerprints(self) -> list[str]:
        """Of what each user's list follows from."""
        asked = f"{self.target.model_id} {self.settings.recommending.num_items}".encode()
        popular = b"popular" + self._named(self.popular[0])
        return [
            hashlib.blake2b(asked + (self._named(one) if len(one) else popular), digest_size=16).hexdigest()
            for one in self.histories
        ]

    def _named(self, rows: np.ndarray) -> bytes:
        return self.catalogue.codes[rows].tobytes()

    def opened(self, workspace: Workspace, force: bool) -> RunManifest:
        """The manifest of the newest run of the date, or of another edition where that is finished and `force` asks."""
        options = self.settings.recommending
        identity = {
            "tables": self.settings.tables.model_dump(mode="json", exclude={"path"}),
            "num_items": options.num_items,
            "model": self.target.model_id,
        }
        edition = 1
        while workspace.run(make_run_id(self.date, identity, edition + 1)).manifest_path.exists():
            edition += 1
        run = workspace.run(make_run_id(self.date, identity, edition))
        if run.is_finished and force:
            edition += 1
            run = workspace.run(make_run_id(self.date, identity, edition))
        if run.manifest_path.exists():
            return RunManifest.load(run.manifest_path)
        told = self.settings.model_dump(mode="json", include={"tables", "recommending"})
        manifest = RunManifest.create(
            run.manifest_path, self.date, told, version("laserbatch"), describe_machine(), edition, identity
        )
        earlier = [other for other in workspace.dated_runs() if other.date <= run.date and other.run_id != run.run_id]
        manifest.previous_run_id = earlier[-1].run_id if earlier else None
        manifest.force, manifest.inputs = force, describe(self.settings.tables.path)
        manifest.model = self._model
        manifest.save()
        return manifest

    def write(self, workspace: Workspace, run: RunFolder, manifest: RunManifest) -> None:
        """Make the lists that are not there yet, check that nobody is missing, and finish the run."""
        start_s = time.perf_counter()
        schema = lists_schema(self.user_ids.type, self.catalogue.item_ids.type)
        previous = None
        if manifest.previous_run_id is not None:
            before = workspace.run(manifest.previous_run_id)
            previous = pa.Table.from_batches(before.iter_knowledge("user", schema.names))
        kept = np.full(len(self.user_ids), -1) if manifest.force or previous is None else self._kept(previous)
        shards = {f"{number:05d}": rows for number, rows in enumerate(self._shards(np.flatnonzero(kept < 0)))}
        finished = run.finished_shards("user")
        planned = {name: self._digest(rows) for name, rows in shards.items()}
        planned[CARRIED] = self._digest(np.flatnonzero(kept >= 0))
        finished = {n: one for n, one in finished.items() if one.info and one.info.planned_sha256 == planned.get(n)}
        run.drop_unfinished("user", finished)
        if CARRIED not in finished:
            table = schema.empty_table() if previous is None else previous.take(pa.array(kept[kept >= 0])).cast(schema)
            info = self._info(planned[CARRIED], DecodingStats())
            finished[CARRIED] = run.write_shard("user", CARRIED, table, (), info)
        drafts = self.small is None and len(finished) <= len(shards)
        lists = ListsBefore.of(previous if drafts else None, self.catalogue)
        with progress("recommend", len(self.user_ids)) as bar:
            bar.advance(sum(one.num_rows for one in finished.values()))
            for name, rows in shards.items():
                if name not in finished:
                    end_at_sigterm()
                    finished[name] = self._write_shard(run, name, rows, lists, schema, planned[name])
                    bar.advance(len(rows))
        run.merge_quarantine("user", finished.values(), (), self.user_ids.type)
        run.require_every_entity("user", pa.chunked_array([self.user_ids]))
        write_parquet(flat_lists(run, schema), run.root / LISTS_NAME)
        manifest.sides = {"user": self._figures(run, finished)}
        before = 0 if previous is None else previous.num_rows
        coverage = None if not before else (len(self.user_ids) - manifest.sides["user"].num_quarantined) / before
        failed = manifest.sides["user"].num_quarantined / max(1, len(self.user_ids))
        told = "no run before" if coverage is None else ""
        measured = GateFigures("quarantine", "user", failed), GateFigures("coverage", "user", coverage, told=told)
        manifest.gates = judge(measured, self.settings.gates)
        manifest.add_stage("recommend", time.perf_counter() - start_s)
        held_by = holding(manifest.gates)
        manifest.status = "held" if held_by else "success"
        manifest.save()
        write_lists_report(manifest, run.report_path)
        run.finish(is_held=bool(held_by))
        if held_by:
            told = "; ".join(map(gate_sentence, held_by))
            raise RunHeld(
                f"run {run.run_id} is done but not published: {told}. Look at {run.report_path}; after a change of the "
                "limit the same command judges it again"
            )

    def _kept(self, previous: pa.Table) -> np.ndarray:
        """Of each user the row of last night's list where it stays, int64; -1 where it does not."""
        rows = pc.fill_null(pc.index_in(self.user_ids, value_set=previous["entity_id"].combine_chunks()), -1)
        rows = rows.to_numpy().astype(np.int64)
        fingerprints = pa.array(self.fingerprints, pa.string())
        same = pc.equal(previous["fingerprint"].combine_chunks().take(pa.array(rows, mask=rows < 0)), fingerprints)
        same = pc.fill_null(same, False).to_numpy(zero_copy_only=False)
        lists = previous["items"].combine_chunks()
        is_gone = pc.invert(pc.is_in(lists.flatten(), value_set=self.catalogue.item_ids)).to_numpy(zero_copy_only=False)
        num_gone = np.diff(np.append(0, np.cumsum(is_gone))[np.append(0, np.cumsum(pc.list_value_length(lists)))])
        stays = (rows >= 0) & same
        stays[stays] = num_gone[rows[stays]] == 0
        return np.where(stays, rows, -1)

    def _shards(self, users: np.ndarray) -> Iterator[np.ndarray]:
        """Users side by side have histories of like length."""
        users = users[np.argsort([len(self.histories[user]) for user in users.tolist()], kind="stable")]
        size = SHARD_BATCHES * self.settings.recommending.batch_size
        return (users[start : start + size] for start in range(0, len(users), size))

    def _digest(self, users: np.ndarray) -> str:
        told = [f"{self.user_ids[user]} {self.fingerprints[user]}" for user in users.tolist()]
        return hashlib.sha256("\n".join(told).encode()).hexdigest()

    @cached_property
    def _model(self) -> ModelFigures:
        model = self.target.model
        return ModelFigures(self.target.model_id, "float32", str(model.device), model.num_parameters())

    def _info(self, digest: str, stats: DecodingStats) -> ShardInfo:
        return ShardInfo(digest, "", stats, self._model, 1)

    def _write_shard(
        self, run: RunFolder, name: str, users: np.ndarray, lists: "ListsBefore", schema: pa.Schema, digest: str
    ) -> ShardRecord:
        start_s, size = time.perf_counter(), self.settings.recommending.batch_size
        rows, failed, num_forwards, num_accepted = [], [], 0, 0
        for start in range(0, len(users), size):
            part = [user for user in users[start : start + size].tolist() if len(self.histories[user])]
            found = dict(zip(part, self._found(part, lists), strict=True)) if part else {}
            for user in users[start : start + size].tolist():
                user_id = self.user_ids[user].as_py()
                if user not in found:
                    items, scores, route, last = *self.popular, "popular", None
                else:
                    one = found[user]
                    items, scores, route, last = one.rows, one.scores, "history", int(self.histories[user][-1])
                    num_accepted += one.num_accepted
                    num_forwards += self.trie.num_levels - one.num_accepted
                    if not np.isfinite(scores).all():
                        message = "not-finite: the model's numbers for the user's history are not finite"
                        failed.append(QuarantineRow.of(user_id, "user", message, self.fingerprints[user]))
                        continue
                rows.append({
                    "entity_id": user_id, "items": self.catalogue.item_ids.take(pa.array(items)).to_pylist(),
                    "scores": scores.tolist(), "route": route, "fingerprint": self.fingerprints[user],
                    "last_item": None if last is None else self.catalogue.item_ids[last].as_py(),
                    "run_id": run.run_id, "model_id": self.target.model_id, "is_stale": False,
                })  # fmt: skip
        stats = DecodingStats(
            num_texts=len(rows), num_tokens=self.trie.num_levels * len(rows), num_steps=num_forwards,
            num_accepted=num_accepted, wall_s=time.perf_counter() - start_s,
        )  # fmt: skip
        table = pa.Table.from_pylist(rows, schema=schema)
        return run.write_shard("user", name, table, failed, self._info(digest, stats))

    def _found(self, users: Sequence[int], lists: "ListsBefore"):
        options = self.settings.recommending
        prompts = [self.target.card.prompt(self.catalogue.codes[self.histories[user]]) for user in users]
        trees = CodeTrees(self.target.model, self.trie, self.target.card.first_tokens, prompts)
        drafter: BeamDrafter
        if self.small is not None:
            own = CodeTrees(self.small.model, self.trie, self.small.card.first_tokens, prompts)
            drafter = ModelBeams(own, self.trie, len(users), max(options.num_drafted, options.num_items))
        else:
            listed = [lists.of_user(self.user_ids[user].as_py(), int(self.histories[user][-1])) for user in users]
            drafter = ListedItems(listed, self.trie, options.num_drafted)
        return search(trees, self.trie, len(users), options.num_items, drafter)

    def _figures(self, run: RunFolder, finished: dict[str, ShardRecord]) -> SideFigures:
        written = [one for name, one in finished.items() if name != CARRIED]
        quarantine = run.read_quarantine("user", ["reason"])
        routes = Counter("history" if len(one) else "popular" for one in self.histories)
        return SideFigures(
            num_entities=len(self.user_ids),
            num_generated=sum(one.num_rows for one in written),
            num_carried_over=finished[CARRIED].num_rows,
            num_quarantined=quarantine.num_rows,
            num_kept=0,
            quarantine_reasons=count_reasons(quarantine),
            routes=dict(routes),
            shards=written,
            stats=DecodingStats.total(one.info.stats for one in written),
            samples=self._samples(run),
        )

    def _samples(self, run: RunFolder) -> list[SampleText]:
        columns = (self.tables.items[name].to_pylist() for name in ("item_id", "title"))
        titles = dict(zip(*columns, strict=True))
        samples = []
        for batch in run.iter_knowledge("user", ["entity_id", "items", "route"]):
            batch = batch.filter(pc.equal(batch["route"], "history"))
            for row in batch.slice(0, NUM_SAMPLES - len(samples)).to_pylist():
                user = pc.index(self.user_ids, pa.scalar(row["entity_id"], self.user_ids.type)).as_py()
                shown = self.catalogue.item_ids.take(pa.array(self.histories[user])).to_pylist()
                history = "\n".join(str(titles.get(item)) for item in shown)
                text = ", ".join(str(titles.get(item)) for item in row["items"])
                spans = [SampleSpan(text, "target")]
                samples.append(SampleText(row["entity_id"], None, history, text, spans, None))
            if len(samples) == NUM_SAMPLES:
                break
        return samples


def _publish(workspace: Workspace, run: RunFolder) -> None:
    published = workspace.published()
    if published is not None and published.date > run.date:
        say(f"not published: readers go on seeing the lists of {published.run_id}, of a later date")
    elif published is None or published.run_id != run.run_id:
        workspace.publish(run.run_id)


def _collect(workspace: Workspace, keep: int) -> None:
    published = workspace.pointed_to()
    for run in [one for one in workspace.dated_runs() if one.run_id != published][: -keep or None]:
        remove_folder(run.root)
