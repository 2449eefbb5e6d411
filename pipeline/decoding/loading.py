"""From a model folder to a model that the engine can run, or a clear reason why not.

Weights are safetensors, files are local, no code of the folder is run. A model is refused when its attention cannot be
packed: by name where that would pass unnoticed in a short test, otherwise by a probe (every layer must call our
attention function) and by comparing a small packed tree forward with plain causal runs on the same weights.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from pipeline.decoding.feed import Feed
from pipeline.decoding.kv_store import KVStore
from pipeline.decoding.model_runner import ModelRunner
from pipeline.decoding.token_store import TokenStore
from pipeline.decoding.token_tree import TokenTree
from pipeline.decoding.tree_attention import ATTENTION_NAME
from pipeline.errors import ModelError

SAMPLE_MODEL = Path(__file__).resolve().parents[2] / "models" / "sample"
_HASHED_BYTES = 1 << 20  # of each end of a weights file
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_POSITION_DEPENDENT_ROPE = ("dynamic", "longrope")  # take the longest position of the whole pack
# Relative error of packed against plain logits above which a model is refused. Broken masks or positions give 0.1 to 1.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for packed steps.

    `end_ids`: every token that ends a text; `max_context`: positions the model has; `bytes_per_token`: of its KV cache.
    """

    model: torch.nn.Module
    tokenizer: object
    device: torch.device
    model_id: str
    end_ids: tuple[int, ...]
    vocab_size: int
    max_context: int
    bytes_per_token: int


def load_model(folder: str | Path, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """Load a folder's model and tokenizer and check that the engine can run it.

    Parameters
    ----------
    folder : path, or "sample" for the bundled model.
    dtype : "auto" (float32 on a CPU, the weights' own on CUDA), "float32" or "bfloat16".
    device : "auto" (CUDA where there is one), or a torch device.

    Raises
    ------
    ModelError : the folder, its weights or its tokenizer are missing or unreadable, or the model cannot be packed.
    """
    path = SAMPLE_MODEL if str(folder) == "sample" else Path(folder)
    weights = find_weights(path)
    target = resolve_device(device)
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(path, **local)
    except Exception as error:
        raise ModelError(
            f"{path}/config.json names no model that this version of transformers knows ({_first_line(error)}); "
            "models with code of their own are not run"
        ) from error
    refuse_by_config(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **local)
    except Exception as error:
        raise ModelError(f"the tokenizer in {path} cannot be read: {_first_line(error)}") from error
    shows_progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=resolve_dtype(dtype, target), attn_implementation="eager", use_safetensors=True, **local
        )
    except Exception as error:
        raise ModelError(f"the weights in {path} cannot be loaded: {_first_line(error)}") from error
    finally:
        if shows_progress:
            transformers_logging.enable_progress_bar()
    return prepare_model(model.to(target), tokenizer, model_id=model_id_of(path, weights))


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
    bytes_per_token = _check_equivalence(model, device, vocab_size)
    config = model.config.get_text_config()
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        device=device,
        model_id=model_id,
        end_ids=end_tokens(model, tokenizer),
        vocab_size=vocab_size,
        max_context=int(getattr(config, "max_position_embeddings", None) or 1 << 20),
        bytes_per_token=bytes_per_token,
    )


def find_weights(path: Path) -> list[Path]:
    """The safetensors files of a model folder.

    Raises
    ------
    ModelError : no folder, no configuration, no tokenizer, or no (complete) safetensors weights.
    """
    if not path.is_dir():
        raise ModelError(f"there is no model folder {path}; give the path of a folder with config.json and weights")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} holds no config.json; it is not a model folder of transformers")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weights = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        weights = sorted(path.glob("*.safetensors"))
    missing = [w.name for w in weights if not w.is_file()]
    if missing or not weights:
        others = sorted(p.name for p in path.glob("*.bin"))
        found = f"; found {', '.join(others)}, which is not read: convert it to safetensors" if others else ""
        raise ModelError(f"{path} holds no weights ({', '.join(missing) or 'model.safetensors'} expected){found}")
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(f"{path} holds no tokenizer; one of {', '.join(_TOKENIZER_FILES)} is expected")
    return weights


def model_id_of(path: Path, weights: list[Path]) -> str:
    """Folder name and a short hash of the configuration and of each weights file's size, first and last MiB."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in weights:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_HASHED_BYTES))
            stream.seek(max(0, size - _HASHED_BYTES))
            digest.update(stream.read())
    return f"{path.resolve().name}-{digest.hexdigest()[:12]}"


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


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """The type of weights: "auto" is float32 on a CPU, where token identity counts, else the weights' own."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]


def end_tokens(model, tokenizer) -> tuple[int, ...]:
    """Every end token that the generation configuration or the tokenizer names, ascending."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(named if isinstance(named, list | tuple) else [named])
    ids.add(getattr(tokenizer, "eos_token_id", None))
    return tuple(sorted(int(i) for i in ids if i is not None))


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


def _check_equivalence(model, device: torch.device, vocab_size: int) -> int:
    """Compare a packed forward of two sequences and a tree with plain causal runs; returns KV bytes per token.

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
        store = (TokenStore if device.type == "cuda" else KVStore)(2)
        runner = ModelRunner(model, store, device)
        rows = [store.acquire(prompt, 32).row for prompt in prompts]
        first = runner.forward([Feed(rows[0], prompts[0][:7]), Feed(rows[1], prompts[1][:2])])
        store.commit(rows, first.slots)
        out = runner.forward([Feed(rows[0], prompts[0][7:], tree), Feed(rows[1], prompts[1][2:])])
    except Exception as error:
        raise ModelError(f"{name} cannot be run packed: {_first_line(error)}") from error
    num_layers = model.config.get_text_config().num_hidden_layers
    seen = runner.last_plan.layers_seen if runner.last_plan else []
    if sorted(seen) != list(range(num_layers)):
        raise ModelError(
            f"{name} cannot be packed: {len(set(seen))} of its {num_layers} layers use transformers' attention "
            "interface; every layer must"
        )
    packed = [out.logits[6], out.logits[3], out.logits[out.starts[1]]]
    for expected, found in zip(plain, packed, strict=True):
        error = float((expected.float() - found.float()).norm() / expected.float().norm().clamp_min(1e-12))
        if not error <= _TOLERANCE.get(expected.dtype, 1e-3):
            raise ModelError(f"{name} gives other logits packed than alone (relative error {error:.1e}); not supported")
    return store.bytes_per_token()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
