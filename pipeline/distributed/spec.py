"""What a worker is started with. Importing it loads no model code."""

import datetime
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.knowledge.templates import KnowledgeSettings, PromptTemplate
from laserbatch.pipeline.sides import Side


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What any worker is started with; plain values, so that it can travel to another machine."""

    run_id: str
    run_dir: Path  # plan/ is read and knowledge/ written here
    model_dir: Path
    device: str = "auto"
    num_threads: int = 1
    num_workers: int = 1  # that work side by side
    workers_a_gpu: int = 1
    token: str = ""  # by which workers see that the run's folder is the same as where the run was started

    worker: ClassVar[str]  # "module:class"

    def load(self) -> Any:
        """The worker; torch, transformers and the model are loaded now."""
        return resolve_name(self.worker)(self)

    @property
    def gpus_a_worker(self) -> int:
        return 1

    def worker_bytes(self) -> int | None:
        """Of a GPU's memory that a worker needs; None: it wants a GPU alone."""
        return None


@dataclass(frozen=True, kw_only=True)
class TextSpec(WorkerSpec):
    decoding: DecodingSettings
    templates: dict[Side, PromptTemplate]
    max_prompt_tokens: int = KnowledgeSettings().max_prompt_tokens
    date: datetime.date | None = None  # of the night, for chat templates that print today's date; None: the clock's
    step_cost_dir: Path  # where measured costs of steps are kept
    pool_dirs: dict[Side, Path] = field(default_factory=dict)  # frozen pools, where there are any
    pool_version: str | None = None  # the version of `pool_dirs`

    worker: ClassVar[str] = "laserbatch.pipeline.distributed.worker:ShardWorker"

    @property
    def gpus_a_worker(self) -> int:
        return self.decoding.gpus_a_worker

    def worker_bytes(self) -> int | None:
        return worker_bytes(self.model_dir, self.decoding, self.max_prompt_tokens)


def worker_bytes(folder: Path, decoding: DecodingSettings, max_prompt_tokens: int) -> int | None:
    """Memory of a GPU that a worker needs for a whole batch: weights as they are stored, and the longest texts' cache.

    None where it is not known, and where another engine or a drafter with a model takes what it wants.
    """
    if decoding.engine != "laserbatch" or decoding.plugin_drafters:
        return None
    import torch  # it takes seconds to load
    from transformers import AutoConfig

    from laserbatch.pipeline.decoding.device_memory import cache_bytes_per_token
    from laserbatch.pipeline.decoding.model.folder import find_weights

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        num_bytes = sum(file.stat().st_size for file in find_weights(folder))
        dtype = torch.float32 if decoding.dtype == "float32" else torch.bfloat16
        num_tokens = decoding.batch_size * (max_prompt_tokens + decoding.max_new_tokens)
        return num_bytes + num_tokens * cache_bytes_per_token(config, dtype)
    except Exception:  # whoever loads the model says what hinders it
        return None
