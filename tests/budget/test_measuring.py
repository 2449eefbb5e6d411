"""Measured costs: every size at every batch size, an engine that is left as it was, and files that are read again."""

import datetime
import json
import logging
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tiny_models import plain_texts, requests_for, tiny_engine, tiny_model, tiny_prompts

from laserbatch.pipeline.budget import measuring, step_cost
from laserbatch.pipeline.budget.choice import SOURCES
from laserbatch.pipeline.budget.measuring import KeptCost, measure_step_cost
from laserbatch.pipeline.budget.step_cost import DraftCost, StepCost, StepPoint, read_step_cost
from laserbatch.pipeline.errors import RunFailed
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.calibration_record import SIZE_KNOTS

MODEL = tiny_model()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(measuring, "MAX_ROUNDS", 1)
    monkeypatch.setattr(measuring, "MIN_ROUNDS", 1)
    monkeypatch.setattr(step_cost.os, "getloadavg", lambda: (0.0, 0.0, 0.0))


def calm(engine, **options):
    """A cost as a quiet machine measures it, however busy this one is."""
    return measure_step_cost(engine, **options).model_copy(update={"load": 1.0, "spread": 0.1})


def drafted(step_cost, batch_size: int) -> list[int]:
    return [point.num_tokens - batch_size for point in step_cost.steps if point.batch_size == batch_size]


def all_sizes(batch_size: int) -> list[int]:
    """Draft tokens of steps where all sequences draft equally, and where one drafts one token alone."""
    return sorted({1, *(batch_size * size for size in SIZE_KNOTS)})


def test_every_size_is_timed_at_every_batch_size_and_the_engine_writes_on():
    engine = tiny_engine(MODEL, batch_size=6)
    step_cost = measure_step_cost(engine)
    assert step_cost.batch_sizes == (1, 2, 4, 6)
    assert all(drafted(step_cost, batch_size) == all_sizes(batch_size) for batch_size in step_cost.batch_sizes)
    for batch_size in step_cost.batch_sizes:
        seconds = step_cost.seconds(batch_size, batch_size * (1 + np.array(SIZE_KNOTS)))
        assert (np.diff(seconds) >= 0).all()
    draft = step_cost.draft  # of a single round noise may put all of it into one of the terms
    assert draft.seconds_per_step + draft.seconds + draft.seconds_per_token > 0
    assert engine.cache.num_live_rows == 0
    prompts = tiny_prompts(5)
    written = {result.request_id: result.token_ids.tolist() for result in engine.generate(requests_for(prompts))}
    assert [written[str(i)] for i in range(5)] == plain_texts(MODEL, prompts, 24)


def test_a_cache_that_holds_fewer_texts_is_timed_with_as_many_as_it_holds():
    engine = tiny_engine(MODEL, batch_size=8, max_cache_tokens=3 * 256)
    step_cost = measure_step_cost(engine, batch_sizes=[8])
    (batch_size,) = step_cost.batch_sizes  # three whole texts, or the prompts of six: fewer than eight
    assert 3 <= batch_size <= 6
    assert engine.cache.num_live_rows == 0


@pytest.mark.parametrize("batch_size", [1, 3])
def test_half_of_every_tree_is_accepted(batch_size):
    steps = measuring._TimedSteps(tiny_engine(MODEL, batch_size=batch_size), batch_size)
    num_written: dict[int, list[int]] = {}

    def note(event):
        if not steps._drafts.is_alone and event.num_drafted == steps._drafts.size:
            num_written.setdefault(event.num_drafted, []).append(len(event.token_ids))

    steps.stream = replace(steps.stream, on_event=note)
    steps.take_rounds()
    # A few end early, where the model would end the text.
    assert {size: np.median(num_written[size]) for size in (2, 4, 8, 16)} == {2: 2, 4: 3, 8: 5, 16: 9}


def test_the_first_step_of_every_size_warms_up(monkeypatch):
    monkeypatch.setattr(measuring, "MAX_ROUNDS", 3)
    monkeypatch.setattr(measuring, "SECONDS", 60.0)
    steps = measuring._TimedSteps(tiny_engine(MODEL, batch_size=1), 1)
    num_steps = Counter()
    steps.stream = replace(steps.stream, on_event=lambda event: num_steps.update([event.num_drafted]))
    steps.take_rounds()
    num_timed = {drafts: len(seconds) for drafts, seconds in steps.seconds.items()}
    assert num_timed == dict.fromkeys(measuring._ROUND, 3)
    assert all(num_steps[size] > 6 for size in SIZE_KNOTS)


def test_an_engine_that_cannot_write_the_texts_says_why():
    engine = tiny_engine(MODEL, max_cache_tokens=100)
    with pytest.raises(RunFailed, match=r"steps cannot be timed: too-long: .*give decoding\.max_draft_tokens"):
        measure_step_cost(engine, batch_sizes=[1])


