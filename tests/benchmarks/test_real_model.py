"""The benchmark of a real model: the goals of its rows, and no measurement without the model."""

import sys
from dataclasses import dataclass

import numpy as np
import pytest
from common import Spread
from real_model import BFLOAT16, FLOAT32, SMOKE, VLLM, figures_of, main, measure
from systems import Pass
from tasks import Task


def row(system: str, batch: int, **ratios: float) -> dict:
    spreads = {name: Spread.of([value]) for name, value in ratios.items()}
    counts = {"num_texts": 4, "num_texts_as_plain_bfloat16": 3}
    return {"system": system, "task": "movielens-users", "batch": batch, "ratios": spreads, **counts}


def test_rows_become_figures():
    rows = [row(BFLOAT16, 16, float32=2.0, vllm=1.4, bfloat16=1.0), row("relaxed", 1, bfloat16=0.9), row(VLLM, 16)]
    by_name = {figure.name.split(": ")[1]: (figure.measured, figure.met) for figure in figures_of(rows)}
    assert by_name == {
        "plain bfloat16 over float32, tokens a second": (2.0, False),
        "plain bfloat16 over vllm, tokens a second": (1.4, True),
        "share of bfloat16 texts that are the same at every batch size": (0.75, False),
        "relaxed drafts over plain, bfloat16, tokens a second": (0.9, False),
    }


@dataclass
class Scripted:
    """Answers each prompt with `answer` in `seconds`."""

    seconds: float
    answer: int = 1

    def run(self, prompts, batch, max_new_tokens):
        return Pass(self.seconds, 10 * len(prompts), 10 * len(prompts), tuple((self.answer,) for _ in prompts))


def test_texts_are_held_against_those_of_the_first_batch_size():
    prompts = tuple(np.array([number]) for number in range(3))
    task, plain = Task("movielens-users", "user", prompts, (), 8, False), {}
    systems = {FLOAT32: Scripted(2.0), BFLOAT16: Scripted(1.0)}
    first = {row["system"]: row for row in measure(systems, task, 2, SMOKE, plain)}
    assert first[BFLOAT16]["ratios"][FLOAT32].median == 2 and first[FLOAT32]["num_texts_as_plain_bfloat16"] == 3
    later = list(measure({FLOAT32: Scripted(2.0), BFLOAT16: Scripted(1.0, answer=2)}, task, 1, SMOKE, plain))
    assert [row["num_texts_as_plain_bfloat16"] for row in later] == [2, 0]


def test_without_the_model_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["real_model.py", "--models", str(tmp_path), "--smoke"])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    assert "smollm2-135m-instruct is not there: nothing is measured" in printed.err and not printed.out
