"""The loop that trains whatever learns by gradients here. Killed at any moment, it goes on to the same bytes."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from laserbatch.pipeline.storage.atomic import atomic_path, leftovers

logger = logging.getLogger("laserbatch")

CHECKPOINT_NAME = "checkpoint.safetensors"
WARM_UP = 0.05  # of all steps

BatchT = TypeVar("BatchT")


def train_steps(
    module: nn.Module,
    batches: Sequence[BatchT],
    loss_of: Callable[[BatchT], torch.Tensor],
    folder: Path,
    digest: str,
    rate: float,
    pace: Callable[[str], float] = lambda name: 1.0,
    tell: Callable[[int, float], None] = lambda step, loss: None,
    after: Callable[[int], None] = lambda step: None,
    seconds_between_checkpoints: float = 60.0,
) -> float:
    """Train those parameters of a module that ask for gradients, a step a batch; returns all seconds that it took.

    The rate rises over the first WARM_UP of all steps and falls to nothing at the last.

    Parameters
    ----------
    folder : of the checkpoint, which stays there; one of another `digest` is not used.
    pace : a parameter's learning rate by its name, as a share of `rate`.
    tell : called after each step with its number, from 1 on, and its loss.
    after : likewise, before the step can be in a checkpoint; after a kill it may be called again for a step.
    """
    learned = {name: each for name, each in module.named_parameters() if each.requires_grad}
    groups = [{"params": [each], "pace": pace(name)} for name, each in learned.items()]
    optimizer = torch.optim.AdamW(groups, rate, weight_decay=0.01)
    done, seconds = _resumed(learned, optimizer, folder / CHECKPOINT_NAME, digest)
    num_warm = max(1, int(WARM_UP * len(batches)))
    kept_s = began_s = time.perf_counter()
    for step in range(done, len(batches)):
        module.train()
        for group in optimizer.param_groups:
            left = (len(batches) - step) / len(batches)
            group["lr"] = group["pace"] * rate * min((step + 1) / num_warm, left)
        loss = loss_of(batches[step])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned.values(), 1.0)
        optimizer.step()
        tell(step + 1, loss.item())
        after(step + 1)
        if time.perf_counter() - kept_s > seconds_between_checkpoints:
            kept_s = time.perf_counter()
            facts = {"digest": digest, "step": step + 1, "seconds": seconds + kept_s - began_s}
            _keep(learned, optimizer, folder / CHECKPOINT_NAME, facts)
    module.eval()
    return seconds + time.perf_counter() - began_s


def save_whole(tensors: dict[str, torch.Tensor], path: Path, facts: dict) -> None:
    """Write a file of tensors, whole or not at all."""
    whole = {name: each.cpu().contiguous() for name, each in tensors.items()}
    with atomic_path(path) as temporary:
        save_file(whole, temporary, {"facts": json.dumps(facts)})


def files_there(folder: Path) -> set[str]:
    """Names of what a folder holds, without what a killed training was about to write."""
    return {path.name for path in folder.glob("*")} - {path.name for path in leftovers(folder)}


def drop_files(folder: Path, *names: str) -> None:
    """Delete files that only a training that is under way needs, and what a killed one was about to write of them."""
    unfinished = (path for path in leftovers(folder) if path.name.startswith(tuple(f".{name}." for name in names)))
    for path in (*(folder / name for name in names), *unfinished):
        path.unlink(missing_ok=True)


def read_facts(path: Path) -> dict:
    """What was written beside the tensors of a file; nothing where there is none, or where it is damaged."""
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "pt") as opened:
            return json.loads(opened.metadata()["facts"])
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s is damaged (%s); what it was to go on with begins anew", path, error)
        return {}


def _keep(learned: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, path: Path, facts: dict) -> None:
    tensors = {}
    for name, parameter in learned.items():
        tensors[f"value.{name}"] = parameter.detach()
        for moment, value in optimizer.state[parameter].items():
            tensors[f"{moment}.{name}"] = value
    save_whole(tensors, path, facts)


def _resumed(
    learned: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, path: Path, digest: str
) -> tuple[int, float]:
    """Steps and seconds that a checkpoint of the same training has done, which is loaded."""
    facts = read_facts(path)
    if facts.get("digest") != digest:
        return 0, 0.0
    tensors = load_file(path)
    with torch.no_grad():
        for name, parameter in learned.items():
            parameter.copy_(tensors[f"value.{name}"])
            optimizer.state[parameter] = {
                "step": tensors[f"step.{name}"],
                "exp_avg": tensors[f"exp_avg.{name}"].to(parameter.device),
                "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(parameter.device),
            }
    return facts["step"], facts["seconds"]
