import json

import numpy as np
import pytest
import torch
from tiny_models import byte_tokenizer, plain_texts, requests_for, tiny_model, tiny_prompts
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.decoding.engine import Engine
from pipeline.decoding.loading.load import load_model, prepare_model
from pipeline.decoding.settings import DecodingSettings
from pipeline.decoding.verifiers import Greedy
from pipeline.errors import ModelError


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "my-model"
    tiny_model(vocab_size=257).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def test_folder_becomes_an_engine(folder):
    engine = Engine.from_pretrained(folder, DecodingSettings(batch_size=2, num_threads=1), device="cpu")
    assert engine.max_context == 128 and engine.model_id.startswith("my-model-")
    assert 256 in engine.end_ids and len(engine.end_ids) == 9  # the tokenizer's, and all of the generation config's
    prompts = tiny_prompts(3)
    found = {r.request_id: r.token_ids.tolist() for r in engine.generate(requests_for(prompts, 8), None, Greedy())}
    assert [found[str(i)] for i in range(3)] == plain_texts(tiny_model(vocab_size=257), prompts, 8)


def test_threads_are_set(folder):
    before = torch.get_num_threads()
    try:
        Engine.from_pretrained(folder, DecodingSettings(num_threads=before + 1), device="cpu")
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_model_id_follows_the_weights(folder):
    first = load_model(folder).model_id
    assert load_model(folder).model_id == first
    tiny_model(vocab_size=257, seed=1).save_pretrained(folder)
    assert load_model(folder).model_id != first


def test_bfloat16_runs(folder):
    engine = Engine.from_pretrained(folder, DecodingSettings(dtype="bfloat16"), device="cpu")
    assert engine.runner.model.dtype == torch.bfloat16
    assert len(list(engine.generate(requests_for(tiny_prompts(3), 8)))) == 3


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no model folder .*nowhere"):
        load_model(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "remove, message",
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_missing_file_is_named(folder, remove, message):
    (folder / remove).unlink()
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_pickled_weights_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin, which is not read"):
        load_model(folder)


def test_missing_shard_is_named(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part-2.safetensors"}}))
    with pytest.raises(ModelError, match=r"part-2\.safetensors expected"):
        load_model(folder)


def test_damaged_weights_are_an_error(folder):
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"weights in .* cannot be loaded"):
        load_model(folder)


def test_model_with_code_of_its_own_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "configuration.Homemade"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(folder)


SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "architecture, config",
    [
        ("bloom", {"n_head": 4}),
        ("mamba", {"state_size": 4}),
        ("falcon", {"num_attention_heads": 4}),
        ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    ],
)
def test_model_whose_attention_is_its_own_is_refused(architecture, config):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **(SMALL | config)))
    with pytest.raises(ModelError, match=f"{architecture} .*packed"):
        prepare_model(model)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_rotary_embeddings_that_depend_on_the_pack_are_refused(rope):
    with pytest.raises(ModelError, match=rope["rope_type"]):
        prepare_model(tiny_model("llama", rope_parameters=rope))


def test_model_that_computes_something_else_packed_is_refused():
    class Leaky(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, hidden):
            return self.inner(hidden + hidden.mean(1, keepdim=True))  # looks over the fence of its sequence

    model = tiny_model()
    model.model.layers[0].mlp = Leaky(model.model.layers[0].mlp)
    with pytest.raises(ModelError, match="other logits packed"):
        prepare_model(model)


def test_bench_model_loads(shared_models):
    loaded = load_model(shared_models / "bench-target")
    assert loaded.max_context == 4096 and np.array(loaded.end_ids).tolist() == [4]
