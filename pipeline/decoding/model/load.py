"""Loads a model folder as a model that the engine can run, or raises an error with the reason why not.

Weights are safetensors, files are local, and no code of the folder is run. A model is refused before loading if it does
not fit the memory (`device_memory`), and after loading if its attention cannot be packed (`checks`).
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from laserbatch.pipeline.decoding.device_memory import (
    MIN_CACHE_TOKENS,
    cache_bytes_per_token,
    memory_of,
    num_stored_values,
    require_memory,
)
from laserbatch.pipeline.decoding.model import folder as files
from laserbatch.pipeline.decoding.model.adapters import merge_adapter
from laserbatch.pipeline.decoding.model.checks import SERVED, check_equivalence, refuse_by_config
from laserbatch.pipeline.decoding.model.compute_type import choose_dtype
from laserbatch.pipeline.decoding.model.described_weights import (
    HARMLESS_WEIGHTS,
    QUANTIZED_EXTRAS,
    require_token_rows,
    require_whole_weights,
)
from laserbatch.pipeline.errors import ModelError, first_line

logger = logging.getLogger(__name__)

LOCAL = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run.

    `end_ids`: the tokens that end a text; `max_context`: the model's number of positions; `bytes_per_token`: bytes of a
    token in its KV cache; `num_parameters`: parameters of the plain model; `quantization`: the method by which weights
    are stored in fewer bits, or None; `repetition_penalty`: that of its generation configuration, 1 for none;
    `dtype_reason`: why the model computes in its type.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    device: torch.device
    model_id: str
    end_ids: tuple[int, ...]
    vocab_size: int
    max_context: int
    bytes_per_token: int
    num_parameters: int
    quantization: str | None = None
    repetition_penalty: float = 1.0
    dtype_reason: str = ""


def load_model(
    folder: str | Path, dtype: str = "auto", device: str = "auto", adapter: str | Path | None = None
) -> LoadedModel:
    """Load a folder's model ("sample": the bundled one) and tokenizer and check that the engine can run it.

    `dtype` and `adapter` are as in `decoding`, `device` is "auto" (CUDA if there is one) or a torch device.

    Raises ModelError: folder, weights or tokenizer are missing or unreadable, they do not fit the memory, the adapter
    is not the model's, or the model cannot be packed.
    """
    path = files.SAMPLE_MODEL if str(folder) == "sample" else Path(folder)
    weights = files.find_weights(path)
    model_id = files.model_identity(path, adapter)
    target = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {device!r} was requested, but torch finds no CUDA device; use device cpu or auto")
    config = packable_config(path)
    quantization = files.quantization_of(config)
    if adapter is not None and quantization is not None:
        raise ModelError(
            f"the adapter {adapter} cannot be merged into the weights in {path}, which are quantised with "
            f"{quantization}: set decoding.model to the unquantised model, or to one with the adapter merged"
        )
    choice = choose_dtype(dtype, target.type, files.stored_dtype(path), quantization)
    weights_dtype = "auto" if choice.name == "auto" else getattr(torch, choice.name)
    require_room(path, weights, config, weights_dtype, target)
    tokenizer = files.load_tokenizer(path, adapter)
    transformers_logging.disable_progress_bar()
    # Weights go from their files to a GPU one by one, so that main memory holds few of them.
    placed = {} if target.type == "cpu" else {"device_map": {"": target}}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            path, dtype=weights_dtype, attn_implementation="eager", use_safetensors=True, output_loading_info=True,
            ignore_mismatched_sizes=True, **placed, **LOCAL,
        )  # fmt: skip
    except Exception as error:  # transformers may raise anything
        advice = "" if quantization is None else (
            f"; they are quantised with {quantization}: install its library (the extra `quantized` has torchao and "
            "compressed-tensors), or use the unquantised checkpoint"
        )  # fmt: skip
        raise ModelError(f"the weights in {path} cannot be loaded: {first_line(error)}{advice}") from error
    model, loading_info = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    require_whole_weights(path, loading_info, harmless=HARMLESS_WEIGHTS if quantization is None else QUANTIZED_EXTRAS)
    if adapter is not None:
        model = merge_adapter(model, adapter)
    num_rows = cast("torch.nn.Embedding", model.get_input_embeddings()).num_embeddings
    if warning := require_token_rows(path, tokenizer, num_rows):
        logger.warning("%s", warning)
    return replace(prepare_model(model, tokenizer, model_id), dtype_reason=choice.reason)


def packable_config(folder: Path):
    """The configuration of a model folder, as transformers reads it.

    Raises ModelError: transformers does not know the model, or its attention cannot be packed.
    """
    try:
        config = AutoConfig.from_pretrained(folder, **LOCAL)
    except Exception as error:  # transformers may raise anything
        raise ModelError(
            f"{folder}/config.json describes no model that this version of transformers can make "
            f"({' '.join(str(error).split())[:200]}); models that bring their own code are not run. {SERVED}"
        ) from error
    if not any(type(part) in MODEL_FOR_CAUSAL_LM_MAPPING for part in (config, config.get_text_config())):
        raise ModelError(f"{folder} has a model of type {config.model_type}, which is not decoder-only. {SERVED}")
    refuse_by_config(config)
    return config


def prepare_model(model, tokenizer=None, model_id: str = "unnamed") -> LoadedModel:
    """Check a transformers model that is in memory and make it ready; it is switched to our attention for good.

    Raises ModelError: its attention cannot be packed.
    """
    model.eval()
    device = next(model.parameters()).device
    vocab_size = model.get_input_embeddings().num_embeddings
    refuse_by_config(model.config)
    quantization = files.quantization_of(model.config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    bytes_per_token = check_equivalence(model, device, vocab_size)
    generation = getattr(model, "generation_config", None)
    config = model.config.get_text_config()
    rules = generation.to_dict() if generation else {}
    return LoadedModel(
        model, tokenizer, device, model_id, end_tokens(generation, config, tokenizer, vocab_size), vocab_size,
        max_context=int(getattr(config, "max_position_embeddings", None) or 1 << 20), bytes_per_token=bytes_per_token,
        num_parameters=files.num_parameters_of(model.config) if quantization else num_parameters,
        quantization=quantization,
        repetition_penalty=files.repetition_penalty_of(rules, "the model's generation_config"),
    )  # fmt: skip


def require_room(
    path: Path, weights: list[Path], config, dtype: torch.dtype | Literal["auto"], target: torch.device
) -> None:
    """Refuse a model whose weights and smallest KV cache do not fit the device's memory.

    Raises ModelError: the message names what is needed and what is free.
    """
    quantization, num_values = files.quantization_of(config), num_stored_values(weights)
    model_dtype = config.get_text_config().dtype or config.dtype or torch.float32
    loaded_dtype = model_dtype if dtype == "auto" else dtype
    # Libraries unpack these weights when the model first runs: they save disk space, not memory.
    is_unpacked = quantization == "compressed-tensors" or (quantization == "fp8" and target.type == "cpu")
    num_bytes = sum(file.stat().st_size for file in weights)
    if is_unpacked:
        num_bytes = files.num_parameters_of(config) * loaded_dtype.itemsize
    elif quantization is None and dtype != "auto":
        num_bytes = num_values * loaded_dtype.itemsize
    cache_bytes = MIN_CACHE_TOKENS * cache_bytes_per_token(config, loaded_dtype)
    require_memory(path, num_bytes, cache_bytes, memory_of(target))


def end_tokens(generation, config, tokenizer, vocab_size: int) -> tuple[int, ...]:
    """All end tokens in the vocabulary that the generation configuration, the model's or the tokenizer names."""
    generation_ids, config_ids = (getattr(source, "eos_token_id", None) for source in (generation, config))
    ids = files.end_ids_of(generation_ids, config_ids, tokenizer)
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        message = "end tokens %s are not among the %d tokens of the vocabulary, so that no text ends with them"
        logger.warning(message, outside, vocab_size)
    return tuple(i for i in ids if 0 <= i < vocab_size)
