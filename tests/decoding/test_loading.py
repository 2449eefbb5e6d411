import itertools
import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_pretend_cuda import KERNEL
from tiny_models import IN_USE, VOCAB, byte_tokenizer, plain_texts, requests_for, tiny_model, tiny_prompts
from transformers import AutoConfig, AutoModelForCausalLM

from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model import checks
from laserbatch.pipeline.decoding.model import runner as runner_module
from laserbatch.pipeline.decoding.model.described_weights import require_described_weights
from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL, require_whole_files
from laserbatch.pipeline.decoding.model.load import load_model, prepare_model
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.verifiers import Greedy
from laserbatch.pipeline.engines.vllm import VllmEngine
from laserbatch.pipeline.errors import ModelError
from laserbatch.pipeline.processor import multiplies_bfloat16


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "my-model"
    tiny_model(vocab_size=257).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def test_folder_becomes_an_engine(folder):
    engine = Engine.from_pretrained(folder, DecodingSettings(batch_size=2), device="cpu")
    assert engine.max_context == 128 and engine.model_id.startswith("my-model-")
    assert 256 in engine.end_ids and len(engine.end_ids) == 9  # those of the tokenizer and of the generation config
    prompts = tiny_prompts(3)
    texts = {r.request_id: r.token_ids.tolist() for r in engine.generate(requests_for(prompts, 8), None, Greedy())}
    assert [texts[str(i)] for i in range(3)] == plain_texts(tiny_model(vocab_size=257), prompts, 8)


def test_model_id_follows_the_weights(folder):
    first = load_model(folder).model_id
    assert load_model(folder).model_id == first
    tiny_model(vocab_size=257, seed=1).save_pretrained(folder)
    assert load_model(folder).model_id != first


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
    with pytest.raises(ModelError, match=r"expected part-2\.safetensors"):
        load_model(folder)


def test_damaged_weights_are_an_error(folder):
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"weights in .* cannot be loaded"):
        load_model(folder)


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("lm_head.weight", None, r"lack lm_head\.weight;"),
        ("model.layers.1.mlp.up_proj.weight", None, r"lack model\.layers\.1\.mlp\.up_proj\.weight;"),
        ("model.norm.weight", (16,), r"model\.norm\.weight \(16,\) where config\.json says \(32,\)"),
    ],
)
def test_weights_that_would_be_random_are_refused(folder, name, shape, message):
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights | ({name: torch.zeros(shape)} if shape else {}), folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load_model(folder)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_names_no_files_is_refused(folder, index):
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json (has no `weight_map`|is not a JSON object)"):
        load_model(folder)


def test_weights_that_are_no_numbers_are_refused_as_such(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"logits that are not numbers \(NaN\)"):
        load_model(folder)


@pytest.mark.parametrize("value", ["x", [1, None], 1.5])
def test_end_tokens_that_are_no_ids_are_refused(folder, value):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"generation_config\.json sets eos_token_id to .* expected the id of a token"):
        load_model(folder)


def test_a_tokenizer_that_lost_what_its_chat_template_writes_is_refused(tmp_path):
    folder = shutil.copytree(SAMPLE_MODEL, tmp_path / "copy")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=r"writes bos_token, .* copy the model's tokenizer_config\.json"):
        load_model(folder)


def add_weights(folder, **added):
    weights = load_file(folder / "model.safetensors")
    save_file(weights | added, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("num_attention_heads", {"num_attention_heads": 0}),
        ("hidden_size", {"hidden_size": -64}),
        ("head_dim", {"head_dim": "a"}),
        ("vocab_size", {"text_config": {"vocab_size": 2.5}}),
        ("max_position_embeddings", {"max_position_embeddings": 0}),
        ("rope_theta", {"rope_parameters": {"rope_theta": "big"}}),
    ],
)
def test_impossible_sizes_are_refused_by_their_key(folder, key, changes):
    edit_config(folder, **changes)
    for check in (load_model, require_described_weights, require_whole_files):
        with pytest.raises(ModelError, match=rf"config\.json sets {key} to .*; expected a (whole )?number above 0"):
            check(folder)


