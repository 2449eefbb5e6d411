"""Checks that a model computes the same for a packed batch as for each text alone.

Where a short test would not notice a difference, the configuration is refused. A probe checks the rest: every layer
must call our attention function, and a small packed forward with a tree must give the logits of plain causal runs. The
probe runs what the engine will run, with linear layers in their layout, on texts longer than the shortened windows.
"""

import copy
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import nn

from laserbatch.pipeline.decoding.attention.interface import ATTENTION_NAME, TOLERANCE, relative_error
from laserbatch.pipeline.decoding.batch import Feed
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.model.cpu_linear import relayout_linear_layers
from laserbatch.pipeline.decoding.model.folder import quantization_of
from laserbatch.pipeline.decoding.model.known_models import KNOWN_KINDS
from laserbatch.pipeline.decoding.model.runner import ModelRunner
from laserbatch.pipeline.decoding.token_tree import TokenTree, TreeBatch
from laserbatch.pipeline.errors import ModelError, first_line

logger = logging.getLogger(__name__)

SERVED = (
    "Laserbatch's engine runs decoder-only models whose layers use transformers' attention interface, such as "
    f"{', '.join(KNOWN_KINDS)}; for others set decoding.engine to vllm or endpoint"
)
_POSITION_DEPENDENT_ROPE = ("dynamic", "longrope")  # depend on the longest position in the batch
# Kernels of packed weights may round differently for another number of tokens, whatever the type of activations.
_QUANTISED_TOLERANCE = 0.05
_NUM_ROUNDED_PROBES = 3  # probes of a model whose results have fewer bits than float32's
_ROUNDED_TOLERANCE = 0.25  # for a model in bfloat16 or float16 whose first layers were checked in float32
_MIN_CHECKED_LAYERS = 4  # some models differ in every fourth layer
_PACKED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_PROBE_WINDOW = 8  # sliding windows are shortened to this while the probe runs
_PROMPT_LENGTHS, _FIRST_PARTS = (21, 6), (13, 2)  # both are fed in two parts; those of the first fill the window


class _DamagedWeights(ModelError):
    """The weights are unusable, whatever the architecture."""


@contextmanager
def naming_served_models() -> Iterator[None]:
    """Add to a ModelError about an architecture which others can be run."""
    try:
        yield
    except _DamagedWeights:
        raise
    except ModelError as error:
        raise ModelError(f"{error}. {SERVED}") from error


