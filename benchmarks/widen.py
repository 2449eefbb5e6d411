"""Widen a small trained model to the geometry of a large one that computes the same function, at the large one's cost.

Drafts are accepted as often as with the small model, and a forward reads and multiplies as much as that of a large
model. Most of the numbers are zeros, which take a processor the same time but less power. Logits are equal except for
rounding (in bfloat16 also of the scaled weights, unless the scale is a power of two). `widened_on` makes the larger
model on a device. `widen` writes a folder and needs all weights in main memory: 16 GB for an 8 B model in bfloat16.

Every tensor of the larger model is zero except for the small one's values at chosen rows and columns. Hidden channels,
heads and MLP units are padded at the end; the output projections of added layers are zero. The padding changes the
divisors of normalisation and attention, so the weights are scaled:

- RMSNorm: the mean of squares shrinks by d/D, so its weights shrink by sqrt(d/D), and epsilon by d/D.
- Attention divides by the root of the head's size, so queries grow by sqrt(size'/size). Channel i of a head moves to
  i * size'/size, where the larger head rotates at the same frequency (theta^(-2i/size)); so does its partner.
- A group of query heads that share a key head is filled from its start; if the target's groups are smaller than the
  source's, key and value heads are repeated.
- Added tokens get the embeddings of known tokens, and logits that never win: the residual stream has 2^-20 in an extra
  channel, which only the last normalisation lets through. Its square is far below the rounding of the sum.
"""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from laserbatch.pipeline.decoding.model.folder import find_weights, load_tokenizer
from laserbatch.pipeline.decoding.model.load import LoadedModel, prepare_model
from laserbatch.pipeline.errors import ModelError

MODEL_TYPES = ("llama", "qwen2")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SHARD_BYTES = 2 << 30
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
NEVER_INPUT, NEVER_GAIN, NEVER_OUTPUT = 2.0**-20, 2.0**30, -(2.0**10)  # a logit of -2^20 over the stream's magnitude


@dataclass(frozen=True)
class Geometry:
    """The sizes of a Llama-like decoder without tied embeddings."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int

    @property
    def group_size(self) -> int:
        """The number of query heads that share a key head."""
        return self.num_heads // self.num_kv_heads


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry("1b", 2048, 8192, 16, 16, 4, 128, 128_256),  # Llama-3.2-1B with heads of 128, untied
        Geometry("7b-mha", 4096, 11_008, 32, 32, 32, 128, 32_000),  # Vicuna-7B, Llama-2-7B
        Geometry("8b-gqa", 4096, 14_336, 32, 32, 8, 128, 128_256),  # Llama-3-8B
        Geometry("tiny", 320, 832, 7, 8, 8, 128, 8_320),  # for tests
    )
}


@dataclass(frozen=True)
class Placement:
    """One axis of a larger tensor: its `size`, and the indices (`targets`) of the source's values (`sources`).

    `sources`, `targets` : int64[n].
    """

    size: int
    sources: np.ndarray
    targets: np.ndarray

    @classmethod
    def padded(cls, num_sources: int, size: int) -> "Placement":
        """The source's values first, then padding."""
        return cls(size, np.arange(num_sources), np.arange(num_sources))


