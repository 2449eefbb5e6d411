"""Deciding which entities keep their text, and sorting the others into shards by pool group; all in columns.

Rows are sorted by pool group, so that the texts that a worker writes one after another share drafts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.decoding.model.folder import model_identity, served_identity, tokenizer_folder
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.knowledge import forms, prompts, templates
from laserbatch.pipeline.knowledge.questions import SideQuestions
from laserbatch.pipeline.knowledge.records import PreviousKnowledge, TokenIds
from laserbatch.pipeline.planning import postpone
from laserbatch.pipeline.planning.plan import CARRIED_SHARD, WAITING_SHARD, Shard, SidePlan, write_shard_plan
from laserbatch.pipeline.planning.postpone import Refresh, choose, still_failing
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage import atomic, mapped
from laserbatch.pipeline.storage.figures import ShardRecord
from laserbatch.pipeline.storage.quarantine import QuarantineRow, count_reasons
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.tables.read import Tables
from laserbatch.pipeline.tables.schema import id_type
from laserbatch.retrieval_pools.index.manifest import tokenizer_hash
from laserbatch.retrieval_pools.routing.router import Router, Routes

ROWS_AT_ONCE = 64 * 1024
FILE_ROWS = 64 * 1024  # rows of a file of carried-over records that is written again
MIN_SHARED_ROWS = 1024  # rows from which on an earlier file is shared; smaller files are merged
SHARDS_A_SIDE = 16  # default least number of shards of a side that is not small, so that all workers have some
FIRST_TEXTS = 32  # number of a side's texts that are judged before the others are written
MIN_BATCHES, MAX_BATCHES = 4, 32  # default batches of a shard; the batch empties at the end of each shard
# Files of a model's folder that determine, besides the vocabulary, how messages become tokens.
CHAT_FILES = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.*",
    "additional_chat_templates/*.jinja",
)  # fmt: skip


@dataclass(frozen=True)
class CarryOver:
    """The earlier records that a plan keeps, read a few at a time; `carried` and `waiting` as in `SideDecision`."""

    folder: RunFolder
    side: Side
    previous: PreviousKnowledge
    id_type: pa.DataType
    carried: np.ndarray
    waiting: np.ndarray
    quarantined: list[QuarantineRow]  # entities without a prompt tonight

    def write(self) -> dict[str, ShardRecord]:
        """Write the records, once; returns the written shards by name. Before that the plan is incomplete.

        An earlier file whose records all stay is shared, if it is not small. The records of other files are merged, so
        that files do not become more and smaller from night to night.
        """
        shards, written = self.folder.shards(self.side), dict[str, ShardRecord]()
        is_left = np.ones(len(self.carried), bool)
        for file, places in self.previous.whole_files(self.carried, self.id_type):
            name, earlier = f"{CARRIED_SHARD}-{len(written):05d}", RunFolder(file.parents[2]).shards(self.side)
            if places.stop - places.start >= MIN_SHARED_ROWS and (record := shards.share(name, earlier, file.stem)):
                written[name], is_left[places] = record, False
        records = self.previous.records(self.carried[is_left], self.id_type, is_stale=False)
        for part, of_part in enumerate(_in_files(records)):
            name = f"{CARRIED_SHARD}-{len(written) - 1:05d}" if part else CARRIED_SHARD
            written[name] = shards.write(name, of_part, () if part else self.quarantined)
        if len(self.waiting):
            records = self.previous.records(self.waiting, self.id_type, is_stale=True)
            written[WAITING_SHARD] = shards.write(WAITING_SHARD, records)
        return written


def _in_files(records: pa.RecordBatchReader) -> Iterator[pa.RecordBatchReader]:
    """Yield the records in parts of `FILE_ROWS` rows or up to a batch more; without records, one part without rows.

    Each part must be read before the next. The last part may be smaller.
    """
    num_before = 0

    def number_of(batch: pa.RecordBatch) -> int:
        nonlocal num_before
        number, num_before = num_before // FILE_ROWS, num_before + batch.num_rows
        return number

    for _, batches in groupby(records, number_of):
        yield pa.RecordBatchReader.from_batches(records.schema, batches)
    if not num_before:
        yield pa.RecordBatchReader.from_batches(records.schema, [])


def shared_fingerprint(
    template: templates.PromptTemplate, max_prompt_tokens: int, decoding: DecodingSettings, model_dir: Path
) -> str:
    """The joined parts of fingerprints that all entities of a side share. The model's files are hashed, not loaded.

    So a chat template that prints today's date does not change the fingerprints every day.
    """
    folders = [model_dir, *([Path(decoding.adapter)] if decoding.adapter is not None else [])]  # its own chat template
    paths = [path for folder in folders for pattern in CHAT_FILES for path in sorted(folder.glob(pattern))]
    chat_files = [(path.name, atomic.sha256_file(path)) for path in paths]
    chat = [tokenizer_hash(tokenizer_folder(model_dir, decoding.adapter)), chat_files, max_prompt_tokens]
    server = decoding.endpoint
    model_id = served_identity(model_dir, decoding) if server else model_identity(model_dir, decoding.adapter)
    shared = {
        "template": [prompts.LAYOUT_VERSION, template.model_dump(mode="json", exclude_defaults=True)],
        "prompt": chat,
        "model": model_id,
        "decoding": decoding.provenance() | ({"guided": True} if forms.guiding_grammar(template, decoding) else {}),
    }
    return "-".join(prompts.digest(shared[name]) for name in prompts.PARTS[: len(shared)])


def side_routes(router: Router | None, tables: Tables, side: Side) -> Routes:
    """The pool group of each entity of a side, from tables that are cut at the end of a date; none without a router."""
    entities = tables.entities(side)
    if router is None:
        return Routes.nowhere(entities.num_rows)
    return router.routes(entities, postpone.interactions_of(tables, side))


@dataclass(frozen=True)
class WriteRules:
    """The rules by which entities get a new text tonight."""

    force: bool = False  # write about unchanged entities too
    refresh: Refresh | None = None  # decides which changed entities wait; None: no entity waits
    excluded: pa.Table | None = None  # entities, as `run_folder.POSTPONED`, that get no text in any case
    unusable: pa.Table | None = None  # rows of the last quarantine, which stay there if their prompt is the same


@dataclass(frozen=True)
class Sharding:
    """The rules for cutting rows into shards."""

    batch_size: int  # number of texts that a worker writes in a batch
    size: int | None = None  # number of rows of a shard; None: `default_shard_size`
    routes: Routes | None = None  # pool groups, as `side_routes` returns them; None: no groups
    isolate_ids: pa.Array | None = None  # share no shard with others and come first, so that their time can be measured
    is_by_score: bool = False  # rows are sorted by the score of their new text, highest first, not by group


@dataclass(frozen=True)
class SideDecision:
    """The decision about every entity of a side. Nothing is rendered, tokenised or written for it."""

    rows: np.ndarray  # int64[n], the rows of the entities that get a new text
    fingerprints: pa.Array  # their fingerprints
    records: np.ndarray  # int64[n], the rows of their earlier records; -1: none
    carried: np.ndarray  # int64, rows of earlier records that stay unchanged
    waiting: np.ndarray  # int64, rows of earlier records that stay because the new text waits
    quarantined: list[QuarantineRow]  # entities without a prompt tonight, or whose prompt failed before
    postponed: pa.Table | None  # as `run_folder.POSTPONED`; None without a rule that postpones
    num_tokens: int  # expected tokens of the new texts; 0 without a rule
    scores: np.ndarray | None  # float64[n], the value of each new text; None without a rule


def decide_side(
    questions: SideQuestions,
    previous: PreviousKnowledge,
    rules: WriteRules,
    on_entities: Callable[[int], None] = lambda num_entities: None,
) -> SideDecision:
    """Decide about every entity of a side, by its fingerprint, its earlier record and the rules."""
    refresh, excluded = rules.refresh, rules.excluded
    ids = questions.entities[f"{questions.side}_id"]
    before = previous.rows_of(ids)
    left_out = np.zeros(len(ids), bool)
    if refresh is not None and questions.side == "user" and refresh.settings.min_interactions:
        left_out = questions.num_events() < refresh.settings.min_interactions
        excluded = postpone.without_evidence(refresh, ids.combine_chunks().filter(pa.array(left_out)))
    elif excluded is not None:
        left_out = pc.is_in(ids, value_set=excluded["entity_id"].combine_chunks()).to_numpy()
    compared = _compared(questions, previous, before, left_out, rules.force, on_entities)
    rows, fingerprints, carried = compared.changed, compared.fingerprints, compared.carried
    refused_ids = ids.take(pa.array(compared.refused)).to_pylist()
    quarantined = [QuarantineRow.of(entity_id, questions.side, prompts.NO_TITLE) for entity_id in refused_ids]
    if rules.unusable is not None and not rules.force:
        failing = still_failing(rules.unusable, ids.take(pa.array(rows)).combine_chunks(), fingerprints)
        same = rules.unusable.take(pa.array(failing[failing >= 0]))
        quarantined += [QuarantineRow(**row) for row in same.to_pylist()]
        rows, fingerprints = rows[failing < 0], fingerprints.filter(pa.array(failing < 0))
    waiting, postponed, num_tokens, scores = before[:0], excluded, 0, None
    if refresh is not None:
        chosen = choose(refresh, questions, previous, rows, fingerprints, before[rows])
        scores, is_written = chosen.scores, chosen.is_written
        if not rules.force:
            postponed = pa.concat_tables([part for part in (excluded, chosen.postponed) if part is not None])
            num_tokens, waiting = chosen.num_tokens, before[rows[~is_written]]
            rows, fingerprints = rows[is_written], fingerprints.filter(pa.array(is_written))
            scores = scores[is_written]
    waiting = np.sort(waiting[waiting >= 0])
    return SideDecision(rows, fingerprints, before[rows], carried, waiting, quarantined, postponed, num_tokens, scores)


def write_side_plan(
    decision: SideDecision, questions: SideQuestions, previous: PreviousKnowledge, sharding: Sharding, folder: RunFolder
) -> tuple[SidePlan, CarryOver]:
    """Write the inputs of a side's shards and the postponed entities; returns the plan, and the carry-over to write."""
    side, rows, postponed, waiting = questions.side, decision.rows, decision.postponed, decision.waiting
    ids = questions.entities[f"{side}_id"]
    postpone.write_postponed(folder, side, postponed)
    carried, kind = np.sort(decision.carried), id_type(ids.type)
    carry_over = CarryOver(folder, side, previous, kind, carried, waiting, decision.quarantined)
    routes = sharding.routes or Routes.nowhere(len(ids))
    groups = routes.groups.take(pa.array(rows)).cast(pa.string())
    has_ids = prompts.have_same_tokens(previous.fingerprints(decision.records).cast(pa.string()), questions.shared)
    columns = {
        "fingerprint": decision.fingerprints,
        "previous_ids": previous.token_ids(np.where(has_ids.to_numpy(False), decision.records, -1)),
        "group": pc.if_else(pc.equal(groups, ""), None, groups),
    }
    plan = SidePlan(
        side=side,
        num_entities=len(ids),
        num_carried_over=len(decision.carried),
        num_unpromptable=len(decision.quarantined),
        routes=routes.num_by_scheme(),
        shards=_write_shards(questions, rows, columns, sharding, decision.scores, folder.root),
        num_waiting=len(waiting),
        num_without_text=0 if postponed is None else len(postponed) - len(waiting),
        postponed={} if postponed is None else count_reasons(postponed),
        num_tokens=decision.num_tokens,
    )
    return plan, carry_over