@pytest.mark.parametrize(
    "changes, added, message",
    [
        ({"num_hidden_layers": 1}, {}, r"does not describe: model\.layers\.1\.input_layernorm\.weight, .* and 6 more"),
        (
            {},
            {"model.layers.0.self_attn.q_proj.bias": 32},
            r"model\.layers\.0\.self_attn\.q_proj\.bias; .*attention_bias",
        ),
        ({}, {"model.layers.0.self_attn.q_norm.weight": 8}, r"model\.layers\.0\.self_attn\.q_norm\.weight; "),
        ({}, {"model.layers.0.self_attn.q_proj.lora_A.weight": 8}, r"q_proj\.lora_A\.weight; "),
    ],
    ids=["another layer", "biases of attention", "norms of queries", "an adapter that was not merged"],
)
def test_weights_that_the_configuration_does_not_describe_are_refused(folder, changes, added, message):
    edit_config(folder, **changes)
    add_weights(folder, **{name: torch.ones(size) for name, size in added.items()})
    with pytest.raises(ModelError, match=message):
        load_model(folder)
    with pytest.raises(ModelError, match=message):
        require_described_weights(folder)


def test_tensors_that_change_no_logit_are_harmless(folder):
    num_parameters = load_model(folder).num_parameters
    names = ("model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq", "v_head.summary.weight",
             "model.layers.0.attention.masked_bias", "model.layers.0.attention.bias", "mtp.layers.0.norm.weight",
             "model.embeddings.position_ids", "model.layers.0.self_attn.rotary_emb.cos_cached")  # fmt: skip
    add_weights(folder, **{name: torch.ones(4) for name in names})
    assert require_described_weights(folder) == 257
    assert load_model(folder).num_parameters == num_parameters


def test_output_layer_that_is_stored_though_tied_is_harmless(folder):
    tiny_model(vocab_size=257, tie_word_embeddings=True).save_pretrained(folder)
    add_weights(
        folder, **{"lm_head.weight": load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()}
    )
    assert require_described_weights(folder) == 257
    load_model(folder)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_neox", "mixtral"])
def test_weights_are_compared_without_being_read(folder, architecture):
    tiny_model(architecture, vocab_size=257).save_pretrained(folder)
    assert require_described_weights(folder) == 257


