"""What can be said of a model folder without loading its weights: its tokenizer, its identity, its tokenizer's hash."""

import hashlib
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from laserbatch.pipeline.decoding.model.load import find_weights, model_id_of
from laserbatch.pipeline.errors import ModelError


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
