"""Our layers for CUDA against transformers' own: on a GPU if there is one, otherwise in Triton's interpreter."""

from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from test_cuda_graphs import assert_equal_logits, is_interpreted
from tiny_models import (
    perturb_constants,
    tiny_model,
)
from torch.utils._python_dispatch import TorchDispatchMode

from laserbatch.pipeline.decoding.batch import Feed
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.model.load import prepare_model
from laserbatch.pipeline.decoding.model.runner import ModelRunner

pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA and with the dev extra")
from laserbatch.pipeline.decoding.attention import metadata
from laserbatch.pipeline.decoding.model import layer_kernels
from laserbatch.pipeline.decoding.model.cuda_layers import CudaLayers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and not is_interpreted(), reason="no CUDA, and triton was imported before TRITON_INTERPRET=1"
)
SERVED = {  # one layer if all layers are alike, since all of it is interpreted
    "llama with biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "num_hidden_layers": 1},
    "mistral": {"num_hidden_layers": 1},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"num_key_value_heads": 1, "num_hidden_layers": 1},
    "gemma3_text": {},
}


@pytest.fixture
def whole_keys(monkeypatch) -> None:
    """Do not cut keys into parts, each of which would be a program to interpret; the layers do not depend on it."""
    monkeypatch.setattr(metadata, "MIN_PROGRAMS", 0)


def prepared(name: str, dtype: torch.dtype = torch.float32):
    """A model whose own layers are transformers', and our layers with its weights."""
    model = tiny_model(name.split()[0], **SERVED.get(name, {}))
    perturb_constants(model)
    layers = CudaLayers.of(model.to(DEVICE, dtype))
    prepare_model(model)
    return model, layers


def runner_with(model, layers: CudaLayers | None, attention: str = "triton") -> ModelRunner:
    runner = ModelRunner(model, KVCache(6), DEVICE, attention)
    runner.fused = None
    if runner.buffered is not None:
        runner.buffered._layers = layers
    return runner


