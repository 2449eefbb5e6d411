"""The engine on a pretended CUDA device: where tensors are, when the host waits, and what is captured."""

import itertools
import logging
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from pretend_cuda import DEVICE, PretendError, move, pretend_cuda
from test_cuda_graphs import masked_attention
from tiny_models import NonsenseDrafter, OracleDrafter, plain_texts, requests_for, tiny_engine, tiny_model, tiny_prompts

from laserbatch.pipeline.budget import measuring
from laserbatch.pipeline.decoding import device_memory
from laserbatch.pipeline.decoding.device_memory import to_device
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.guided import GuidedLogits
from laserbatch.pipeline.decoding.model import runner
from laserbatch.pipeline.decoding.model.cuda_graphs import TOKEN_BUCKETS
from laserbatch.pipeline.decoding.model.load import prepare_model
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.pipeline.decoding.verifiers import Greedy, Relaxed

NUM_NEW = 8
NUM_PROMPTS = 5
KERNEL = mock.patch.object(
    runner, "kernel_for", lambda choice, device: None if choice == "torch" else lambda: masked_attention
)


def one_layer(architecture: str = "llama"):
    """A model with one layer: a second one would make the same requests of the device."""
    return tiny_model(architecture, num_hidden_layers=1)


def engine_on_device(model, max_prefill_tokens: int | None = None, **settings) -> Engine:
    """An engine whose model is on the pretended device."""
    settings = {"batch_size": 3, "max_cache_tokens": 4096} | settings
    engine = Engine(prepare_model(move(model)), DecodingSettings(**settings))
    engine.max_prefill_tokens = max_prefill_tokens or engine.max_prefill_tokens
    return engine


def watch_steps(engine: Engine, cuda) -> list[tuple[int, bool]]:
    """The list to which each later step appends how often the host waited in it, and whether it replayed a graph."""
    steps, submit_step, finish_step = [], engine.submit_step, engine.finish_step
    before = []

    def submitted(*arguments):
        before[:] = cuda.num_waits, cuda.num_replays
        return submit_step(*arguments)

    def finished(*arguments):
        outcomes = finish_step(*arguments)
        num_waits, num_replays = before
        steps.append((cuda.num_waits - num_waits, cuda.num_replays > num_replays))
        return outcomes

    engine.submit_step, engine.finish_step = submitted, finished
    return steps


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_step_waits_for_the_device_once_and_texts_are_plain_ones(architecture, caplog):
    """`masked_attention` replaces the kernel, which cannot run on pretended tensors."""
    model = tiny_model(architecture) if architecture == "gemma2" else one_layer(architecture)
    prompts = tiny_prompts(NUM_PROMPTS)
    expected = plain_texts(model, prompts, NUM_NEW)
    with pretend_cuda() as cuda, KERNEL, caplog.at_level(logging.WARNING):
        engine = engine_on_device(model)
        assert engine.runner.buffered is not None
        steps = watch_steps(engine, cuda)
        for _ in range(3):  # a bucket's first step is eager, its second one is captured
            results = engine.generate(requests_for(prompts, NUM_NEW), OracleDrafter(expected), Greedy())
            texts = {result.request_id: result.token_ids.tolist() for result in results}
            assert [texts[str(i)] for i in range(NUM_PROMPTS)] == expected
    assert not caplog.messages
    after_checks = steps[1:]  # the first compares the kernel with the slow attention
    assert {num_waits for num_waits, _ in after_checks} == {1}
    assert sum(is_replayed for _, is_replayed in after_checks) > 3


@pytest.mark.parametrize("verifier", [Relaxed(), Relaxed(3, 0.0), Relaxed(None, 0.2)])
def test_every_rule_judges_on_the_device(verifier):
    prompts = tiny_prompts(NUM_PROMPTS)
    drafter = OracleDrafter(plain_texts(one_layer(), prompts, NUM_NEW))

    def texts_of(engine: Engine) -> list[tuple[str, list[int]]]:
        results = engine.generate(requests_for(prompts, NUM_NEW), drafter, verifier)
        return sorted((result.request_id, result.token_ids.tolist()) for result in results)

    expected = texts_of(tiny_engine(one_layer(), batch_size=3))
    with pretend_cuda() as cuda, KERNEL:
        engine = engine_on_device(one_layer())
        steps = watch_steps(engine, cuda)
        assert texts_of(engine) == expected
    assert {num_waits for num_waits, _ in steps[1:]} == {1}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sampling_and_a_repetition_penalty_wait_no_more(temperature):
    model, prompts = one_layer(), tiny_prompts(NUM_PROMPTS)
    model.generation_config.repetition_penalty = 1.3
    settings = {"verifier": "greedy", "temperature": temperature}

    def texts_of(engine: Engine) -> list[tuple[str, list[int]]]:
        results = engine.generate(requests_for(prompts, NUM_NEW), NonsenseDrafter())
        return sorted((result.request_id, result.token_ids.tolist()) for result in results)

    expected = texts_of(tiny_engine(model, batch_size=3, **settings))
    with pretend_cuda() as cuda, KERNEL:
        engine = engine_on_device(model, **settings)
        steps = watch_steps(engine, cuda)
        assert texts_of(engine) == expected
    assert {num_waits for num_waits, _ in steps[1:]} == {1}


