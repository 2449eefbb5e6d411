"""Brings the texts of a run into the form that a pool takes, and calibrates that pool by replaying some of them.

Texts have the order of the entity table, which is the same every night, so unchanged texts keep their place and are not
sorted again. Token ids, entity ids and start offsets are read in batches into files.

If tonight's run drafted from a pool, the texts that it wrote are replayed against that pool with the run's prompts,
groups and previous texts. On a first night some texts are replayed against a pool of the others. A calibration is valid
until a tenth of a side's texts have been written since.
"""

import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.jobs.console import say
from laserbatch.jobs.stages.budgets import budget_of
from laserbatch.jobs.stages.night import Night
from laserbatch.pipeline.decoding.grammar import Grammars
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge.forms import guiding_grammar
from laserbatch.pipeline.knowledge.prompts import have_same_tokens
from laserbatch.pipeline.knowledge.thoughts import mark_tokens
from laserbatch.pipeline.planning.plan import RenderedRow, load_plan, read_shard
from laserbatch.pipeline.planning.planner import shared_fingerprint
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.mapped import mapped_column
from laserbatch.pipeline.tables.read import Tables
from laserbatch.retrieval_pools.calibration.calibrate import (
    MIN_CHANGED_TEXTS,
    MIN_TEXTS,
    NUM_CALIBRATION_TEXTS,
    calibrate,
    num_held_back,
    spread_positions,
    with_budgets,
)
from laserbatch.retrieval_pools.calibration.replay import ReplayText
from laserbatch.retrieval_pools.draft import DraftOptions
from laserbatch.retrieval_pools.ids import rows_among
from laserbatch.retrieval_pools.index.arrays import ArrayWriter, give_back, map_array
from laserbatch.retrieval_pools.index.build import HeldBack
from laserbatch.retrieval_pools.index.calibration_record import BudgetCurve, Calibration
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.index.texts import MAX_POSITIONS, PoolTexts
from laserbatch.retrieval_pools.routing.router import Routes
from laserbatch.retrieval_pools.settings import DraftSettings

ROWS_AT_ONCE = 8 * 1024
MAX_SHARE_CHANGED = 0.1  # texts are replayed again once more than this share of a side changed since the last replay
TOKENS_NAME, STARTS_NAME = "texts.npy", "starts.npy"


@dataclass(frozen=True)
class RunTexts:
    entity_ids: pa.Array  # memory-mapped, like `starts` and `tokens`
    starts: np.ndarray  # int64[num_texts + 1], the offset in `tokens` at which each text begins
    tokens: np.ndarray  # int32, the token ids of all texts
    model_id: str  # the model that wrote the first text

    def __len__(self) -> int:
        return len(self.entity_ids)

    def of_entities(self, entity_ids: list) -> dict[str | int, np.ndarray]:
        """The token ids, int32[num_tokens], of each entity that has a text."""
        rows = rows_among(pa.array(entity_ids, self.entity_ids.type), self.entity_ids)
        found = [(key, row) for key, row in zip(entity_ids, rows.tolist(), strict=True) if row >= 0]
        return {key: self.tokens[self.starts[row] : self.starts[row + 1]] for key, row in found}

    def in_pool(self, tables: Tables, side: Side) -> np.ndarray:
        """The text number of each entity of a table, int64[num_entities]; -1 if it has no text or is left out.

        If a pool cannot hold all texts, the entities whose ids have the highest checksums are left out, so that every
        night leaves out the same ones.
        """
        entity_ids = tables.entities(side)[f"{side}_id"]
        numbers = rows_among(entity_ids, self.entity_ids)
        if not self._is_too_long:
            return numbers
        places = np.flatnonzero(numbers >= 0)
        lengths = self.starts[numbers[places] + 1] - self.starts[numbers[places]] + 1  # with a separator
        ids = (str(key.as_py()) for chunk in entity_ids.chunks for key in chunk)
        checksums = np.fromiter((zlib.crc32(key.encode("utf-8", "backslashreplace")) for key in ids), np.uint32)
        turns = np.argsort(checksums[places], kind="stable")
        is_left_out = np.cumsum(lengths[turns]) >= MAX_POSITIONS
        numbers[places[turns[is_left_out]]] = -1
        return numbers

    @property
    def _is_too_long(self) -> bool:
        """Whether all texts, each with a separator, have more tokens than a pool can hold."""
        return len(self.tokens) + len(self) >= MAX_POSITIONS

    def pool_texts(self, tables: Tables, side: Side, routes: Routes) -> Iterator[PoolTexts]:
        """Yield the texts that go into the pool in blocks, without entities that the tables no longer have.

        `routes` has the pool group of each entity of the tables.
        """
        groups, codes = routes.groups.dictionary.to_pylist(), routes.groups.indices.to_numpy()
        numbers = self.in_pool(tables, side)
        if self._is_too_long:
            num_texts = np.count_nonzero(numbers >= 0)
            say(f"the {side} pool holds {num_texts:,} of {len(self):,} texts: its limit is {MAX_POSITIONS:,} tokens")
        for start in range(0, len(numbers), ROWS_AT_ONCE):
            rows = numbers[start : start + ROWS_AT_ONCE]
            entities, rows = start + np.flatnonzero(rows >= 0), rows[rows >= 0]
            if len(rows):
                lengths = self.starts[rows + 1] - self.starts[rows]
                yield PoolTexts(self.tokens, self.starts[rows], lengths, codes[entities], groups, entities)
        give_back(self.tokens)


