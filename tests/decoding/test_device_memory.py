"""A model that does not fit into memory is refused before it is loaded, with the figures."""

import json

import pytest
import torch
from tiny_models import byte_tokenizer, tiny_model
from transformers import AutoConfig, LlamaConfig

from laserbatch.pipeline.decoding import device_memory
from laserbatch.pipeline.decoding.device_memory import (
    DeviceLost,
    Memory,
    cache_bound,
    cache_bytes_per_token,
    host_memory,
    is_device_lost,
    is_out_of_memory,
    memory_of,
    num_stored_values,
    require_memory,
    step_bytes,
)
from laserbatch.pipeline.decoding.model import load
from laserbatch.pipeline.decoding.model.load import load_model, require_room
from laserbatch.pipeline.errors import ModelError

GB = 10**9


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "my-model"
    tiny_model(vocab_size=257).to(torch.bfloat16).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def test_values_are_those_of_the_tensors(folder):
    num_values = sum(parameter.numel() for parameter in tiny_model(vocab_size=257).parameters())
    assert num_stored_values([folder / "model.safetensors"]) == num_values
    assert num_stored_values([folder / "model.safetensors"] * 2) == 2 * num_values


@pytest.mark.parametrize("content", [b"", b"nothing at all", (2).to_bytes(8, "little") + b"[]"])
def test_file_that_is_no_safetensors_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be loaded .*expected a safetensors file"):
        num_stored_values([tmp_path / "model.safetensors"])


@pytest.mark.parametrize("architecture", ["llama", "gemma4_text"])  # gemma4_text has heads of two sizes
def test_estimate_of_the_cache_is_what_the_engine_finds(architecture, folder):
    sizes = {"vocab_size": 260, "vocab_size_per_layer_input": 260, "num_kv_shared_layers": 0}
    tiny_model(architecture, **sizes).save_pretrained(folder)
    loaded = load_model(folder, device="cpu")
    assert cache_bytes_per_token(loaded.model.config, torch.float32) == loaded.bytes_per_token


def test_model_larger_than_a_gpu_is_refused_with_both_figures(tmp_path):
    gpu = Memory("cuda:0", free_bytes=79 * GB, total_bytes=80 * GB)
    with pytest.raises(ModelError) as refused:
        require_memory(tmp_path, 140 * GB, GB, gpu)
    message = str(refused.value)
    assert "it needs 141.0 GB (weights 140.0 GB, smallest cache 1.0 GB), and 79.0 GB of 80.0 GB are free" in message
    assert "quantised checkpoint" in message
    assert "set decoding.engine: vllm with decoding.vllm: {tensor_parallel_size: 4} (docs/vllm.md)" in message


def test_model_larger_than_main_memory_is_not_advised_to_use_gpus(tmp_path):
    with pytest.raises(ModelError, match=r"or a smaller model$"):
        require_memory(tmp_path, 140 * GB, GB, Memory("cpu", free_bytes=79 * GB, total_bytes=80 * GB))
    with pytest.raises(ModelError, match=r"or start fewer workers \(cluster\.num_workers\)$"):
        require_memory(tmp_path, 50 * GB, GB, Memory("cpu", free_bytes=40 * GB, total_bytes=80 * GB))


def test_gpu_that_others_hold_is_refused_where_the_rest_is_too_small(tmp_path):
    busy = Memory("cuda:1", free_bytes=20 * GB, total_bytes=80 * GB)
    with pytest.raises(ModelError, match=r"end other processes .*, or name another GPU"):
        require_memory(tmp_path, 30 * GB, GB, busy)
    require_memory(tmp_path, 15 * GB, GB, busy)


def test_load_asks_before_it_reads_weights(folder, monkeypatch):
    def loads_nothing(*_, **__):
        raise AssertionError("the weights were read")

    monkeypatch.setattr("laserbatch.pipeline.decoding.model.load.AutoModelForCausalLM.from_pretrained", loads_nothing)
    num_values = num_stored_values([folder / "model.safetensors"])
    needed = 4 * num_values + 2048 * 2 * 2 * 2 * 8 * 4  # float32; tokens x (keys, values) x layers x heads x width
    for num_bytes, message in ((needed - 1, "does not fit into the memory of cpu"), (needed, "weights were read")):
        memory = Memory("cpu", num_bytes, num_bytes)
        monkeypatch.setattr(load, "memory_of", lambda _, memory=memory: memory)
        with pytest.raises(ModelError, match=message):
            load_model(folder, "float32", "cpu")


def test_machine_says_what_is_available():
    memory = memory_of(torch.device("cpu"))
    assert memory.name == "cpu" and 0 < memory.free_bytes <= memory.total_bytes


