"""The table of rules: what is told of its rows, and what the model thinks of what was written."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import Spread
from methods import RULES, figures_of, own_log_probability, table


def row(verifier: str, **changed) -> dict:
    one = {"verifier": verifier, "task": "reki", "batch": 1, "budget": 8, "tokens_per_step": 2.0, "length": 1.0}
    one |= {"share_as_plain": 1.0, "share_cut": 0.0, "speed": Spread(1.0, 1.0, 1.0), "own_log_probability": -1.0}
    return one | changed


def test_texts_that_run_on_and_greedy_texts_that_are_others_are_told():
    rows = [row("plain", budget=0), *(row(name) for name in RULES)]
    assert all(figure.met for figure in figures_of(rows))
    rows[1] |= {"share_as_plain": 0.5}
    rows[-1] |= {"length": 1.2}
    unmet = [figure.name for figure in figures_of(rows) if not figure.met]
    assert unmet == [
        "reki, batch 1: share of greedy texts that are plain ones", "reki, batch 1: length over plain, fly, from 1"
    ]  # fmt: skip
    assert len(table(rows).splitlines()) == 1 + len(rows)


def test_a_text_is_judged_token_by_token_behind_its_prompt():
    def model(input_ids, use_cache):
        return SimpleNamespace(logits=torch.nn.functional.one_hot((input_ids + 1) % 4, 4).float()[None, 0])

    task = SimpleNamespace(held_out=(np.array([0, 1]), np.array([3])))
    expected = np.array([0.0, 1.0, 1.0]) - np.log(np.e + 3)  # only the second and third token are what it expects
    assert own_log_probability(model, task, ((3, 0), (0,))) == pytest.approx(expected.mean())
