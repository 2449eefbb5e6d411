"""A worker: it holds a model and the night's frozen pools, and writes one shard after another.

The input of a shard is a plan file; its output is a knowledge file, quarantined rows and counts. `actors.py` wraps the
worker for Ray.
"""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from laserbatch.pipeline.decoding.sequence import GenerationFailure, GenerationRequest, GenerationResult, Outcome
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.distributed.settings import workers_of_node
from laserbatch.pipeline.distributed.spec import TextSpec
from laserbatch.pipeline.engines.answers import UNCLOSED_THOUGHTS, unclosed_thoughts
from laserbatch.pipeline.engines.engine import TextEngine
from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge.answers import require_answer
from laserbatch.pipeline.knowledge.forms import guiding_grammar
from laserbatch.pipeline.knowledge.parsers import Parsed, parse_answer
from laserbatch.pipeline.knowledge.prompts import RenderedPrompt, Shown, render_shown
from laserbatch.pipeline.knowledge.records import knowledge_schema
from laserbatch.pipeline.knowledge.templates import PromptTemplate
from laserbatch.pipeline.planning.plan import PlannedRow, RenderedRow, Shard, read_shard
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.figures import ShardInfo, ShardRecord
from laserbatch.pipeline.storage.quarantine import QuarantineRow
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.stats import DecodingStats

logger = logging.getLogger(__name__)

MAX_SHARE_RUN_ON = 0.1  # if more of a shard's texts ran on to the token limit, they are kept rather than written again


