"""What can be said of a model folder without loading its weights: its files, its tokenizer, its identity."""

import hashlib
import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from laserbatch.pipeline.decoding.model.adapters import find_adapter
from laserbatch.pipeline.decoding.model.generation_rules import folder_rules
from laserbatch.pipeline.errors import ModelError

SAMPLE_MODEL = Path(__file__).resolve().parents[3] / "models" / "sample"
_HASHED_BYTES = 1 << 20  # of each end of a weights file
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


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


def model_id_of(path: Path, weights: list[Path], adapter: str | Path | None = None) -> str:
    """Folder name and a short hash of the configuration, of what generation_config.json does to texts, and of each
    weights file's size, first and last MiB.

    An adapter's name and files are part of it: with another adapter it is another model.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    if done := folder_rules(path):
        digest.update(json.dumps(done, sort_keys=True).encode())
    name = path.resolve().name
    if adapter is not None:
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


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder.

    Raises
    ------
    ModelError
        The folder is no model folder, or its tokenizer cannot be read.
    """
    find_weights(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"the tokenizer in {folder} cannot be read: {error}") from error


def model_identity(folder: Path, adapter: str | Path | None = None) -> str:
    """Names and a short hash of model and adapter: equal to `Engine.model_id` of the same folders."""
    return model_id_of(folder, find_weights(folder), adapter)


def tokenizer_hash(folder: Path) -> str:
    """Hex SHA-256 of the files that decide what a token id means; pools are refused under another one."""
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    return digest.hexdigest()
