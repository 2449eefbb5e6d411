"""Whether a model computes the same packed as alone.

A model is refused by its configuration where a short test would not notice, else by a probe: every layer must call our
attention function, and a small packed tree forward must give the logits of plain causal runs on the same weights. The
probe runs what the engine will run, linear layers in their layout included, and past windows that are shortened for it.
"""

import importlib.util
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from laserbatch.pipeline.decoding.attention.interface import ATTENTION_NAME, TOLERANCE, relative_error
from laserbatch.pipeline.decoding.batch import Feed
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.model.cpu_linear import relayout_linear_layers
from laserbatch.pipeline.decoding.model.folder import quantization_of
from laserbatch.pipeline.decoding.model.runner import ModelRunner
from laserbatch.pipeline.decoding.token_tree import TokenTree, TreeBatch
from laserbatch.pipeline.errors import ModelError, first_line

logger = logging.getLogger(__name__)

_POSITION_DEPENDENT_ROPE = ("dynamic", "longrope")  # take the longest position of the whole batch
# Kernels of packed weights may round otherwise with another number of tokens, whatever the type of activations.
_QUANTISED_TOLERANCE = 0.05
_PACKED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_PROBE_WINDOW = 8  # windows are cut to it while the probe runs
_PROMPT_LENGTHS, _FIRST_PARTS = (21, 6), (13, 2)  # the first is fed in two parts, each longer than the window


