"""A small trained model in the geometry of a large one, computing the same function: decoding at its true cost.

    python benchmarks/widen.py MODEL OUT --geometry 8b-gqa --dtype bfloat16
    python benchmarks/widen.py MODEL OUT --geometry 8b-gqa --show

Drafts are accepted as often as with the small model, and a forward reads and multiplies as much as the large one does;
most of the numbers are zeros, which costs a processor the same time but less power. Logits are equal but for rounding
(of the scaled weights too, in bfloat16, unless their scale is a power of two). Owns the command, the reading and the
writing in shards, one of which is in memory at a time. Where weights go is in `widen_weights.py`.
"""

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from widen_weights import GEOMETRIES, Geometry, Widening

from laserbatch.pipeline.decoding.model.load import find_weights
from laserbatch.pipeline.errors import ModelError

MODEL_TYPES = ("llama", "qwen2")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SHARD_BYTES = 2 << 30
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def read_source(folder: Path) -> tuple[dict, Geometry]:
    """Configuration and sizes of a model that can be widened.

    Raises
    ------
    ModelError : there is none, or it is of another kind; the message names what stands in the way.
    """
    find_weights(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ModelError(f"{folder.name} is a {kind} model; {' and '.join(MODEL_TYPES)} models can be widened")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise ModelError(f"{folder.name} has {rope_type} rotary embeddings; only plain ones can be widened")
    if config.get("hidden_act", "silu") != "silu" or config.get("use_sliding_window"):
        raise ModelError(f"{folder.name} has sliding windows or another activation than silu; it cannot be widened")
    num_heads = config["num_attention_heads"]
    return config, Geometry(
        folder.name,
        config["hidden_size"],
        config["intermediate_size"],
        config["num_hidden_layers"],
        num_heads,
        config.get("num_key_value_heads") or num_heads,
        config.get("head_dim") or config["hidden_size"] // num_heads,
        config["vocab_size"],
    )


def widened_config(config: dict, widening: Widening, dtype: str) -> dict:
    """The larger model's config.json; rotary embeddings and context stay those of the source."""
    target = widening.target
    kept = {name: value for name, value in config.items() if name not in ("layer_types", "torch_dtype")}
    return kept | {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": target.num_layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_size,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": config["rms_norm_eps"] * widening.source.hidden_size / target.hidden_size,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All of the source's tensors: it is the small one."""
    weights = {}
    for file in find_weights(folder):
        with safe_open(file, "pt") as stream:
            weights |= {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    return weights


def widen(source_dir: Path, out_dir: Path, geometry: Geometry, dtype: str, shard_bytes: int = SHARD_BYTES) -> int:
    """Write the larger model's folder; returns the number of its parameters.

    Parameters
    ----------
    out_dir : must not exist; config.json is written last, so that an unfinished folder is no model.
    dtype : a name of DTYPES.
    shard_bytes : tensors are written when they are this many bytes; a single one may be larger.

    Raises
    ------
    ModelError : the source cannot be widened.
    ValueError : it does not fit the geometry.
    FileExistsError : something is at `out_dir`.
    """
    config, source = read_source(source_dir)
    widening = Widening(source, geometry)
    out_dir.mkdir(parents=True)
    shards: list[list[str]] = []
    waiting: dict[str, torch.Tensor] = {}
    num_parameters = 0
    for name, tensor in widening.tensors(read_weights(source_dir)):
        waiting[name] = tensor.to(DTYPES[dtype])
        num_parameters += tensor.numel()
        del tensor
        if _num_bytes(waiting) >= shard_bytes:
            _write_shard(waiting, shards, out_dir)
    if waiting:
        _write_shard(waiting, shards, out_dir)
    weight_map = {name: _shard_name(number) for number, names in enumerate(shards) for name in names}
    index = {"metadata": {"total_size": num_parameters * DTYPES[dtype].itemsize}, "weight_map": weight_map}
    _write_json(out_dir / "model.safetensors.index.json", index)
    for file in (source_dir / name for name in TOKENIZER_FILES):
        if file.is_file():
            shutil.copyfile(file, out_dir / file.name)  # without its permissions: sources may be read-only
    _write_json(out_dir / "config.json", widened_config(config, widening, dtype))
    return num_parameters


def widened(source_dir: Path, geometry: str, dtype: str, cache: Path) -> Path:
    """The folder of a model in a named geometry; written to `cache` where it is not there yet."""
    folder = cache / f"{source_dir.name}-{geometry}-{dtype}"
    if not (folder / "config.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off
        widen(source_dir, folder, GEOMETRIES[geometry], dtype)
    return folder


def count_parameters(source_dir: Path, geometry: Geometry) -> int:
    """Parameters that `widen` would write, by their shapes alone."""
    config, source = read_source(source_dir)
    target = Widening(source, geometry).target
    hidden, queries = target.hidden_size, target.num_heads * target.head_size
    keys = target.num_kv_heads * target.head_size
    layer = 2 * hidden * (queries + keys) + 3 * hidden * target.intermediate_size + 2 * hidden
    if config["model_type"] == "qwen2" or config.get("attention_bias"):
        layer += queries + 2 * keys
    if config.get("attention_bias"):
        layer += hidden
    if config.get("mlp_bias"):
        layer += 2 * target.intermediate_size + hidden
    return target.num_layers * layer + hidden + 2 * target.vocab_size * hidden


def describe(source_dir: Path, geometry: Geometry, dtype: str) -> str:
    """What `widen` would write, for a terminal."""
    _, source = read_source(source_dir)
    target, itemsize = Widening(source, geometry).target, DTYPES[dtype].itemsize
    num_parameters = count_parameters(source_dir, geometry)
    return "\n".join(
        [
            f"{target.name}: {target.num_layers} layers of {target.hidden_size}, {target.num_heads} heads of "
            f"{target.head_size}, {target.num_kv_heads} key heads, MLP of {target.intermediate_size}, "
            f"{target.vocab_size:,} tokens",
            f"{num_parameters:,} parameters, {num_parameters * itemsize:,} bytes in {dtype}",
            f"{target.num_kv_values * itemsize:,} bytes of KV cache a token",
        ]
    )


def _num_bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _shard_name(number: int) -> str:
    return f"model-{number + 1:05d}.safetensors"


def _write_shard(waiting: dict[str, torch.Tensor], shards: list[list[str]], out_dir: Path) -> None:
    save_file(waiting, out_dir / _shard_name(len(shards)), metadata={"format": "pt"})
    shards.append(list(waiting))
    waiting.clear()


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the small model")
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--geometry", choices=GEOMETRIES, required=True, help="sizes of the large one")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="type of its weights")
    parser.add_argument("--show", action="store_true", help="print parameters and bytes; write nothing")
    return parser.parse_args(words)


def main() -> None:
    """Show or write."""
    arguments = parse_arguments()
    geometry = GEOMETRIES[arguments.geometry]
    start_s = time.perf_counter()
    try:
        print(describe(arguments.model, geometry, arguments.dtype))
        if not arguments.show:
            widen(arguments.model, arguments.out, geometry, arguments.dtype)
            print(f"written to {arguments.out} in {time.perf_counter() - start_s:.0f} s")
    except (ModelError, ValueError, FileExistsError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