def test_what_a_grammar_forbids_is_masked_on_the_device_without_a_wait():
    rows, guide = mock.Mock(device=DEVICE, num_rows=3), mock.Mock()
    rows.of = lambda numbers: to_device(np.ones((len(numbers), 40), np.float32), DEVICE)
    guide.write_mask = lambda path, mask: np.copyto(mask, np.array([0x80000001, 0x2], np.uint32))
    with pretend_cuda() as cuda:
        logits = GuidedLogits(rows, [guide, None, guide], TreeBatch.empty(3)).of(np.arange(2))
        assert cuda.num_waits == 0
        is_allowed = logits.cpu().isfinite().numpy()
    assert np.flatnonzero(is_allowed[0]).tolist() == [0, 31, 33] and is_allowed[1].all()


def test_attention_without_a_kernel_waits_once_too():
    model, prompts = one_layer(), tiny_prompts(NUM_PROMPTS)
    drafted = plain_texts(model, prompts, NUM_NEW)
    with pretend_cuda() as cuda:
        engine = engine_on_device(model, attention="torch")
        steps = watch_steps(engine, cuda)
        assert len(list(engine.generate(requests_for(prompts, NUM_NEW), OracleDrafter(drafted)))) == NUM_PROMPTS
    assert set(steps) == {(1, False)}


def test_a_text_is_handed_over_while_the_device_computes_the_next_step():
    """Except for the last text, after which there is no step."""
    model, prompts = one_layer(), tiny_prompts(NUM_PROMPTS)
    with pretend_cuda() as cuda, KERNEL:
        engine = engine_on_device(model)
        submitted = []
        forward = engine.runner.forward
        engine.runner.forward = lambda *step: submitted.append(cuda.num_waits) or forward(*step)
        requests = [replace(request, max_new_tokens=2 + i) for i, request in enumerate(requests_for(prompts, NUM_NEW))]
        waits_since_launch = [cuda.num_waits - submitted[-1] for _ in engine.generate(requests)]
    assert len(waits_since_launch) == NUM_PROMPTS and waits_since_launch[-1] == 1
    assert set(waits_since_launch[:-1]) == {0}


def test_a_step_within_a_long_prompt_waits_once_too():
    """The results of such a step are shared only if they are finite, which costs no further wait."""
    model, prompts = one_layer(), [np.arange(20, 60, dtype=np.int32)]
    with pretend_cuda() as cuda, KERNEL:
        engine = engine_on_device(model, max_prefill_tokens=8)
        for _ in engine.generate(requests_for(prompts, 4)):
            pass
        steps = watch_steps(engine, cuda)
        assert [type(result).__name__ for result in engine.generate(requests_for([prompts[0][::-1]], 4))]
    assert [num_waits for num_waits, _ in steps] == [1] * 8


LONG_TEXTS = [np.arange(start, start + 9, dtype=np.int32) for start in (20, 40, 60)]


def endless_engine() -> Engine:
    """An engine for which no token ends a text before its limit."""
    engine = engine_on_device(one_layer())
    engine._is_end[:] = False
    return engine


def test_after_its_first_step_a_full_batch_has_the_cache_that_it_will_need():
    with pretend_cuda() as cuda, KERNEL:
        engine = endless_engine()
        steps = watch_steps(engine, cuda)
        results = list(engine.generate(requests_for(LONG_TEXTS, 40)))
        capacity = engine.cache.capacity
    assert [len(result.token_ids) for result in results] == [40] * 3
    assert capacity >= 3 * (9 + 40)
    assert [is_replayed for _, is_replayed in steps] == [False] * 2 + [True] * 38


