"""The keystone: for any drafts and any batch, greedy verification writes the texts of plain greedy decoding."""

import numpy as np
import pytest
from tiny_models import (
    ARCHITECTURES,
    IN_USE,
    NonsenseDrafter,
    OracleDrafter,
    PromptLookupDrafter,
    perturb_constants,
    plain_texts,
    requests_for,
    tiny_engine,
    tiny_model,
    tiny_prompts,
)

from laserbatch.pipeline.decoding.drafters import Drafter, NoDrafter, RetrievalDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.load import prepare_model
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.verifiers import Greedy, Relaxed
from laserbatch.retrieval_pools.index.build import PoolText, build_pool

MAX_NEW = 24
BATCHES = (1, 3, 9)  # one text at a time; a queue; all texts at once


@pytest.fixture(scope="module")
def plain() -> tuple:
    """A model, prompts, and their greedy texts."""
    model, prompts = tiny_model(), tiny_prompts()
    return model, prompts, plain_texts(model, prompts, MAX_NEW)


class MixedDrafter(Drafter):
    """Drafts for the sequences of a batch with different drafters."""

    def __init__(self, drafters: list) -> None:
        self.drafters = drafters

    def draft(self, sequence):
        return self.drafters[int(sequence.request.request_id) % len(self.drafters)].draft(sequence)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_verification_equals_generate(architecture, tmp_path):
    is_first = architecture == "llama"  # more batch sizes, and one drafter for all: no layer depends on them
    model, prompts = tiny_model(architecture), tiny_prompts(9 if is_first else 5)
    expected = plain_texts(model, prompts, MAX_NEW)
    assert len({tuple(text) for text in expected}) > 3, "the random model says too little to test with"
    assert any(0 < len(text) < MAX_NEW for text in expected), "no sequence leaves early"
    previous = [np.array([*text[:7], 1, *text[8:]], np.int32) for text in expected]
    pool = build_pool(
        [PoolText(text) for text in previous], tmp_path / "pool", side="user", tokenizer_hash="t", model_id="m"
    )
    drafters = [
        NoDrafter(), NonsenseDrafter(), OracleDrafter(expected), PromptLookupDrafter(), RetrievalDrafter(pool),
        RetrievalDrafter(pool, ("pool",)), RetrievalDrafter(),
    ]  # fmt: skip
    mixed = MixedDrafter(drafters)
    for batch_size in (*BATCHES, 2, 4) if is_first else BATCHES:
        engine = tiny_engine(model, batch_size=batch_size)
        for drafter in [mixed, *drafters] if is_first and batch_size == 4 else [mixed]:
            requests = requests_for(prompts, MAX_NEW, previous)
            results = {int(r.request_id): r for r in engine.generate(requests, drafter, Greedy())}
            for j, text in enumerate(expected):
                assert results[j].token_ids.tolist() == text, (type(drafter).__name__, batch_size, j)
                assert results[j].finish_reason == ("length" if len(text) == MAX_NEW else "end_of_text")
            assert engine.cache.num_live_rows == engine.cache.num_committed_slots == 0


@pytest.mark.parametrize("architecture", IN_USE)
def test_architectures_in_use_write_what_generate_writes(architecture):
    model = tiny_model(architecture)
    perturb_constants(model)
    prompts = tiny_prompts(4)
    expected = plain_texts(model, prompts, 8)
    assert len({tuple(text) for text in expected}) > 2, "the random model says too little to test with"
    loaded = prepare_model(model)
    drafter = MixedDrafter([NonsenseDrafter(), OracleDrafter(expected), NoDrafter()])
    results = Engine(loaded, DecodingSettings(batch_size=4)).generate(requests_for(prompts, 8), drafter, Greedy())
    assert {int(r.request_id): r.token_ids.tolist() for r in results} == dict(enumerate(expected))


def test_oracle_drafts_save_steps(plain):
    model, prompts, expected = plain
    engine = tiny_engine(model, batch_size=4)
    results = list(engine.generate(requests_for(prompts, MAX_NEW), OracleDrafter(expected), Greedy()))
    assert sum(r.num_accepted for r in results) > sum(r.num_steps for r in results)
    for result in results:
        ended = result.finish_reason == "end_of_text"
        assert result.num_accepted + result.num_steps == len(result.token_ids) + ended
        assert result.drafted_by_source.sum() == result.num_drafted
        assert result.accepted_by_source.sum() == result.num_accepted
        assert (result.sources != 0).sum() == result.num_accepted


def test_relaxed_texts_do_not_depend_on_batch_or_order():
    model = tiny_model(initializer_range=0.12)
    prompts = tiny_prompts(12)
    rng = np.random.default_rng(0)
    texts = []
    for batch_size in (1, 5):
        engine = tiny_engine(model, batch_size=batch_size)
        requests = requests_for(prompts, MAX_NEW)
        rng.shuffle(requests)
        results = list(engine.generate(requests, NonsenseDrafter(40), Relaxed(20, 0.01)))
        texts.append({r.request_id: (r.token_ids.tolist(), r.num_steps) for r in results})
    assert all(t == texts[0] for t in texts)
    plain = dict(enumerate(plain_texts(model, prompts, MAX_NEW)))
    assert any(texts[0][str(i)][0] != plain[i] for i in plain), "nothing was relaxed, so nothing was tested"
