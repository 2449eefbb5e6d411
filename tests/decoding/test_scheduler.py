"""Memory that runs out and long prompts: no text changes or is lost, and none waits longer than necessary."""

from functools import cache

import numpy as np
import pytest
import torch
from tiny_models import (
    NonsenseDrafter,
    OracleDrafter,
    plain_texts,
    requests_for,
    tiny_engine,
    tiny_model,
    tiny_prompts,
)

from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.scheduler import Concurrency, RequestLimits, Scheduler
from laserbatch.pipeline.decoding.sequence import DecodingSequence, GenerationFailure, GenerationRequest
from laserbatch.pipeline.decoding.verifiers import Greedy, Relaxed

MODEL = tiny_model()
PROMPTS = tiny_prompts(12)
MAX_NEW = 24


@cache
def expected() -> list[list[int]]:
    return plain_texts(MODEL, PROMPTS, MAX_NEW)


def oracle() -> OracleDrafter:
    return OracleDrafter(expected())


def texts_of(results) -> dict[int, list[int]]:
    return {int(r.request_id): r.token_ids.tolist() for r in results}


def optimist(engine):
    """Have an engine expect texts of one token, so that it admits more sequences than its memory holds."""
    engine.concurrency.expected_output = lambda sequence: 1
    return engine


def preemptions(engine) -> list[int]:
    """The list to which each preemption appends the number of sequences that stay."""
    seen = []
    lower = engine.concurrency.lower

    def counted(num_live):
        seen.append(num_live)
        lower(num_live)

    engine.concurrency.lower = counted
    return seen


def feeds_of(engine) -> list[list[tuple[int, int]]]:
    """The list to which each later forward appends the (row, number of tokens) of its feeds."""
    steps = []
    forward = engine.runner.forward

    def watched(feeds, trees):
        fed = zip(feeds, trees.sizes.tolist(), strict=True)
        steps.append([(feed.row, len(feed.chain_ids) + size) for feed, size in fed])
        return forward(feeds, trees)

    engine.runner.forward = watched
    return steps


@pytest.mark.parametrize(
    ("max_tokens", "drafter_of"),
    [(76, lambda: None), (76, oracle), (76, NonsenseDrafter), (110, NonsenseDrafter)],
)
def test_preempted_texts_are_unchanged(max_tokens, drafter_of, caplog):
    rng = np.random.default_rng(max_tokens)
    seen = []
    for batch_size in (2, 12):
        settings = {"max_cache_tokens": max_tokens, "max_prefill_tokens": 7}
        engine = optimist(tiny_engine(MODEL, batch_size=batch_size, max_draft_tokens=8, **settings))
        seen.append(preemptions(engine))
        requests = requests_for(PROMPTS, MAX_NEW)
        rng.shuffle(requests)  # any order of admission
        assert texts_of(engine.generate(requests, drafter_of(), Greedy())) == dict(enumerate(expected()))
        assert engine.cache.num_live_rows == engine.cache.num_committed_slots == 0
        assert engine.cache.capacity <= max_tokens
    assert any(seen) and "are written at once" in caplog.text


def test_relaxed_texts_are_unchanged_by_preemption():
    """Relaxed texts depend on drafts, so a preempted text must get the same drafts at the same tokens."""
    model = tiny_model(initializer_range=0.12)
    texts = []
    for settings in ({"batch_size": 1}, {"batch_size": 8, "max_cache_tokens": 120}):
        engine = optimist(tiny_engine(model, max_draft_tokens=16, max_prefill_tokens=9, **settings))
        seen = preemptions(engine)
        results = list(engine.generate(requests_for(PROMPTS, MAX_NEW), NonsenseDrafter(40), Relaxed(20, 0.01)))
        texts.append({r.request_id: (r.token_ids.tolist(), r.num_steps, r.num_drafted) for r in results})
    assert seen and texts[0] == texts[1]


