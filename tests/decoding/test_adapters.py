"""A LoRA adapter merged at load: the sum computed by hand, a new model id, and adapters that are refused."""

import json
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from laserbatch.pipeline.decoding.model.adapters import find_adapter, merge_adapter
from laserbatch.pipeline.decoding.model.folder import (
    SAMPLE_MODEL,
    load_tokenizer,
    model_identity,
    tokenizer_folder,
)
from laserbatch.pipeline.decoding.model.load import load_model
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.errors import ModelError
from laserbatch.pipeline.knowledge.chat_format import encode_chat
from laserbatch.pipeline.knowledge.templates import load_template
from laserbatch.pipeline.planning.planner import shared_fingerprint

RANK, ALPHA = 4, 8
TARGETS = ("self_attn.q_proj", "mlp.down_proj")


def base_model():
    return AutoModelForCausalLM.from_pretrained(SAMPLE_MODEL, dtype=torch.float32, attn_implementation="eager").eval()


def adapter_tensors(model, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random pairs of factors for two matrices of every layer, in the names that PEFT saves them under."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(TARGETS):
            num_out, num_in = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, num_in, generator=generator) * 0.1
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(num_out, RANK, generator=generator) * 0.1
    return tensors


def write_adapter(folder, tensors, **changes):
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": [name.split(".")[-1] for name in TARGETS],
        "base_model_name_or_path": "elsewhere/base",
    }
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def adapter(tmp_path):
    return write_adapter(tmp_path / "style", adapter_tensors(base_model()))


def test_tokenizer_and_chat_template_of_an_adapter_are_used(adapter):
    assert load_tokenizer(SAMPLE_MODEL, adapter).chat_template == load_tokenizer(SAMPLE_MODEL).chat_template
    assert tokenizer_folder(SAMPLE_MODEL, adapter) == SAMPLE_MODEL
    decoding = DecodingSettings(adapter=str(adapter))
    template = load_template("kar_item")
    before = shared_fingerprint(template, 1024, decoding, SAMPLE_MODEL)
    assert "librarian" not in load_tokenizer(SAMPLE_MODEL, adapter).chat_template
    own = "{{ bos_token }}Answer as a librarian.{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (adapter / "tokenizer_config.json").write_text(json.dumps({"chat_template": own}))
    assert load_tokenizer(SAMPLE_MODEL, adapter).chat_template == own
    (adapter / "chat_template.jinja").write_text(f"{own}:")
    tokenizer = load_tokenizer(SAMPLE_MODEL, adapter)
    assert tokenizer.chat_template == f"{own}:"
    assert "librarian" in tokenizer.decode(encode_chat(tokenizer, "Alien", None, {}))
    after = shared_fingerprint(template, 1024, decoding, SAMPLE_MODEL)
    assert [old == new for old, new in zip(before.split("-"), after.split("-"), strict=True)] == [
        True,
        False,
        True,
        True,
    ]


def test_tokenizer_of_an_adapter_is_used_with_the_chat_template_of_the_model_where_it_has_none(adapter):
    tokenizer = load_tokenizer(SAMPLE_MODEL)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    tokenizer.add_special_tokens({"pad_token": "<|style|>"})
    tokenizer.save_pretrained(adapter)
    loaded = load_tokenizer(SAMPLE_MODEL, adapter)
    assert (loaded.chat_template, loaded.pad_token) == (template, "<|style|>")
    assert tokenizer_folder(SAMPLE_MODEL, adapter) == adapter


def logits_of(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(20, 60)[None], use_cache=False).logits[0]


def test_merged_logits_are_those_of_base_and_adapter(adapter):
    pytest.importorskip("peft")
    by_hand = base_model()
    tensors = adapter_tensors(by_hand)
    weights = dict(by_hand.named_parameters())
    for key, b in tensors.items():
        if ".lora_B." in key:
            name = key.removeprefix("base_model.model.").replace(".lora_B", "")
            weights[name].data += ALPHA / RANK * b @ tensors[key.replace("lora_B", "lora_A")]
    merged = merge_adapter(base_model(), adapter)
    torch.testing.assert_close(logits_of(merged), logits_of(by_hand), rtol=1e-4, atol=1e-4)
    assert (logits_of(merged) - logits_of(base_model())).abs().max() > 0.1
    assert not any("lora" in name for name, _ in merged.named_parameters())


