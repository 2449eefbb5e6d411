"""Shared parts of all trainings: models, batches, and a training loop that resumes after a kill with equal results."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from laserbatch.pipeline.errors import ConfigError, ModelError, first_line
from laserbatch.pipeline.storage.atomic import atomic_path, leftovers

logger = logging.getLogger("laserbatch")

CHECKPOINT_NAME = "checkpoint.safetensors"
WARM_UP = 0.05  # share of the steps in which the learning rate rises
SECONDS_BETWEEN_CHECKPOINTS = 60.0

BatchT = TypeVar("BatchT")


def whole_model(folder: Path, device: str | torch.device = "cpu") -> PreTrainedModel:
    """Load the model of a folder in float32."""
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    nn.Module.to(model, device)  # transformers types its own `to` wrongly
    return model


def with_lora(model: PreTrainedModel, rank: int, alpha: int):
    """Add an untrained LoRA to all linear layers of a model. Raises ConfigError if peft is not installed."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        advice = "pip install 'laserbatch[lora]'"
        raise ConfigError(f"a language model is adapted with peft, which is missing ({error}): {advice}") from error
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear"))


def padded(rows: Sequence[np.ndarray], fill: int = 0, left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows of token ids to the longest, int64 (len(rows), longest); also return the mask of their tokens, bool."""
    longest = max(map(len, rows))
    ids, is_real = np.full((len(rows), longest), fill, np.int64), np.zeros((len(rows), longest), bool)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), longest) if left else slice(0, len(row))
        ids[number, place], is_real[number, place] = row, True
    return torch.from_numpy(ids), torch.from_numpy(is_real)


def batches_by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Batch the numbers of rows by similar lengths."""
    order = np.argsort(lengths, kind="stable").tolist()
    return [order[start : start + size] for start in range(0, len(order), size)]


def train_steps(
    module: nn.Module,
    batches: Sequence[BatchT],
    loss_of: Callable[[BatchT], torch.Tensor],
    folder: Path,
    digest: str,
    rate: float,
    pace: Callable[[str], float] = lambda name: 1.0,
    on_progress: Callable[[int, float], None] = lambda step, loss: None,
    after: Callable[[int], None] = lambda step: None,
) -> float:
    """Train the parameters of a module that require gradients, one step per batch; return the seconds of all attempts.

    The learning rate rises over the first share WARM_UP of the steps, and falls towards 0 at the last step.

    Parameters
    ----------
    folder : holds the checkpoint, which stays there; a checkpoint with another `digest` is not used.
    pace : returns the factor of a parameter's learning rate, given the parameter's name.
    on_progress : called after each step with its number, from 1, and its loss.
    after : called after each step, before its checkpoint is written; after a kill it may be called again for a step.
    """
    learned = {name: each for name, each in module.named_parameters() if each.requires_grad}
    groups = [{"params": [each], "pace": pace(name)} for name, each in learned.items()]
    optimizer = torch.optim.AdamW(groups, rate, weight_decay=0.01)
    done, seconds = _resumed(learned, optimizer, folder / CHECKPOINT_NAME, digest)
    num_warm = max(1, int(WARM_UP * len(batches)))
    saved_s = began_s = time.perf_counter()
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
        on_progress(step + 1, loss.item())
        after(step + 1)
        if time.perf_counter() - saved_s > SECONDS_BETWEEN_CHECKPOINTS:
            saved_s = time.perf_counter()
            facts = {"digest": digest, "step": step + 1, "seconds": seconds + saved_s - began_s}
            _keep(learned, optimizer, folder / CHECKPOINT_NAME, facts)
    module.eval()
    return seconds + time.perf_counter() - began_s


def save_whole(tensors: dict[str, torch.Tensor], path: Path, facts: dict) -> None:
    """Write tensors and facts to a file, atomically."""
    whole = {name: each.cpu().contiguous() for name, each in tensors.items()}
    with atomic_path(path) as temporary:
        save_file(whole, temporary, {"facts": json.dumps(facts)})


def files_in(folder: Path) -> set[str]:
    """The names of the files of a folder, without temporary files of a killed training."""
    return {path.name for path in folder.glob("*")} - {path.name for path in leftovers(folder)}


def require_own_folder(folder: Path, kind: str, *names: str) -> None:
    """Raise ConfigError if a folder has files, but neither a checkpoint nor one of `names`, the files of a training."""
    others = files_in(folder)
    if others and not others & {CHECKPOINT_NAME, *names}:
        raise ConfigError(f"{folder} has files that do not belong to a {kind} ({min(others)}): give a new folder")


def drop_files(folder: Path, *names: str) -> None:
    """Delete files that only a running training needs, and their temporary files that a killed training left."""
    unfinished = (path for path in leftovers(folder) if path.name.startswith(tuple(f".{name}." for name in names)))
    for path in (*(folder / name for name in names), *unfinished):
        path.unlink(missing_ok=True)


def trained_shapes(path: Path) -> dict[str, list[int]]:
    """The shapes of the tensors of a trained model, by name. Raises ModelError if its file is missing or damaged."""
    try:
        with safe_open(path, "pt") as opened:
            return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read ({first_line(error)}); train it again") from error


def read_facts(path: Path) -> dict:
    """The facts in a file of `save_whole`; empty if the file is missing or damaged."""
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "pt") as opened:
            return json.loads(opened.metadata()["facts"])
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s is damaged (%s), so its part of the training starts again", path, error)
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
    """Load the checkpoint if it is of the same training; return its number of steps and seconds, otherwise zeros."""
    facts = read_facts(path)
    if facts.get("digest") != digest:
        return 0, 0.0
    tensors = load_file(path)
    with torch.no_grad():
        for name, parameter in learned.items():
            parameter.copy_(tensors[f"value.{name}"])
            moments = {key: tensors[f"{key}.{name}"].to(parameter.device) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": tensors[f"step.{name}"]} | moments
    return facts["step"], facts["seconds"]
