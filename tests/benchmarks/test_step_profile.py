"""The profile of a step: nothing is counted twice, nothing is left out, and what was watched runs on unwatched."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # its modules find one another as neighbours of the command

from step_profile import engine_of, profile, prompts_of  # noqa: E402
from step_spans import MODEL_PARTS, PARTS, Spans, watched  # noqa: E402

from laserbatch.pipeline.decoding.attention.packed_attention import packed_attention  # noqa: E402
from laserbatch.pipeline.decoding.drafters import NoDrafter  # noqa: E402
from laserbatch.pipeline.decoding.engine import Engine, GenerationRequest  # noqa: E402
from laserbatch.pipeline.decoding.memory.token_store import TokenStore  # noqa: E402
from laserbatch.pipeline.decoding.model.load import load_model  # noqa: E402
from laserbatch.pipeline.decoding.model.model_runner import ModelRunner  # noqa: E402
from laserbatch.pipeline.decoding.model.packed_forward import PackedForward  # noqa: E402
from laserbatch.pipeline.decoding.verifiers import Greedy  # noqa: E402


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
    row = profile(engine, NoDrafter(), prompts_of(loaded.tokenizer, 2), num_steps=3, is_plain=True)
    assert (row["num_steps"], row["batch"], row["drafted_tokens_a_text"]) == (3, 2, 0)
    assert set(row["parts_ms"]) == set(PARTS)
    assert sum(row["parts_ms"].values()) == pytest.approx(row["step_ms"])
    assert all(row["parts_ms"][part] > 0 for part in MODEL_PARTS)
    assert row["parts_ms"]["draft"] < 0.1 * row["step_ms"] and 0 < row["host_share"] < 1
    assert text_of(engine) == before
    assert "_step" not in vars(engine) and "forward" not in vars(loaded.model.lm_head)


def test_steps_of_the_kernel_are_the_models_time_not_packing(loaded):
    """As on CUDA, where another function runs the model and graphs would be captured."""
    engine = engine_of(loaded, 2, 0)
    engine.store = TokenStore(2)
    runner = engine.runner = ModelRunner(loaded.model, engine.store, engine.device)
    runner.packed = PackedForward(
        loaded.model, engine.store, engine.device, packed_attention, runner._selects_logits, pads=True, captures=True
    )
    row = profile(engine, NoDrafter(), prompts_of(loaded.tokenizer, 2), num_steps=3, is_plain=True)
    assert runner.packed is not None and runner.packed._captures and "run" not in vars(runner.packed)
    assert all(row["parts_ms"][part] > 0 for part in MODEL_PARTS)
    assert row["parts_ms"]["packing"] < 0.2 * row["step_ms"]


def test_steps_that_are_not_kept_are_not_counted(loaded):
    engine = engine_of(loaded, 2, 0)
    with watched(engine, NoDrafter()) as spans:
        spans.keeps = lambda live: False
        text_of(engine)
    assert spans.num_steps == 0 and not spans.seconds


@pytest.mark.slow
def test_command_writes_every_row(tmp_path):
    out = tmp_path / "profile.json"
    command = [sys.executable, "benchmarks/step_profile.py", "--smoke", "--model", "models/sample", "--json", str(out)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["kind"], row["batch"]) for row in rows] == [
        ("plain", 1), ("trees of 16", 1), ("plain", 2), ("trees of 16", 2)
    ]  # fmt: skip
    assert rows[1]["drafted_tokens_a_text"] > 0