def test_engine_loads_a_model_with_its_adapter(adapter):
    pytest.importorskip("peft")
    loaded = load_model("sample", device="cpu", adapter=adapter)
    assert loaded.model_id == model_identity(SAMPLE_MODEL, adapter) != model_identity(SAMPLE_MODEL)
    assert loaded.num_parameters == base_model().num_parameters()


def test_identity_follows_the_adapter(adapter, tmp_path):
    with_adapter = model_identity(SAMPLE_MODEL, adapter)
    assert with_adapter.startswith("sample+style-")
    assert with_adapter != model_identity(SAMPLE_MODEL)
    (tmp_path / "later").mkdir()
    of_same_name = write_adapter(tmp_path / "later" / "style", adapter_tensors(base_model(), seed=1))
    assert model_identity(SAMPLE_MODEL, of_same_name) != with_adapter
    write_adapter(adapter, adapter_tensors(base_model()), lora_alpha=2 * ALPHA)
    assert model_identity(SAMPLE_MODEL, adapter) != with_adapter


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_file_is_named(adapter, name):
    (adapter / name).unlink()
    with pytest.raises(ModelError, match=f"style has no {name}"):
        load_model("sample", device="cpu", adapter=adapter)


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no adapter folder .*nowhere"):
        find_adapter(tmp_path / "nowhere")


def test_pickled_adapter_is_not_read(adapter):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model\.bin, which is not read"):
        find_adapter(adapter)


def test_missing_library_is_named_with_its_command(adapter, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it were not installed
    with pytest.raises(ModelError, match=r"peft .*pip install 'laserbatch\[lora\]'"):
        merge_adapter(base_model(), adapter)


def test_adapter_of_another_base_is_refused_naming_file_and_tensor(adapter):
    pytest.importorskip("peft")
    tensors = adapter_tensors(base_model())
    key = next(iter(tensors))
    write_adapter(adapter, tensors | {key: torch.zeros(RANK, 7)})
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors does not fit .*layers\.0\.self_attn\.q_proj"):
        merge_adapter(base_model(), adapter)


@pytest.mark.parametrize("change, problem", [("more", "the model has no place for"), ("fewer", "it lacks")])
def test_adapter_with_other_tensors_than_the_model_is_refused(adapter, change, problem):
    pytest.importorskip("peft")
    tensors = adapter_tensors(base_model())
    if change == "fewer":
        del tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    else:
        tensors["base_model.model.model.layers.9.self_attn.q_proj.lora_B.weight"] = torch.zeros(4, RANK)
    write_adapter(adapter, tensors)
    with pytest.raises(ModelError, match=f"does not fit the model: {problem}.*q_proj"):
        merge_adapter(base_model(), adapter)


def test_adapter_for_modules_that_the_model_lacks_is_refused(adapter):
    pytest.importorskip("peft")
    write_adapter(adapter, adapter_tensors(base_model()), target_modules=["query_key_value"])
    with pytest.raises(ModelError, match=r"does not fit the model: .*query_key_value"):
        merge_adapter(base_model(), adapter)


def test_other_kinds_of_adapters_are_refused(adapter):
    pytest.importorskip("peft")
    config = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="expected LoRA"):
        merge_adapter(base_model(), adapter)


def test_weights_that_are_not_finite_are_refused(adapter):
    pytest.importorskip("peft")
    tensors = adapter_tensors(base_model())
    tensors[next(iter(tensors))][0, 0] = torch.nan
    write_adapter(adapter, tensors)
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors cannot be merged"):
        merge_adapter(base_model(), adapter)


def test_change_of_the_output_layer_alone_is_refused_where_it_is_the_embeddings_too(adapter):
    pytest.importorskip("peft")
    model = base_model()
    assert model.config.tie_word_embeddings
    vocab_size, width = model.lm_head.weight.shape
    factors = {"lora_A": torch.randn(RANK, width), "lora_B": torch.randn(vocab_size, RANK)}
    tensors = {f"base_model.model.lm_head.{name}.weight": factor for name, factor in factors.items()}
    write_adapter(adapter, tensors, target_modules=["lm_head"])
    with pytest.raises(ModelError, match="the merged model has other logits"):
        merge_adapter(model, adapter)