@dataclass(frozen=True)
class _Compared:
    """Entities by the result of comparing fingerprints: int64 rows of the table; for `carried` of earlier records."""

    changed: np.ndarray
    fingerprints: pa.Array  # of the changed entities
    carried: np.ndarray
    refused: np.ndarray  # entities without a prompt


def _compared(
    questions: SideQuestions,
    previous: PreviousKnowledge,
    before: np.ndarray,
    left_out: np.ndarray,
    force: bool,
    on_entities: Callable[[int], None],
) -> _Compared:
    """Compare the fingerprints of all entities that are not left out with their earlier records, the rows `before`."""
    changed, carried, refused = [], [], []

    def fingerprints_of_changed() -> Iterator[pa.Array]:
        for start in range(0, len(before), ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, len(before))
            tonight, records = questions.fingerprints(start, stop), before[start:stop]
            is_same = pc.fill_null(pc.equal(tonight, previous.fingerprints(records).cast(pa.string())), False)
            is_included = ~left_out[start:stop]
            can_ask = tonight.is_valid().to_numpy(False) & is_included
            is_same = is_same.to_numpy(False) & is_included & (not force)
            refused.append(start + np.flatnonzero(~can_ask & is_included))
            carried.append(records[is_same])
            changed.append(start + np.flatnonzero(can_ask & ~is_same))
            on_entities(stop - start)
            yield tonight.filter(pa.array(can_ask & ~is_same))

    fingerprints = mapped.mapped_column(fingerprints_of_changed(), questions.tables.scratch.folder, pa.large_string())
    return _Compared(_concatenated(changed), fingerprints, _concatenated(carried), _concatenated(refused))