def pack_as_gptq(folder):
    """Write the weights of linear layers under the names and in the shapes of GPTQ, without that library."""
    packed = {}
    for name, value in load_file(folder / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj"):
            rows, columns = value.shape
            packed[f"{layer}.qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
            packed[f"{layer}.qzeros"] = torch.zeros(1, rows // 8, dtype=torch.int32)
            packed |= {f"{layer}.scales": torch.ones(1, rows), f"{layer}.g_idx": torch.zeros(columns)}
        else:
            packed[name] = value
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})


@pytest.mark.parametrize(
    ("changes", "added", "removed", "message"),
    [
        ({}, {}, "", None),
        ({}, {"model.layers.0.self_attn.k_scale": 1}, "", None),
        ({"num_hidden_layers": 1}, {}, "", r"does not describe: model\.layers\.1\.input_layernorm\.weight, .* more"),
        ({}, {"model.layers.0.self_attn.q_proj.bias": 32}, "", r"model\.layers\.0\.self_attn\.q_proj\.bias; "),
        ({}, {"model.layers.0.self_attn.q_norm.weight": 8}, "", r"model\.layers\.0\.self_attn\.q_norm\.weight; "),
        ({}, {}, "layers.1.mlp.up_proj", r"lack model\.layers\.1\.mlp\.up_proj\.weight"),
        ({"vocab_size": 300}, {}, "", r"other shapes than expected: .*embed_tokens\.weight \(257, 32\)"),
    ],
)  # fmt: skip
def test_packed_weights_are_compared_by_the_layers_that_they_belong_to(folder, changes, added, removed, message):
    pack_as_gptq(folder)
    edit_config(folder, **changes)
    add_weights(folder, **{name: torch.ones(size) for name, size in added.items()})
    tensors = {name: value for name, value in load_file(folder / "model.safetensors").items()
            if not removed or removed not in name}  # fmt: skip
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if message is None:
        assert require_described_weights(folder) == 257
        return
    with pytest.raises(ModelError, match=message):
        require_described_weights(folder)


def test_packed_weights_of_unknown_names_are_not_compared(folder):
    pack_as_gptq(folder)
    weights = {
        name.replace(".layers.", ".blobs."): value for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert require_described_weights(folder) is None


@pytest.mark.parametrize("fault", ["a layer", "a token"])
def test_vllm_writes_with_no_model_whose_weights_or_tokens_are_not_those_of_its_configuration(folder, fault, tmp_path):
    if fault == "a layer":
        edit_config(folder, num_hidden_layers=1)
    else:
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens(["Heat"])
        tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"does not describe: model\.layers\.1|which has 257 rows: 'Heat'"):
        VllmEngine(folder, DecodingSettings(engine="vllm"), "cpu", 1, 1, {}, tmp_path)


def test_tokens_without_rows_in_the_embedding_are_refused_unless_no_prompt_holds_them(folder, caplog):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(folder)
    load_model(folder)
    assert "control tokens that occur in no prompt have no row in the embedding: '<pad>' (257)" in caplog.text
    tokenizer.chat_template = "<pad>{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"which has 257 rows: '<pad>' \(257\); copy the tokenizer"):
        load_model(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["Heat", "crime"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"which has 257 rows: 'Heat' \(257\), 'crime' \(258\); "):
        load_model(folder)


@pytest.mark.parametrize("architecture, changes", [("llama", {"tie_word_embeddings": True}), ("gemma3_text", {}),
                                                   ("gpt_neox", {}), ("mixtral", {})])  # fmt: skip
def test_weights_that_go_straight_to_a_device_are_the_same(folder, monkeypatch, architecture, changes):
    """Includes buffers that are in no file, and tied weights; the device is this CPU."""
    monkeypatch.setattr(checks, "relayout_linear_layers", lambda model: 0)  # relaid weights cannot be compared
    tiny_model(architecture, vocab_size=257, **changes).save_pretrained(folder)
    dtype = "bfloat16" if multiplies_bfloat16() else "float32"
    plain = load_model(folder, dtype, "cpu").model
    direct = partial(AutoModelForCausalLM.from_pretrained, device_map={"": torch.device("cpu")})
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", direct)
    placed = load_model(folder, dtype, "cpu").model
    tensors, expected = (dict((*each.named_parameters(), *each.named_buffers())) for each in (placed, plain))
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_weights_go_straight_to_a_gpu(folder, monkeypatch, a_device):
    read, devices = AutoModelForCausalLM.from_pretrained, []

    def watched(*arguments, **named):
        devices.append(named.get("device_map"))
        return read(*arguments, **named)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    settings = DecodingSettings(batch_size=2, dtype="float32", max_cache_tokens=1024)
    with KERNEL:
        engine = Engine.from_pretrained(folder, settings, device="cuda")
        prompts = tiny_prompts(3)
        texts = {r.request_id: r.token_ids.tolist() for r in engine.generate(requests_for(prompts, 8), None, Greedy())}
    assert devices == [{"": torch.device("cuda")}] and engine.device.type == "cuda"
    assert [texts[str(i)] for i in range(3)] == plain_texts(tiny_model(vocab_size=257), prompts, 8)


def test_model_with_code_of_its_own_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "configuration.Homemade"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(folder)


SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": 5}
GROUPED = SMALL | {"num_key_value_heads": 2, "intermediate_size": 48, "initializer_range": 0.3, "pad_token_id": 0}
DECODER = {"decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "d_model": 32}


@pytest.mark.parametrize(
    "architecture, config, reason",
    [
        ("bloom", {"n_head": 4}, "its forward takes no `position_ids`"),
        ("bart", SMALL | DECODER, "its forward takes no `position_ids`"),
        ("mamba", {"state_size": 4}, "layers of linear_attention"),
        ("falcon", SMALL, "0 of its 2 layers use transformers' attention interface"),
        ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, "0 of its 2 layers"),
        ("opt", DECODER | {"word_embed_proj_dim": 32}, r"cannot be run packed: .*\. Laserbatch's engine runs .*vllm"),
        ("bert", SMALL | {"intermediate_size": 48}, "keeps no keys and values of earlier tokens"),
        ("xmod", SMALL | {"intermediate_size": 48, "pad_token_id": 0}, "cannot be run: .*language"),
        ("diffllama", GROUPED, "a layer attends more than once"),
        ("doge", GROUPED, "takes its own mask"),
        ("lfm2", GROUPED | {"layer_types": ["conv", "full_attention"]}, "layers of conv, which cannot be packed"),
        ("llama4_text", {"attn_temperature_tuning": True}, "scales attention by a token's place in the forward"),
        # These differ only for texts longer than their windows, which are shortened for the probe.
        ("phimoe", GROUPED | {"sliding_window": 40, "num_local_experts": 2}, "other logits packed"),
        ("moshi", GROUPED | {"sliding_window": 40, "ffn_dim": 48, "head_dim": 8}, "other logits packed"),
    ],
)  # fmt: skip
def test_model_that_cannot_be_packed_is_refused_for_its_reason(architecture, config, reason):
    if architecture in IN_USE:
        model = tiny_model(architecture, **config)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **(SMALL | config)))
    with pytest.raises(ModelError, match=f"{architecture} .*{reason}"):
        prepare_model(model)