def test_container_has_its_own_share(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 99 kB\nMemAvailable:   2000000 kB\n")
    group = tmp_path / "cgroup"
    group.mkdir()
    (group / "memory.max").write_text("max\n")
    assert host_memory(meminfo, group).free_bytes == 2_000_000 * 1024
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("700000\n")
    (group / "memory.stat").write_text("anon 300000\nactive_file 250000\ninactive_file 150000\n")
    assert host_memory(meminfo, group) == Memory("cpu", 700_000, 1_000_000)
    assert host_memory(tmp_path / "none", tmp_path / "none").free_bytes > 0


def test_weights_keep_their_own_type_on_a_gpu(folder, monkeypatch):
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    dtypes = []
    needed = (folder / "model.safetensors").stat().st_size + 2048 * 2 * 2 * 2 * 8 * 2

    def gpu(device):
        dtypes.append(device.type)
        return Memory(str(device), needed - 1, needed - 1)

    def roomy_gpu(device):
        return Memory(str(device), needed, needed) if device.type == "cuda" else Memory("cpu", 10, 10)

    config, weights, cuda = AutoConfig.from_pretrained(folder), [folder / "model.safetensors"], torch.device("cuda")
    monkeypatch.setattr(load, "memory_of", gpu)
    with pytest.raises(ModelError, match="does not fit into the memory of cuda"):
        require_room(folder, weights, config, "auto", cuda)
    assert dtypes == ["cuda"]
    monkeypatch.setattr(load, "memory_of", roomy_gpu)
    require_room(folder, weights, config, "auto", cuda)  # weights that go straight to a GPU need no main memory


def test_the_cache_may_take_part_of_what_is_free():
    cpu = torch.device("cpu")
    assert 0 < cache_bound(cpu, 1 << 20) < memory_of(cpu).free_bytes / (1 << 20)


def test_a_cache_leaves_what_the_engine_reserves(monkeypatch):
    monkeypatch.setattr(device_memory, "memory_of", lambda device: Memory("cuda", 1000 * 64, 2000 * 64))
    assert cache_bound(torch.device("cuda"), 64, reserved_bytes=250 * 64) == 600
    assert cache_bound(torch.device("cuda"), 64, reserved_bytes=2000 * 64) == 1


def test_steps_of_an_8_b_model_take_what_its_sizes_say():
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    num_bytes = step_bytes(LlamaConfig(**sizes), num_decoding=576, num_tokens=2624, num_parts=32)
    partial_results, activations = 576 * 32 * 129 * 32 * 4, 2624 * (4 * 4096 + 3 * 14336) * 4
    assert num_bytes == partial_results + 2 * activations == 1_551_106_048


@pytest.mark.parametrize("architecture", ["gpt_neox", "gemma3n_text", "gemma4_text", "gpt_oss"])
def test_steps_of_other_models_take_memory_too(architecture):
    assert step_bytes(tiny_model(architecture).config, 1, 1, 1) > 0


@pytest.mark.parametrize(
    ("device", "num_sharing", "expected"),
    [("cpu", 1, 500), ("cpu", 4, 125), ("cuda", 1, 800), ("cuda", 2, 720), ("cuda", 4, 320)],
)
def test_engines_share_the_memory_of_a_machine_or_gpu(monkeypatch, device, num_sharing, expected):
    """Each engine gets an equal share of a GPU. The weights take as much memory as a cache of 100 tokens."""
    memory = Memory(device, free_bytes=1000 * 64, total_bytes=2000 * 64)
    monkeypatch.setattr(device_memory, "memory_of", lambda device: memory)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100 * 64)
    assert cache_bound(torch.device(device), 64, num_sharing) == expected


def test_a_host_allocation_that_torch_refuses_is_out_of_memory():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=str,
)
def test_every_form_of_out_of_memory_counts_and_loses_no_device(error):
    assert is_out_of_memory(error) and not is_device_lost(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("unspecified launch failure"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        DeviceLost("as the engine says it"),
    ],
    ids=str,
)
def test_errors_after_which_a_process_cannot_use_its_device(error):
    assert is_device_lost(error) and not is_out_of_memory(error)
    with pytest.raises(ModelError) as raised:
        raise ModelError("the weights cannot be loaded") from error
    assert is_device_lost(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        ValueError(),
        RuntimeError("shapes differ"),
        RuntimeError("out of memory, says a model's own code"),
        torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
        torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"),
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
        RuntimeError("Triton Error [CUDA]: invalid argument"),
    ],
    ids=str,
)
def test_other_errors_are_neither(error):
    assert not is_out_of_memory(error) and not is_device_lost(error)
