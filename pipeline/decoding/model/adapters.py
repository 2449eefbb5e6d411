"""Merges a LoRA adapter into its base model at loading, so that a step costs the same as without an adapter.

peft does the merging and knows LoRA's variants. This module makes a wrong adapter an error, so that none is silently
applied in part: every tensor must find its place, and the merged model must give the logits of the unmerged one.
"""

from pathlib import Path

import torch

from laserbatch.pipeline.decoding.attention.interface import TOLERANCE, relative_error
from laserbatch.pipeline.errors import ModelError, first_line

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_NUM_PROBE_TOKENS = 16


def find_adapter(folder: str | Path) -> list[Path]:
    """The configuration and weights files of an adapter folder, in this order.

    Raises ModelError: the folder or a file is missing.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(f"there is no adapter folder {path}; give a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (path / name).is_file():
            pickled = name == WEIGHTS_FILE and (path / "adapter_model.bin").is_file()
            hint = "found adapter_model.bin, which is not read: convert it to safetensors"
            raise ModelError(f"{path} has no {name}; {hint if pickled else 'expected an adapter that PEFT saved'}")
    return [path / CONFIG_FILE, path / WEIGHTS_FILE]


def merge_adapter(model, folder: str | Path):
    """The base model with a LoRA adapter merged into its weights; `model` itself is changed and must not be used.

    Raises ModelError: peft is not installed, the folder holds no LoRA adapter, or it belongs to another base model.
    """
    config_file, weights_file = find_adapter(folder)
    try:
        from peft import LoraConfig, PeftConfig, PeftModel
    except ImportError as error:
        advice = "pip install 'laserbatch[lora]'"
        raise ModelError(f"decoding.adapter needs the library peft ({error}); install it: {advice}") from error
    try:
        config = PeftConfig.from_pretrained(str(config_file.parent))
    except Exception as error:  # peft may raise anything
        raise ModelError(f"{config_file} cannot be read: {first_line(error)}; copy the adapter again") from error
    if not isinstance(config, LoraConfig):
        raise ModelError(f"{config_file} describes a {config.peft_type} adapter; expected LoRA, as no other is merged")
    config.inference_mode = True
    try:
        wrapped = PeftModel(model, config)
        loaded = wrapped.load_adapter(str(config_file.parent), "default", torch_device=str(model.device))
    except Exception as error:  # likewise; from torch's report on sizes, the line with the first tensor is shown
        sizes = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
        reason = sizes[0] if sizes else first_line(error)
        raise ModelError(f"{weights_file} does not fit the model: {reason}") from error
    for keys, problem in ((loaded.unexpected_keys, "the model has no place for"), (loaded.missing_keys, "it lacks")):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ModelError(f"{weights_file} does not fit the model: {problem} {keys[0]}{more}")
    return _merge_checked(wrapped, weights_file)


@torch.inference_mode()
def _merge_checked(wrapped, weights_file: Path):
    """Merge, and compare the logits before and after: an adapter of tied embeddings, for example, cannot be merged."""
    embeddings = wrapped.get_input_embeddings().weight
    ids = torch.arange(_NUM_PROBE_TOKENS, device=embeddings.device)[None] * 7919 % len(embeddings)
    wrapped.eval()
    expected = wrapped(input_ids=ids, use_cache=False).logits
    try:
        merged = wrapped.merge_and_unload(safe_merge=True)  # refuses weights that are not finite
    except Exception as error:  # likewise
        raise ModelError(f"{weights_file} cannot be merged: {first_line(error)}") from error
    error = relative_error(merged(input_ids=ids, use_cache=False).logits, expected)
    if not error <= TOLERANCE[expected.dtype]:  # merging rounds each weight once to its type
        raise ModelError(
            f"{weights_file} cannot be merged: the merged model has other logits than the model with its adapter "
            f"(relative error {error:.1e}), as if the adapter changes embeddings that are also the output layer"
        )
    return merged
