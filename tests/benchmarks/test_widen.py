"""A widened model computes the same function: equal logits and texts for all sizes and groupings of heads."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from common import DEFAULT_MODEL, SAMPLE_MODEL
from systems import generate
from transformers import AutoConfig, AutoModelForCausalLM
from widen import GEOMETRIES, Geometry, load_widened, read_source, widen, widened_on
from widen import widened as widened_folder

from laserbatch.pipeline.decoding.drafters import NoDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.verifiers import Greedy
from laserbatch.pipeline.errors import ModelError

TINY = GEOMETRIES["tiny"]
MODELS = [
    SAMPLE_MODEL,
    pytest.param(DEFAULT_MODEL, marks=pytest.mark.skipif(not DEFAULT_MODEL.is_dir(), reason="no measuring model")),
]
LARGEST_ERROR = 2e-5  # relative to the largest logit


def prompts_of(model_dir: Path) -> list[np.ndarray]:
    vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    return [rng.integers(8, vocab_size, n).astype(np.int32) for n in (1, 7, 40, 90)]


def logits_of(folder: Path, prompts: list[np.ndarray]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0] for prompt in prompts]


def require_equal_logits(source: Path, widened: Path, num_added: int) -> None:
    prompts = prompts_of(source)
    for small, large in zip(logits_of(source, prompts), logits_of(widened, prompts), strict=True):
        assert large.shape[1] == small.shape[1] + num_added
        known, added = large[:, : small.shape[1]], large[:, small.shape[1] :]
        assert (known - small).abs().max() <= LARGEST_ERROR * small.abs().max()
        assert num_added == 0 or added.max() < small.min() - 100


def texts_by(engine: Engine, source: Path) -> list[list[int]]:
    prompts = prompts_of(source)
    results = {result.request_id: result for result in generate(engine, prompts, 24, NoDrafter(), Greedy())}
    return [results[str(number)].token_ids.tolist() for number in range(len(prompts))]


@cache
def texts_of(folder: Path, source: Path) -> list[list[int]]:
    settings = DecodingSettings(dtype="float32", batch_size=4)
    return texts_by(Engine.from_pretrained(folder, settings, device="cpu"), source)


@pytest.fixture(scope="module", params=MODELS, ids=lambda path: path.name)
def widened(request, tmp_path_factory) -> tuple[Path, Path]:
    """The folder of a model, and that of its widened copy in the tiny geometry: float32, in many shards."""
    out = tmp_path_factory.mktemp("widened") / "model"
    widen(request.param, out, TINY, "float32", shard_bytes=4 << 20)
    return request.param, out


def test_logits_are_the_same_and_added_tokens_never_win(widened):
    source, out = widened
    num_known = json.loads((source / "config.json").read_text())["vocab_size"]
    require_equal_logits(source, out, TINY.vocab_size - num_known)


def test_our_engine_writes_the_same_texts(widened):
    source, out = widened
    assert texts_of(out, source) == texts_of(source, source)


def test_a_model_made_on_its_device_is_the_one_that_is_written(widened):
    source, out = widened
    made = widened_on(source, TINY, "float32", "cpu")
    written = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    expected = dict(written.named_parameters())
    assert expected.keys() == dict(made.named_parameters()).keys()
    assert all(torch.equal(expected[name], weight) for name, weight in made.named_parameters())
    assert made.config.rms_norm_eps == written.config.rms_norm_eps
    engine = Engine(load_widened(source, "tiny", device="cpu"), DecodingSettings(dtype="float32", batch_size=4))
    assert texts_by(engine, source) == texts_of(source, source)


def test_the_folder_is_a_model_in_shards_with_its_tokenizer(widened):
    source, out = widened
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files and len(files) > 3
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert index["metadata"]["total_size"] == 4 * sum(parameter.numel() for parameter in model.parameters())
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    config = AutoConfig.from_pretrained(out)
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim) == (320, 8, 128)
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_size": 96},
        {"num_heads": 12, "num_kv_heads": 2},
        {"num_heads": 4, "num_kv_heads": 4},
        {"hidden_size": 64, "num_layers": 5, "vocab_size": 130},
        {"intermediate_size": 96},
    ],
    ids=lambda changes: ", ".join(f"{name} {value}" for name, value in changes.items()) or "same size",
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_each_size_can_grow_alone(model_type, changes, tmp_path):
    small = Geometry("small", 48, 80, 2, 4, 2, 24, 96)
    source = tmp_path / "source"
    write_random_model(model_type, small, source)
    target = replace(small, **({"head_size": small.head_size} | changes))
    widen(source, tmp_path / "out", target, "float32")
    require_equal_logits(source, tmp_path / "out", target.vocab_size - 96)


def write_random_model(model_type: str, sizes: Geometry, folder: Path) -> None:
    config = AutoConfig.for_model(
        model_type, hidden_size=sizes.hidden_size, intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_layers, num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads, head_dim=sizes.head_size, vocab_size=sizes.vocab_size,
        initializer_range=0.3, max_position_embeddings=128, bos_token_id=None, eos_token_id=5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def test_known_geometries_have_the_sizes_that_their_names_promise():
    billions = {name: num_parameters(geometry) / 1e9 for name, geometry in GEOMETRIES.items()}
    assert billions["7b-mha"] == pytest.approx(6.738, abs=0.001)
    assert billions["8b-gqa"] == pytest.approx(8.030, abs=0.001)
    assert 1.2 < billions["1b"] < 1.6


def num_parameters(sizes: Geometry) -> int:
    """The number of parameters of a Llama of these sizes with untied embeddings."""
    heads, kv_heads = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
    layer = sizes.hidden_size * (2 * heads + 2 * kv_heads + 3 * sizes.intermediate_size + 2)
    return sizes.num_layers * layer + sizes.hidden_size * (1 + 2 * sizes.vocab_size)


def test_a_widened_folder_is_written_once_and_again_where_it_was_cut_off(tmp_path):
    folder = widened_folder(SAMPLE_MODEL, "tiny", "float32", tmp_path)
    written = (folder / "config.json").stat().st_mtime_ns
    assert widened_folder(SAMPLE_MODEL, "tiny", "float32", tmp_path) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    (folder / "config.json").unlink()
    assert (widened_folder(SAMPLE_MODEL, "tiny", "float32", tmp_path) / "config.json").is_file()


def test_what_cannot_be_widened_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="key heads"):
        widen(SAMPLE_MODEL, tmp_path / "a", replace(TINY, num_heads=8, num_kv_heads=1), "float32")
    with pytest.raises(ValueError, match="hidden_size 64, the model 192"):
        widen(SAMPLE_MODEL, tmp_path / "b", replace(TINY, hidden_size=64), "float32")
    with pytest.raises(ValueError, match="no multiple"):
        widen(SAMPLE_MODEL, tmp_path / "c", replace(TINY, head_size=96), "float32")
    with pytest.raises(ValueError, match="no hidden channel"):
        widen(SAMPLE_MODEL, tmp_path / "d", replace(TINY, hidden_size=192), "float32")
    config = json.loads((SAMPLE_MODEL / "config.json").read_text())
    for change, message in (
        ({"model_type": "gemma3_text"}, "gemma3_text model"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "llama3 rotary"),
    ):
        other = tmp_path / message.split()[0]
        other.mkdir()
        (other / "config.json").write_text(json.dumps(config | change))
        for name in ("model.safetensors", "tokenizer.json"):
            (other / name).symlink_to(SAMPLE_MODEL / name)
        with pytest.raises(ModelError, match=message):
            read_source(other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gemma3_text", "llama3"]
