"""Step costs that were measured here, or elsewhere, read from a file."""

from pathlib import Path

from pydantic import ValidationError

from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.validation import explain, read_yaml
from laserbatch.retrieval_pools.step_cost import StepCost

EXAMPLE = (
    "steps: [{batch_size: 16, num_tokens: 16, seconds: 0.0043}, {batch_size: 16, num_tokens: 256, seconds: 0.0064}]"
)
MAX_AGE_DAYS = 30  # drivers, kernels and neighbours change


def read_step_cost(path: Path) -> StepCost:
    """A step cost from YAML or JSON.

    Raises ConfigError: the file is not there, is neither, or does not hold what `StepCost` describes.
    """
    data = read_yaml(path, "step cost", f"expected such as `{EXAMPLE}`")
    try:
        return StepCost.model_validate(data)
    except ValidationError as error:
        problem = explain(error, StepCost)
        raise ConfigError(f"{path} is not a step cost: {problem}. Expected such as `{EXAMPLE}`") from None
