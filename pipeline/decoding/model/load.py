"""From a model folder to a model that the engine can run, or a clear reason why not.

Weights are safetensors, files are local, no code of the folder is run. A model is refused before it is loaded when it
does not fit the memory (`device_memory`), and after it when its attention cannot be packed (`checks`).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from laserbatch.pipeline.decoding.memory.device_memory import (
    MIN_CACHE_TOKENS,
    Memory,
    cache_bytes_per_token,
    memory_of,
    require_memory,
    stored_weights,
)
from laserbatch.pipeline.decoding.model.adapters import merge_adapter
from laserbatch.pipeline.decoding.model.checks import check_equivalence, refuse_by_config
from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL, find_weights, model_id_of
from laserbatch.pipeline.decoding.model.generation_rules import (
    NO_RULES,
    GenerationRules,
    rules_of,
    unused_settings,
)
from laserbatch.pipeline.decoding.model.output_head import has_output_head
from laserbatch.pipeline.decoding.model.quantization import (
    is_unpacked_when_run,
    num_parameters_of,
    quantization_of,
    resident_bytes,
    why_not_loaded,
)
from laserbatch.pipeline.errors import ModelError, first_line
from laserbatch.pipeline.whole_weights import require_whole_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run.

    `end_ids`: every token that ends a text; `max_context`: positions the model has; `bytes_per_token`: of its KV cache.
    `num_parameters` are those of the plain model, `weight_bytes` what its weights take in memory; `quantization` names
    the method by which they are stored in fewer bits, None where they are not. `splits_head`: logits can be computed
    apart from the model's body. `rules`: what its generation configuration does to logits.
    """

    model: torch.nn.Module
    tokenizer: object
    device: torch.device
    model_id: str
    end_ids: tuple[int, ...]
    vocab_size: int
    max_context: int
    bytes_per_token: int
    num_parameters: int
    weight_bytes: int
    quantization: str | None = None
    splits_head: bool = False
    rules: GenerationRules = NO_RULES


def load_model(
    folder: str | Path,
    dtype: str = "auto",
    device: str = "auto",
    adapter: str | Path | None = None,
    memory: Callable[[torch.device], Memory] = memory_of,
) -> LoadedModel:
    """Load a folder's model and tokenizer and check that the engine can run it.

    Parameters
    ----------
    folder : path, or "sample" for the bundled model.
    dtype : "auto" (float32 on a CPU, the weights' own on CUDA or where they are quantised), "float32" or "bfloat16".
    device : "auto" (CUDA where there is one), or a torch device.
    adapter : folder of a LoRA adapter to merge into the weights, or None.
    memory : what a device has.

    Raises
    ------
    ModelError : the folder, its weights or its tokenizer are missing or unreadable, they do not fit the memory, the
        adapter is not the model's, or the model cannot be packed.
    """
    path = SAMPLE_MODEL if str(folder) == "sample" else Path(folder)
    weights = find_weights(path)
    model_id = model_id_of(path, weights, adapter)
    if (line := unused_settings(path)) is not None:
        logger.info(line)
    target = resolve_device(device)
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(path, **local)
    except Exception as error:
        raise ModelError(
            f"{path}/config.json names no model that this version of transformers knows ({first_line(error)}); "
            "models with code of their own are not run"
        ) from error
    refuse_by_config(config)
    quantization = quantization_of(config)
    if adapter is not None and quantization is not None:
        raise ModelError(
            f"an adapter cannot be merged into weights quantised with {quantization}: merge {adapter} into the "
            f"unquantised model of {path}, or name that one in decoding.model"
        )
    weights_dtype = resolve_dtype(dtype, target, quantization)
    require_room(path, weights, config, weights_dtype, target, memory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **local)
    except Exception as error:
        raise ModelError(f"the tokenizer in {path} cannot be read: {first_line(error)}") from error
    shows_progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            path, dtype=weights_dtype, attn_implementation="eager", use_safetensors=True, output_loading_info=True,
            ignore_mismatched_sizes=True, **local,
        )  # fmt: skip
        model = model.to(target)
    except Exception as error:
        if quantization is not None:
            raise ModelError(
                f"the weights in {path} cannot be loaded: {why_not_loaded(quantization, error)}"
            ) from error
        raise ModelError(f"the weights in {path} cannot be loaded: {first_line(error)}") from error
    finally:
        if shows_progress:
            transformers_logging.enable_progress_bar()
    require_whole_weights(path, loading_info)
    if adapter is not None:
        model = merge_adapter(model, adapter)
    return prepare_model(model, tokenizer, model_id)


