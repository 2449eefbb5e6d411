import itertools
import json
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest

import numpy as np
import pytest
import torch
from tiny_models import (
    END_IDS,
    VOCAB,
    NonsenseDrafter,
    OracleDrafter,
    PromptLookupDrafter,
    byte_tokenizer,
    plain_texts,
    requests_for,
    tiny_engine,
    tiny_model,
    tiny_prompts,
)

from laserbatch.pipeline.decoding.device_memory import DeviceLost
from laserbatch.pipeline.decoding.drafters import Drafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.sequence import GenerationFailure, GenerationRequest, GenerationResult
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.token_tree import TokenTree
from laserbatch.pipeline.decoding.verifiers import Greedy
from laserbatch.pipeline.storage.stats import DecodingStats

MODEL = tiny_model()
PROMPTS = tiny_prompts()


def by_id(results) -> dict:
    return {r.request_id: r for r in results}


def fed_tokens(engine: Engine) -> list[int]:
    """The list to which each later forward of the engine appends the number of tokens that it computes."""
    counts = []
    forward = engine.runner.forward

    def counted(feeds, trees):
        counts.append(len(trees) + sum(len(feed.chain_ids) for feed in feeds))
        return forward(feeds, trees)

    engine.runner.forward = counted
    return counts


def test_defaults_decode_plainly():
    result = next(tiny_engine(MODEL).generate([GenerationRequest("only", PROMPTS[0])]))
    assert isinstance(result, GenerationResult) and result.num_drafted == 0
    assert result.num_steps == len(result.token_ids) + (result.finish_reason == "end_of_text")


def test_shared_prefix_is_computed_once():
    template = np.arange(20, 60, dtype=np.int32)
    prompts = [np.concatenate((template, [60 + i])).astype(np.int32) for i in range(6)]
    engine = tiny_engine(MODEL, batch_size=6, max_prefill_tokens=16)  # one computes the prefix in parts
    counts = fed_tokens(engine)
    results = list(engine.generate(requests_for(prompts, 1)))
    assert sum(counts) == 40 + 6
    stats = DecodingStats.of(results, 1.0)
    assert (stats.num_prompt_tokens, stats.num_prompt_reused) == (6 * 41, 5 * 40)
    list(engine.generate(requests_for(prompts, 1)))
    assert sum(counts) <= 40 + 6 + 6 + 6  # a later stream finds the cached prefix


def test_requests_are_pulled_as_rows_come_free():
    pulled = []

    def stream():
        for request in requests_for(PROMPTS, 3):
            pulled.append(request.request_id)
            yield request

    results = tiny_engine(MODEL, batch_size=2).generate(stream())
    next(results)
    assert len(pulled) <= 4
    assert len(list(results)) == len(PROMPTS) - 1


def test_bad_requests_fail_and_the_others_go_on():
    good = requests_for(PROMPTS, 5)
    long = np.full(128, 20, np.int32)
    bad = [
        GenerationRequest("long", long, None, None, 5),
        GenerationRequest("token", np.array([3, VOCAB], np.int32), None, None, 5),
        GenerationRequest("negative", np.array([-1], np.int32), None, None, 5),
        GenerationRequest("empty", np.empty(0, np.int32), None, None, 5),
        GenerationRequest("nothing", PROMPTS[0], None, None, 0),
    ]
    results = by_id(tiny_engine(MODEL, batch_size=2).generate([*good[:3], *bad, *good[3:]]))
    failures = {name: r.reason.split(":")[0] for name, r in results.items() if isinstance(r, GenerationFailure)}
    assert failures == {
        "long": "too-long", "token": "bad-token", "negative": "bad-token", "empty": "empty", "nothing": "bad-limit",
    }  # fmt: skip
    assert len(results) == len(good) + len(bad)


def test_context_bounds_the_text():
    prompt = np.full(120, 20, np.int32)
    results = by_id(tiny_engine(MODEL).generate([GenerationRequest("a", prompt, None, None, 500)], NonsenseDrafter()))
    assert len(results["a"].token_ids) == 8 or results["a"].finish_reason == "end_of_text"
    last = np.full(127, 20, np.int32)
    assert len(next(tiny_engine(MODEL).generate([GenerationRequest("b", last)])).token_ids) <= 1


def test_prompt_that_exceeds_the_cache_fails_alone():
    engine = tiny_engine(MODEL, max_cache_tokens=64, max_draft_tokens=4)
    requests = [GenerationRequest("a", PROMPTS[0], None, None, 60), *requests_for(PROMPTS[:3], 5)]
    results = by_id(engine.generate(requests))
    assert results["a"].reason.startswith("too-long") and len(results) == 4
    engine = tiny_engine(MODEL, max_cache_tokens=160)  # room for the context of 128, and so for any limit
    assert all(r.token_ids.size for r in engine.generate([GenerationRequest("b", PROMPTS[0], None, None, 500)]))