class ShardWorker:
    """Generates the knowledge of shards. Raises ModelError or PoolError if the model or a pool cannot be used."""

    def __init__(self, spec: TextSpec) -> None:
        self.engine = engine_of(spec)
        self._templates = spec.templates
        self._usual_tokens = {side: self.engine.usual_tokens(side) for side in spec.templates}
        self._grammars = {side: guiding_grammar(template, spec.decoding) for side, template in spec.templates.items()}
        self.num_texts = 0  # number of texts of all shards
        self.reconfigure(spec)

    def reconfigure(self, spec: TextSpec) -> None:
        """Use another specification of the same model and pools."""
        self.spec, self._provenance = spec, spec.decoding.provenance()
        if spec.decoding.engine != "laserbatch":
            self._provenance |= {"engine": spec.decoding.engine}

    def progress(self) -> tuple[int, float, int]:
        """The number of forwards so far, the seconds of the costliest step, and the number of finished texts."""
        return (*self.engine.progress(), self.num_texts)

    def warm_up(self) -> None:
        """Write and discard a batch of short texts for each side, so that code is loaded before the first shard."""
        self.engine.warm_up(self._templates)

    def rendered(self, side: Side, row: PlannedRow) -> RenderedPrompt:
        """The prompt of a planned row; raises RowError if it has none."""
        tokenizer, most = self.engine.tokenizer, self.spec.max_prompt_tokens
        return render_shown(self._templates[side], row.shown, tokenizer, most, self.spec.date)

    def run(self, shard: Shard, budget: Budget | None = None) -> ShardRecord:
        """Generate one shard and write its files, under a draft budget; None: the budget of the settings."""
        start_s, graphs_before = time.perf_counter(), Counter(self.engine.graph_counts)
        records: dict[str, dict[str, Any]] = {}
        results: list[GenerationResult] = []
        quarantined: list[QuarantineRow] = []
        planned = read_shard(self.spec.run_dir / shard.path)
        rows: dict[str, RenderedRow] = {}
        for number, row in enumerate(planned):
            try:
                rows[str(number)] = RenderedRow(**vars(row), prompt=self.rendered(shard.side, row))
            except RowError as error:
                quarantined.append(QuarantineRow.of(row.entity_id, shard.side, error.reason, row.fingerprint))
        num_rewritten, repairs = 0, Counter()
        for outcome, verifier in self._outcomes(shard.side, rows, budget):
            row = rows[outcome.request_id]
            if isinstance(outcome, GenerationFailure):
                quarantined.append(QuarantineRow.of(row.entity_id, shard.side, outcome.reason, row.fingerprint))
                continue
            self.num_texts += 1
            results.append(outcome)  # quarantined texts cost time too, so they count
            num_rewritten += verifier != self.spec.decoding.verifier
            try:
                records[outcome.request_id] = self._record(shard.side, row, outcome, verifier, repairs)
            except RowError as error:
                failed = QuarantineRow.of(row.entity_id, shard.side, error.reason, row.fingerprint, outcome.text)
                quarantined.append(failed)
        ordered = [records[key] for key in rows if key in records]  # plan order, not the order of finishing
        entity_id_type = pa.array([row.entity_id for row in planned]).type
        table = pa.Table.from_pylist(ordered, schema=knowledge_schema(entity_id_type))
        graph_counts = dict(Counter(self.engine.graph_counts) - graphs_before)
        stats = DecodingStats.of(results, time.perf_counter() - start_s, num_rewritten, dict(repairs), graph_counts)
        logger.info("%s %s: %d texts, %d quarantined", shard.side, shard.name, len(ordered), len(quarantined))
        info = ShardInfo(
            planned_sha256=shard.sha256, group=shard.group, stats=stats, model=self.engine.model,
            num_workers=self.spec.num_workers,
        )  # fmt: skip
        return RunFolder(self.spec.run_dir).shards(shard.side).write(shard.name, table, quarantined, info)

    def _outcomes(
        self, side: Side, rows: dict[str, RenderedRow], budget: Budget | None
    ) -> Iterator[tuple[Outcome, str]]:
        """The outcome and verifier of each row; a relaxed text that ran on is written again with the greedy verifier.

        Such a text may have missed its end, and then repeats itself by drafting from itself; plain decoding seldom does
        so. If many texts reach the limit, the limit is too low for them, and they are kept.
        """
        decoding, usual, run_on = self.spec.decoding, self._usual_tokens[side], []
        verifier = decoding.verifier
        for outcome in self._generate(side, rows, budget, decoding):
            if (
                decoding.is_relaxed
                and usual is not None
                and isinstance(outcome, GenerationResult)
                and outcome.finish_reason in ("length", UNCLOSED_THOUGHTS)
                and len(outcome.token_ids) > usual
            ):
                run_on.append(outcome)
            else:
                yield outcome, verifier
        if len(run_on) > max(1, MAX_SHARE_RUN_ON * len(rows)):
            yield from ((outcome, verifier) for outcome in run_on)
        elif run_on:
            logger.info("%s: %d texts ran to their limit and are written again with verifier greedy", side, len(run_on))
            again = {outcome.request_id: rows[outcome.request_id] for outcome in run_on}
            greedily = decoding.model_copy(update={"verifier": "greedy"})
            for outcome in self._generate(side, again, budget, greedily):
                yield outcome, "greedy"

    def _generate(
        self, side: Side, rows: dict[str, RenderedRow], budget: Budget | None, decoding: DecodingSettings
    ) -> Iterator[Outcome]:
        requests = (
            GenerationRequest(
                key, row.prompt.token_ids, row.previous_ids, row.group, decoding.max_new_tokens,
                seed_of(side, row.entity_id), self._grammars[side], row.prompt.messages,
            )
            for key, row in longest_first(rows)
        )  # fmt: skip
        return self.engine.generate(side, requests, decoding, budget)

    def _record(
        self, side: Side, row: RenderedRow, result: GenerationResult, verifier: str, repairs: Counter[str]
    ) -> dict[str, Any]:
        template, prompt = self._templates[side], row.prompt
        provenance = self._provenance | {"verifier": verifier}
        if self._grammars[side] is not None:
            provenance["guided"] = True
        text, parsed = parsed_answer(self.engine.tokenizer, template, row.shown, prompt, result)
        token_ids, sources = result.written
        repairs.update(parsed.repairs)
        return {
            "entity_id": row.entity_id, "side": side, "framework": template.framework, "template": template.identity,
            "text": text, "token_ids": token_ids, "token_sources": sources, "num_tokens": len(token_ids),
            "fields_json": json.dumps(parsed.fields, ensure_ascii=False, sort_keys=True),
            "fingerprint": row.fingerprint, "run_id": self.spec.run_id, "model_id": self.engine.model.id,
            "pool_version": self.spec.pool_version if side in self.spec.pool_dirs else None, "pool_group": row.group,
            "decoding_json": json.dumps(provenance, sort_keys=True), "num_prompt_tokens": len(prompt.token_ids),
            "num_history": prompt.num_history, "num_history_dropped": prompt.num_history_dropped,
            "num_steps": result.num_steps, "num_drafted": result.num_drafted, "num_accepted": result.num_accepted,
            "finish_reason": result.finish_reason, "is_stale": False,
        }  # fmt: skip


