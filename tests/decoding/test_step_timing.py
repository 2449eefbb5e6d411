"""Measured costs: every size at every batch size, an engine that is left as it was, and files that are read again."""

import json
import logging

import numpy as np
import pytest
from tiny_models import plain_texts, requests_for, tiny_engine, tiny_model, tiny_prompts

from pipeline.decoding import step_timing
from pipeline.decoding.step_cost_cache import cached_step_cost, known_step_cost
from pipeline.decoding.step_timing import measure_step_cost
from retrieval_pools.budget_curve import SIZE_KNOTS
from retrieval_pools.build import PoolText, build_pool
from retrieval_pools.step_cost import read_step_cost

MODEL = tiny_model()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(step_timing, "MAX_ROUNDS", 1)
    monkeypatch.setattr(step_timing, "MIN_ROUNDS", 1)


def sizes(step_cost, batch_size: int) -> list[int]:
    return sorted(point.num_tokens // batch_size - 1 for point in step_cost.steps if point.batch_size == batch_size)


def test_every_size_is_timed_at_every_batch_size_and_the_engine_writes_on():
    engine = tiny_engine(MODEL, batch_size=6)
    step_cost = measure_step_cost(engine)
    assert step_cost.batch_sizes == (1, 2, 4, 6)
    assert all(sizes(step_cost, batch_size) == list(SIZE_KNOTS) for batch_size in step_cost.batch_sizes)
    for batch_size in step_cost.batch_sizes:
        seconds = step_cost.seconds(batch_size, batch_size * (1 + np.array(SIZE_KNOTS)))
        assert (np.diff(seconds) >= 0).all()
    assert step_cost.draft.seconds > 0
    assert engine.store.num_live_rows == 0
    prompts = tiny_prompts(5)
    written = {result.request_id: result.token_ids.tolist() for result in engine.generate(requests_for(prompts))}
    assert [written[str(i)] for i in range(5)] == plain_texts(MODEL, prompts, 24)


def test_a_cache_that_holds_fewer_texts_is_timed_with_as_many_as_it_holds():
    engine = tiny_engine(MODEL, batch_size=8, max_cache_tokens=3 * 256)
    step_cost = measure_step_cost(engine, batch_sizes=[8])
    assert step_cost.batch_sizes == (3,)
    assert engine.store.num_live_rows == 0


def test_drafting_is_timed_with_the_pool(tmp_path):
    engine = tiny_engine(MODEL)
    rng = np.random.default_rng(0)
    texts = [PoolText(rng.integers(0, 9, 60).astype(np.int32)) for _ in range(20)]
    pool = build_pool(texts, tmp_path / "pool", side="item", tokenizer_hash="t", model_id="m")
    draft = measure_step_cost(engine, pool, batch_sizes=[1]).draft
    assert draft.seconds > 0 and draft.seconds_per_token > 0
    assert measure_step_cost(engine, pool, (), [1]).draft.seconds == 0


def test_the_same_machine_and_model_are_measured_once(tmp_path):
    engine = tiny_engine(MODEL, batch_size=2)
    calls = []

    def measure():
        calls.append(1)
        return measure_step_cost(engine, batch_sizes=[2])

    first = cached_step_cost(tmp_path, engine, False, measure)
    assert cached_step_cost(tmp_path, engine, False, measure) == first
    assert len(calls) == 1
    (path,) = tmp_path.glob("*.json")
    assert read_step_cost(path) == first  # as `pools simulate --step-cost` reads it
    cached_step_cost(tmp_path, engine, True, measure)
    cached_step_cost(tmp_path, tiny_engine(MODEL, batch_size=3), False, measure)
    assert len(calls) == 3


@pytest.mark.parametrize("spoil", ["{", "{}", "another"])
def test_a_file_that_is_damaged_or_of_something_else_is_measured_again(tmp_path, spoil, caplog):
    engine = tiny_engine(MODEL, batch_size=1)
    cached_step_cost(tmp_path, engine, False, lambda: measure_step_cost(engine))
    (path,) = tmp_path.glob("*.json")
    if spoil == "another":
        spoil = json.dumps(json.loads(path.read_text()) | {"name": "another machine"})
    path.write_text(spoil)
    with caplog.at_level(logging.WARNING):
        assert known_step_cost(tmp_path, engine, False) is None
    assert "measured again" in caplog.text
    again = cached_step_cost(tmp_path, engine, False, lambda: measure_step_cost(engine))
    assert known_step_cost(tmp_path, engine, False) == again