@contextmanager
def breaks_where(model, token: int):
    """Have a model raise an error if its input contains `token`."""

    def refuse(module, arguments):
        if (arguments[0] == token).any():
            raise RuntimeError("out of memory, say")

    hook = model.get_input_embeddings().register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("drafter", [None, PromptLookupDrafter()])
def test_a_sequence_that_breaks_the_model_fails_alone(drafter):
    texts = plain_texts(MODEL, PROMPTS, 12)
    poison = min(set(range(VOCAB)) - {int(token) for text in [*PROMPTS, *texts] for token in text} - set(END_IDS))
    engine = tiny_engine(MODEL, batch_size=4)
    requests = requests_for(PROMPTS, 12)
    requests.insert(2, GenerationRequest("poisoned", np.array([25, poison, 30], np.int32), None, None, 12))
    with breaks_where(engine.runner.model, poison):
        results = by_id(engine.generate(requests, drafter, Greedy()))
    failure = results.pop("poisoned")
    assert failure.reason == "model-error: RuntimeError: out of memory, say"
    assert {int(i): r.token_ids.tolist() for i, r in results.items()} == dict(enumerate(texts))
    assert engine.cache.num_live_rows == 0


def test_what_the_caller_does_between_texts_is_no_part_of_a_step(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr("laserbatch.pipeline.decoding.engine.time.perf_counter", lambda: now_s[0])
    engine = tiny_engine(MODEL, batch_size=2)
    forward = engine.runner.forward

    def clocked(*step):
        now_s[0] += 3.0
        return forward(*step)

    engine.runner.forward = clocked
    for _ in engine.generate(requests_for(PROMPTS, 5)):
        now_s[0] += 100.0
    assert engine.costliest_step_s == 3.0


@pytest.mark.parametrize("num_good", [1, 6])
def test_a_lost_device_ends_the_stream_and_fails_no_text(num_good):
    """Every later call fails too, so no text may be retried alone."""
    engine = tiny_engine(MODEL, batch_size=4)
    forward, num_forwards = engine.runner.forward, itertools.count(1)

    def broken(*step):
        if next(num_forwards) > num_good:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return forward(*step)

    engine.runner.forward = broken
    results = []
    with pytest.raises(DeviceLost, match="illegal memory access"):
        results.extend(engine.generate(requests_for(PROMPTS, 12), PromptLookupDrafter(), Greedy()))
    assert next(num_forwards) == num_good + 2, "a forward was tried again"
    assert not any(isinstance(result, GenerationFailure) for result in results)
    assert engine.cache.num_live_rows == 0


def test_a_drafter_that_loses_the_device_ends_the_stream():
    class Broken(Drafter):
        def draft_all(self, sequences, max_depths):
            raise torch.AcceleratorError("CUDA error: misaligned address")

    with pytest.raises(DeviceLost, match="misaligned address"):
        list(tiny_engine(MODEL, batch_size=4).generate(requests_for(PROMPTS, 12), Broken()))


def test_a_device_that_is_lost_while_texts_are_tried_alone_ends_the_stream():
    engine = tiny_engine(MODEL, batch_size=4)
    errors = iter([RuntimeError("shapes differ"), torch.AcceleratorError("CUDA error: unspecified launch failure")])

    def broken(*step):
        raise next(errors)

    engine.runner.forward = broken
    with pytest.raises(DeviceLost, match="unspecified launch failure"):
        list(engine.generate(requests_for(PROMPTS, 12)))


def test_logits_that_are_not_finite_fail_alone():
    engine = tiny_engine(MODEL, batch_size=3)
    embeddings = engine.runner.model.get_input_embeddings()
    with torch.no_grad():
        embeddings.weight[1] = float("nan")
    requests = requests_for(PROMPTS, 6)
    requests.insert(1, GenerationRequest("poisoned", np.array([25, 1], np.int32), None, None, 6))
    results = by_id(engine.generate(requests))
    assert results.pop("poisoned").reason.startswith("not-finite")
    assert [results[str(i)].token_ids.tolist() for i in range(len(PROMPTS))] == plain_texts(MODEL, PROMPTS, 6)


def test_what_was_not_finite_does_not_reach_the_next_text_of_its_row():
    engine = tiny_engine(MODEL, batch_size=1)
    with torch.no_grad():
        engine.runner.model.get_input_embeddings().weight[1] = float("nan")
    poisoned = GenerationRequest("poisoned", np.array([25, 30, 31, 32, 33, 34, 1, 1, 1, 1], np.int32))
    short = [np.array([40, 41], np.int32)]
    first, second = engine.generate([poisoned, *requests_for(short, 6)])
    assert first.reason.startswith("not-finite") and second.token_ids.tolist() == plain_texts(MODEL, short, 6)[0]


def test_a_part_of_a_prompt_that_is_not_finite_is_not_shared():
    """Attention to a masked NaN is NaN, so tokens before it in the same part are spoiled too."""
    engine = tiny_engine(MODEL, batch_size=3, max_prefill_tokens=16)
    with torch.no_grad():
        engine.runner.model.get_input_embeddings().weight[1] = float("nan")
    template = np.arange(20, 50, dtype=np.int32)
    prompts = [np.append(template, [61 + number, 70]).astype(np.int32) for number in range(6)]
    poisoned = GenerationRequest("poisoned", np.concatenate((template, [1], template)).astype(np.int32))
    results = by_id(engine.generate([poisoned, *requests_for(prompts, 6)]))
    assert results.pop("poisoned").reason.startswith("not-finite")
    assert [results[str(i)].token_ids.tolist() for i in range(len(prompts))] == plain_texts(MODEL, prompts, 6)


class PoisonDrafter(Drafter):
    """Drafts a token that no model chooses: beside a guess, and as the parent of another guess."""

    def draft(self, sequence) -> TokenTree:
        guess = int(sequence.context[-1])
        tokens, parents = np.array([1, guess, guess], np.int32), np.array([-1, -1, 0], np.int32)
        return TokenTree(tokens, parents, np.zeros(3, np.float32), np.zeros(3, np.uint8))


def test_a_draft_that_is_not_finite_does_not_fail_its_text():
    engine = tiny_engine(MODEL, batch_size=3)
    with torch.no_grad():
        engine.runner.model.get_input_embeddings().weight[1] = float("nan")
    results = by_id(engine.generate(requests_for(PROMPTS, 6), PoisonDrafter(), Greedy()))
    assert [results[str(i)].token_ids.tolist() for i in range(len(PROMPTS))] == plain_texts(MODEL, PROMPTS, 6)


def test_stream_closed_early_gives_its_rows_back():
    engine = tiny_engine(MODEL, batch_size=3)
    results = engine.generate(requests_for(PROMPTS, 6))
    next(results)
    results.close()
    assert engine.cache.num_live_rows == engine.cache.num_committed_slots == 0
    assert len(list(engine.generate(requests_for(PROMPTS, 6)))) == len(PROMPTS)


def test_streams_of_one_engine_may_take_turns():
    """A stream is asked for its next text while another stream is between its forward and its verification."""
    expected = plain_texts(MODEL, PROMPTS, 9)
    engine = tiny_engine(MODEL, batch_size=len(PROMPTS))
    engine.concurrency.current = 2
    requests = [  # texts of different lengths
        replace(request, max_new_tokens=3 + 2 * (number % 4)) for number, request in enumerate(requests_for(PROMPTS, 9))
    ]
    streams = [engine.generate(requests[part::2], OracleDrafter(expected), Greedy()) for part in (0, 1)]
    results = [result for pair in zip_longest(*streams) for result in pair if result is not None]
    assert len(results) == len(PROMPTS)
    for result in results:
        number = int(result.request_id)
        assert result.token_ids.tolist() == expected[number][: 3 + 2 * (number % 4)]


def test_draft_limits_hold():
    texts = plain_texts(MODEL, PROMPTS, 12)
    engine = tiny_engine(MODEL, max_draft_tokens=3)
    for result in engine.generate(requests_for(PROMPTS, 12), OracleDrafter(texts), Greedy()):
        assert result.num_drafted <= 3 * result.num_steps
    engine = tiny_engine(MODEL, min_acceptance=0.9)
    for result in engine.generate(requests_for(PROMPTS, 12), NonsenseDrafter(), Greedy()):
        assert result.num_drafted <= result.num_steps * 2


def test_every_end_token_ends_a_text():
    prompts = tiny_prompts(12)
    texts = plain_texts(MODEL, prompts, 24)
    engine = tiny_engine(MODEL)
    results = by_id(engine.generate(requests_for(prompts, 24)))
    assert engine.end_ids == tuple(END_IDS)
    ended = [i for i in range(len(prompts)) if len(texts[i]) < 24]
    assert len(ended) > 2 and all(results[str(i)].finish_reason == "end_of_text" for i in ended)


def test_a_text_is_what_its_tokens_decode_to():
    model = tiny_model(vocab_size=257, eos_token_id=256, seed=3)
    model.generation_config.eos_token_id = 256
    tokenizer = byte_tokenizer()
    for result in tiny_engine(model, tokenizer).generate(requests_for(PROMPTS, 20)):
        assert result.text == tokenizer.decode(result.token_ids.tolist(), skip_special_tokens=True)


def test_settings_are_plain_data():
    settings = DecodingSettings()
    assert DecodingSettings(**json.loads(settings.model_dump_json())) == settings
    with pytest.raises(ValueError, match="batchsize"):
        DecodingSettings(batchsize=3)
