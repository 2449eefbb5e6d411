"""Storage of the measured costs of steps: in a workspace, and in the user's cache for all workspaces."""

import datetime
import hashlib
import importlib.metadata
import logging
import os
import platform
from contextlib import suppress
from pathlib import Path

import torch

from laserbatch.pipeline.budget.choice import read_step_cost
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.storage.atomic import canonical_json, write_json
from laserbatch.retrieval_pools.step_cost import StepCost

logger = logging.getLogger(__name__)

VERSION = 18  # of the way in which steps are measured
MAX_AGE_DAYS = 30  # drivers, kernels and neighbours change


class StepCostCache:
    """The file in a folder that keeps the cost of an engine's steps; all that the cost depends on decides its name.

    `num_pool_tokens` is of the pool whose drafting is timed, 0 without one; `num_workers` is the number of engines that
    work at the same time, and on CPUs are measured at the same time.
    """

    def __init__(self, folder: Path, engine: Engine, num_pool_tokens: int, num_workers: int = 1) -> None:
        self._folders = folder, user_step_costs()
        on_cuda = engine.device.type == "cuda"
        facts = {
            "version": VERSION,
            "model_id": engine.model_id,
            "device": torch.cuda.get_device_name(engine.device) if on_cuda else _processor(),
            "dtype": str(next(engine.runner.model.parameters()).dtype).removeprefix("torch."),
            "num_threads": torch.get_num_threads(),
            "num_workers": 1 if on_cuda else num_workers,
            "batch_size": engine.settings.batch_size,
            "attention": engine.settings.attention,
            "verifier": engine.settings.verifier,
            "libraries": {lib: importlib.metadata.version(lib) for lib in ("torch", "transformers", "numpy", "numba")},
        }
        pool_scale = (num_pool_tokens.bit_length() + 1) // 2  # a draft takes longer from a larger one
        drafts = {"drafters": list(engine.settings.drafters), "pool_scale": pool_scale}
        digest, drafts_digest = (
            hashlib.sha256(canonical_json(part).encode()).hexdigest()[:12] for part in (facts, drafts)
        )
        self.path, self._same_steps = folder / f"{digest}-{drafts_digest}.json", f"{digest}-*.json"
        name = f"measured {digest}: {engine.model_id} on {facts['device']}"
        self._labels = {"name": name, "model_id": engine.model_id}

    def read(self) -> StepCost | None:
        """The cost that was measured on this machine before; None if there is none, or it is old or cannot be used.

        A cost that another workspace measured is copied into the folder.
        """
        for folder in self._folders:
            cost = self._read(folder / self.path.name)
            if cost is not None:
                return cost if folder == self.path.parent else self.write(cost)
        return None

    def known_steps(self) -> StepCost | None:
        """The cost of the same steps, with any drafters and pool; None if it was not measured."""
        paths = (path for folder in self._folders for path in sorted(folder.glob(self._same_steps)))
        return next(filter(None, map(self._read, paths)), None)

    def write(self, step_cost: StepCost) -> StepCost:
        """Write a cost to the folder and, if possible, for other workspaces; return it as it will be read."""
        named = step_cost.model_copy(update=self._labels)
        folder, user_folder = self._folders
        if folder != user_folder:
            write_json(named.model_dump(mode="json"), self.path)
        with suppress(OSError):  # such as a home that cannot be written
            write_json(named.model_dump(mode="json"), user_folder / self.path.name)
        return named

    def _read(self, path: Path) -> StepCost | None:
        if not path.exists():
            return None
        try:
            cost = read_step_cost(path)
            age_days = (datetime.date.today() - (cost.measured_on or datetime.date.today())).days
            name = self._labels["name"]
            if cost.name == name and age_days <= MAX_AGE_DAYS:
                return cost
            problem = f"{path} has {cost.name!r}, {age_days} days old; expected {name!r}, {MAX_AGE_DAYS} or less"
        except ConfigError as error:
            problem = str(error)
        logger.warning("the cost of steps is measured again, because a saved cost cannot be used: %s", problem)
        return None


def user_step_costs() -> Path:
    """The folder of a user's measured costs, which all workspaces read: in LASERBATCH_CACHE, otherwise in ~/.cache.

    Without a home folder nothing can be read or written there.
    """
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or os.devnull, ".cache"), "laserbatch")
    return Path(os.environ.get("LASERBATCH_CACHE") or usual) / "step-costs"


def _processor() -> str:
    """The CPU's name, if the system tells it, and the number of cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"
