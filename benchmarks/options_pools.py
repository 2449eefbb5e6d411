"""Pools of `options.py`: the first night's texts, with what the model nearly wrote, built with other settings.

Texts are generated once and kept on disk by model (`night_pools.py`); the alternatives are recorded by writing the same
texts again, each drafted from itself. Measures nothing.
"""

import hashlib
import logging
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
from night_pools import own_texts
from options_tasks import NightTask

from laserbatch.pipeline.decoding.drafters import RetrievalDrafter
from laserbatch.pipeline.decoding.engine import Engine, GenerationFailure, GenerationRequest
from laserbatch.pipeline.decoding.verifiers import Greedy
from laserbatch.pipeline.storage.parquet import read_parquet, write_parquet
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.settings import PoolSettings

logger = logging.getLogger("options")


@dataclass(frozen=True)
class NightTexts:
    """What the model wrote on the first night: a text a prompt, int32 token ids, and as many alternatives."""

    token_ids: tuple[np.ndarray, ...]
    alternatives: tuple[np.ndarray, ...]


def first_night(engine: Engine, task: NightTask, cache: Path) -> NightTexts:
    """Plain greedy texts of the first night's prompts. The engine records alternatives; both are kept in `cache`."""
    kept = own_texts(engine, task.first, cache)
    digest = hashlib.sha256(b"".join(ids.tobytes() + b"|" for ids in (*task.first.pool_prompts, *kept)))
    path = cache / engine.model_id / f"{task.name}-alternatives-{digest.hexdigest()[:12]}.parquet"
    if not path.exists():
        texts = _written_again(engine, task, kept)
        lists = {field.name: getattr(texts, field.name) for field in fields(NightTexts)}
        write_parquet(pa.table({name: pa.array(rows, pa.list_(pa.int32())) for name, rows in lists.items()}), path)
    table = read_parquet(path)
    return NightTexts(
        *(tuple(np.asarray(ids.values, np.int32) for ids in table[field.name]) for field in fields(NightTexts))
    )


def _written_again(engine: Engine, task: NightTask, kept: list[np.ndarray]) -> NightTexts:
    logger.info("%s: recording alternatives of %d texts (kept for later runs)", task.name, len(kept))
    requests = (
        GenerationRequest(str(number), prompt, text, None, task.first.max_new_tokens)
        for number, (prompt, text) in enumerate(zip(task.first.pool_prompts, kept, strict=True))
    )
    drafter = RetrievalDrafter(None, ("previous",))
    results = {result.request_id: result for result in engine.generate(requests, drafter, Greedy())}
    failed = [result.reason for result in results.values() if isinstance(result, GenerationFailure)]
    if failed:
        raise SystemExit(f"{task.name}: {failed[0]}")
    ordered = [results[str(number)] for number in range(len(kept))]
    return NightTexts(
        tuple(result.token_ids for result in ordered), tuple(result.alternative_ids for result in ordered)
    )


class Pools:
    """Pools of one task's first night, by settings; built when first asked for, in a folder of their own."""

    def __init__(self, task: NightTask, texts: NightTexts, engine: Engine, folder: Path) -> None:
        self._task, self._texts, self._engine, self._folder = task, texts, engine, folder
        self._built: dict[str, Pool] = {}

    @cached_property
    def default(self) -> Pool:
        """With the settings that a user gets."""
        return self.built()

    def built(self, **changes) -> Pool:
        """With other settings."""
        settings = PoolSettings(**changes)
        key = settings.model_dump_json()
        if key not in self._built:
            texts = zip(self._texts.token_ids, self._task.pool_groups, self._texts.alternatives, strict=True)
            self._built[key] = build_pool(
                (PoolText(ids, group, n, alternatives=other) for n, (ids, group, other) in enumerate(texts)),
                self._folder / f"{self._task.name}-{len(self._built)}",
                side=self._task.first.side,
                tokenizer_hash=self._engine.model_id,  # stands for its tokenizer: the pools live no longer
                model_id=self._engine.model_id,
                settings=settings,
            )
        return self._built[key]
