"""Whether a model computes the same packed as alone.

A model is refused by name where that would pass unnoticed in a short test, otherwise by a probe (every layer must call
our attention function) and by comparing a small packed tree forward with plain causal runs on the same weights.
"""

import numpy as np
import torch

from pipeline.decoding.forward.compiled_layers import compile_layers
from pipeline.decoding.forward.feed import Feed
from pipeline.decoding.forward.model_runner import ModelRunner
from pipeline.decoding.forward.tree_attention import ATTENTION_NAME
from pipeline.decoding.loading.quantization import TOLERANCE, quantization_of
from pipeline.decoding.memory.kv_store import KVStore
from pipeline.decoding.memory.token_store import TokenStore
from pipeline.decoding.packed_trees import PackedTrees
from pipeline.decoding.token_tree import TokenTree
from pipeline.errors import ModelError

_POSITION_DEPENDENT_ROPE = ("dynamic", "longrope")  # take the longest position of the whole pack
# Relative error of packed against plain logits above which a model is refused. Broken masks or positions give 0.1 to 1.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}


def refuse_by_config(config) -> None:
    """Refuse models that a short test would pass and a long text would break.

    Raises
    ------
    ModelError : rotary embeddings or attention chunks that depend on what else is in the pack.
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
    layer_types = getattr(text, "layer_types", None) or ()
    if getattr(text, "attention_chunk_size", None) and "chunked_attention" in layer_types:
        raise ModelError(f"{text.model_type} attends in chunks, which cannot be packed")


def check_equivalence(
    model, device: torch.device, vocab_size: int, splits_head: bool = False, compiles: bool = False
) -> int:
    """Compare a packed forward of two sequences and a tree with plain causal runs; returns KV bytes per token.

    Parameters
    ----------
    compiles : have the model's layers compiled; where they do not compute the same, they go back to what they were.

    Raises
    ------
    ModelError : a layer did not call our attention function, or the logits differ.
    """
    name = model.config.model_type
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab_size, n).astype(np.int32) for n in (11, 6)]
    parents = np.array([-1, -1, 0, 1, 1, 4], np.int32)
    drafted = rng.integers(0, vocab_size, len(parents)).astype(np.int32)
    tree = TokenTree(drafted, parents, np.zeros(len(parents), np.float32), np.zeros(len(parents), np.uint8))
    paths = [
        np.concatenate((prompts[0], drafted[[1, 4, 5]])),
        np.concatenate((prompts[0], drafted[[0, 2]])),
        prompts[1],
    ]
    try:
        with torch.inference_mode():
            plain = [
                model(input_ids=torch.from_numpy(p.astype(np.int64)).to(device)[None], use_cache=False).logits[0, -1]
                for p in paths
            ]
        model.set_attn_implementation(ATTENTION_NAME)
    except Exception as error:
        raise ModelError(f"{name} cannot be run packed: {_first_line(error)}") from error
    compiled = compile_layers(model) if compiles else None
    if compiled is not None:
        try:
            return _compare(model, device, prompts, tree, plain, splits_head)
        except ModelError as error:
            compiled.restore(error)
    return _compare(model, device, prompts, tree, plain, splits_head)


def _compare(
    model,
    device: torch.device,
    prompts: list[np.ndarray],
    tree: TokenTree,
    plain: list[torch.Tensor],
    splits_head: bool,
) -> int:
    """The packed run of `check_equivalence`, and its comparison with the plain one."""
    name = model.config.model_type
    try:
        store = (TokenStore if device.type == "cuda" else KVStore)(2)
        runner = ModelRunner(model, store, device, splits_head=splits_head)
        rows = [store.acquire(prompt, 32).row for prompt in prompts]
        first = runner.forward([Feed(rows[0], prompts[0][:7]), Feed(rows[1], prompts[1][:2])])
        store.commit(rows, first.pack.sizes, first.pack.slots)
        second = [Feed(rows[0], prompts[0][7:]), Feed(rows[1], prompts[1][2:])]
        out = runner.forward(second, PackedTrees.of([tree]).spread([0], 2))
    except Exception as error:
        raise ModelError(f"{name} cannot be run packed: {_first_line(error)}") from error
    num_layers = model.config.get_text_config().num_hidden_layers
    seen = runner.last_plan.layers_seen if runner.last_plan else []
    if sorted(seen) != list(range(num_layers)):
        raise ModelError(
            f"{name} cannot be packed: {len(set(seen))} of its {num_layers} layers use transformers' attention "
            "interface; every layer must"
        )
    logits = out.logits
    packed = [logits[6], logits[3], logits[out.starts[1]]]
    for expected, found in zip(plain, packed, strict=True):
        error = float((expected.float() - found.float()).norm() / expected.float().norm().clamp_min(1e-12))
        tolerance = TOLERANCE if quantization_of(model.config) else _TOLERANCE.get(expected.dtype, 1e-3)
        if not error <= tolerance:
            raise ModelError(f"{name} gives other logits packed than alone (relative error {error:.1e}); not supported")
    return store.bytes_per_token()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