def test_steps_that_something_else_made_longer_do_not_count():
    calm = [1.0, 1.1, 1.2, 1.1, 1.0]
    assert measuring.undisturbed_seconds([*calm, 9.0, 9.0, 9.0, 9.0]) == pytest.approx(1.1)
    assert measuring.undisturbed_seconds([5.0]) == 5.0


def pool_of_random_texts(folder):
    rng = np.random.default_rng(0)
    texts = [PoolText(rng.integers(0, 9, 60).astype(np.int32)) for _ in range(20)]
    return build_pool(texts, folder, side="item", tokenizer_hash="t", model_id="m")


def test_drafting_is_timed_with_the_pool(tmp_path):
    engine = tiny_engine(MODEL)
    pool = pool_of_random_texts(tmp_path / "pool")
    draft = measure_step_cost(engine, pool, batch_sizes=[1]).draft
    assert max(vars(draft).values()) > 0  # which of them is left to chance where other processes disturb the clock
    assert measure_step_cost(engine, pool, (), [1]).draft == DraftCost()


@pytest.mark.parametrize("has_pool", [False, True])
def test_drafting_is_timed_as_the_engine_drafts_one_call_for_all(tmp_path, monkeypatch, has_pool):
    """The clock is a drafter's: 5 a call, 3 a sequence and 2 a token, and that is what comes out."""
    now_s, calls = [0.0], []
    draft_all = measuring.draft_all

    def clocked(drafter, sequences, max_depths):
        trees = draft_all(drafter, sequences, max_depths)
        calls.append(len(sequences))
        now_s[0] += 5 + 3 * len(sequences) + 2 * sum(map(len, trees))
        return trees

    engine = tiny_engine(MODEL)
    pool = pool_of_random_texts(tmp_path / "pool") if has_pool else None
    monkeypatch.setattr(measuring, "draft_all", clocked)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now_s[0])
    found = measuring._time_drafts(engine, pool, SOURCES)
    assert set(calls) == {1, measuring.NUM_DRAFTS}
    assert found.seconds_per_step == pytest.approx(5, abs=2) and found.seconds == pytest.approx(3, abs=2)
    if has_pool:
        assert found.seconds_per_token == pytest.approx(2, rel=0.2)


def test_a_cost_is_kept_for_the_same_machine_and_model(tmp_path):
    engine = tiny_engine(MODEL, batch_size=2)
    kept = KeptCost(tmp_path, engine, 0)
    assert kept.read() is None
    first = kept.write(calm(engine, batch_sizes=[2]))
    assert KeptCost(tmp_path, engine, 0).read() == first
    assert read_step_cost(kept.path) == first  # as `pools simulate --step-cost` reads it
    others = [
        KeptCost(tmp_path, engine, 1000),
        KeptCost(tmp_path, engine, 1_000_000),  # a draft takes longer from a larger pool
        KeptCost(tmp_path, tiny_engine(MODEL, batch_size=3), 0),
        KeptCost(tmp_path, engine, 0, num_workers=2),  # two side by side are slower than one
    ]
    assert len({kept.path, *(other.path for other in others)}) == 5
    assert KeptCost(tmp_path, engine, 1001).path == others[0].path


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"measured_on": datetime.date(2024, 2, 1)}, "it is of 2024-02-01"),
        ({"spread": 0.9, "load": 3.4}, "half of like steps lay 90% .* 3.4 processes"),
        ({"load": 3.4}, "the machine was busy"),
    ],
)
def test_a_cost_that_is_old_or_was_disturbed_is_in_doubt(said, reason):
    steps = tuple(StepPoint(batch_size=4, num_tokens=number, seconds=1.0) for number in (4, 8))
    today = datetime.date(2024, 4, 1)
    assert StepCost(steps=steps, measured_on=today, spread=0.1, load=1.0).doubt(today) is None
    assert re.search(reason, StepCost(steps=steps, **said).doubt(today))


def test_a_measurement_says_when_it_was_and_what_disturbed_it(monkeypatch):
    monkeypatch.setattr(step_cost.os, "getloadavg", lambda: (6.0, 0, 0))
    monkeypatch.setattr(step_cost.os, "cpu_count", lambda: 2)
    found = measure_step_cost(tiny_engine(MODEL, batch_size=1))
    assert found.measured_on == datetime.date.today() and found.load == 3.0 and found.spread >= 0


@pytest.mark.parametrize("spoil", ["{", "{}", "another"])
def test_a_file_that_is_damaged_or_of_something_else_is_measured_again(tmp_path, spoil, caplog):
    engine = tiny_engine(MODEL, batch_size=1)
    kept = KeptCost(tmp_path, engine, 0)
    kept.write(calm(engine))
    if spoil == "another":
        spoil = json.dumps(json.loads(kept.path.read_text()) | {"name": "another machine"})
    kept.path.write_text(spoil)
    with caplog.at_level(logging.WARNING):
        assert kept.read() is None
    assert "measured again" in caplog.text
