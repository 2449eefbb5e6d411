"""The specification that a worker is started with. Importing this module loads no model code."""

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
    """The specification of any worker; it has plain values, so that it can be sent to another machine."""

    run_id: str
    run_dir: Path  # plan/ is read and knowledge/ written here
    model_dir: Path
    device: str = "auto"
    num_threads: int = 1
    num_workers: int = 1  # number of workers of the run
    workers_a_gpu: int = 1
    token: str = ""  # a worker compares it with a file, to check that it sees the same folder of the run as the driver
    software: dict[str, str] = field(default_factory=dict)  # the driver's, which a worker compares with its own

    worker: ClassVar[str]  # "module:class"

    def load(self) -> Any:
        """Make the worker, which loads torch, transformers and the model."""
        return resolve_name(self.worker)(self)

    @property
    def gpus_a_worker(self) -> int:
        return 1

    def worker_bytes(self) -> int | None:
        """Bytes of a GPU's memory that a worker needs; None: it needs a GPU of its own."""
        return None


@dataclass(frozen=True, kw_only=True)
class TextSpec(WorkerSpec):
    decoding: DecodingSettings
    templates: dict[Side, PromptTemplate]
    max_prompt_tokens: int = KnowledgeSettings().max_prompt_tokens
    date: datetime.date | None = None  # the night's, for chat templates that print today's date; None: the clock's date
    step_cost_dir: Path  # where measured costs of steps are kept
    pool_dirs: dict[Side, Path] = field(default_factory=dict)  # frozen pools of the sides that have one
    pool_version: str | None = None  # the version of `pool_dirs`

    worker: ClassVar[str] = "laserbatch.pipeline.distributed.worker:ShardWorker"

    @property
    def gpus_a_worker(self) -> int:
        return self.decoding.gpus_a_worker

    def worker_bytes(self) -> int | None:
        return worker_bytes(self.model_dir, self.decoding, self.max_prompt_tokens)


def worker_bytes(folder: Path, decoding: DecodingSettings, max_prompt_tokens: int) -> int | None:
    """GPU memory that a worker needs for a full batch: the weights as stored, and the KV cache of the longest texts.

    None if it is not known, or if another engine, or a drafter with a model, takes memory as it likes.
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
    except Exception:  # loading the model reports the error
        return None
