"""A fused model against transformers' own layers, on any batch of prompts, trees and single tokens."""

import copy
from unittest import mock

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, perturb_constants, tiny_model

from laserbatch.pipeline.decoding.attention.interface import ATTENTION_NAME, relative_error
from laserbatch.pipeline.decoding.batch import Feed
from laserbatch.pipeline.decoding.drafters import drafter_from
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.model import fused_model
from laserbatch.pipeline.decoding.model.fused_model import FusedModel
from laserbatch.pipeline.decoding.model.load import prepare_model
from laserbatch.pipeline.decoding.model.runner import ModelRunner
from laserbatch.pipeline.decoding.sequence import GenerationRequest
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.decoding.token_tree import TokenTree, TreeBatch
from laserbatch.pipeline.processor import multiplies_bfloat16

CPU = torch.device("cpu")
WIDE = "gemma3_text", {"head_dim": 32}  # where the processor has AMX, it computes the attention of such heads
PARENTS = np.array([-1, 0, 0, 2, -1], np.int32)


def forwards(model, fused) -> tuple[list[torch.Tensor], KVCache]:
    """Logits of prompts (padded to a compiled size) and of trees below them, and the cache after both."""
    rng = np.random.default_rng(0)
    cache = KVCache(3)
    runner = ModelRunner(model, cache, CPU)
    runner.fused = fused
    prompts = [rng.integers(0, VOCAB, size).astype(np.int32) for size in (70, 25, 4)]
    rows = np.array([cache.acquire(prompt, 100).row for prompt in prompts])
    first = runner.forward([Feed(row, prompt[:-1]) for row, prompt in zip(rows, prompts, strict=True)])
    cache.commit(rows, first.batch.sizes, first.batch.slot_mapping)
    logits = [first.logits]
    drafted = rng.integers(0, VOCAB, len(PARENTS)).astype(np.int32)
    tree = TokenTree(drafted, PARENTS, np.zeros(len(PARENTS), np.float32), np.zeros(len(PARENTS), np.uint8))
    feeds = [Feed(row, prompt[-1:]) for row, prompt in zip(rows, prompts, strict=True)]
    for trees in (TreeBatch.of([tree]).scatter([1], 3), TreeBatch.empty(3)):
        logits.append(runner.forward(feeds, trees).logits)
    return logits, cache


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("llama", {}), ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
     ("mistral", {}), ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
     ("qwen3", {"num_key_value_heads": 1}), ("gemma3_text", {"hidden_activation": "gelu_pytorch_tanh"})],
)  # fmt: skip
def test_it_computes_what_transformers_does(architecture, changes):
    model = tiny_model(architecture, **changes)
    perturb_constants(model)
    model = prepare_model(model).model
    assert isinstance(model.fused, FusedModel)
    actual, cache = forwards(model, model.fused)
    expected, own_cache = forwards(model, None)
    for logits, other in zip(actual, expected, strict=True):
        assert relative_error(logits, other) < 1e-5
    for number, memory in own_cache.layers.items():
        assert relative_error(cache.layers[number].keys, memory.keys) < 1e-5
        assert relative_error(cache.layers[number].values, memory.values) < 1e-5


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
def test_threads_divide_tokens_and_not_sums(architecture, monkeypatch):
    model = prepare_model(tiny_model(architecture)).model
    by_one, _ = forwards(model, model.fused)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(fused_model, "num_threads", lambda: 3)
    monkeypatch.setattr(fused_model, "MIN_TOKENS_PER_THREAD", 5)
    assert fused_model._num_parts(np.empty((99, 1))) == 2
    by_two, _ = forwards(model, model.fused)
    assert all(torch.equal(one, two) for one, two in zip(by_one, by_two, strict=True))


@pytest.mark.skipif(not multiplies_bfloat16(), reason="this processor does not multiply bfloat16")
@pytest.mark.parametrize(("architecture", "changes"), [("llama", {}), ("qwen3", {}), ("gemma3_text", {}), WIDE])
def test_in_bfloat16_its_error_is_no_larger_than_that_of_transformers(architecture, changes):
    """Both errors are against transformers' own layers in float32, with the same rounded weights."""
    rounded = tiny_model(architecture, **changes).bfloat16()
    exact = prepare_model(copy.deepcopy(rounded).float()).model
    plain, model = copy.deepcopy(rounded), prepare_model(rounded).model
    assert isinstance(model.fused, FusedModel)
    plain.set_attn_implementation(ATTENTION_NAME)
    expected, own, reference = forwards(exact, None)[0], forwards(model, model.fused)[0], forwards(plain, None)[0]
    errors = [
        [relative_error(actual, exact) for actual, exact in zip(logits, expected, strict=True)]
        for logits in (own, reference)
    ]
    assert np.mean(errors[0]) <= 1.05 * np.mean(errors[1])


@pytest.mark.parametrize(
    ("architecture", "changes", "dtype"),
    [(name, {}, dtype) for name in ("llama", "gemma3_text", "mistral") for dtype in (torch.float32, torch.bfloat16)]
    + [(*WIDE, torch.bfloat16)],
)
def test_texts_are_the_same_at_any_batch_size_drafted_or_not(architecture, changes, dtype):
    if dtype == torch.bfloat16 and not multiplies_bfloat16():
        pytest.skip("this processor does not multiply bfloat16")
    loaded = prepare_model(tiny_model(architecture, **changes).to(dtype))
    assert loaded.model.fused is not None
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, int(size)).astype(np.int32) for size in rng.integers(4, 80, 20)]
    requests = [GenerationRequest(str(n), prompt, max_new_tokens=20) for n, prompt in enumerate(prompts)]
    texts = []
    for batch_size, num_drafts in ((1, 0), (16, 0), (16, 9), (7, 3)):
        settings = DecodingSettings(
            batch_size=batch_size, verifier="greedy", drafters=("prompt", "output"), max_draft_tokens=num_drafts
        )
        engine, budget = Engine(loaded, settings), Budget(num_drafts, 0.0)
        drafter = drafter_from(settings, None, budget) if num_drafts else None
        order = [requests[n] for n in rng.permutation(len(requests))]
        results = {result.request_id: result for result in engine.generate(order, drafter, None, budget)}
        texts.append([results[request.request_id].token_ids.tolist() for request in requests])
    assert all(written == texts[0] for written in texts)


@pytest.mark.parametrize("architecture", ["gemma2", "phi3", "qwen3_moe"])
def test_other_models_stay_as_they_are(architecture):
    assert prepare_model(tiny_model(architecture)).model.fused is None


def test_one_with_another_gate_stays_as_it_is():
    assert prepare_model(tiny_model("llama", hidden_act="gelu")).model.fused is None


def test_one_that_computes_something_else_is_not_believed(caplog):
    def scaled(self, hidden):
        return 2 * self._output_layer(hidden)

    with mock.patch.object(FusedModel, "logits_of", scaled):
        model = prepare_model(tiny_model("llama")).model
    assert model.fused is None
    assert "gives other logits" in caplog.text


def test_positions_beyond_those_seen_are_rotated_alike():
    fused = prepare_model(tiny_model("llama", max_position_embeddings=8192)).model.fused
    fused._rotary.cover(3)
    before, _ = fused._rotary.tables[None]
    fused._rotary.cover(5000)
    cosines, _ = fused._rotary.tables[None]
    assert len(cosines) > 5000
    torch.testing.assert_close(cosines[: len(before)], before, rtol=0, atol=0)