def test_a_step_without_memory_drops_the_graphs_and_texts_go_on():
    with pretend_cuda(), KERNEL:
        engine = endless_engine()
        forward, shrink, num_forwards, graphs = engine.runner.forward, engine.cache.shrink, itertools.count(), []

        def failing_once(*step):
            if next(num_forwards) == 9:
                graphs.append({bucket.graph is None for bucket in engine.runner.buffered.buckets.values()})
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(*step)

        def shrunk(*arguments):
            graphs.append({bucket.graph is None for bucket in engine.runner.buffered.buckets.values()})
            shrink(*arguments)

        engine.runner.forward, engine.cache.shrink = failing_once, shrunk
        results = list(engine.generate(requests_for(LONG_TEXTS, 20)))
    assert [len(result.token_ids) for result in results] == [20] * 3
    assert False in graphs[0] and graphs[1:] == [{True}]


def test_the_cache_leaves_memory_to_drafters_and_to_steps(monkeypatch):
    memory = device_memory.Memory("cuda:0", 10**9, 2 * 10**9)
    monkeypatch.setattr(device_memory, "memory_of", lambda device: memory)
    settings = DecodingSettings(batch_size=3, max_draft_tokens=5)
    with pretend_cuda(), KERNEL:
        target, small = (prepare_model(move(one_layer())) for _ in range(2))
        engine = Engine(target, settings, drafter_bytes_per_token=small.bytes_per_token)
    config = target.model.config
    reserved = device_memory.step_bytes(config, 3 * 6, 3 * 6 + 2048, 8)  # 8 parts of 128 positions
    expected = int((10**9 - reserved) * 0.8) // (2 * target.bytes_per_token)
    assert engine.cache.max_tokens == expected


def test_drafts_take_several_threads_beside_a_device_and_one_beside_torchs(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert tiny_engine(one_layer()).num_draft_threads == 1
    with pretend_cuda(), KERNEL:
        assert engine_on_device(one_layer()).num_draft_threads == 4


def test_step_costs_are_timed_on_a_device(monkeypatch):
    monkeypatch.setattr(measuring, "MIN_ROUNDS", 1)
    monkeypatch.setattr(measuring, "SECONDS", 0.0)
    monkeypatch.setattr(measuring, "_ROUND", measuring._ROUND[:2])
    with pretend_cuda() as cuda, KERNEL:
        engine = engine_on_device(one_layer())
        cost = measuring.measure_step_cost(engine, None, (), (3,))
        assert cuda.num_replays > len(cost.steps) == 2
    assert [point.num_tokens for point in cost.steps] == [4, 8], "of 3 and 6 tokens, padded"
    assert cost.padded_to == TOKEN_BUCKETS
    assert cost.seconds(3, np.array([5]))[0] == cost.seconds(3, np.array([8]))[0]


def test_what_a_gpu_would_refuse_is_refused():
    with pretend_cuda() as cuda:
        here = torch.arange(3.0)
        there = to_device(here.numpy(), DEVICE)
        assert cuda.num_waits == 0
        assert (there + 1).cpu().tolist() == [1.0, 2.0, 3.0] and cuda.num_waits == 1
        for mixed in (lambda: there + here, lambda: there[torch.tensor([0])], lambda: torch.cat((here, there))):
            with pytest.raises(PretendError, match="both places"):
                mixed()
        graph = torch.cuda.CUDAGraph()
        for read in (there.sum().item, there.nonzero, there.cpu, lambda: to_device(here.numpy(), DEVICE)):
            with pytest.raises(PretendError, match="in a capture"), torch.cuda.graph(graph):
                read()
        assert there.to("cpu").tolist() == [0.0, 1.0, 2.0]


def test_pinned_memory_must_outlast_its_copy():
    with pretend_cuda():
        pinned = torch.zeros(4, pin_memory=True)
        there = torch.zeros(4, device="cuda")
        there.copy_(pinned, non_blocking=True)
        there.cpu()
        pinned.fill_(1.0)  # the host has waited for that copy
        there.copy_(pinned, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        pinned.fill_(2.0)
        with pytest.raises(PretendError, match="overwritten"):
            copied.synchronize()


def test_a_graph_computes_anew_what_its_inputs_hold_and_spoils_what_other_graphs_left():
    with pretend_cuda():
        inputs = torch.zeros(2, device="cuda")
        graphs, results = [], []
        for factor in (2.0, 3.0):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                results.append((inputs + 1) * factor)
        inputs.fill_(1.0)
        graphs[0].replay()
        assert results[0].cpu().tolist() == [4.0, 4.0]
        graphs[1].replay()
        assert results[1].cpu().tolist() == [6.0, 6.0]
        assert results[0].isnan().all().item()