def read_run_texts(night: Night, side: Side, scratch: Path) -> RunTexts | None:
    """Read the texts of a side in the tokenizer of a night's run; None if it has none.

    Stale texts may have an earlier tokenizer and are then left out. Files in `scratch` must stay while the texts are in
    use.
    """
    run, settings = night.run, night.settings
    current = (
        batch["fingerprint"].filter(pc.invert(batch["is_stale"]))
        for batch in run.iter_knowledge(side, ("fingerprint", "is_stale"))
    )
    fingerprint = next((of_batch[0].as_py() for of_batch in current if len(of_batch)), None)
    if fingerprint is None:  # all texts are stale: every new one failed or was postponed
        most = settings.knowledge.max_prompt_tokens
        fingerprint = shared_fingerprint(night.template(side), most, settings.decoding, settings.model_dir)

    def batches(*columns: str) -> Iterator[pa.RecordBatch]:
        for batch in run.iter_knowledge(side, (*columns, "fingerprint")):
            is_readable = have_same_tokens(batch["fingerprint"], fingerprint)
            yield batch if pc.all(is_readable).as_py() else batch.filter(is_readable)

    model_id, num_tokens = None, 0
    with ArrayWriter(scratch / TOKENS_NAME, np.int32) as tokens, ArrayWriter(scratch / STARTS_NAME, np.int64) as starts:
        starts.write(np.zeros(1, np.int64))
        for batch in batches("model_id", "token_ids"):
            if batch.num_rows:
                model_id = model_id or batch["model_id"][0].as_py()
                ends = num_tokens + np.cumsum(pc.list_value_length(batch["token_ids"]).to_numpy(zero_copy_only=False))
                starts.write(ends)
                tokens.write(batch["token_ids"].flatten().to_numpy())
                num_tokens = ends[-1]
    if model_id is None:
        return None
    ids = mapped_column((batch["entity_id"] for batch in batches("entity_id")), scratch)
    return RunTexts(ids, map_array(scratch / STARTS_NAME), map_array(scratch / TOKENS_NAME), model_id)


def calibrate_side(night: Night, side: Side, run_texts: RunTexts, routes: Routes) -> Calibration | HeldBack | None:
    """Calibrate a side's pool by replays of some texts, or return the texts to replay against a pool of the others.

    None if there are too few texts. `routes` has the pool group of each entity of the tables.
    """
    options = draft_options(night.settings.decoding, drafted_with(night, side))
    if (drafted_from := _drafted_from(night, side)) is not None:
        if (calibration := drafted_from.manifest.calibration) is not None:
            plan = load_plan(night.run.root, side)
            num_written = 0 if plan is None else sum(shard.num_rows for shard in plan.shards)
            update = {"num_texts_changed": calibration.num_texts_changed + num_written}
            calibration = calibration.model_copy(update=update)
        budgets = _valid_budgets(calibration, run_texts, drafted_from, options)
        if budgets is not None and budgets.changed is not None:
            return calibration
        rows = planned_rows(night, side, NUM_CALIBRATION_TEXTS)
        token_ids = run_texts.of_entities([row.entity_id for row in rows])
        is_form = form_tokens(night, side, token_ids)
        written = [row for row in rows if row.entity_id in token_ids]
        texts = [replay_text(row, token_ids[row.entity_id], row.group, is_form) for row in written]
        num_with_previous = sum(text.previous_ids is not None for text in texts)
        if len(texts) < MIN_TEXTS or (budgets is not None and num_with_previous < MIN_CHANGED_TEXTS):
            return calibration
        return _calibrated(night, drafted_from, texts, options)
    rows = planned_rows(night, side, num_held_back(len(run_texts), NUM_CALIBRATION_TEXTS))
    row_of = {row.entity_id: row for row in rows}
    token_ids, table_ids = run_texts.of_entities(list(row_of)), night.tables.entities(side)[f"{side}_id"]
    places = rows_among(pa.array(token_ids, table_ids.type), table_ids).tolist()
    is_in_pool = run_texts.in_pool(night.tables, side) >= 0
    pairs = sorted(pair for pair in zip(places, token_ids, strict=True) if pair[0] >= 0 and is_in_pool[pair[0]])
    if len(pairs) < 2:
        return None
    is_form = form_tokens(night, side, token_ids)
    texts = [replay_text(row_of[key], token_ids[key], routes.of(place).group, is_form) for place, key in pairs]
    numbers = np.cumsum(is_in_pool)[[place for place, _ in pairs]] - 1
    return HeldBack(numbers.tolist(), lambda pool: _calibrated(night, pool, texts, options))


