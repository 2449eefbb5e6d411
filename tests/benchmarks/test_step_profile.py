"""The profile of a step counts nothing twice, leaves nothing out, and stops watching at its end."""

import time
from dataclasses import replace

import numpy as np
import pytest
import roofline
import step_profile
import torch
from common import SAMPLE_MODEL
from reference import reference_attention
from step_profile import engine_of, profile, prompts_of, requests_of, timed_steps
from step_spans import MODEL_PARTS, PARTS, Spans, watched

from laserbatch.pipeline.decoding.drafters import NoDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.model.cuda_graphs import BufferedForward
from laserbatch.pipeline.decoding.model.load import load_model
from laserbatch.pipeline.decoding.model.runner import ModelRunner
from laserbatch.pipeline.decoding.sequence import GenerationRequest
from laserbatch.pipeline.decoding.verifiers import Greedy


@pytest.fixture(scope="module")
def loaded():
    return load_model("sample", device="cpu")


def text_of(engine: Engine) -> list[int]:
    request = GenerationRequest("0", np.arange(20, 40, dtype=np.int32), None, None, 8)
    (result,) = engine.generate([request], NoDrafter(), Greedy())
    return result.token_ids.tolist()


def test_time_of_an_inner_part_is_not_its_outer_ones():
    spans = Spans(torch.device("cpu"))
    inner = spans.timed("inner", lambda: time.sleep(0.3))

    def both():
        time.sleep(0.1)
        inner()

    outer = spans.timed("outer", both)
    outer()
    spans.end_step(keep=True)
    outer()
    spans.end_step(keep=False)
    assert spans.num_steps == 1
    assert 0.3 <= spans.seconds["inner"] < 0.6
    assert 0.1 <= spans.seconds["outer"] < 0.3


def test_parts_make_up_the_step_and_the_engine_is_left_as_it_was(loaded):
    before = text_of(engine_of(loaded, 2, 0))
    engine = engine_of(loaded, 2, 0)
    row = profile(engine, NoDrafter(), prompts_of(loaded.tokenizer, 2), 3, Greedy())
    assert (row["num_steps"], row["batch"], row["drafted_tokens_a_text"]) == (3, 2, 0)
    assert set(row["parts_ms"]) == set(PARTS)
    assert sum(row["parts_ms"].values()) == pytest.approx(row["step_ms"])
    assert all(row["parts_ms"][part] > 0 for part in MODEL_PARTS)
    assert row["parts_ms"]["draft"] < 0.1 * row["step_ms"] and 0 < row["host_share"] < 1
    assert text_of(engine) == before
    assert "_step" not in vars(engine) and "forward" not in vars(loaded.model.lm_head)


def test_steps_of_the_kernel_are_the_models_time_not_packing(loaded):
    """The path of CUDA, where another function runs the model and graphs would be captured."""
    engine = engine_of(loaded, 2, 0)
    engine.cache = KVCache(2)
    runner = engine.runner = ModelRunner(loaded.model, engine.cache, engine.device)
    runner.buffered = BufferedForward(runner.head, engine.cache, engine.device, lambda: reference_attention)
    runner.buffered._captures = True
    row = profile(engine, NoDrafter(), prompts_of(loaded.tokenizer, 2), 3, Greedy())
    assert runner.buffered is not None and runner.buffered._captures and "run" not in vars(runner.buffered)
    assert all(row["parts_ms"][part] > 0 for part in MODEL_PARTS)
    assert row["parts_ms"]["packing"] < 0.2 * row["step_ms"]


def test_steps_that_are_not_kept_are_not_counted(loaded):
    engine = engine_of(loaded, 2, 0)
    with watched(engine) as spans:
        spans.keeps = lambda live: False
        text_of(engine)
    assert spans.num_steps == 0 and not spans.seconds


def test_a_batch_that_the_cache_never_holds_is_left_out(loaded, monkeypatch):
    def short(engine, prompts):
        return [replace(request, max_new_tokens=96) for request in requests_of(engine, prompts)]

    monkeypatch.setattr(step_profile, "requests_of", short)
    prompts = prompts_of(loaded.tokenizer, 4)
    engine = engine_of(loaded, 4, 0, max_cache_tokens=int(2.2 * (len(prompts[0]) + 96)))
    assert timed_steps(engine, NoDrafter(), prompts, 6, Greedy()) == []


def test_command_writes_every_row(run_benchmark, monkeypatch):
    monkeypatch.setattr(roofline, "NUM_TIMES", 2)
    rows = run_benchmark("step_profile", "--smoke", "--model", SAMPLE_MODEL, "--threads", 1, "--device", "cpu")["rows"]
    assert [(row["kind"], row["batch"]) for row in rows] == [
        ("plain", 1), ("trees of 16", 1), ("plain", 2), ("trees of 16", 2)
    ]  # fmt: skip
    assert rows[1]["drafted_tokens_a_text"] > 0
    assert all(row["roofline_share"] > 0 and row["host_share_unwatched"] > 0 for row in rows)
