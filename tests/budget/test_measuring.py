"""Measured step costs: all sizes and batch sizes, an engine that is left unchanged, and files that are read again."""

import json
import logging
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import plain_texts, requests_for, tiny_engine, tiny_model, tiny_prompts

from laserbatch.pipeline.budget import measuring
from laserbatch.pipeline.budget.choice import read_step_cost
from laserbatch.pipeline.budget.cost_cache import StepCostCache, user_step_costs
from laserbatch.pipeline.budget.measuring import measure_step_cost
from laserbatch.pipeline.decoding import kv_cache
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.settings import TEXT_SOURCES
from laserbatch.pipeline.errors import RunFailed
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.calibration_record import SIZE_KNOTS
from laserbatch.retrieval_pools.step_cost import DraftCost, StepCost, StepPoint

MODEL = tiny_model()
COST = StepCost(steps=tuple(StepPoint(batch_size=1, num_tokens=number, seconds=1) for number in (1, 2)))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(measuring, "MAX_ROUNDS", 1)
    monkeypatch.setattr(measuring, "MIN_ROUNDS", 1)


def watch(engine, note) -> None:
    """Call `note` with the numbers of drafted and of written tokens for each text of each step."""
    finish_step = engine.finish_step

    def watched(step, stream):
        before = [sequence.num_output for sequence in step.sequences]
        ended = finish_step(step, stream)
        for sequence, was, drafted in zip(step.sequences, before, step.trees.sizes.tolist(), strict=True):
            if sequence.num_output > was:
                note(drafted, sequence.num_output - was)
        return ended

    engine.finish_step = watched


def timed_steps(batch_size: int) -> measuring._TimedSteps:
    engine = tiny_engine(MODEL, batch_size=batch_size)
    return measuring._TimedSteps(engine, batch_size, [measuring.random_tokens(engine, 64)])


def drafted(step_cost, batch_size: int) -> list[int]:
    return [point.num_tokens - batch_size for point in step_cost.steps if point.batch_size == batch_size]


def all_sizes(batch_size: int) -> list[int]:
    """The draft tokens of steps in which all sequences draft equally many, and of one with a single draft token."""
    return sorted({1, *(batch_size * size for size in SIZE_KNOTS)})


def test_every_size_is_timed_at_every_batch_size_and_the_engine_writes_on(monkeypatch):
    for limit in ("MAX_SLOWDOWN", "MAX_SECONDS"):  # a busy machine may exceed both
        monkeypatch.setattr(measuring, limit, np.inf)
    engine = tiny_engine(MODEL, batch_size=6)
    step_cost = measure_step_cost(engine, None, TEXT_SOURCES, [1, 2, 4, 6])
    assert step_cost.batch_sizes == (1, 2, 4, 6)
    assert all(drafted(step_cost, batch_size) == all_sizes(batch_size) for batch_size in step_cost.batch_sizes)
    for batch_size in step_cost.batch_sizes:
        seconds = step_cost.seconds(batch_size, batch_size * (1 + np.array(SIZE_KNOTS)))
        assert (np.diff(seconds) >= 0).all()
    draft = step_cost.draft  # noise of a single round may put all of the cost into one term
    assert draft.seconds_per_step + draft.seconds + draft.seconds_per_token > 0
    assert engine.cache.num_live_rows == 0
    prompts = tiny_prompts(5)
    written = {result.request_id: result.token_ids.tolist() for result in engine.generate(requests_for(prompts))}
    assert [written[str(i)] for i in range(5)] == plain_texts(MODEL, prompts, 24)


def test_a_cache_that_holds_fewer_texts_is_timed_with_as_many_as_it_holds():
    engine = tiny_engine(MODEL, batch_size=8, max_cache_tokens=3 * 256)
    step_cost = measure_step_cost(engine, None, TEXT_SOURCES, [8])
    (batch_size,) = step_cost.batch_sizes  # three whole texts, or the prompts of six: fewer than eight
    assert 3 <= batch_size <= 6
    assert engine.cache.num_live_rows == 0


def test_no_prompt_is_computed_where_a_context_is_timed(monkeypatch):
    num_tokens, submit_step = [], Engine.submit_step

    def submitted(engine, stream):
        step = submit_step(engine, stream)
        num_tokens.append(step.num_tokens)
        return step

    monkeypatch.setattr(Engine, "submit_step", submitted)
    monkeypatch.setattr(kv_cache, "GROWTH_STEP", 1)  # so that a new cache holds few tokens, like a large model's
    measuring._context_seconds(tiny_engine(MODEL, batch_size=6), 6, measuring._ROUND[0])
    assert set(num_tokens) == {6}