def _calibrated(night: Night, pool: Pool, texts: list[ReplayText], options: DraftOptions) -> Calibration:
    calibration = with_budgets(calibrate(pool, texts, options), pool, texts, options)
    return calibration.model_copy(update={"replayed_run": night.run.run_id})


def _valid_budgets(
    calibration: Calibration | None, run_texts: RunTexts, pool: Pool, options: DraftOptions
) -> BudgetCurve | None:
    """The replayed budgets of the pool that the run drafted from; None if they are not valid for the new pool.

    They are not valid if many texts were written since, another model wrote the texts, or drafts have other sources.
    """
    if calibration is None or calibration.budgets is None or pool.manifest.model_id != run_texts.model_id:
        return None
    is_stale = calibration.num_texts_changed > MAX_SHARE_CHANGED * len(run_texts)
    return None if is_stale or calibration.budgets.sources != options.sources else calibration.budgets


def drafted_with(night: Night, side: Side) -> Budget | None:
    """The draft budget that a side of a run used; None if nothing was drafted, or no budget was chosen."""
    recorded = night.manifest.generation.budgets.get(side)
    return budget_of(recorded) if recorded is not None and recorded.max_draft_tokens else None


def draft_options(decoding: DecodingSettings, budget: Budget | None = None) -> DraftOptions:
    """The draft options of a run of these settings; `budget` None: the budget of the settings."""
    budget = budget or Budget.of(decoding)
    used: dict[str, Any] = {f"use_{name}": name in decoding.drafters for name in ("prompt", "output", "previous")}
    most = budget.max_draft_tokens or DraftOptions.max_nodes
    return DraftOptions(max_nodes=most, min_acceptance=budget.min_acceptance, **used)


def _drafted_from(night: Night, side: Side) -> Pool | None:
    """The pool that the run drafted from, if it exists and was built with tonight's draft settings."""
    version = night.manifest.generation.pools.version
    if version is None or version not in {entry.version for entry in night.pools.list() if entry.problem is None}:
        return None
    pool = night.pools.open(version, side, night.tokenizer_hash)
    return pool if pool is not None and pool.settings == DraftSettings.of(night.settings.pools) else None


def planned_rows(night: Night, side: Side, max_rows: int) -> list[RenderedRow]:
    """Planned rows of a run, sampled evenly from its plan; rows without a prompt are left out."""
    plan = load_plan(night.run.root, side)
    if plan is None:
        return []
    starts = np.cumsum([0, *(shard.num_rows for shard in plan.shards)])
    positions = spread_positions(int(starts[-1]), max_rows, night.settings.seed)
    shard_of = np.searchsorted(starts, positions, side="right") - 1
    rows = []
    for number in np.unique(shard_of):
        shard_rows = read_shard(night.run.root / plan.shards[number].path)
        for row in (shard_rows[position - starts[number]] for position in positions[shard_of == number]):
            with suppress(RowError):
                rows.append(RenderedRow(**vars(row), prompt=night.render(side, row.shown)))
    return rows


def form_tokens(night: Night, side: Side, texts: Mapping[str | int, np.ndarray]) -> dict[str | int, np.ndarray]:
    """The mask of the tokens of each entity's text that the form of answers forces: bool[num_tokens].

    Forced tokens need no step, even if a draft proposed them. Empty if answers have no form.
    """
    grammar = guiding_grammar(night.template(side), night.settings.decoding)
    if grammar is None or not texts:
        return {}
    end_id = night.tokenizer.eos_token_id
    grammars = Grammars(night.tokenizer, len(night.tokenizer), [end_id if isinstance(end_id, int) else 0])
    _, close_id = mark_tokens(night.tokenizer) or (None, None)
    return {entity_id: grammars.forced_in(grammar, token_ids, close_id) for entity_id, token_ids in texts.items()}


def replay_text(row: RenderedRow, token_ids: np.ndarray, group: str | None, is_form: Mapping) -> ReplayText:
    """A text of tonight for a replay; `is_form` is the result of `form_tokens`."""
    return ReplayText(row.prompt.token_ids, token_ids, row.previous_ids, group or None, is_form.get(row.entity_id))