def _write_shards(
    questions: SideQuestions,
    rows: np.ndarray,
    columns: dict[str, pa.Array | TokenIds],
    sharding: Sharding,
    scores: np.ndarray | None,
    run_dir: Path,
) -> tuple[Shard, ...]:
    """Write the shards of some rows: the contents of prompts, and `columns`; `scores` and `columns` are theirs."""
    side, isolate_ids = questions.side, sharding.isolate_ids
    ids = questions.entities[f"{side}_id"].take(pa.array(rows))
    keys = pc.rank(pc.fill_null(columns["group"], ""), tiebreaker="dense").to_numpy()
    turns = np.argsort(-scores if sharding.is_by_score and scores is not None else keys, kind="stable")
    is_isolated = np.zeros(len(rows), bool) if isolate_ids is None else pc.is_in(ids, value_set=isolate_ids).to_numpy()
    size = sharding.size or default_shard_size(len(rows), sharding.batch_size)
    shards = []
    for places, is_isolated_shard in _cut(turns, is_isolated, size):
        shown = questions.shown(rows[places])
        part = {"entity_id": ids.take(pa.array(places))} | {name: shown[name] for name in shown.column_names}
        part |= {name: values.take(pa.array(places)) for name, values in columns.items()}
        part["fingerprint"] = part["fingerprint"].cast(pa.string())
        shards.append(write_shard_plan(side, f"{len(shards):05d}", pa.table(part), run_dir, is_isolated_shard))
    return tuple(shards)