def longest_first(rows: dict[str, RenderedRow]) -> list[tuple[str, RenderedRow]]:
    """Rows in the order in which their texts are started: the texts that should take longest first.

    Otherwise a long text that is started last is written alone after the others of its shard have ended. A text's
    length is estimated by the previous text; without one by the mean length of the others.
    """
    lengths = {key: len(row.previous_ids) for key, row in rows.items() if row.previous_ids is not None}
    mean = sum(lengths.values()) / max(1, len(lengths))
    return sorted(rows.items(), key=lambda item: -lengths.get(item[0], mean))


def parsed_answer(
    tokenizer, template: PromptTemplate, shown: Shown, prompt: RenderedPrompt, result: GenerationResult
) -> tuple[str, Parsed]:
    """The text to keep from a result, and its fields. Raises RowError, with the reason, if nothing can be kept."""
    if result.finish_reason == UNCLOSED_THOUGHTS:
        raise RowError(unclosed_thoughts(result))
    text = sound_text(tokenizer, result, prompt.token_ids)
    is_cut = result.finish_reason == "length"
    require_answer(template, text, result.token_ids, prompt.token_ids, shown)
    return text, parse_answer(template, text, is_cut)


def engine_of(spec: TextSpec) -> TextEngine:
    """Load the engine that a specification names, without importing the code of other engines."""
    if spec.decoding.engine == "endpoint":
        from laserbatch.pipeline.engines.endpoint import EndpointEngine

        return EndpointEngine(spec.model_dir, spec.decoding, spec.run_dir)
    arguments = {name: getattr(spec, name) for name in ("model_dir", "decoding", "device", "num_threads", "pool_dirs",
                                                    "step_cost_dir")}  # fmt: skip
    on_gpu = spec.device == "cuda"
    arguments["num_sharing"] = spec.workers_a_gpu if on_gpu else workers_of_node(spec.num_workers, spec.num_threads)
    if spec.decoding.engine == "vllm":
        from laserbatch.pipeline.engines.vllm import VllmEngine

        return VllmEngine(**arguments)
    from laserbatch.pipeline.engines.own import OwnEngine

    return OwnEngine(**arguments, num_workers=spec.num_workers)


def seed_of(side: Side, entity_id: object) -> int:
    """The seed of an entity's texts, int64."""
    digest = hashlib.blake2b(f"{side} {entity_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def sound_text(tokenizer, result: GenerationResult, prompt_ids: np.ndarray) -> str:
    """The text of a result, without a last character that the token limit cut in two.

    Raises RowError if the model wrote another broken character (a U+FFFD of the prompt may be quoted), or a zero byte,
    which few readers of text can handle.
    """
    text = result.text.rstrip("\ufffd") if result.finish_reason == "length" else result.text
    if "\ufffd" in text and "\ufffd" not in tokenizer.decode(prompt_ids.tolist()):
        raise RowError("undecodable: the output is not valid UTF-8")
    if "\0" in text:
        raise RowError("undecodable: the output has a zero byte")
    return text
