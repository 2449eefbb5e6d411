"""Pools of `night.py`: the model's own earlier texts, generated once and kept on disk by model. Measures nothing."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from night_systems import generate
from night_tasks import Task

from laserbatch.pipeline.decoding.drafters import NoDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.verifiers import Greedy
from laserbatch.pipeline.storage.parquet import read_parquet, write_parquet
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.settings import PoolSettings

logger = logging.getLogger("night")


def own_texts(engine: Engine, task: Task, cache: Path) -> list[np.ndarray]:
    """The model's plain greedy texts on the task's pool prompts, int32 token ids each.

    Read from `cache` when the same model has answered the same prompts before.
    """
    digest = hashlib.sha256(b"".join(prompt.tobytes() + b"|" for prompt in task.pool_prompts))
    digest.update(str(task.max_new_tokens).encode())
    path = cache / engine.model_id / f"{task.name}-{digest.hexdigest()[:12]}.parquet"
    if path.exists():
        return [np.asarray(ids.values, np.int32) for ids in read_parquet(path)["token_ids"]]
    logger.info("%s: writing %d pool texts (kept for later runs)", task.name, len(task.pool_prompts))
    texts: dict[str, np.ndarray] = {}
    for result in generate(engine, task.pool_prompts, task.max_new_tokens, NoDrafter(), Greedy()):
        texts[result.request_id] = result.token_ids
        if len(texts) % 100 == 0:
            logger.info("%s: %d of %d pool texts", task.name, len(texts), len(task.pool_prompts))
    ordered = [texts[str(number)] for number in range(len(task.pool_prompts))]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_parquet(pa.table({"token_ids": pa.array(ordered, pa.list_(pa.int32()))}), path)
    return ordered


def build(texts: Sequence[np.ndarray], folder: Path, engine: Engine, side: str) -> Pool:
    """A pool of one group."""
    return build_pool(
        (PoolText(token_ids=text, group="all") for text in texts),
        folder,
        side=side,
        tokenizer_hash=engine.model_id,  # stands for its tokenizer: these pools live as long as the process
        model_id=engine.model_id,
        settings=PoolSettings(),
    )