def _concatenated(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def default_shard_size(num_rows: int, batch_size: int) -> int:
    """The number of rows per shard, for a side with `num_rows` texts to generate.

    A shard's texts are batched only with each other, so that its forwards, and the rounding of their sums, are the same
    on any worker and after any other shard. So the batch empties at the end of a shard, which costs less per text in
    longer shards (`benchmarks/tail.py`); but a killed run loses the texts of unfinished shards. A side of two or more
    batches has at least two shards: with one, a second worker would have nothing to do.
    """
    size = min(max(-(-num_rows // SHARDS_A_SIDE), MIN_BATCHES * batch_size), MAX_BATCHES * batch_size)
    return size if num_rows < 2 * batch_size else min(size, -(-num_rows // 2))


def _cut(turns: np.ndarray, is_isolated: np.ndarray, shard_size: int) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield the places of each shard's rows, and whether they are isolated.

    If no rows are isolated and shards are long, a small shard of rows of all groups comes first: a night is stopped
    after it if most texts cannot be kept. `turns` has the places of all rows, by group and then in the input's order.
    """
    if not is_isolated.any() and len(turns) > shard_size > FIRST_TEXTS:
        stride = len(turns) // FIRST_TEXTS
        is_first = (np.arange(len(turns)) % stride == 0) & (np.arange(len(turns)) < stride * FIRST_TEXTS)
        yield turns[is_first], False
        turns = turns[~is_first]
    for isolated in (True, False):
        part = turns[is_isolated[turns] == isolated]
        for start in range(0, len(part), shard_size):
            yield part[start : start + shard_size], isolated
