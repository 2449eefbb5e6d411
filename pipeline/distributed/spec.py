"""What a worker is started with; who only hands it out loads no model code."""

from dataclasses import dataclass, field
from pathlib import Path

from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.knowledge.templates import KnowledgeSettings, PromptTemplate
from laserbatch.pipeline.sides import Side


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker is started with; plain values, so that it can travel to another machine."""

    run_id: str
    run_dir: Path  # plan/ is read and knowledge/ written here
    model_dir: Path
    decoding: DecodingSettings
    device: str = "auto"
    num_threads: int = 1
    num_workers: int = 1  # that work side by side
    templates: dict[Side, PromptTemplate]
    max_prompt_tokens: int = KnowledgeSettings().max_prompt_tokens
    step_cost_dir: Path  # where measured costs of steps are kept
    pool_dirs: dict[Side, Path] = field(default_factory=dict)  # frozen pools, where there are any
    pool_versions: dict[Side, str] = field(default_factory=dict)
    token: str = ""  # by which workers see that the run's folder is the same as where the run was started