@pytest.mark.usefixtures("whole_keys")
@pytest.mark.parametrize("name", SERVED)
def test_they_compute_what_transformers_does(name):
    model, layers = prepared(name)
    runner = runner_with(model, layers)
    reference = runner_with(model, None, "torch")
    assert_equal_logits([reference, runner], num_steps=1, tolerance=2e-4, lengths=(10,))  # longer than any window
    assert int(runner.cache.lengths.max()) > 10, "no node of the tree was kept"
    assert runner.buffered is not None, "the kernels failed"
    for number, memory in reference.cache.layers.items():
        own = runner.cache.layers[number]
        torch.testing.assert_close(own.keys[:, :-1], memory.keys[:, :-1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(own.values[:, :-1], memory.values[:, :-1], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("whole_keys")
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_they_round_where_transformers_does(name):
    """Most hidden states must be bit-identical in the interpreter. It truncates bfloat16, so float16 is used there.

    On a GPU, joined products use other cuBLAS kernels, which add in another order.
    """
    model, layers = prepared(name, torch.bfloat16 if DEVICE.type == "cuda" else torch.float16)
    hidden = []
    for own in (None, layers):
        runner = runner_with(model, own)
        row = runner.cache.acquire(np.arange(9, dtype=np.int32), 60).row
        output = runner.forward([Feed(row, np.arange(9, dtype=np.int32))])
        assert runner.buffered is not None
        hidden.append(output.rows.hidden[:9].float())
    error = (hidden[0] - hidden[1]).norm() / hidden[0].norm()
    assert error < (0.03 if DEVICE.type == "cuda" else 0.01)
    assert DEVICE.type == "cuda" or (hidden[0] == hidden[1]).float().mean() > 0.5


@pytest.mark.parametrize("name", ["gemma2", "phi3", "qwen3_moe", "gpt_neox"])
def test_other_models_keep_their_own_layers(name):
    assert CudaLayers.of(tiny_model(name)) is None


def test_projections_share_their_memory_with_the_joined_ones():
    model = tiny_model("qwen2", **SERVED["qwen2"]).to(DEVICE)
    layers = CudaLayers.of(model)
    if DEVICE.type == "cuda":
        prepare_model(model)  # joins the weights again, and keeps the last joined ones
        layers = model.cuda_layers
    attention = model.model.layers[0].self_attn
    joined = layers._layers[0].qkv[0].untyped_storage().data_ptr()
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert projection.weight.untyped_storage().data_ptr() == joined


@pytest.mark.usefixtures("whole_keys")
def test_layers_that_compute_something_else_are_not_believed(caplog):
    model = tiny_model("llama", num_hidden_layers=1).to(DEVICE)
    gate = CudaLayers._gated

    def doubled(self, gate_up):
        return 2 * gate(self, gate_up)

    with mock.patch.object(CudaLayers, "_gated", doubled):
        model = pretend_cuda_check(model)
    assert model.cuda_layers is None
    assert "gives other logits" in caplog.text


@pytest.mark.usefixtures("whole_keys")
def test_layers_that_compute_the_same_are_used():
    model = pretend_cuda_check(tiny_model("llama", num_hidden_layers=1).to(DEVICE))
    assert isinstance(model.cuda_layers, CudaLayers)
    assert ModelRunner(model, KVCache(2), DEVICE, "triton").buffered._layers is model.cuda_layers


def pretend_cuda_check(model):
    """The check of a model on CUDA, by interpreted kernels where there is no CUDA."""
    from laserbatch.pipeline.decoding.model import checks

    probes = [checks.Probe.of(0, 96)]
    model.set_attn_implementation("eager")
    plain = checks.plain_logits(model, probes, DEVICE)
    model.set_attn_implementation(checks.ATTENTION_NAME)
    checks._add_cuda_layers(model, partial(checks._compare, model, DEVICE, probes, plain, 1e-3, "triton"))
    return model


def test_a_step_is_captured_anew_when_the_rotary_tables_have_grown():
    layers = CudaLayers.of(tiny_model("gemma3_text", max_position_embeddings=20_000).to(DEVICE))
    layers.cover(3)
    before = [(table.data_ptr(), table.clone()) for table in layers.static_tensors]
    assert len(before) == 4  # two kinds of layers
    layers.cover(4095)
    assert [table.data_ptr() for table in layers.static_tensors] == [address for address, _ in before]
    held = layers.static_tensors
    layers.cover(4096)
    for (address, table), grown in zip(before, layers.static_tensors, strict=True):
        assert grown.data_ptr() != address
        torch.testing.assert_close(grown[: len(table)], table)
    assert held


class CountsOperations(TorchDispatchMode):
    """Counts torch operations that launch something on a device; views and empty tensors do not."""

    VIEWS = ("view", "_unsafe_view", "transpose", "t", "slice", "select", "expand", "detach", "empty", "new_empty",
             "empty_like", "split", "as_strided", "unsqueeze", "squeeze", "permute", "alias")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._opname not in self.VIEWS
        return function(*args, **(kwargs or {}))


class CountsLaunches:
    """Replaces a kernel and counts its launches; computes nothing."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid):
        def launch(*arguments, **options) -> None:
            self.count += 1

        return launch


@pytest.mark.parametrize(("name", "most"), [("llama", 325), ("qwen3", 325), ("gemma3_text", 327)])
def test_launches_of_a_step_of_32_layers(name, most, monkeypatch):
    model = tiny_model(name, num_hidden_layers=32, layer_types=None).to(DEVICE)
    layers = CudaLayers.of(model)
    prepare_model(model)
    counters = [CountsLaunches() for _ in range(5)]
    from laserbatch.pipeline.decoding.attention import triton_attention as launcher

    places = [(layer_kernels, "rms_norm"), (layer_kernels, "rotate_and_store"), (layer_kernels, "gate"),
              (launcher, "attend"), (launcher, "combine")]  # fmt: skip
    for (module, kernel), counter in zip(places, counters, strict=True):
        monkeypatch.setattr(module, kernel, counter)
    runner = runner_with(model, layers)
    runner.buffered._checked = AllKinds()
    prompt = np.arange(90, dtype=np.int32) % 90
    row = runner.cache.acquire(prompt, 600).row
    for _ in range(4):  # until its keys have more than one part
        batch = runner.forward([Feed(row, prompt)]).batch
        runner.cache.commit([row], batch.sizes, batch.slot_mapping)
    for counter in counters:
        counter.count = 0
    operations = CountsOperations()
    forward = runner.buffered._forward

    def counted(buffers, shape):
        with operations:
            return forward(buffers, shape)

    runner.buffered._forward = counted
    runner.forward([Feed(row, prompt[:1])])
    assert runner.buffered is not None
    assert counters[-1].count == 32, "keys were not cut into parts"
    num_launches = operations.count + sum(counter.count for counter in counters)
    assert 32 * 9 < num_launches <= most


class AllKinds(set):
    def __contains__(self, kind) -> bool:
        return True