def test_the_youngest_are_preempted_and_come_back_first():
    cache, concurrency = KVCache(4), Concurrency(4)
    prompts = [np.array([20 + i, 30], np.int32) for i in range(8)]
    scheduler = Scheduler(requests_for(prompts, 5), cache, concurrency, RequestLimits(128, 96, 4))
    assert list(scheduler.admit()) == [] and len(scheduler.live) == 4
    scheduler.finish(scheduler.live[0])
    assert list(scheduler.admit()) == []  # the fifth request is the youngest now, and has the lowest row
    scheduler.live[-1].append([], [], 50)  # the fourth has written a token
    names = [s.request.request_id for s in scheduler.preempt(2)]
    assert names == ["3", "4"] and [s.request.request_id for s in scheduler.live] == ["1", "2"]
    assert list(scheduler.admit()) == [] and len(scheduler.live) == 2  # not more sequences than the memory held
    scheduler.finish(scheduler.live[0])
    assert list(scheduler.admit()) == []
    assert sorted(s.request.request_id for s in scheduler.live) == ["2", "3"]
    back = next(s for s in scheduler.live if s.request.request_id == "3")
    assert back.output_ids.tolist() == [50]
    scheduler.close()
    assert cache.num_live_rows == 0


def test_concurrency_recovers_as_texts_end():
    concurrency = Concurrency(8)
    concurrency.lower(3)
    assert concurrency.current == 3
    for _ in range(3):
        concurrency.record_finished(10)
    assert concurrency.current == 4
    for _ in range(100):
        concurrency.record_finished(10)
    assert concurrency.current == 8
    concurrency.lower(0)
    assert concurrency.current == 1


def test_texts_of_a_warm_up_do_not_say_how_long_those_after_it_are():
    engine = tiny_engine(MODEL)
    list(engine.generate(requests_for(PROMPTS[:2], 3)))
    (request,) = requests_for(PROMPTS[:1], MAX_NEW)
    assert engine.concurrency.expected_output(DecodingSequence(request, MAX_NEW)) == 3
    engine.reset_prefix_cache()
    assert engine.concurrency.expected_output(DecodingSequence(request, MAX_NEW)) == MAX_NEW


def test_a_forward_that_runs_out_of_memory_is_done_by_fewer(caplog):
    def refuse_many(module, arguments):
        if arguments[0].shape[1] > 20:
            raise torch.OutOfMemoryError("CUDA out of memory, say")

    engine = tiny_engine(MODEL, batch_size=8, max_prefill_tokens=12, max_draft_tokens=4)
    engine.runner.model.get_input_embeddings().register_forward_pre_hook(refuse_many)
    texts = texts_of(engine.generate(requests_for(PROMPTS, MAX_NEW), oracle(), Greedy()))
    assert texts == dict(enumerate(expected()))
    assert caplog.text.count("are written at once") == 1


def test_preempted_texts_give_memory_back_to_the_forwards_of_the_others(monkeypatch):
    """Forwards of four texts fail until the cache is smaller; no text is lost, and the bound stays lower."""
    monkeypatch.setattr("laserbatch.pipeline.decoding.kv_cache.GROWTH_STEP", 16)
    engine = tiny_engine(MODEL, batch_size=4, max_cache_tokens=240, max_draft_tokens=4)
    held_tokens = []

    def need_memory(module, arguments):
        held_tokens.append(max((memory.keys.shape[1] for memory in engine.cache.layers.values()), default=0))
        if held_tokens[-1] > 185:
            raise torch.OutOfMemoryError("CUDA out of memory, say")

    engine.runner.model.get_input_embeddings().register_forward_pre_hook(need_memory)
    texts = texts_of(engine.generate(requests_for(PROMPTS, MAX_NEW), oracle(), Greedy()))
    assert texts == dict(enumerate(expected()))
    failed = [at for at, held in enumerate(held_tokens) if held > 185]
    assert failed and all(held_tokens[at + 1] <= 185 for at in failed)
    assert engine.cache.max_tokens <= 180


def refuse_large_tensors(monkeypatch, most_bytes: int) -> list[tuple]:
    """Have caches fail to allocate larger tensors; returns the list to which each failure appends a size."""
    zeros = torch.Tensor.new_zeros
    refused = []

    def new_zeros(self, *size, **kwargs):
        tensor = zeros(self, *size, **kwargs)
        if tensor.dim() > 2 and tensor.numel() * 4 > most_bytes:
            refused.append(tuple(size))
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate some bytes")
        return tensor

    monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros)
    return refused


def test_memory_that_cannot_be_had_lowers_concurrency(monkeypatch, caplog):
    engine = optimist(tiny_engine(MODEL, batch_size=8, max_prefill_tokens=16, max_draft_tokens=0))
    monkeypatch.setattr("laserbatch.pipeline.decoding.kv_cache.GROWTH_STEP", 16)
    failed = refuse_large_tensors(monkeypatch, 8_000)
    assert texts_of(engine.generate(requests_for(PROMPTS, MAX_NEW))) == dict(enumerate(expected()))
    assert failed and engine.cache.max_tokens <= 4 * 256
    assert "there is no memory for a KV cache" in caplog.text


