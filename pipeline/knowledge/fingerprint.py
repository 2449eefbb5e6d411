"""Fingerprints: whether an entity's text would be generated from the same input as before."""

import hashlib
import json

import numpy as np

from laserbatch.pipeline.knowledge.prompts import RenderedPrompt
from laserbatch.pipeline.knowledge.templates import PromptTemplate


def fingerprint(
    rendered: RenderedPrompt, template: PromptTemplate, model_id: str, decoding_settings: dict[str, object]
) -> str:
    """SHA-256, as 32 hexadecimal digits, of all that decides a text apart from the drafts.

    Parameters
    ----------
    rendered : the prompt; its token ids count, which hold the tokenizer and the chat template.
    model_id : changes with the weights.
    decoding_settings : what of decoding can change a text (verifier, its limits, length, stop strings, dtype); a JSON
        object in which the order of keys means nothing.
    """
    described = json.dumps(
        {"template": template.identity, "parser": template.parser, "model": model_id, "decoding": decoding_settings},
        sort_keys=True,
        separators=(",", ":"),
    )
    digest = hashlib.sha256(described.encode())
    digest.update(b"\0")
    digest.update(np.ascontiguousarray(rendered.token_ids, "<i4").tobytes())
    return digest.hexdigest()[:32]