@naming_served_models()
def refuse_by_config(config) -> None:
    """Refuse models that a short test would pass and a long text would break.

    Raises ModelError: rotary embeddings or attention depend on the rest of the batch, or layers are sparse or of
    another kind that cannot be packed.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    by_layer_type = [v for v in rope.values() if isinstance(v, dict)]
    for parameters in by_layer_type or [rope]:
        kind = parameters.get("rope_type") or parameters.get("type")
        if kind in _POSITION_DEPENDENT_ROPE:
            raise ModelError(
                f"{text.model_type} with {kind} rotary embeddings cannot be packed: they depend on the longest "
                "sequence of the forward; use a model whose rotary embeddings are default, linear, yarn or llama3"
            )
    if getattr(text, "attn_temperature_tuning", False):
        raise ModelError(f"{text.model_type} cannot be packed: it scales attention by a token's place in the forward")
    unsupported = sorted(set(getattr(text, "layer_types", None) or ()) - _PACKED_LAYER_TYPES)
    if unsupported:
        raise ModelError(
            f"{text.model_type} has layers of {', '.join(unsupported)}, which cannot be packed; use a model whose "
            f"layers are {' or '.join(sorted(_PACKED_LAYER_TYPES))}"
        )


@naming_served_models()
def check_equivalence(model, device: torch.device, vocab_size: int) -> int:
    """Compare a packed forward of two sequences and a tree with plain causal runs; return KV bytes per token.

    This makes the model ready: it is switched to our attention, and its linear layers are laid out for a CPU. If fused
    layers compute the same, they become its attribute `fused` (on a CPU) or `cuda_layers` (on CUDA).

    Raises ModelError: a layer did not call our attention function, or the logits differ.
    """
    name = model.config.model_type
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{name} cannot be packed: its forward takes no `position_ids`")
    is_exact, is_quantised = model.dtype == torch.float32, quantization_of(model.config) is not None
    probes = [Probe.of(seed, vocab_size) for seed in range(1 if is_exact else _NUM_ROUNDED_PROBES)]
    with _short_windows(model):
        part = None if is_exact or is_quantised else _first_layers_in_float32(model)
        if part is None:
            return _make_ready(model, device, probes, _QUANTISED_TOLERANCE if is_quantised else TOLERANCE[model.dtype])
        _make_ready(part, device, probes[:1], TOLERANCE[torch.float32])
        serves_cuda = getattr(part, "cuda_layers", None) is not None
        del part
        return _make_ready(model, device, probes, _ROUNDED_TOLERANCE, serves_cuda)


def _first_layers_in_float32(model) -> nn.Module | None:
    """A float32 copy of a model's first layers, with each kind of layer; None if the model cannot be cut.

    Bfloat16 alone moves the logits of real models by 0.1, as much as a wrong mask does. So the comparison is made in
    float32, over few layers, so that the copy takes little memory.
    """
    text = model.config.get_text_config()
    lists = [
        (owner, name, layers)
        for owner in model.modules()
        for name, layers in owner.named_children()
        if isinstance(layers, nn.ModuleList) and len(layers) == text.num_hidden_layers
    ]
    if len(lists) != 1:
        return None
    owner, name, layers = lists[0]
    kinds = list(getattr(text, "layer_types", None) or [""])
    num_layers = min(len(layers), max(_MIN_CHECKED_LAYERS, *(kinds.index(kind) + 1 for kind in kinds)))
    setattr(owner, name, layers[:num_layers])
    try:
        part = copy.deepcopy(model).float()
        config = part.config.get_text_config()
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
        part.config.dtype = config.dtype = torch.float32
        _last_logits(part, np.arange(4, dtype=np.int32), part.device)
        return part
    except Exception as error:  # a model's code may raise anything once layers are taken out of it
        logger.warning("%s is checked in its own type, not in float32: %s", model.config.model_type, first_line(error))
        return None
    finally:
        setattr(owner, name, layers)


def _make_ready(model, device: torch.device, probes: list["Probe"], tolerance: float, tries_cuda: bool = True) -> int:
    """Switch to our attention and to the fastest layers that compute the same; return KV bytes per token.

    Raises ModelError: the logits differ by more than the tolerance.
    """
    name = model.config.model_type
    try:
        plain = plain_logits(model, probes, device)
        model.set_attn_implementation(ATTENTION_NAME)
    except ModelError as error:
        raise ModelError(f"{name} cannot be packed: {error}") from error
    except Exception as error:  # a model's code may raise anything
        raise ModelError(f"{name} cannot be run: {first_line(error)}") from error
    if any(logits.isnan().any() for logits in chain.from_iterable(plain)):
        raise _DamagedWeights(
            f"{name} computes logits that are not numbers (NaN), even for one sequence: its weights have such values, "
            f"or values too large for {model.dtype}; download the checkpoint again"
        )
    compare = partial(_compare, model, device, probes, plain, tolerance)
    is_quantised = quantization_of(model.config) is not None
    if not is_quantised and relayout_linear_layers(model):
        from laserbatch.pipeline.decoding.model.fused_model import FusedModel  # numba takes a while to import

        model.fused = FusedModel.of(model)
        if model.fused is not None:
            try:
                return compare()
            except ModelError as error:
                logger.warning("%s is computed by transformers' layers, not by fused ones: %s", name, error)
                model.fused = None
    num_bytes = compare()
    if device.type == "cuda" and tries_cuda and not is_quantised:
        _add_cuda_layers(model, partial(compare, attention="auto"))
    return num_bytes


@dataclass(frozen=True)
class Probe:
    """Two random prompts with a draft tree after the first, and the texts whose last logits are compared."""

    prompts: list[np.ndarray]
    tree: TokenTree
    paths: list[np.ndarray]

    @classmethod
    def of(cls, seed: int, vocab_size: int) -> "Probe":
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(0, vocab_size, n).astype(np.int32) for n in _PROMPT_LENGTHS]
        parents = np.array([-1, -1, 0, 1, 1, 4], np.int32)
        drafted = rng.integers(0, vocab_size, len(parents)).astype(np.int32)
        tree = TokenTree(drafted, parents, np.zeros(len(parents), np.float32), np.zeros(len(parents), np.uint8))
        paths = [np.append(prompts[0], drafted[[1, 4, 5]]), np.append(prompts[0], drafted[[0, 2]]), prompts[1]]
        return cls(prompts, tree, paths)


def plain_logits(model, probes: list[Probe], device: torch.device) -> list[list[torch.Tensor]]:
    """Logits (vocab_size,) after each path of each probe, by the model's own attention and cache."""
    return [[_last_logits(model, path, device) for path in probe.paths] for probe in probes]


