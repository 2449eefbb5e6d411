"""A real, tiny text encoder for tests."""

from pathlib import Path

import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from laserbatch.pipeline.encoding.encoder import TextEncoder
from laserbatch.pipeline.encoding.settings import EncodingSettings

WORDS = [*"abcdefghij", "quiet", "loud", "radio", "sea"]


def write_tiny_encoder(folder: Path, dim: int = 32) -> Path:
    """Write a two-layer BERT with random weights, and its tokenizer, into a folder."""
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=64).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=5 + len(WORDS),
        hidden_size=dim,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def load(folder, max_batch_tokens=None, **options):
    settings = EncodingSettings(encoder=folder, dtype=options.pop("dtype", "float32"), **options)
    return TextEncoder.load(settings, max_batch_tokens)
