"""The weights of a text encoder that `gpu_pack.py` changes."""

import numpy as np
from gpu_pack import pack_encoder, restore_encoder
from safetensors.numpy import load_file, save_file

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def test_a_restored_encoder_has_the_names_types_and_nearly_the_weights_of_the_packed_one(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in FILES:
        (source / name).write_text("{}")
    rng = np.random.default_rng(0)
    weights = {"embedding": rng.normal(size=(6, 8)).astype(np.float32), "bias": rng.normal(size=8).astype(np.float32)}
    weights["embedding"][2] = 0.0
    weights["positions"] = np.arange(4).reshape(1, 4)
    save_file(weights, source / "model.safetensors")
    pack_encoder(source, tmp_path / "packed")
    restore_encoder(tmp_path / "packed")
    restored = load_file(tmp_path / "packed" / "model.safetensors")
    assert {path.name for path in (tmp_path / "packed").iterdir()} == {*FILES, "model.safetensors"}
    assert restored.keys() == weights.keys()
    for name in ("bias", "positions"):
        np.testing.assert_array_equal(restored[name], weights[name])
    error = np.abs(restored["embedding"] - weights["embedding"]).max(1)
    assert (error <= np.abs(weights["embedding"]).max(1) / 127).all() and error.max() > 0
    assert restored["embedding"].dtype == np.float32 and not error[2]