def test_a_first_forward_that_memory_is_too_small_for_is_done_by_fewer(monkeypatch):
    engine = tiny_engine(MODEL, batch_size=8, max_draft_tokens=0)
    monkeypatch.setattr("laserbatch.pipeline.decoding.kv_cache.GROWTH_STEP", 16)
    failed = refuse_large_tensors(monkeypatch, 48 * 64)
    prompts = [np.full(12, 20 + i, np.int32) for i in range(8)]  # without a shared prefix for which one would wait
    assert texts_of(engine.generate(requests_for(prompts, 6))) == dict(enumerate(plain_texts(MODEL, prompts, 6)))
    assert failed and failed[0][1] >= 96 and engine.cache.num_live_rows == 0


def test_a_text_for_which_memory_cannot_be_had_fails_alone(monkeypatch):
    engine = tiny_engine(MODEL, batch_size=2, max_draft_tokens=0)
    monkeypatch.setattr("laserbatch.pipeline.decoding.kv_cache.GROWTH_STEP", 16)
    resize = KVCache._resize

    def small(self, capacity):
        if capacity > 64:
            raise MemoryError
        resize(self, capacity)

    monkeypatch.setattr(KVCache, "_resize", small)
    long = GenerationRequest("99", np.full(60, 20, np.int32), None, None, 30)
    results = list(engine.generate([*requests_for(PROMPTS[:2], MAX_NEW), long, *requests_for(PROMPTS, MAX_NEW)[2:4]]))
    failed = [r for r in results if isinstance(r, GenerationFailure)]
    assert [r.request_id for r in failed] == ["99"] and failed[0].reason.startswith("too-long")
    assert texts_of(r for r in results if r not in failed) == dict(enumerate(expected()[:4]))


def test_admission_goes_by_the_length_of_earlier_texts():
    engine = tiny_engine(MODEL, batch_size=12, max_cache_tokens=200, max_draft_tokens=0)
    steps = feeds_of(engine)
    prompts = [np.full(10, 20 + i, np.int32) for i in range(8)]
    previous = [np.full(3, 9, np.int32)] * 8
    list(engine.generate(requests_for(prompts, 90)))
    careful = max(len(step) for step in steps[:3])
    steps.clear()
    list(engine.generate(requests_for(prompts, 90, previous)))
    assert careful == 2 and max(len(step) for step in steps) == 8


def test_a_long_prompt_delays_no_one_by_more_than_its_part():
    """Every live text grows in each step while a long prompt is computed, one part a step."""
    part = 8
    short = [np.array([20 + i, 30, 40], np.int32) for i in range(3)]
    long = np.arange(100, dtype=np.int32) % 60 + 18
    engine = tiny_engine(MODEL, batch_size=4, max_prefill_tokens=part, max_draft_tokens=0)
    steps = feeds_of(engine)
    requests = [*requests_for(short, MAX_NEW), GenerationRequest("9", long, None, None, 4)]
    texts = texts_of(engine.generate(requests))
    assert texts[9] == plain_texts(MODEL, [long], 4)[0]
    assert [texts[i] for i in range(3)] == plain_texts(MODEL, short, MAX_NEW)
    parts = [step for step in steps if any(row == 3 and count > 1 for row, count in step)]
    assert len(parts) in (13, 14)  # 100 tokens in parts of 8; the first step shares its room
    lengths = [len(text) + (len(text) < MAX_NEW) for text in plain_texts(MODEL, short, MAX_NEW)]
    first = next(i for i, step in enumerate(steps) if len(step) == 4)
    for at, step in enumerate(steps[first:]):
        assert sum(count for _, count in step if count > 1) <= part
        others = sum(row < 3 for row, _ in step)
        assert others >= sum(length > first + at + 1 for length in lengths)


def test_prompts_share_a_step_the_oldest_first():
    """A later prompt in a lower row does not take the room of a prompt that is being computed."""
    prompts = [np.array([20], np.int32), np.arange(18, 78, dtype=np.int32), np.arange(78, 18, -1).astype(np.int32)]
    engine = tiny_engine(MODEL, batch_size=2, max_prefill_tokens=6, max_draft_tokens=0)
    order = [int(r.request_id) for r in engine.generate(requests_for(prompts, 3))]
    assert order == [0, 1, 2]
