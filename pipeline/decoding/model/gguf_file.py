"""Converts a GGUF file, the format of llama.cpp, to a model folder: safetensors, configuration and tokenizer.

transformers reads the file and unpacks quantised weights; the library `gguf` (the extra `gguf`) lists its contents.
Contents that either cannot read are refused, by their name in the file.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar
from transformers.utils.quantization_config import GgufConfig

from laserbatch.pipeline.decoding.device_memory import host_memory, require_memory
from laserbatch.pipeline.decoding.model.folder import load_tokenizer, require_sizes
from laserbatch.pipeline.errors import ModelError, first_line
from laserbatch.pipeline.storage.atomic import share_weights

if TYPE_CHECKING:
    from gguf import GGUFReader

MAGIC = b"GGUF"
INSTEAD = "use the model's folder of safetensors instead"
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16}  # weights of all others become bfloat16
# Values of `tokenizer.ggml.pre` that split a text as GPT-2 does, and values that split off digits first. transformers
# knows some others; for unknown ones it splits as GPT-2 does, and the model would read other tokens than it learned.
SPLIT_AS_GPT2 = (None, "default", "gpt-2", "gpt2", "mpt", "olmo", "phi-2", "jais", "trillion", "granite-docling")
SPLIT_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")


@dataclass(frozen=True)
class GgufFacts:
    """The facts that a GGUF file states about its model."""

    architecture: str
    types: Counter[str]  # number of tensors by the name of their type
    num_values: int
    num_tokens: int  # size of the vocabulary
    split: str | None  # the rule by which a text is split before it becomes tokens
    chat_template: str | None

    @property
    def dtype(self) -> torch.dtype:
        """The type to store weights in; norms are float32 in nearly every file."""
        kinds = set(self.types)
        return next((PLAIN_TYPES[name] for name in ("F16", "F32") if name in kinds and kinds <= {name, "F32"}),
                    torch.bfloat16)  # fmt: skip


def import_gguf(path: Path, out: Path) -> GgufFacts:
    """Write the model of a GGUF file into a folder, which may exist.

    Raises ModelError: it is no GGUF file, or has contents that cannot be read.
    """
    facts = read_facts(path)
    require_memory(path, 2 * facts.num_values * facts.dtype.itemsize, 0, host_memory())
    tokenizer = _tokenizer(path, facts)
    model = _model(path, facts)
    config = model.config
    vars(config).pop("quantization_config", None)
    config.dtype, config.name_or_path = facts.dtype, ""
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.get_text_config().tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.save_pretrained(out)
    share_weights(out / "config.json")
    if model.generation_config is not None:
        model.generation_config.save_pretrained(out)
    _save_tokenizer(tokenizer, facts, path, out)
    return facts


def read_facts(path: Path) -> GgufFacts:
    """Read the facts of a GGUF file. Raises ModelError: it is no GGUF file, or not the whole model."""
    if not path.is_file():
        raise ModelError(f"there is no file {path}; give the path of a GGUF file")
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ModelError(f"{path} is not a GGUF file: it does not begin with the bytes GGUF; copy it again")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        advice = "pip install 'laserbatch[gguf]'"
        raise ModelError(f"a GGUF file is read with the library gguf ({error}); install it: {advice}") from error
    try:
        reader = GGUFReader(path)
    except Exception as error:  # the library may raise anything about a damaged file
        raise ModelError(f"{path} is cut short or damaged: {first_line(error)}; copy it again") from error
    kind, num_parts = _value(reader, "general.type"), _value(reader, "split.count")
    if kind not in (None, "model"):
        raise ModelError(f"{path} holds no language model: its general.type is {kind!r}; give the file of the model")
    if num_parts is not None and num_parts > 1:
        raise ModelError(
            f"{path} is one of {num_parts} parts (split.count); join them with `llama-gguf-split --merge` and give the "
            "joined file"
        )
    require_sizes({name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}, path)
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    return GgufFacts(
        str(_value(reader, "general.architecture")), Counter(tensor.tensor_type.name for tensor in reader.tensors),
        num_values=sum(int(tensor.n_elements) for tensor in reader.tensors),
        num_tokens=0 if tokens is None else len(tokens.data),
        split=_value(reader, "tokenizer.ggml.pre"), chat_template=_value(reader, "tokenizer.chat_template"),
    )  # fmt: skip


def _value(reader: "GGUFReader", name: str) -> Any:
    field = reader.fields.get(name)
    return None if field is None else field.contents()


def _tokenizer(path: Path, facts: GgufFacts) -> PreTrainedTokenizerFast:
    """The tokenizer of a file, which has each of the file's tokens and splits texts by the file's rule."""
    try:
        tokenizer = cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name))
    except Exception as error:  # transformers may raise anything
        raise ModelError(
            f"the tokenizer of {path} (general.architecture {facts.architecture!r}) cannot be read: "
            f"{first_line(error)}; {INSTEAD}"
        ) from error
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    if isinstance(splitter, pre_tokenizers.ByteLevel):  # transformers' default where it does not know the rule
        if facts.split in SPLIT_DIGITS:
            digits = pre_tokenizers.Digits(individual_digits=True)
            splitter = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
            tokenizer.backend_tokenizer.pre_tokenizer = splitter
        elif facts.split not in SPLIT_AS_GPT2:
            raise ModelError(
                f"{path} splits texts by the rule {facts.split!r} (tokenizer.ggml.pre), which is not supported; "
                f"{INSTEAD}"
            )
    tokenizer.chat_template = facts.chat_template
    return tokenizer


def _save_tokenizer(tokenizer: PreTrainedTokenizerFast, facts: GgufFacts, path: Path, out: Path) -> None:
    """Save a tokenizer without the tokens that its class adds to the file's tokens, such as one for unknown words."""
    tokenizer.save_pretrained(out)
    file = out / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < facts.num_tokens]
    file.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    num_tokens = len(load_tokenizer(out))
    if num_tokens != facts.num_tokens:
        raise ModelError(
            f"the tokenizer of {path} has {facts.num_tokens} tokens (tokenizer.ggml.tokens), but {num_tokens} were "
            f"read; {INSTEAD}"
        )


def _model(path: Path, facts: GgufFacts) -> PreTrainedModel:
    disable_progress_bar()
    types = ", ".join(f"{name} ({number})" for name, number in facts.types.most_common())
    about = f"{path} (general.architecture {facts.architecture!r}, tensors of type {types})"
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        loaded = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, config=config, dtype=facts.dtype, output_loading_info=True,
            quantization_config=GgufConfig(dequantize=True), attn_implementation="eager",
        )  # fmt: skip
    except Exception as error:  # transformers may raise anything
        raise ModelError(f"{about} cannot be read: {first_line(error)}; {INSTEAD}") from error
    model, info = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    if lost := sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])}):
        raise ModelError(f"{about} cannot be read: it has no weights for {', '.join(lost[:3])}; {INSTEAD}")
    return model