def test_prompts_of_a_large_vocabulary_are_drawn_at_once():
    """A GPU draws a prompt for each text of its batch, four times."""
    engine, began_s = SimpleNamespace(vocab_size=128_256, end_ids=(2, 128_009)), time.process_time()
    prompts = [measuring.random_tokens(engine, 64, seed) for seed in range(100)]
    assert time.process_time() - began_s < 1.0, "the vocabulary is sorted for each of them"
    assert len(prompts[0]) == 64 and not np.isin(prompts, engine.end_ids).any()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_half_of_every_tree_is_accepted(batch_size, monkeypatch):
    monkeypatch.setattr(measuring, "MAX_ROUNDS", 3)
    monkeypatch.setattr(measuring, "SECONDS", 60.0)
    steps = timed_steps(batch_size)
    num_written: dict[int, list[int]] = {}

    def note(drafted, written):
        if not steps._drafts.is_alone and drafted == steps._drafts.size:
            num_written.setdefault(drafted, []).append(written)

    watch(steps._engine, note)
    steps.take_rounds()
    # Some drafts are cut by the end of a text; never is more than half of a draft accepted.
    assert {size: max(num_written[size]) for size in (2, 4, 8, 16)} == {2: 2, 4: 3, 8: 5, 16: 9}


@pytest.mark.parametrize(("device", "least", "most"), [("cpu", 3, 5), ("cuda", 8, 12)])
def test_on_cuda_the_first_of_two_steps_warms_up(device, least, most, monkeypatch):
    monkeypatch.setattr(measuring, "MAX_ROUNDS", 3)
    monkeypatch.setattr(measuring, "SECONDS", 60.0)
    monkeypatch.setattr(measuring, "MAX_SLOWDOWN", np.inf)  # so that no size is left out on a busy machine
    steps = timed_steps(1)
    monkeypatch.setattr(steps._engine, "device", torch.device(device))
    num_steps = Counter()
    watch(steps._engine, lambda drafted, written: num_steps.update([drafted]))
    steps.take_rounds()
    num_timed = {drafts: len(seconds) for drafts, seconds in steps.seconds.items()}
    assert num_timed == dict.fromkeys(measuring._ROUND, 3)
    assert all(least <= num_steps[size] <= most for size in SIZE_KNOTS[2:]), num_steps  # sizes without prompts


def test_when_time_is_up_the_largest_batch_is_timed_alone(monkeypatch):
    monkeypatch.setattr(measuring, "MAX_SECONDS", 0.0)
    step_cost = measure_step_cost(tiny_engine(MODEL, batch_size=3), None, TEXT_SOURCES, [1, 2, 3])
    assert step_cost.batch_sizes == (3,)


def test_an_engine_that_cannot_write_the_texts_says_why():
    engine = tiny_engine(MODEL, max_cache_tokens=100)
    with pytest.raises(RunFailed, match=r"cannot be measured: too-long: .*set decoding\.max_draft_tokens"):
        measure_step_cost(engine, None, TEXT_SOURCES, [1])


def test_a_busy_machine_does_not_make_drafts_look_dear(monkeypatch):
    """Half of the steps take ten times as long because of other processes; the compute time grows with their tokens."""
    computed_s, passed_s = [0.0], [0.0]
    busy = np.random.default_rng(0)
    submit_step = Engine.submit_step

    def submitted(engine, stream):
        step = submit_step(engine, stream)
        computed_s[0] += 1 + step.num_tokens / 1000
        passed_s[0] += busy.choice([1, 10]) * (1 + step.num_tokens / 1000)
        return step

    monkeypatch.setattr(Engine, "submit_step", submitted)
    monkeypatch.setattr(measuring.time, "thread_time", lambda: computed_s[0])
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: passed_s[0])
    step_cost = measure_step_cost(tiny_engine(MODEL, batch_size=4), None, (), [4])
    num_tokens = np.array([4, 20, 68])
    assert step_cost.seconds(4, num_tokens).tolist() == pytest.approx((1 + num_tokens / 1000).tolist())


@pytest.fixture
def context_costs(monkeypatch):
    """A clock by which each token of context costs 1/500 s a step, and each draft token 1/4000 s for each of them."""
    computed_s = [0.0]
    submit_step = Engine.submit_step

    def submitted(engine, stream):
        lengths = [sequence.length for sequence in stream.scheduler.live]
        step = submit_step(engine, stream)
        drafted = step.num_tokens / len(lengths) - 1 if lengths else 0  # draft tokens of each text
        computed_s[0] += 1 + step.num_tokens / 1000 + sum(lengths) * (1 / 500 + drafted / 4000)
        return step

    monkeypatch.setattr(Engine, "submit_step", submitted)
    monkeypatch.setattr(measuring, "PROMPT_TOKENS", 16)
    monkeypatch.setattr(measuring.time, "thread_time", lambda: computed_s[0])


def test_context_is_timed_in_steps_of_as_many_texts_if_the_cache_holds_fewer_long_prompts(context_costs):
    engine = tiny_engine(MODEL, batch_size=4, max_cache_tokens=448)
    assert measuring._context_seconds(engine, 4, measuring._ROUND[0]) == pytest.approx(1 / 500, rel=0.1)


def test_what_context_adds_to_a_step_is_measured_and_taken_off_longer_ones(context_costs):
    cost = measure_step_cost(tiny_engine(MODEL, batch_size=4), None, (), [4])
    assert cost.context_tokens == 16 and cost.seconds_per_context_token == pytest.approx(1 / 500)
    assert cost.seconds_per_draft_context_token == pytest.approx(1 / 4000)
    num_tokens = np.array([4, 20, 68])
    expected = 1 + num_tokens / 1000 + 4 * 40 / 500 + (num_tokens - 4) * 40 / 4000
    assert cost.at_context(40).seconds(4, num_tokens).tolist() == pytest.approx(expected.tolist())


