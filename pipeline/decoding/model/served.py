"""What the folder of a tokenizer says of a model that a server elsewhere has; weights need not be in it."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from laserbatch.pipeline.decoding.model.folder import end_ids_of, folder_rules, model_identity, read_config
from laserbatch.pipeline.decoding.settings import DecodingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def served_identity(folder: Path, decoding: DecodingSettings) -> str:
    """The identity of a server's model.

    With weights in the folder it is theirs, so that texts that another engine wrote with the same model stay. Without
    them it is the server's name for the model, and a short hash of what the folder says of it, if it is the model's.
    """
    assert decoding.endpoint is not None
    name, facts = decoding.endpoint.model, []
    if not decoding.borrows_tokenizer:
        if any(folder.glob("*.safetensors")):
            return model_identity(folder)
        facts = [_config(folder), folder_rules(folder)]
    description = json.dumps([name, *facts], sort_keys=True)
    return f"{name}-{hashlib.sha256(description.encode()).hexdigest()[:12]}"


def served_end_ids(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """The end tokens that the folder's files name, ascending, as the other engines find them."""
    config_end = _config(folder).get("eos_token_id")
    return end_ids_of(folder_rules(folder).get("eos_token_id") or config_end, config_end, tokenizer)


def with_rows(folder: Path, token_ids: Iterable[int]) -> list[int]:
    """The tokens, ascending, for which the model has rows by its config.json: no server takes others."""
    most = num_rows(folder)
    return sorted(i for i in set(token_ids) if most is None or i < most)


def num_rows(folder: Path) -> int | None:
    """Tokens for which the model has rows by its config.json; None where that does not say it."""
    return _config(folder).get("vocab_size")


def _config(folder: Path) -> dict:
    return read_config(folder) if (folder / "config.json").is_file() else {}