def refuse_by_config(config) -> None:
    """Refuse models that a short test would pass and a long text would break.

    Raises ModelError: rotary embeddings or attention that depend on what else is in the batch, or on sparse or other
    layers.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    by_layer_type = [v for v in rope.values() if isinstance(v, dict)]
    for parameters in by_layer_type or [rope]:
        kind = parameters.get("rope_type") or parameters.get("type")
        if kind in _POSITION_DEPENDENT_ROPE:
            raise ModelError(
                f"{text.model_type} with {kind} rotary embeddings cannot be packed: they depend on the longest "
                "sequence of the forward; use a model with default, linear, yarn or llama3 ones"
            )
    if getattr(text, "attn_temperature_tuning", False):
        raise ModelError(f"{text.model_type} scales attention by a token's place in the forward; it cannot be packed")
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _PACKED_LAYER_TYPES)
    if others:
        raise ModelError(
            f"{text.model_type} has layers of {', '.join(others)}, which cannot be packed; use a model of "
            f"{' and '.join(sorted(_PACKED_LAYER_TYPES))} alone"
        )


def check_equivalence(model, device: torch.device, vocab_size: int) -> int:
    """Compare a packed forward of two sequences and a tree with plain causal runs; returns KV bytes per token.

    The model is made ready on the way: switched to our attention, its linear layers laid out for a CPU and, where that
    computes the same, fused: there (its attribute `fused`) or on CUDA (its attribute `cuda_layers`).

    Raises ModelError: a layer did not call our attention function, or the logits differ.
    """
    name = model.config.model_type
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{name} cannot be packed: it does not take the positions of its tokens")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab_size, n).astype(np.int32) for n in _PROMPT_LENGTHS]
    tree, paths = probe_tree(prompts, vocab_size)
    with _short_windows(model):
        try:
            plain = [_last_logits(model, path, device) for path in paths]
            model.set_attn_implementation(ATTENTION_NAME)
        except ModelError as error:
            raise ModelError(f"{name} cannot be packed: {error}") from error
        except Exception as error:
            raise ModelError(f"{name} cannot be run: {first_line(error)}") from error
        if quantization_of(model.config) is None and relayout_linear_layers(model):
            from laserbatch.pipeline.decoding.model.fused_model import FusedModel  # numba takes a while to import

            model.fused = FusedModel.of(model)
            if model.fused is not None:
                try:
                    return _compare(model, device, prompts, tree, plain)
                except ModelError as error:
                    logger.warning("%s is computed by transformers' layers, not by fused ones: %s", name, error)
                    model.fused = None
        num_bytes = _compare(model, device, prompts, tree, plain)
        if device.type == "cuda" and quantization_of(model.config) is None:
            _add_cuda_layers(model, device, prompts, tree, plain)
        return num_bytes


def probe_tree(prompts: list[np.ndarray], vocab_size: int) -> tuple[TokenTree, list[np.ndarray]]:
    """A tree below the first prompt, and the texts whose last logits `_compare` looks at."""
    parents = np.array([-1, -1, 0, 1, 1, 4], np.int32)
    drafted = np.random.default_rng(1).integers(0, vocab_size, len(parents)).astype(np.int32)
    tree = TokenTree(drafted, parents, np.zeros(len(parents), np.float32), np.zeros(len(parents), np.uint8))
    return tree, [np.append(prompts[0], drafted[[1, 4, 5]]), np.append(prompts[0], drafted[[0, 2]]), prompts[1]]


def _add_cuda_layers(
    model, device: torch.device, prompts: list, tree: TokenTree, plain: list[torch.Tensor], attention: str = "auto"
) -> None:
    """Set the attribute `cuda_layers` where our layers serve the model and compute what its own do."""
    if importlib.util.find_spec("triton") is None:
        return
    from laserbatch.pipeline.decoding.model.cuda_layers import CudaLayers

    model.cuda_layers = CudaLayers.of(model)
    if model.cuda_layers is None:
        return
    try:
        _compare(model, device, prompts, tree, plain, attention)
    except ModelError as error:
        logger.warning("%s is computed by transformers' layers, not by fused ones: %s", model.config.model_type, error)
        model.cuda_layers = None


@torch.inference_mode()
def _last_logits(model, text: np.ndarray, device: torch.device) -> torch.Tensor:
    """Logits (vocab_size,) behind a text, by a cache of transformers: some models slide their window there alone."""
    input_ids = torch.from_numpy(text.astype(np.int64)).to(device)[None]
    cache = getattr(model(input_ids=input_ids[:, :-1], use_cache=True), "past_key_values", None)
    if cache is None:
        raise ModelError("it keeps no keys and values of earlier tokens (an encoder, or recurrent)")
    return model(input_ids=input_ids[:, -1:], past_key_values=cache, use_cache=True).logits[0, -1]


@contextmanager
def _short_windows(model) -> Iterator[None]:
    """Masks are made by what configurations say, attention by what layers hold: both are shortened meanwhile."""
    modules = list(model.modules())
    owners = {id(owner): owner for owner in (*modules, *(vars(module).get("config") for module in modules))}
    windows = [(owner, getattr(owner, "__dict__", {}).get("sliding_window")) for owner in owners.values()]
    windows = [(owner, window) for owner, window in windows if isinstance(window, int) and window > _PROBE_WINDOW]
    for owner, _ in windows:
        owner.sliding_window = _PROBE_WINDOW
    try:
        yield
    finally:
        for owner, window in windows:
            owner.sliding_window = window


def _compare(
    model,
    device: torch.device,
    prompts: list[np.ndarray],
    tree: TokenTree,
    plain: list[torch.Tensor],
    attention: str = "torch",
) -> int:
    """The packed run of `check_equivalence`, and its comparison with the plain one; returns KV bytes per token."""
    name = model.config.model_type
    try:
        cache = KVCache(2)
        runner = ModelRunner(model, cache, device, attention)
        rows = [cache.acquire(prompt, 32).row for prompt in prompts]
        parts = list(zip(rows, prompts, _FIRST_PARTS, strict=True))
        first = runner.forward([Feed(row, prompt[:size]) for row, prompt, size in parts])
        cache.commit(rows, first.batch.sizes, first.batch.slot_mapping)
        second = [Feed(row, prompt[size:]) for row, prompt, size in parts]
        out = runner.forward(second, TreeBatch.of([tree]).spread([0], 2))
    except ModelError as error:
        raise ModelError(f"{name} cannot be packed: {error}") from error
    except Exception as error:
        raise ModelError(f"{name} cannot be run packed: {first_line(error)}") from error
    if attention != "torch" and runner.buffered is None:
        raise ModelError("the attention kernel failed")
    plan = runner.last_plan if runner.buffered is None else runner.buffered.last_plan
    seen, num_layers = plan.layers_seen, model.config.get_text_config().num_hidden_layers
    if len(set(seen)) < len(seen):
        raise ModelError(f"{name} cannot be packed: a layer attends more than once in a forward")
    if sorted(seen) != list(range(num_layers)):
        raise ModelError(
            f"{name} cannot be packed: {len(seen)} of its {num_layers} layers use transformers' attention interface; "
            "every layer must"
        )
    logits = out.logits
    packed = [logits[6], logits[3], logits[out.batch.wanted_starts[1]]]
    tolerance = _QUANTISED_TOLERANCE if quantization_of(model.config) else TOLERANCE[logits.dtype]
    for expected, found in zip(plain, packed, strict=True):
        error = relative_error(found, expected)
        if not error <= tolerance:
            raise ModelError(f"{name} gives other logits packed than alone (relative error {error:.1e}); not supported")
    return cache.bytes_per_token()
