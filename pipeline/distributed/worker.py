"""One worker: a model, the night's frozen pools, and one shard after another.

A shard goes in as a plan file and comes out as a knowledge file, quarantined rows and counts. `actors.py` wraps it for
Ray.
"""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from laserbatch.pipeline.budget.choice import UNCHECKED_SIZE
from laserbatch.pipeline.budget.measuring import KeptCost, measure_step_cost, texts_of
from laserbatch.pipeline.budget.step_cost import StepCost
from laserbatch.pipeline.decoding.device_memory import host_memory
from laserbatch.pipeline.decoding.drafters import Drafter, drafter_from
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.sequence import GenerationFailure, GenerationRequest, GenerationResult
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.decoding.token_tree import MAX_NODES
from laserbatch.pipeline.decoding.verifiers import Greedy, Verifier, verifier_from
from laserbatch.pipeline.distributed.settings import workers_of_node
from laserbatch.pipeline.distributed.spec import WorkerSpec
from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge.answers import require_answer
from laserbatch.pipeline.knowledge.parsers import parse_answer
from laserbatch.pipeline.knowledge.prompts import RenderedPrompt, render_shown
from laserbatch.pipeline.knowledge.records import knowledge_schema
from laserbatch.pipeline.planning.plan import PlannedRow, Shard, read_shard
from laserbatch.pipeline.planning.planner import decoding_provenance
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.manifest import ModelFigures
from laserbatch.pipeline.storage.quarantine import QuarantineRow
from laserbatch.pipeline.storage.run_folder import RunFolder, ShardInfo, ShardRecord
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.retrieval_pools.index.manifest import tokenizer_hash
from laserbatch.retrieval_pools.index.pool import Pool

logger = logging.getLogger(__name__)

WARM_UP_PROMPT_TOKENS, WARM_UP_NEW_TOKENS = 64, 8
USUAL_SHARE = 0.99  # of a pool's texts
MOST_RUN_ON = 0.1  # of a shard's texts
RESIDENT_SHARE = 0.25  # of the free memory: a larger pool is read from the disk as drafts need it


@dataclass(frozen=True)
class AskedRow:
    """A planned row with its prompt."""

    row: PlannedRow
    prompt: RenderedPrompt


