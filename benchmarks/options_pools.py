"""Pools of `options.py`: the first night's texts, built with other settings."""

from functools import cached_property
from pathlib import Path

import numpy as np
from options_tasks import NightTask

from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.settings import PoolSettings


class Pools:
    """Pools of one task's first night, by settings; built when first asked for, in a folder of their own."""

    def __init__(self, task: NightTask, texts: list[np.ndarray], engine: Engine, folder: Path) -> None:
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
            texts = zip(self._texts, self._task.pool_groups, strict=True)
            self._built[key] = build_pool(
                (PoolText(ids, group, n) for n, (ids, group) in enumerate(texts)),
                self._folder / f"{self._task.name}-{len(self._built)}",
                side=self._task.first.side,
                tokenizer_hash=self._engine.model_id,  # stands for its tokenizer: the pools live no longer
                model_id=self._engine.model_id,
                settings=settings,
            )
        return self._built[key]
