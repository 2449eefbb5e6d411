"""The measured cost of steps, kept in a folder: the same model on the same machine is measured once in a while.

So the budget that is chosen by it is the same the next time, and so are relaxed texts. One file for everything that a
cost depends on; each can be read as any step cost can. What is old or was measured on a busy machine is measured again
by the next run; so is what somebody deletes.
"""

import datetime
import hashlib
import importlib.metadata
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch

from laserbatch.pipeline.budget.step_cost import StepCost, read_step_cost
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.storage.atomic import canonical_json, write_json
from laserbatch.retrieval_pools.errors import PoolError

logger = logging.getLogger(__name__)

VERSION = 6  # of how steps are measured


def cached_step_cost(
    folder: Path, engine: Engine, num_pool_tokens: int, measure: Callable[[], StepCost], num_workers: int = 1
) -> StepCost:
    """The cost that was measured here before, or else measured now and kept.

    A file that cannot be read, or that says it is of something else, is measured again and replaced.

    Parameters
    ----------
    num_pool_tokens : of the pool that drafting is timed with; 0 without one.
    num_workers : engines that work side by side, and are measured so.
    """
    found = known_step_cost(folder, engine, num_pool_tokens, num_workers)
    if found is not None:
        return found
    path, name = _place(folder, engine, num_pool_tokens, num_workers)
    step_cost = measure().model_copy(update={"name": name})
    write_json(step_cost.model_dump(mode="json"), path)
    return step_cost


def known_step_cost(folder: Path, engine: Engine, num_pool_tokens: int, num_workers: int = 1) -> StepCost | None:
    """The cost that was measured here before; None where there is none that can be used, or that should be doubted."""
    path, name = _place(folder, engine, num_pool_tokens, num_workers)
    if not path.exists():
        return None
    try:
        found = read_step_cost(path)
        doubt = found.doubt(datetime.date.today())
        if found.name != name:
            doubt = f"{path} is {found.name!r}, expected {name!r}"
    except PoolError as error:
        doubt = str(error)
    if doubt is None:
        return found
    logger.warning("the cost of steps has to be measured again: %s", doubt)
    return None


def _place(folder: Path, engine: Engine, num_pool_tokens: int, num_workers: int) -> tuple[Path, str]:
    """Where a cost is kept, and the name that it has there."""
    facts = cost_facts(engine, num_pool_tokens, num_workers)
    digest = hashlib.sha256(canonical_json(facts).encode()).hexdigest()[:12]
    return folder / f"{digest}.json", f"measured {digest}: {facts['model_id']} on {facts['device']}"


def cost_facts(engine: Engine, num_pool_tokens: int, num_workers: int = 1) -> dict[str, object]:
    """Everything that the cost of steps depends on."""
    device = engine.device
    settings = engine.settings
    return {
        "version": VERSION,
        "model_id": engine.model_id,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "dtype": str(next(engine.runner.model.parameters()).dtype).removeprefix("torch."),
        "num_threads": torch.get_num_threads(),
        "num_workers": num_workers,
        "batch_size": settings.batch_size,
        "attention": settings.attention,
        "verifier": settings.verifier,
        "drafters": list(settings.drafters),
        "pool_scale": (num_pool_tokens.bit_length() + 1) // 2,  # a draft takes longer from a larger one
        "libraries": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy", "numba")},
    }


def _processor() -> str:
    """The CPU's name where the system says it, and how many cores there are."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"
