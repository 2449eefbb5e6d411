"""What is said where the bundled sample model meets tables that it cannot write about."""

from pathlib import Path

from laserbatch.jobs.settings import SAMPLE_MODEL, Settings
from laserbatch.pipeline.sample.world import is_sample_world

NEEDS_A_MODEL = (
    "the bundled sample model knows only the sample world: what it writes of other tables cannot be parsed. Set "
    "decoding.model to the folder of a chat model with safetensors, for example of `hf download "
    'Qwen/Qwen2.5-1.5B-Instruct --local-dir qwen` (README.md, "Your own tables", says which sizes fit)'
)


def needs_a_model(settings: Settings, tables: Path) -> bool:
    """Whether a configuration has the bundled model write about tables that are not its sample world."""
    return settings.decoding.model == SAMPLE_MODEL and not is_sample_world(tables)