def prepare_model(model, tokenizer=None, model_id: str = "unnamed") -> LoadedModel:
    """Check a transformers model that is in memory and make it ready; it is switched to our attention for good.

    Raises
    ------
    ModelError : its attention cannot be packed.
    """
    model.eval()
    device = next(model.parameters()).device
    vocab_size = model.get_input_embeddings().num_embeddings
    refuse_by_config(model.config)
    quantization = quantization_of(model.config)
    splits_head = has_output_head(model, vocab_size)
    num_parameters = num_parameters_of(model.config) if quantization else _num_parameters(model)
    bytes_per_token = check_equivalence(model, device, vocab_size, splits_head)
    generation = getattr(model, "generation_config", None)
    rules = rules_of(generation.to_dict() if generation else {}, "the model's generation_config")
    config = model.config.get_text_config()
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        device=device,
        model_id=model_id,
        end_ids=end_tokens(model, tokenizer, vocab_size),
        vocab_size=vocab_size,
        max_context=int(getattr(config, "max_position_embeddings", None) or 1 << 20),
        bytes_per_token=bytes_per_token,
        num_parameters=num_parameters,
        weight_bytes=resident_bytes(model),
        quantization=quantization,
        splits_head=splits_head,
        rules=rules,
    )


def resolve_device(device: str) -> torch.device:
    """ "auto" is CUDA where there is one.

    Raises
    ------
    ModelError : CUDA was asked for and is not there.
    """
    target = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {device!r} was asked for and torch finds no CUDA; use device cpu or auto")
    return target


def resolve_dtype(dtype: str, device: torch.device, quantization: str | None = None) -> torch.dtype | str:
    """The type of weights: "auto" is float32 on a CPU, where token identity counts, else the weights' own.

    Of quantised weights it is the type of what is not packed, for which they were made.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" and quantization is None else "auto"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]


def require_room(path: Path, weights: list[Path], config, dtype, target: torch.device, memory) -> None:
    """Refuse a model that does not fit the device, or main memory on its way there.

    Raises
    ------
    ModelError : naming what is needed and what there is.
    """
    quantization = quantization_of(config)
    stored = stored_weights(weights)
    own = config.get_text_config().dtype or config.dtype or torch.float32
    kept = own if dtype == "auto" else dtype
    if quantization is None:
        num_bytes = stored.num_bytes if dtype == "auto" else stored.num_values * kept.itemsize
    elif is_unpacked_when_run(quantization, target):
        num_bytes = num_parameters_of(config) * kept.itemsize
    else:
        num_bytes = stored.num_bytes
    require_memory(path, num_bytes, MIN_CACHE_TOKENS * cache_bytes_per_token(config, kept), memory(target))
    if target.type != "cpu":
        require_memory(path, num_bytes, 0, memory(torch.device("cpu")))


def _num_parameters(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def end_tokens(model, tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Every end token that the generation configuration or the tokenizer names and that can be written, ascending."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(named if isinstance(named, list | tuple) else [named])
    ids.add(getattr(tokenizer, "eos_token_id", None))
    ids.discard(None)
    outside = sorted(int(i) for i in ids if not 0 <= i < vocab_size)
    if outside:
        logger.warning("end tokens %s are outside the vocabulary of %d: no text ends with them", outside, vocab_size)
    return tuple(sorted(int(i) for i in ids if 0 <= i < vocab_size))