def _add_cuda_layers(model, compare: Callable[[], int]) -> None:
    """Set the attribute `cuda_layers` if our layers fit the model and `compare` finds that they compute the same."""
    if importlib.util.find_spec("triton") is None:
        return
    from laserbatch.pipeline.decoding.model.cuda_layers import CudaLayers

    model.cuda_layers = CudaLayers.of(model)
    if model.cuda_layers is None:
        return
    try:
        compare()
    except ModelError as error:
        logger.warning("%s is computed by transformers' layers, not by fused ones: %s", model.config.model_type, error)
        model.cuda_layers = None


@torch.inference_mode()
def _last_logits(model, text: np.ndarray, device: torch.device) -> torch.Tensor:
    """Logits (vocab_size,) after a text, with a cache of transformers: some models slide their window only there."""
    input_ids = torch.from_numpy(text.astype(np.int64)).to(device)[None]
    cache = getattr(model(input_ids=input_ids[:, :-1], use_cache=True), "past_key_values", None)
    if cache is None:
        raise ModelError("it keeps no keys and values of earlier tokens (an encoder, or recurrent)")
    return model(input_ids=input_ids[:, -1:], past_key_values=cache, use_cache=True).logits[0, -1]


@contextmanager
def _short_windows(model) -> Iterator[None]:
    """Shorten sliding windows within the block: those of configurations, which make masks, and those of layers."""
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
    model, device: torch.device, probes: list[Probe], plain: list[list[torch.Tensor]], tolerance: float,
    attention: str = "torch",
) -> int:  # fmt: skip
    """Run the probes packed and compare with their plain logits; return KV bytes per token.

    The median error over probes counts: rounding may spoil the logits of one text, but a broken mask spoils most.
    """
    name = model.config.model_type
    errors, bytes_per_token = [], 0
    for probe, expected in zip(probes, plain, strict=True):
        cache = KVCache(2)
        runner = ModelRunner(model, cache, device, attention)
        try:
            packed = _packed_logits(runner, probe)
        except ModelError as error:
            raise ModelError(f"{name} cannot be packed: {error}") from error
        except Exception as error:  # likewise
            raise ModelError(f"{name} cannot be run packed: {first_line(error)}") from error
        _require_all_layers(runner, attention)
        errors.append([relative_error(*pair) for pair in zip(packed, expected, strict=True)])
        bytes_per_token = cache.bytes_per_token()
    error = float(np.median(errors, axis=0).max())
    if not error <= tolerance:
        problem = f"it gives other logits packed than alone (relative error {error:.1e})"
        raise ModelError(f"{name} cannot be packed: {problem}")
    return bytes_per_token


def _packed_logits(runner: ModelRunner, probe: Probe) -> list[torch.Tensor]:
    """Logits after each path of a probe, whose prompts are fed in two parts."""
    cache = runner.cache
    leases = [cache.acquire(prompt, 32) for prompt in probe.prompts]
    rows = [lease.row for lease in leases if lease is not None]
    parts = list(zip(rows, probe.prompts, _FIRST_PARTS, strict=True))
    first = runner.forward([Feed(row, prompt[:size]) for row, prompt, size in parts])
    cache.commit(np.array(rows), first.batch.sizes, first.batch.slot_mapping)
    second = [Feed(row, prompt[size:]) for row, prompt, size in parts]
    out = runner.forward(second, TreeBatch.of([probe.tree]).scatter([0], 2))
    logits = out.logits
    return [logits[6], logits[3], logits[out.batch.logit_starts[1]]]


def _require_all_layers(runner: ModelRunner, attention: str) -> None:
    """Raise ModelError if not every layer attended once in the last forward, or the requested kernel failed."""
    config = runner.model.config
    if attention != "torch" and runner.buffered is None:
        raise ModelError("the attention kernel failed")
    plan = runner.last_plan if runner.buffered is None else runner.buffered.last_plan
    assert plan is not None
    seen, num_layers = plan.layers_seen, config.get_text_config().num_hidden_layers
    if len(set(seen)) < len(seen):
        raise ModelError(f"{config.model_type} cannot be packed: a layer attends more than once in a forward")
    if sorted(seen) != list(range(num_layers)):
        raise ModelError(
            f"{config.model_type} cannot be packed: {len(seen)} of its {num_layers} layers use transformers' attention "
            "interface; expected all of them"
        )
