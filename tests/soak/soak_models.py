"""Two language models and two encoders, as small as can be: real folders, with weights that differ."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, BertTokenizerFast

SAMPLE = Path(__file__).resolve().parents[2] / "models" / "sample"
MODELS = ("model_a", "model_b")
ENCODERS = ("encoder_a", "encoder_b")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def write_model(folder: Path) -> None:
    """The bundled model; of another name than the first with other weights."""
    shutil.copytree(SAMPLE, folder)
    if folder.name != MODELS[0]:
        weights = load_file(folder / "model.safetensors")
        name = next(name for name in weights if name.endswith("norm.weight"))
        weights[name] = weights[name] * 1.05
        save_file(weights, folder / "model.safetensors", {"format": "pt"})


def write_encoder(folder: Path) -> None:
    """A BERT of one layer that reads letters."""
    folder.mkdir()
    pieces = [*LETTERS, *(f"##{letter}" for letter in LETTERS), *".,:;!?-|()'"]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]))
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=128).save_pretrained(folder)
    torch.manual_seed(ENCODERS.index(folder.name))
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=5 + len(pieces), max_position_embeddings=128, **sizes)).save_pretrained(folder)