def pool_of_random_texts(folder):
    rng = np.random.default_rng(0)
    texts = [PoolText(rng.integers(0, 9, 60).astype(np.int32)) for _ in range(20)]
    return build_pool(texts, folder, side="item", tokenizer_hash="t", model_id="m")


def test_drafting_is_timed_with_the_pool(tmp_path):
    engine = tiny_engine(MODEL)
    pool = pool_of_random_texts(tmp_path / "pool")
    draft = measure_step_cost(engine, pool, TEXT_SOURCES, [1]).draft
    assert max(vars(draft).values()) > 0  # noise may decide which of the terms is above 0
    assert measure_step_cost(engine, pool, (), [1]).draft == DraftCost()


@pytest.mark.parametrize("has_pool", [False, True])
def test_drafting_is_timed_as_the_engine_drafts_one_call_for_all(tmp_path, monkeypatch, has_pool):
    """The drafter's clock counts 5 for a call, 3 for a sequence and 2 for a token, and the fit finds these values."""
    now_s, calls = [0.0], []
    draft_all = measuring.RetrievalDrafter.draft_all

    def clocked(drafter, sequences, max_depths):
        trees = draft_all(drafter, sequences, max_depths)
        calls.append(len(sequences))
        now_s[0] += 5 + 3 * len(sequences) + 2 * sum(map(len, trees))
        return trees

    engine = tiny_engine(MODEL)
    pool = pool_of_random_texts(tmp_path / "pool") if has_pool else None
    monkeypatch.setattr(measuring.RetrievalDrafter, "draft_all", clocked)
    monkeypatch.setattr(measuring.time, "thread_time", lambda: now_s[0])
    seconds = measuring._time_drafts(engine, pool, TEXT_SOURCES)
    assert set(calls) == {1, measuring.NUM_DRAFTS}
    assert seconds.seconds_per_step == pytest.approx(5, abs=2) and seconds.seconds == pytest.approx(3, abs=2)
    if has_pool:
        assert seconds.seconds_per_token == pytest.approx(2, rel=0.2)


def test_a_cost_is_kept_for_the_same_machine_and_model(tmp_path):
    engine = tiny_engine(MODEL, batch_size=2)
    cache = StepCostCache(tmp_path, engine, 0)
    assert cache.read() is None
    first = cache.write(measure_step_cost(engine, None, TEXT_SOURCES, [2]))
    assert StepCostCache(tmp_path, engine, 0).read() == first
    assert first.model_id == engine.model_id
    assert read_step_cost(cache.path) == first  # as `decoding.step_cost` is read
    others = [
        StepCostCache(tmp_path, engine, 1000),
        StepCostCache(tmp_path, engine, 1_000_000),  # drafting from a larger pool takes longer
        StepCostCache(tmp_path, tiny_engine(MODEL, batch_size=3), 0),
        StepCostCache(tmp_path, engine, 0, num_workers=2),  # two workers that share a machine are slower
    ]
    assert len({cache.path, *(other.path for other in others)}) == 5
    assert StepCostCache(tmp_path, engine, 1001).path == others[0].path
    with_pool = others[0].known_steps()
    assert others[0].read() is None and with_pool is not None and with_pool.steps == first.steps
    again = measure_step_cost(engine, None, TEXT_SOURCES, [2], with_pool)
    assert again.steps == first.steps and again.draft != first.draft
    assert [other.known_steps() for other in others[2:]] == [None, None]


def test_a_cost_is_measured_once_for_all_workspaces(tmp_path, monkeypatch):
    monkeypatch.setenv("LASERBATCH_CACHE", str(tmp_path / "cache"))
    engine = tiny_engine(MODEL, batch_size=1)
    cache, other = (StepCostCache(tmp_path / name, engine, 0) for name in ("one", "other"))
    first = cache.write(COST)
    assert not other.path.exists() and other.read() == first and other.path.exists()
    monkeypatch.setenv("LASERBATCH_CACHE", str(other.path / "no-folder"))
    homeless = StepCostCache(user_step_costs(), engine, 0)
    assert homeless.write(first) == first and homeless.read() is None
    for name in ("LASERBATCH_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert not user_step_costs().exists()


@pytest.mark.parametrize("spoil", ["{", "{}", "another", "old"])
def test_a_file_that_is_damaged_old_or_of_something_else_is_measured_again(tmp_path, spoil, caplog):
    engine = tiny_engine(MODEL, batch_size=1)
    cache = StepCostCache(tmp_path, engine, 0)
    cache.write(COST)
    other = {"another": {"name": "another machine"}, "old": {"measured_on": "2024-02-01"}}
    if spoil in other:
        spoil = json.dumps(json.loads(cache.path.read_text()) | other[spoil])
    cache.path.write_text(spoil)
    with caplog.at_level(logging.WARNING):
        assert cache.read() is None
    assert "measured again" in caplog.text
