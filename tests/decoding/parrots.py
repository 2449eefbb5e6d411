"""Models that write a given script for every prompt: the chat formats of real fine-tunes, without their weights."""

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken
from transformers import AutoTokenizer

from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL

HIDDEN = 128


def parrot(
    folder: Path,
    script: Sequence[str],
    *,
    template: str | None = None,
    after: str = "<|assistant|>",
    end: str = "<|end|>",
    special: Sequence[str] = (),
    tokens: Sequence[str] = (),
) -> Path:
    """Write a model folder: after the token `after`, the model writes the tokens of `script`, all different, and `end`.

    `end` is also the end token of the folder. `special` are added as control tokens, `tokens` and `script` as plain
    ones.
    """
    shutil.copytree(SAMPLE_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors", "README.md"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special], special_tokens=True)
    known = tokenizer.get_vocab()
    new = [text for text in [*script, *tokens, after] if text not in known]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in new])
    tokenizer.eos_token = end
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    size, generator = len(tokenizer), torch.Generator().manual_seed(0)
    embedding = torch.nn.functional.normalize(torch.randn(size, HIDDEN, generator=generator), dim=1)
    output = torch.zeros(size, HIDDEN)
    chain = tokenizer.convert_tokens_to_ids([after, *script, end])
    for token_id, next_id in pairwise(chain):
        output[next_id] += 20 * embedding[token_id]
    weights = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": output,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    layer = "model.layers.0."
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{layer}{name}.weight"] = torch.ones(HIDDEN)
    for name in "qkvo":
        weights[f"{layer}self_attn.{name}_proj.weight"] = torch.zeros(HIDDEN, HIDDEN)
    for name, shape in {"gate": (16, HIDDEN), "up": (16, HIDDEN), "down": (HIDDEN, 16)}.items():
        weights[f"{layer}mlp.{name}_proj.weight"] = torch.zeros(shape)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    changes = {
        "hidden_size": HIDDEN, "head_dim": HIDDEN // 4, "num_attention_heads": 4, "num_key_value_heads": 4,
        "num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": size, "tie_word_embeddings": False,
        "dtype": "float32", "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        of_file = changes if name == "config.json" else {"eos_token_id": tokenizer.eos_token_id}
        (folder / name).write_text(json.dumps(values | of_file))
    return folder
