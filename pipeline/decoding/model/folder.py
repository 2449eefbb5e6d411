"""Facts about a model folder that need no run: files, tokenizer, identity, the type of the stored weights, and the
rules of its generation_config.json.

End tokens end texts (`end_ids_of`) and a `repetition_penalty` is applied, as in `transformers.generate`. Options that
would change the likeliest token in another way are refused (REFUSED). Options for sampling and limits are ignored. The
applied rules are part of a model's identity, and so of its texts' fingerprints; a neutral value counts as absent.
"""

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open

from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.errors import ModelError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE_MODEL = Path(__file__).resolve().parents[3] / "models" / "sample"
_HASHED_BYTES = 1 << 20  # hashed at each end of a weights file
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # by architecture
# Keys of a config.json, and last parts of keys of a GGUF file, whose value is a whole number above 0.
_SIZES = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "num_key_value_heads", "max_position_embeddings", "embedding_length", "block_count", "feed_forward_length",
    "context_length", "head_count", "head_count_kv",
}  # fmt: skip
_NUMBERS = {"rms_norm_eps", "layer_norm_eps", "rope_theta"}  # above 0, too
# Refused options with their neutral values; null is neutral, too.
REFUSED = {
    "min_length": 0, "min_new_tokens": 0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "bad_words_ids": [], "sequence_bias": {}, "begin_suppress_tokens": [],
    "suppress_tokens": [], "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "guidance_scale": 1.0, "watermarking_config": None,
    "token_healing": False, "stop_strings": [], "max_time": None, "dola_layers": None, "constraints": None,
    "force_words_ids": None,
}  # fmt: skip


def find_weights(path: Path) -> list[Path]:
    """The safetensors files of a model folder.

    Raises ModelError: no folder, no configuration, no tokenizer, or no (complete) safetensors weights.
    """
    if not path.is_dir():
        raise ModelError(f"there is no model folder {path}; give the path of a folder with config.json and weights")
    read_config(path)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            weights = [path / name for name in sorted(set(_read(index)["weight_map"].values()))]
        except (KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} has no `weight_map` of tensors to files; copy the checkpoint again") from error
    else:
        weights = sorted(path.glob("*.safetensors"))
    missing = [w.name for w in weights if not w.is_file()]
    if missing or not weights:
        pickled = sorted(p.name for p in path.glob("*.bin"))
        hint = f"; found {', '.join(pickled)}, which is not read: convert it to safetensors" if pickled else ""
        raise ModelError(f"{path} has no weights; expected {', '.join(missing) or 'model.safetensors'}{hint}")
    require_tokenizer(path)
    return weights


def require_tokenizer(folder: Path) -> None:
    """Raise ModelError if a folder holds no tokenizer; it need not hold a model."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(f"{folder} has no tokenizer; expected one of {', '.join(_TOKENIZER_FILES)}")


def require_whole_files(folder: Path) -> None:
    """Raise ModelError if a model's files are missing or cut off; no weight is read, and torch is not needed."""
    for file in find_weights(folder):
        try:
            with safe_open(file, "numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged ({first_line(error)}); copy the checkpoint again") from error
    if (folder / "tokenizer.json").is_file():
        _read(folder / "tokenizer.json")


def model_identity(folder: Path, adapter: str | Path | None = None) -> str:
    """The folder's name and a short hash of the configuration, the applied rules of generation_config.json, and each
    weights file's size, first and last MiB.

    An adapter's name and files are part of it: with another adapter it is another model. Raises ModelError like
    `find_weights`.
    """
    weights = find_weights(folder)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    if done := folder_rules(folder):
        digest.update(json.dumps(done, sort_keys=True).encode())
    name = folder.resolve().name
    if adapter is not None:
        from laserbatch.pipeline.decoding.model.adapters import find_adapter

        config_file, adapter_weights = find_adapter(adapter)
        digest.update(config_file.read_bytes())
        weights = [*weights, adapter_weights]
        name = f"{name}+{Path(adapter).resolve().name}"
    for file in weights:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_HASHED_BYTES))
            stream.seek(max(0, size - _HASHED_BYTES))
            digest.update(stream.read())
    return f"{name}-{digest.hexdigest()[:12]}"