class ShardWorker:
    """Generates the knowledge of shards. Raises ModelError, PoolError: the model or a pool cannot be used."""

    def __init__(self, spec: WorkerSpec) -> None:
        torch.set_num_threads(spec.num_threads)
        sharing = workers_of_node(spec.num_workers, spec.num_threads)
        self.engine = Engine.from_pretrained(spec.model_dir, spec.decoding, spec.device, sharing)
        self._templates = spec.templates
        expected = tokenizer_hash(spec.model_dir)
        self._pools: dict[Side, Pool] = {
            side: Pool.open(path, expected, max_resident_bytes=int(RESIDENT_SHARE * host_memory().free_bytes))
            for side, path in spec.pool_dirs.items()
        }
        # The length that nearly all texts of a pool do not exceed.
        filled = {side: pool for side, pool in self._pools.items() if pool.manifest.num_texts}
        self._usual_tokens = {side: pool.length_of(USUAL_SHARE) for side, pool in filled.items()}
        loaded = self.engine.loaded
        packed = f" ({loaded.quantization} weights)" if loaded.quantization else ""
        self._model = ModelFigures(
            id=self.engine.model_id,
            dtype=str(loaded.model.dtype).removeprefix("torch.") + packed,
            device=self.engine.device.type,
            num_parameters=loaded.num_parameters,
        )
        self.num_texts = 0  # of all shards
        self.turn_to(spec)

    def turn_to(self, spec: WorkerSpec) -> None:
        """Go on by another specification, of the same model and pools."""
        self.spec, self._provenance = spec, decoding_provenance(spec.decoding)

    def drafter(self, side: Side, budget: Budget | None = None) -> Drafter:
        """The side's drafter: its pool and the sequence's own texts, as configured."""
        return drafter_from(self.spec.decoding, self._pools.get(side), budget, self.engine.num_draft_threads)

    def warm_up(self) -> None:
        """Write a batch of short texts for each side and keep none: code is loaded before a shard."""
        for side in self._templates:
            text = texts_of(self.engine, self._pools.get(side))[0]
            requests = (
                GenerationRequest(
                    request_id=str(number),
                    prompt_ids=text[: min(WARM_UP_PROMPT_TOKENS, len(text) // 2)],  # the rest may be drafted
                    previous_ids=text,
                    max_new_tokens=WARM_UP_NEW_TOKENS,
                )
                for number in range(self.spec.decoding.batch_size)
            )
            for _ in self.engine.generate(requests, self.drafter(side)):
                pass

    def kept_step_cost(self) -> StepCost | None:
        """What steps cost here, as it was measured before; None where it was not."""
        return self._kept_cost.read()

    def measured_step_cost(self, keeps: bool = True) -> StepCost:
        """What steps cost here, measured now; of workers that measure side by side one keeps it."""
        batch_size = self.spec.decoding.batch_size
        pool, sources = self._largest_pool, self.spec.decoding.drafters
        largest = UNCHECKED_SIZE if pool is None else MAX_NODES  # of what may be chosen
        found = measure_step_cost(self.engine, pool, sources, [batch_size], largest)
        return self._kept_cost.write(found) if keeps else found

    @property
    def _kept_cost(self) -> KeptCost:
        num_pool_tokens = 0 if self._largest_pool is None else self._largest_pool.manifest.num_tokens
        return KeptCost(self.spec.step_cost_dir, self.engine, num_pool_tokens, self.spec.num_workers)

    @property
    def _largest_pool(self) -> Pool | None:
        """Of both sides': drafting from it is timed."""
        return max(self._pools.values(), key=lambda pool: pool.manifest.num_tokens, default=None)

    def rendered(self, side: Side, row: PlannedRow) -> RenderedPrompt:
        """The prompt of a planned row; raises RowError where it has none."""
        tokenizer, most = self.engine.tokenizer, self.spec.max_prompt_tokens
        return render_shown(self._templates[side], row.shown, tokenizer, most)

    def run(self, shard: Shard, budget: Budget | None = None) -> ShardRecord:
        """Generate one shard and write its files, drafting by a budget; None is that of the settings."""
        start_s = time.perf_counter()
        records: dict[str, dict[str, Any]] = {}
        results: list[GenerationResult] = []
        quarantined: list[QuarantineRow] = []
        planned = read_shard(self.spec.run_dir / shard.path)
        rows: dict[str, AskedRow] = {}
        for number, row in enumerate(planned):
            try:
                rows[str(number)] = AskedRow(row, self.rendered(shard.side, row))
            except RowError as error:
                quarantined.append(QuarantineRow.of(row.entity_id, shard.side, error.reason, row.fingerprint))
        num_rewritten, repairs = 0, Counter()
        for outcome, verifier in self._outcomes(shard.side, rows, budget):
            asked = rows[outcome.request_id]
            row = asked.row
            if isinstance(outcome, GenerationFailure):
                quarantined.append(QuarantineRow.of(row.entity_id, shard.side, outcome.reason, row.fingerprint))
                continue
            self.num_texts += 1
            results.append(outcome)  # quarantined texts cost time too, so they count
            num_rewritten += verifier != self.spec.decoding.verifier
            try:
                records[outcome.request_id] = self._record(shard.side, asked, outcome, verifier, repairs)
            except RowError as error:
                failed = QuarantineRow.of(row.entity_id, shard.side, error.reason, row.fingerprint, outcome.text)
                quarantined.append(failed)
        ordered = [records[key] for key in rows if key in records]  # plan order, not the order of finishing
        entity_id_type = pa.array([row.entity_id for row in planned]).type
        table = pa.Table.from_pylist(ordered, schema=knowledge_schema(entity_id_type))
        stats = DecodingStats.of(results, time.perf_counter() - start_s, num_rewritten, dict(repairs))
        logger.info("%s %s: %d texts, %d quarantined", shard.side, shard.name, len(ordered), len(quarantined))
        info = ShardInfo(
            planned_sha256=shard.sha256,
            group=shard.group,
            stats=stats,
            model=self._model,
            num_workers=self.spec.num_workers,
        )
        return RunFolder(self.spec.run_dir).write_shard(shard.side, shard.name, table, quarantined, info)

    def _outcomes(
        self, side: Side, rows: dict[str, AskedRow], budget: Budget | None
    ) -> Iterator[tuple[GenerationResult | GenerationFailure, str]]:
        """What came of each row, and the verifier of it: a relaxed text that ran on is written again as a greedy one.

        It may have missed its end, and then drafts itself, again and again; plain decoding would seldom have. Where
        many reach the limit, it is the limit that is short for them, and they stay.
        """
        verifier, usual, run_on = self.spec.decoding.verifier, self._usual_tokens.get(side), []
        for outcome in self._generate(side, rows, budget):
            is_cut = isinstance(outcome, GenerationResult) and outcome.finish_reason == "length"
            if verifier != "greedy" and is_cut and usual is not None and len(outcome.token_ids) > usual:
                run_on.append(outcome)
            else:
                yield outcome, verifier
        if len(run_on) > max(1, MOST_RUN_ON * len(rows)):
            yield from ((outcome, verifier) for outcome in run_on)
        elif run_on:
            logger.info("%s: %d texts ran on to their limit and are written again, greedily", side, len(run_on))
            again = {outcome.request_id: rows[outcome.request_id] for outcome in run_on}
            for outcome in self._generate(side, again, budget, verifier=Greedy()):
                yield outcome, "greedy"

    def _generate(
        self, side: Side, rows: dict[str, AskedRow], budget: Budget | None, verifier: Verifier | None = None
    ) -> Iterator[GenerationResult | GenerationFailure]:
        most = self.spec.decoding.max_new_tokens
        requests = (
            GenerationRequest(
                key,
                asked.prompt.token_ids,
                asked.row.previous_ids,
                asked.row.group,
                most,
                seed_of(side, asked.row.entity_id),
            )
            for key, asked in rows.items()
        )
        self.engine.forget_prompts()  # what was written before, for whatever purpose, must not matter
        verifier = verifier or verifier_from(self.spec.decoding)  # the engine's own may be that of another pass
        return self.engine.generate(requests, self.drafter(side, budget), verifier, budget=budget)

    def _record(
        self, side: Side, asked: AskedRow, result: GenerationResult, verifier: str, repairs: Counter[str]
    ) -> dict[str, Any]:
        template, row, prompt = self._templates[side], asked.row, asked.prompt
        text = sound_text(self.engine.tokenizer, result, prompt.token_ids)
        is_cut = result.finish_reason == "length"
        require_answer(template, text, result.token_ids, prompt.token_ids, is_cut)
        parsed = parse_answer(template, text, is_cut)
        repairs.update(parsed.repairs)
        return {
            "entity_id": row.entity_id,
            "side": side,
            "framework": template.framework,
            "template": template.identity,
            "text": text,
            "token_ids": result.token_ids,
            "token_sources": result.sources,
            "fields_json": json.dumps(parsed.fields, ensure_ascii=False, sort_keys=True),
            "fingerprint": row.fingerprint,
            "run_id": self.spec.run_id,
            "model_id": self.engine.model_id,
            "pool_version": self.spec.pool_versions.get(side),
            "pool_group": row.group,
            "decoding_json": json.dumps(self._provenance | {"verifier": verifier}, sort_keys=True),
            "num_prompt_tokens": len(prompt.token_ids),
            "num_history": prompt.num_history,
            "num_history_dropped": prompt.num_history_dropped,
            "num_tokens": len(result.token_ids),
            "num_steps": result.num_steps,
            "num_drafted": result.num_drafted,
            "num_accepted": result.num_accepted,
            "finish_reason": result.finish_reason,
            "is_stale": False,
        }


def seed_of(side: Side, entity_id: object) -> int:
    """The seed of an entity's texts, int64."""
    digest = hashlib.blake2b(f"{side} {entity_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def sound_text(tokenizer, result: GenerationResult, prompt_ids: np.ndarray) -> str:
    """A text without the last character where the token limit cut that in two.

    Raises RowError: another character is broken, which is the model's doing; a U+FFFD of its prompt is quoted.
    """
    text = result.text.rstrip("\ufffd") if result.finish_reason == "length" else result.text
    if "\ufffd" in text and "\ufffd" not in tokenizer.decode(prompt_ids.tolist()):
        raise RowError("undecodable: the output is not valid UTF-8")
    return text
