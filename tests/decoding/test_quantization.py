"""Checkpoints with packed weights load if their library is installed, and are refused with a reason otherwise."""

import json
import shutil

import pytest
import torch
from tiny_models import requests_for
from transformers import AutoConfig, AutoModelForCausalLM

from laserbatch.pipeline.decoding.attention.interface import relative_error
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.compute_type import choose_dtype
from laserbatch.pipeline.decoding.model.described_weights import require_described_weights
from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL, num_parameters_of, quantization_of
from laserbatch.pipeline.decoding.model.load import load_model
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.errors import ModelError

QUANTISED = ("torchao int8", "compressed-tensors int8", "compressed-tensors int4", "compressed-tensors fp8")
MAX_ERROR = {"int8": 0.05, "fp8": 0.1, "int4": 0.5}  # of logits, by weight type; wrong weights have 1.4


def sample_model():
    return AutoModelForCausalLM.from_pretrained(SAMPLE_MODEL, dtype=torch.float32, attn_implementation="eager").eval()


def with_files_of_sample(folder):
    for file in SAMPLE_MODEL.iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    return folder


@pytest.fixture
def claimed(tmp_path):
    """The sample model with a config that claims quantisation, although its weights are plain."""
    folder = with_files_of_sample(tmp_path)

    def claim(**quantization_config):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config}))
        return folder

    return claim


@pytest.fixture(scope="module")
def torchao_folder(tmp_path_factory):
    """The sample model with int8 weights, as torchao and transformers write it."""
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    folder = tmp_path_factory.mktemp("torchao") / "sample-int8"
    quantised = AutoModelForCausalLM.from_pretrained(
        SAMPLE_MODEL, dtype=torch.float32, quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig())
    )
    quantised.save_pretrained(folder)
    return with_files_of_sample(folder)


def write_compressed(folder, type_: str, num_bits: int):
    """The sample model in the format of compressed-tensors; `type_` of its weights is "int" or "float"."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )

    model = sample_model()
    weights = QuantizationArgs(num_bits=num_bits, type=type_, symmetric=True, strategy="channel")
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    layout = "pack-quantized" if type_ == "int" else "float-quantized"
    config = QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], format=layout)
    config.quantization_status = QuantizationStatus.FROZEN
    apply_quantization_config(model, config)
    largest = 2 ** (num_bits - 1) - 1 if type_ == "int" else torch.finfo(torch.float8_e4m3fn).max
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight.abs().amax(1, keepdim=True) / largest
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return with_files_of_sample(folder)


def logits_of(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(20, 60)[None], use_cache=False).logits[0].float()


@pytest.fixture(scope="module", params=QUANTISED)
def quantised(request, tmp_path_factory):
    """A quantised checkpoint: method, type of the weights, folder."""
    method, kind = request.param.split()
    if method == "torchao":
        return method, kind, request.getfixturevalue("torchao_folder")
    folder = tmp_path_factory.mktemp("compressed") / f"sample-{kind}"
    return method, kind, write_compressed(folder, "float" if kind == "fp8" else "int", int(kind[-1]))


def test_quantised_checkpoint_loads_unmodified_and_writes(quantised):
    method, _, folder = quantised
    engine = Engine.from_pretrained(folder, DecodingSettings(batch_size=2), device="cpu")
    assert engine.loaded.quantization == method
    assert require_described_weights(folder) == engine.loaded.vocab_size  # from names and shapes, without its library
    assert engine.loaded.num_parameters == sum(p.numel() for p in sample_model().parameters())
    prompts = [engine.tokenizer(text, return_tensors="np").input_ids[0] for text in ("A film about", "The user likes")]
    results = list(engine.generate(requests_for(prompts, 12)))
    assert len(results) == 2 and all(len(result.token_ids) for result in results)


def test_quantised_logits_are_near_the_plain_ones(quantised):
    _, kind, folder = quantised
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="eager").eval()
    error = relative_error(logits_of(model), logits_of(sample_model()))
    assert 0 < error < MAX_ERROR[kind]


def test_adapter_on_packed_weights_is_refused(claimed, tmp_path):
    adapter = tmp_path / "style"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_text("{}")
    with pytest.raises(ModelError, match=r"cannot be merged into .* quantised with torchao"):
        load_model(claimed(quant_method="torchao"), device="cpu", adapter=adapter)


def test_missing_library_is_named_with_its_command(claimed, monkeypatch):
    from transformers.quantizers import quantizer_compressed_tensors

    def is_missing():
        return False

    monkeypatch.setattr(quantizer_compressed_tensors, "is_compressed_tensors_available", is_missing)
    scheme = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}
    folder = claimed(quant_method="compressed-tensors", config_groups={"all": scheme})
    with pytest.raises(ModelError, match=r"compressed-tensors.*; they are quantised with compressed-tensors: install"):
        load_model(folder, device="cpu")


def test_method_is_read_from_every_form_of_configuration():
    config = AutoConfig.from_pretrained(SAMPLE_MODEL)
    assert quantization_of(config) is None
    for section, expected in (({"quant_method": "gptq", "bits": 4}, "gptq"), ({"load_in_8bit": True}, "bitsandbytes")):
        config.quantization_config = section
        assert quantization_of(config) == expected


def test_parameters_are_those_of_the_plain_model():
    config = AutoConfig.from_pretrained(SAMPLE_MODEL)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    assert num_parameters_of(config) == sum(p.numel() for p in sample_model().parameters())
    assert config.quantization_config["bits"] == 4  # unchanged


def test_packed_weights_keep_the_type_they_were_made_for():
    assert choose_dtype("auto", "cpu", "bfloat16", "torchao").name == "auto"
    assert choose_dtype("float32", "cpu", "bfloat16", "torchao").name == "float32"