def tokenizer_folder(folder: Path, adapter: str | Path | None = None) -> Path:
    """The folder whose tokenizer is used: the adapter's if it holds one, as PEFT saves it, otherwise the model's."""
    has_tokenizer = adapter is not None and any((Path(adapter) / name).is_file() for name in _TOKENIZER_FILES)
    return Path(adapter) if has_tokenizer and adapter is not None else folder


def load_tokenizer(folder: Path, adapter: str | Path | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder, or of an adapter that has its own; an adapter's own chat template is used, too.

    Raises ModelError: the folder holds no tokenizer, or it cannot be read.
    """
    require_tokenizer(folder)
    template = None if adapter is None else _chat_template(Path(adapter))
    model_folder, folder = folder, tokenizer_folder(folder, adapter)
    from transformers import AutoTokenizer  # here: it takes seconds to load, and checks of files do not need it

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers may raise anything
        raise ModelError(f"the tokenizer in {folder} cannot be read: {first_line(error)}; copy it again") from error
    if folder != model_folder and template is None and not tokenizer.chat_template:
        template = load_tokenizer(model_folder).chat_template  # an adapter's tokenizer that was saved without one
    if template is not None:
        tokenizer.chat_template = template
    written = set(re.findall(r"\b(?:bos|eos)_token\b", str(tokenizer.chat_template)))
    lost = written - tokenizer.special_tokens_map.keys()  # the template would write nothing in their places
    if lost and not (folder / "tokenizer_config.json").is_file():
        raise ModelError(
            f"the chat template of {folder} writes {' and '.join(sorted(lost))}, which the tokenizer there does not "
            "define; copy the model's tokenizer_config.json too"
        )
    return tokenizer


def _chat_template(adapter: Path) -> str | None:
    if (file := adapter / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    file = adapter / "tokenizer_config.json"
    template = _read(file).get("chat_template") if file.is_file() else None
    return template if isinstance(template, str) else None


def quantization_of(config) -> str | None:
    """The quantisation method that a configuration names for its weights; None for plain weights.

    `config` : a configuration of transformers, or the content of a config.json.
    """
    get = config.get if isinstance(config, dict) else partial(getattr, config)
    section = get("quantization_config", None)
    if not section:
        return None
    method = section.get("quant_method") if isinstance(section, dict) else getattr(section, "quant_method", None)
    # Older configurations of bitsandbytes name no method.
    return "bitsandbytes" if method is None else str(getattr(method, "value", method))


def is_mixture_of_experts(config: Mapping[str, Any]) -> bool:
    """Whether the content of a config.json names more than one expert, in any of its sections."""
    for key, value in config.items():
        if isinstance(value, Mapping) and is_mixture_of_experts(value):
            return True
        if key in _NUM_EXPERTS and isinstance(value, int) and value > 1:
            return True
    return False


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json. Raises ModelError: there is none, or it does not describe a model."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no config.json; expected a model folder of transformers")
    config = _read(file)
    require_sizes(config, file)
    return config


def require_sizes(config: Mapping[str, Any], source: Path) -> None:
    """Raise ModelError if `source` gives a model an impossible size, such as 0 heads."""
    for key, value in config.items():
        name = key.rpartition(".")[2]
        if isinstance(value, Mapping):
            require_sizes(value, source)
        elif name in _SIZES | _NUMBERS and value is not None and not isinstance(value, list):  # one per layer
            is_whole = name in _SIZES
            if type(value) not in ((int,) if is_whole else (int, float)) or not value > 0:
                expected = f"a {'whole ' * is_whole}number above 0"
                raise ModelError(f"{source} sets {key} to {_shown(value)}; expected {expected}. Copy the file again")


def stored_dtype(folder: Path) -> str:
    """The type of a folder's stored weights by its config.json, as torch names it; float32 if it names none.

    Raises ModelError: config.json is no JSON object.
    """
    config = read_config(folder)
    named = [part.get(key) for part in (config.get("text_config") or {}, config) for key in ("dtype", "torch_dtype")]
    return next((str(name) for name in named if name), "float32")


def num_parameters_of(config) -> int:
    """The number of parameters of the plain model that a configuration describes; packed values cannot be counted."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plain)
    return sum(parameter.numel() for parameter in model.parameters())


def repetition_penalty_of(config: Mapping[str, Any], source: str | Path) -> float:
    """The repetition penalty of a generation configuration, 1 for none.

    Raises ModelError: it sets an option that is not supported; the message says that `source` sets it.
    """
    for key, neutral in REFUSED.items():
        if config.get(key) not in (None, neutral):
            raise ModelError(
                f"{source} sets {key} to {_shown(config[key])}, which changes greedy decoding and is not supported; "
                "remove the key from the file"
            )
    penalty = config.get("repetition_penalty")
    penalty = 1.0 if penalty is None else penalty
    if not isinstance(penalty, int | float) or not penalty > 0:
        raise ModelError(f"{source} sets repetition_penalty to {_shown(penalty)}; expected a number above 0 (1: none)")
    return float(penalty)


def folder_rules(folder: Path) -> dict[str, Any]:
    """The applied values of generation_config.json that differ from neutral ones and from those of config.json.

    Raises ModelError: it is no JSON object, or sets an option that is not supported.
    """
    file = folder / "generation_config.json"
    if not file.is_file():  # old models have these values in config.json, all of which is part of the identity
        return {}
    config = _read(file)
    penalty = repetition_penalty_of(config, file)
    done = {} if penalty == 1.0 else {"repetition_penalty": penalty}
    named = config.get("eos_token_id")
    values = named if isinstance(named, list) else [] if named is None else [named]
    if any(type(token_id) is not int for token_id in values):
        raise ModelError(f"{file} sets eos_token_id to {_shown(named)}; expected the id of a token, or a list of ids")
    generation_ids, config_ids = _ids(values), _ids(_config_or_none(folder).get("eos_token_id"))
    return done | ({"eos_token_id": generation_ids} if generation_ids and generation_ids != config_ids else {})


def end_ids_of(
    generation: int | list[int] | None, config: int | list[int] | None, tokenizer: "PreTrainedTokenizerBase | None"
) -> tuple[int, ...]:
    """The end tokens of a generation configuration, of the model's configuration and of the tokenizer, ascending.

    Fine-tunes often name the token that ends their turns in only one of the three files. From the model's configuration
    only added tokens are taken: if config.json names none, its class fills in a default for another vocabulary.
    """
    end_ids = {*_ids(generation)}
    if tokenizer is not None:
        eos_token_id = cast("int | None", tokenizer.eos_token_id)
        end_ids |= {*_ids(eos_token_id), *(i for i in _ids(config) if i in tokenizer.added_tokens_decoder)}
    return tuple(sorted(int(i) for i in end_ids))


def served_identity(folder: Path, decoding: DecodingSettings) -> str:
    """The identity of a server's model; `folder` has its tokenizer and may have its weights.

    If the folder has weights, it is `model_identity`, so that texts of another engine with the same model stay valid.
    Otherwise it is the server's name for the model, and a short hash of the folder's facts if it is the model's folder.
    """
    assert decoding.endpoint is not None
    name, facts = decoding.endpoint.model, []
    if not decoding.borrows_tokenizer:
        if any(folder.glob("*.safetensors")):
            return model_identity(folder)
        facts = [_config_or_none(folder), folder_rules(folder)]
    description = json.dumps([name, *facts], sort_keys=True)
    return f"{name}-{hashlib.sha256(description.encode()).hexdigest()[:12]}"


def served_end_ids(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """The end tokens that the files of a server's model name, ascending, found as for the other engines."""
    config_end = _config_or_none(folder).get("eos_token_id")
    return end_ids_of(folder_rules(folder).get("eos_token_id") or config_end, config_end, tokenizer)


def with_rows(folder: Path, token_ids: Iterable[int]) -> list[int]:
    """The tokens for which the model has rows by its config.json, ascending: servers take no others."""
    most = num_rows(folder)
    return sorted(i for i in set(token_ids) if most is None or i < most)


def num_rows(folder: Path) -> int | None:
    """The number of tokens for which the model has rows by its config.json; None if that does not say it."""
    return _config_or_none(folder).get("vocab_size")


def _config_or_none(folder: Path) -> dict[str, Any]:
    return read_config(folder) if (folder / "config.json").is_file() else {}


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ModelError(f"{file} is not a JSON object ({error}); copy it again") from error


def _ids(value: int | list[int] | None) -> list[int]:
    return sorted(set(value if isinstance(value, list | tuple) else [] if value is None else [value]))


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:80]
