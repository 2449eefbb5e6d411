"""The engine that fits a model and a machine."""

import re

import pytest

from laserbatch.pipeline.engine_choice import choose_engine, num_gpus_for, vllm_advice

GB = 10**9
H100 = {"device_bytes": 85 * GB, "num_gpus": 8}
CPU = {"device_bytes": 0, "num_gpus": 0}
DENSE_8B = {
    "num_parameters": 8 * GB,
    "weights_bytes": 16 * GB,
    "quantization": None,
    "is_mixture_of_experts": False,
}


@pytest.mark.parametrize(
    ("changed", "engine", "reason"),
    [
        (H100, "laserbatch", "faster than vLLM with the same drafts"),
        (H100 | {"num_parameters": 14_800_000_000, "weights_bytes": 30 * GB}, "laserbatch", "fits one GPU"),
        (H100 | {"num_parameters": 33 * GB, "weights_bytes": 66 * GB}, "vllm", "33.0 B parameters"),
        (H100 | {"quantization": "fp8", "weights_bytes": 8 * GB}, "vllm", r"quantised \(fp8\)"),
        (H100 | {"quantization": "awq"}, "vllm", r"quantised \(awq\)"),
        (H100 | {"is_mixture_of_experts": True}, "vllm", "mixture of experts"),
        (H100 | {"device_bytes": 17 * GB, "num_gpus": 2}, "vllm", "16.0 GB, too much for one GPU of 17.0 GB$"),
        (H100 | {"device_bytes": 17 * GB, "num_gpus": 1}, "vllm", "2 GPUs .* this machine has 1$"),
        (CPU, "laserbatch", "no GPU"),
        (CPU | {"quantization": "fp8", "is_mixture_of_experts": True}, "laserbatch", "no GPU"),
    ],
)
def test_the_engine_that_fits_and_why(changed, engine, reason):
    choice = choose_engine(**(DENSE_8B | changed))
    assert choice.engine == engine
    assert re.search(reason, choice.reason)


@pytest.mark.parametrize(("num_bytes", "size"), [(16, 1), (72, 1), (73, 2), (141, 2), (145, 4), (671, 16)])
def test_weights_are_split_over_a_power_of_two(num_bytes, size):
    assert num_gpus_for(num_bytes * GB, 85 * GB) == size
    spread = choose_engine(**(DENSE_8B | H100 | {"weights_bytes": num_bytes * GB}))
    assert spread.tensor_parallel_size == size and (spread.engine == "vllm") == (size > 1)


def test_advice_names_every_setting():
    assert vllm_advice() == "set decoding.engine: vllm (docs/vllm.md)"
    advice = vllm_advice(4, ["decoding.temperature"])
    assert "decoding.vllm: {tensor_parallel_size: 4}, without decoding.temperature" in advice