def test_model_that_is_not_decoder_only_is_refused_by_its_type(folder):
    AutoConfig.for_model("t5", **SMALL).save_pretrained(folder)
    with pytest.raises(ModelError, match=r"a model of type t5, which is not decoder-only\. Laserbatch's engine runs"):
        load_model(folder)


def test_probe_leaves_windows_as_they_are():
    model = tiny_model("gemma3_text", sliding_window=40)
    prepare_model(model)
    assert model.config.sliding_window == model.model.layers[0].self_attn.sliding_window == 40
    assert model.model.layers[1].self_attn.sliding_window is None


def test_layers_with_other_results_packed_for_the_processor_are_refused(monkeypatch):
    """The probe runs the linear layers that generation will use."""

    def spoil(model):
        model.model.layers[1].mlp.down_proj.weight.data.mul_(1.5)

    monkeypatch.setattr(checks, "relayout_linear_layers", spoil)
    with pytest.raises(ModelError, match="other logits packed"):
        prepare_model(tiny_model())


def test_end_tokens_outside_the_vocabulary_are_left_out(caplog):
    model = tiny_model()
    model.generation_config.eos_token_id = [5, VOCAB, -1]
    assert Engine(prepare_model(model)).end_ids == (5,)
    assert f"end tokens [-1, {VOCAB}] are not among the {VOCAB} tokens" in caplog.text


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
            return self.inner(hidden + hidden.mean(1, keepdim=True))  # mixes the sequences of a batch

    model = tiny_model()
    model.model.layers[0].mlp = Leaky(model.model.layers[0].mlp)
    with pytest.raises(ModelError, match="other logits packed"):
        prepare_model(model)


def test_bench_model_loads(shared_models):
    loaded = load_model(shared_models / "bench-target")
    assert loaded.max_context == 4096 and np.array(loaded.end_ids).tolist() == [4]


@pytest.mark.parametrize(("num_spoiled", "is_refused"), [(1, False), (2, True)])
def test_rounding_that_spoils_a_few_texts_does_not_refuse_a_model(monkeypatch, num_spoiled, is_refused):
    """The limit is for most of the three probes: an error that affects every text affects most of them."""
    packed_logits, num_rounded = checks._packed_logits, itertools.count()

    def spoiled(runner, probe):
        logits = packed_logits(runner, probe)
        is_spoiled = runner.model.dtype == torch.bfloat16 and next(num_rounded) < num_spoiled
        return [2 * row for row in logits] if is_spoiled else logits

    monkeypatch.setattr(checks, "_packed_logits", spoiled)
    monkeypatch.setattr(checks, "relayout_linear_layers", lambda model: 0)  # leaves no fused layers to try
    model = tiny_model("llama").to(torch.bfloat16)
    if is_refused:
        with pytest.raises(ModelError, match="other logits packed than alone"):
            prepare_model(model)
    else:
        prepare_model(model)
    assert next(num_rounded) == 3


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "smollm3"])
def test_a_wrong_mask_is_noticed_in_bfloat16_as_in_float32(monkeypatch, architecture):
    """A tree node that attends to one node too many changes logits no more than rounding to bfloat16 does."""
    attention_metadata = runner_module.attention_metadata

    def wrong(batch, cache):
        metadata = attention_metadata(batch, cache)
        return replace(metadata, ancestors=np.where(metadata.ancestors > 0, metadata.ancestors | 1, 0))

    monkeypatch.setattr(runner_module, "attention_metadata", wrong)
    monkeypatch.setattr(checks, "_ROUNDED_TOLERANCE", np.inf)
    with pytest.raises(ModelError, match="other logits packed than alone"):
        prepare_model(tiny_model(architecture).to(torch.bfloat16))


def test_the_float32_part_of_a_model_leaves_it_as_it_was():
    model = tiny_model("gemma3_text", num_hidden_layers=6, layer_types=["sliding_attention"] * 5 + ["full_attention"])
    model = model.to(torch.bfloat16)
    part = checks._first_layers_in_float32(model)
    assert part.dtype == torch.float32 and part.config.num_hidden_layers == 6
    longer = tiny_model("llama", num_hidden_layers=7).to(torch.bfloat16)
    assert len(checks._first_layers_in_float32(longer).model.layers) == 4
    assert len(longer.model.layers) == longer.config.num_hidden_layers == 7 and longer.dtype == torch.bfloat16