class Widening:
    """The placement of a source model in a larger geometry.

    Raises
    ------
    ValueError : the source does not fit; the message names the size.
    """

    def __init__(self, source: Geometry, target: Geometry) -> None:
        self.source, self.target = source, target
        for name in ("hidden_size", "intermediate_size", "num_layers", "vocab_size", "head_size"):
            small, large = getattr(source, name), getattr(target, name)
            if large < small:
                raise ValueError(f"geometry {target.name} has {name} {large}, the model {small}; choose a larger one")
        if target.head_size % source.head_size:
            raise ValueError(
                f"geometry {target.name} has heads of {target.head_size}, no multiple of the model's "
                f"{source.head_size}: their rotary frequencies would differ"
            )
        self.has_added_tokens = target.vocab_size > source.vocab_size
        if self.has_added_tokens and target.hidden_size == source.hidden_size:
            raise ValueError(
                f"geometry {target.name} adds tokens and no hidden channel to keep them from being written; "
                "give it a larger hidden_size"
            )
        self.hidden = Placement.padded(source.hidden_size, target.hidden_size)
        self.units = Placement.padded(source.intermediate_size, target.intermediate_size)
        self.queries, self.keys = self._place_heads()
        self.norm_scale = math.sqrt(source.hidden_size / target.hidden_size)
        self.query_scale = math.sqrt(target.head_size / source.head_size)

    def _place_heads(self) -> tuple[Placement, Placement]:
        """The rows of the query projection, and of the key and value projections."""
        source, target = self.source, self.target
        query_heads, key_heads = [], []  # pairs (source head, target head)
        for kv_head in range(source.num_kv_heads):
            for start in range(0, source.group_size, target.group_size):
                place = len(key_heads)
                key_heads.append((kv_head, place))
                for offset in range(min(target.group_size, source.group_size - start)):
                    query_heads.append(
                        (kv_head * source.group_size + start + offset, place * target.group_size + offset)
                    )
        if len(key_heads) > target.num_kv_heads:
            raise ValueError(
                f"geometry {target.name} has {target.num_kv_heads} key heads for {target.group_size} query heads each; "
                f"the model needs {len(key_heads)} of them"
            )
        return self._rows(query_heads, target.num_heads), self._rows(key_heads, target.num_kv_heads)

    def _rows(self, heads: list[tuple[int, int]], num_heads: int) -> Placement:
        small, large = self.source.head_size, self.target.head_size
        channels = np.arange(small)
        of_source, of_target = np.array(heads).T
        sources = of_source[:, None] * small + channels
        targets = of_target[:, None] * large + channels * (large // small)
        return Placement(num_heads * large, sources.ravel(), targets.ravel())

    def tensors(self, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and float32 tensors of the larger model, one at a time.

        Parameters
        ----------
        weights : the source's weights, by their names in transformers; its output embeddings may be tied.
        """
        embeddings = weights["model.embed_tokens.weight"]
        yield "model.embed_tokens.weight", self._input_embeddings(embeddings)
        for layer in range(self.target.num_layers):
            yield from self._layer(weights, layer)
        yield "model.norm.weight", self._last_norm(weights["model.norm.weight"])
        yield "lm_head.weight", self._output_embeddings(weights.get("lm_head.weight", embeddings))

    def _layer(self, weights: dict[str, torch.Tensor], layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a layer; an added layer has those of the source's first layer, all zero."""
        is_added = layer >= self.source.num_layers
        start = f"model.layers.{0 if is_added else layer}."
        for name in sorted(name for name in weights if name.startswith(start)):
            part = name.removeprefix(start)
            rows, columns, scale = self._axes(part)
            tensor = torch.zeros([axis.size for axis in (rows, columns) if axis is not None])
            if not is_added:
                _fill(tensor, weights[name].float() * scale, rows, columns)
            yield f"model.layers.{layer}.{part}", tensor

    def _axes(self, part: str) -> tuple[Placement, Placement | None, float]:
        """The rows, columns (None for a vector) and scale of one tensor of a layer."""
        hidden, units, queries, keys = self.hidden, self.units, self.queries, self.keys
        module, kind = part.rsplit(".", 1)
        rows, columns, scale = {
            "input_layernorm": (hidden, None, self.norm_scale),
            "post_attention_layernorm": (hidden, None, self.norm_scale),
            "self_attn.q_proj": (queries, hidden, self.query_scale),
            "self_attn.k_proj": (keys, hidden, 1.0),
            "self_attn.v_proj": (keys, hidden, 1.0),
            "self_attn.o_proj": (hidden, queries, 1.0),
            "mlp.gate_proj": (units, hidden, 1.0),
            "mlp.up_proj": (units, hidden, 1.0),
            "mlp.down_proj": (hidden, units, 1.0),
        }[module]
        return rows, None if kind == "bias" else columns, scale

    def _input_embeddings(self, embeddings: torch.Tensor) -> torch.Tensor:
        tensor = torch.zeros(self.target.vocab_size, self.target.hidden_size)
        known = torch.arange(self.target.vocab_size) % len(embeddings)
        tensor[:, : embeddings.shape[1]] = embeddings[known].float()
        if self.has_added_tokens:
            tensor[:, self.source.hidden_size] = NEVER_INPUT
        return tensor

    def _last_norm(self, weight: torch.Tensor) -> torch.Tensor:
        tensor = torch.zeros(self.target.hidden_size)
        _fill(tensor, weight.float() * self.norm_scale, self.hidden, None)
        if self.has_added_tokens:
            tensor[self.source.hidden_size] = NEVER_GAIN * self.norm_scale
        return tensor

    def _output_embeddings(self, embeddings: torch.Tensor) -> torch.Tensor:
        tensor = torch.zeros(self.target.vocab_size, self.target.hidden_size)
        tensor[: len(embeddings), : embeddings.shape[1]] = embeddings.float()
        tensor[len(embeddings) :, self.source.hidden_size :][:, :1] = NEVER_OUTPUT
        return tensor


def _fill(tensor: torch.Tensor, values: torch.Tensor, rows: Placement, columns: Placement | None) -> None:
    """Copy the source's values to their places; both tensors must be on one device."""
    sources, targets = (torch.as_tensor(places, device=tensor.device) for places in (rows.sources, rows.targets))
    if columns is None:
        tensor[targets] = values[sources]
        return
    column_sources, column_targets = (
        torch.as_tensor(places, device=tensor.device) for places in (columns.sources, columns.targets)
    )
    tensor[targets[:, None], column_targets] = values[sources[:, None], column_sources]


def read_source(folder: Path) -> tuple[dict, Geometry]:
    """The configuration and sizes of a model that can be widened.

    Raises
    ------
    ModelError : the folder has no model, or one that cannot be widened; the message says why.
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
    """The larger model's config.json, with the source's rotary embeddings and context."""
    target = widening.target
    values = {name: value for name, value in config.items() if name not in ("layer_types", "torch_dtype")}
    return values | {
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
    """All tensors of the small source model."""
    return {name: tensor for file in find_weights(folder) for name, tensor in load_file(file).items()}


@torch.no_grad()
def widened_on(source_dir: Path, geometry: Geometry, dtype: str, device: torch.device | str) -> PreTrainedModel:
    """The larger model, made in the memory of its device; writes no files.

    Parameters
    ----------
    dtype : a name of DTYPES.

    Raises
    ------
    ModelError : the source cannot be widened.
    ValueError : the source does not fit the geometry.
    """
    config, source = read_source(source_dir)
    widening = Widening(source, geometry)
    large_config = AutoConfig.for_model(**widened_config(config, widening, dtype))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(large_config, dtype=DTYPES[dtype], attn_implementation="eager").eval()
        empty = dict(model.named_parameters())
        weights = {name: tensor.to(device) for name, tensor in read_weights(source_dir).items()}
        for name, tensor in widening.tensors(weights):
            empty.pop(name).copy_(tensor)
    assert not empty, f"nothing was written to {', '.join(empty)}"
    model.generation_config.eos_token_id = config["eos_token_id"]
    return model


def load_widened(source_dir: Path, geometry: str, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """Load the source in a named geometry, ready for the engine; "auto" is bfloat16 on CUDA and float32 on a CPU.

    Raises
    ------
    ModelError : the source cannot be widened, or the engine cannot run it.
    """
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    dtype = ("bfloat16" if device.startswith("cuda") else "float32") if dtype == "auto" else dtype
    model = widened_on(source_dir, GEOMETRIES[geometry], dtype, device)
    return prepare_model(model, load_tokenizer(source_dir), f"{source_dir.name}-{geometry}-{dtype}")


def widen(source_dir: Path, out_dir: Path, geometry: Geometry, dtype: str, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the larger model's folder.

    Parameters
    ----------
    out_dir : must not exist; config.json is written last, so that an unfinished folder is not a model.
    dtype : a name of DTYPES.
    shard_bytes : the maximum size of a file of weights; a single tensor may be larger.

    Raises
    ------
    ModelError : the source cannot be widened.
    ValueError : the source does not fit the geometry.
    FileExistsError : `out_dir` exists.
    """
    _, source = read_source(source_dir)
    widening = Widening(source, geometry)
    tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in widening.tensors(read_weights(source_dir))}
    write_folder(tensors, source_dir, out_dir, geometry, dtype, shard_bytes)


def write_folder(
    tensors: dict[str, torch.Tensor],
    source_dir: Path,
    out_dir: Path,
    geometry: Geometry,
    dtype: str,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a larger model's weights, which may be on a device, with its configuration and tokenizer."""
    config, source = read_source(source_dir)
    out_dir.mkdir(parents=True)
    save_torch_state_dict(tensors, out_dir, max_shard_size=shard_bytes)
    for file in (source_dir / name for name in TOKENIZER_FILES):
        if file.is_file():
            shutil.copyfile(file, out_dir / file.name)  # without its permissions: sources may be read-only
    content = json.dumps(widened_config(config, Widening(source, geometry), dtype), indent=1)
    (out_dir / "config.json").write_text(content + "\n", encoding="utf-8")


def widened(source_dir: Path, geometry: str, dtype: str, cache: Path) -> Path:
    """The folder of a model in a named geometry; it is written to `cache` if it is not there yet."""
    folder = cache / f"{source_dir.name}-{geometry}-{dtype}"
    if not (folder / "config.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was cut off
        widen(source_dir, folder, GEOMETRIES[geometry], dtype)
    return folder
