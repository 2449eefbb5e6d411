"""Our engine with the night's pools."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from laserbatch.pipeline.budget.cost_cache import StepCostCache
from laserbatch.pipeline.budget.measuring import measure_step_cost, texts_of
from laserbatch.pipeline.decoding.device_memory import host_memory
from laserbatch.pipeline.decoding.drafters import drafter_from, load_plugin_drafters
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.folder import tokenizer_folder
from laserbatch.pipeline.decoding.model.load import load_model
from laserbatch.pipeline.decoding.sequence import DecodingSequence, GenerationFailure, GenerationRequest, Outcome
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.decoding.step_budget import StepBudget
from laserbatch.pipeline.decoding.verifiers import verifier_from
from laserbatch.pipeline.engines.answers import Answers
from laserbatch.pipeline.engines.engine import TextEngine
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.figures import ModelFigures
from laserbatch.retrieval_pools.index.manifest import tokenizer_hash
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.step_cost import StepCost

WARM_UP_PROMPT_TOKENS, WARM_UP_NEW_TOKENS = 64, 8
GRAPH_COUNTS = ("captures", "failed_captures", "replays", "eager_steps")
SMALL_BATCHES = 1, 4  # batch sizes of a shard's last steps
USUAL_SHARE = 0.99  # share of a pool's texts that are no longer than `usual_tokens`
RESIDENT_SHARE = 0.25  # of the free memory: a larger pool is read from the disk as drafts need it


class OwnEngine(TextEngine):
    """`Engine` as a `TextEngine`. Raises ModelError, PoolError: the model or a pool cannot be used.

    `num_threads` : number of CPU threads for this engine.
    `num_sharing`, `num_workers` : number of engines on this machine or, on a GPU, on that GPU; and in the run.
    """

    def __init__(
        self, model_dir: Path, decoding: DecodingSettings, device: str, num_threads: int, num_sharing: int,
        num_workers: int, pool_dirs: Mapping[Side, Path], step_cost_dir: Path,
    ) -> None:  # fmt: skip
        torch.set_num_threads(num_threads)
        loaded = load_model(model_dir, decoding.dtype, device, decoding.adapter)
        self._plugins = load_plugin_drafters(decoding, loaded)
        drafter_bytes_per_token = sum(plugin.bytes_per_token for plugin in self._plugins)
        self.engine = Engine(loaded, decoding, num_sharing, drafter_bytes_per_token)
        assert loaded.tokenizer is not None
        self.tokenizer = loaded.tokenizer
        self._answers = Answers(self.tokenizer, self.engine.end_ids, decoding.thinking == "cut")
        self.engine.end_at(self._answers.role_ids)
        self._decoding = decoding
        expected = tokenizer_hash(tokenizer_folder(model_dir, decoding.adapter))
        self._pools: dict[Side, Pool] = {
            side: Pool.open(path, expected, max_resident_bytes=int(RESIDENT_SHARE * host_memory().free_bytes))
            for side, path in pool_dirs.items()
        }
        # The larger of both sides' pools, whose drafting is timed.
        self._largest_pool = max(self._pools.values(), key=lambda pool: pool.manifest.num_tokens, default=None)
        num_pool_tokens = 0 if self._largest_pool is None else self._largest_pool.manifest.num_tokens
        self._cost_cache = StepCostCache(step_cost_dir, self.engine, num_pool_tokens, num_workers)
        packed = f" ({loaded.quantization} weights)" if loaded.quantization else ""
        self.model = ModelFigures(
            id=self.engine.model_id, dtype=str(loaded.model.dtype).removeprefix("torch.") + packed,
            device=self.engine.device.type, num_parameters=loaded.num_parameters, dtype_reason=loaded.dtype_reason,
        )  # fmt: skip

    def progress(self) -> tuple[int, float]:
        return self.engine.num_forwards, self.engine.costliest_step_s

    @property
    def graph_counts(self) -> dict[str, int]:
        buffered = self.engine.runner.buffered
        return {} if buffered is None else {name: getattr(buffered, f"num_{name}") for name in GRAPH_COUNTS}

    def generate(
        self, side: Side, requests: Iterable[GenerationRequest], decoding: DecodingSettings,
        budget: Budget | None = None,
    ) -> Iterator[Outcome]:  # fmt: skip
        self.engine.reset_prefix_cache()  # texts that were written before, for whatever purpose, must not matter
        # The engine's own settings may be those of another pass.
        engine, budget = self.engine, budget or Budget.of(decoding)
        drafter = drafter_from(
            decoding, self._pools.get(side), budget, engine.num_draft_threads, self._plugins, engine.cache.max_tokens
        )
        prompts: dict[str, np.ndarray] = {}

        def remembered() -> Iterator[GenerationRequest]:
            for request in requests:
                prompts[request.request_id] = request.prompt_ids
                yield self._answers.guided(request)

        step_budget = StepBudget(self.cached_step_cost() or self.measured_step_cost()) if budget.is_by_step else None
        written = engine.generate(remembered(), drafter, verifier_from(decoding), budget, step_budget)
        return self._answers.of(written, prompts)

    def result(self, sequence: DecodingSequence, outcome: str | GenerationFailure) -> Outcome:
        """The result, as `generate` yields it, of a text that ended with this outcome in a stream of the engine."""
        result = self.engine.result(sequence, outcome)
        if isinstance(result, GenerationFailure):
            return result
        return self._answers.answer(result, sequence.request.prompt_ids)

    def warm_up(self, sides: Iterable[Side]) -> None:
        for side in sides:
            text = texts_of(self.engine, self._pools.get(side))[0]
            prompt_ids = text[: min(WARM_UP_PROMPT_TOKENS, len(text) // 2)]  # the rest may be drafted
            requests = (
                GenerationRequest(str(number), prompt_ids, text, max_new_tokens=WARM_UP_NEW_TOKENS)
                for number in range(self._decoding.batch_size)
            )
            for _ in self.generate(side, requests, self._decoding):
                pass

    def usual_tokens(self, side: Side) -> int | None:
        pool = self._pools.get(side)
        return pool.length_of(USUAL_SHARE) if pool is not None and pool.manifest.num_texts else None

    def cached_step_cost(self) -> StepCost | None:
        return self._cost_cache.read()

    def measured_step_cost(self, save: bool = True) -> StepCost:
        decoding, cache = self._decoding, self._cost_cache
        sizes = [*(size for size in SMALL_BATCHES if size < decoding.batch_size), decoding.batch_size]
        known_steps = cache.known_steps()
        step_cost = measure_step_cost(self.engine, self._largest_pool, decoding.text_sources, sizes, known_steps)
        return cache.write(step_cost) if save else step_cost
