"""The table of methods: its rows, and the probability that the model gives to the written texts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import Spread, table
from drafter_methods import SAMPLING_RULES, Trained, settings_by_method
from methods import COLUMNS, OF_DRAFTERS, RULES, facts_of, figures_of, own_log_probability

from laserbatch.pipeline.decoding.plugins import RULES as BUILT_IN
from laserbatch.pipeline.plugins import installed
from laserbatch.research.drafters.trained import DrafterCard

KINDS = ("medusa", "eagle", "hass", "small")
CARD = DrafterCard(kind="hass", target="t", acceptance=(0.7, 0.6, 0.5, 0.4, 0.3), training_seconds=60.0)
METHODS = settings_by_method({kind: Trained(kind, CARD, 0.1) for kind in KINDS})


def row(method: str, verifier: str, **changed) -> dict:
    values = {"method": method, "verifier": verifier, "task": "reki", "temperature": 0.0, "batch": 1, "budget": 8}
    values |= {"tokens_per_step": 2.0, "mbsu": 1.5, "length": 1.0, "mean_length": 100.0, "share_as_plain": 1.0}
    values |= {"share_cut": 0.0, "speed": Spread(1.0, 1.0, 1.0), "tokens_per_s": Spread(100.0, 100.0, 100.0)}
    return values | changed


def all_rows() -> list[dict]:
    rows = [row("none", "plain", budget=0), *(row(name, "greedy") for name in METHODS)]
    rows += [row("pool", rule) for rule in RULES if rule != "greedy"]
    for measured in rows:
        measured["tokens_per_step"] += 0.4 * measured["method"].startswith("pool +")
    drawn = {"temperature": 1.0, "tokens_per_step": 1.5}
    return [*rows, *(row("model", f"{rule}, 5 deep", **drawn) for rule in SAMPLING_RULES)]


def test_what_misses_is_told():
    rows = all_rows()
    assert all(figure.met for figure in figures_of(rows, [vars(CARD) | {"kind": kind} for kind in KINDS]))
    rows[1] |= {"share_as_plain": 0.5}
    at = {(row["method"], row["verifier"]): row for row in rows}
    at["pool", "fly"]["length"] = 1.2
    at["pool + hass", "greedy"]["tokens_per_step"] = 2.2
    at["model", "k_seq, 5 deep"]["tokens_per_step"] = 1.6
    worse = [vars(CARD) | {"kind": kind, "acceptance": (0.9, 0.9, 0.2 + 0.3 * (kind == "eagle"))} for kind in KINDS]
    assert [figure.name for figure in figures_of(rows, worse) if not figure.met] == [
        "reki, batch 1: least share of greedy texts that are plain ones",
        "reki, batch 1: length over plain, fly, from 1",
        "reki, batch 1: tokens a step, pool and hass over the better alone",
        "reki, 8 draft tokens, 5 deep: tokens a step, rsd over the better of specinfer and k_seq",
        "depth 3: acceptance, hass over eagle",
    ]
    assert len(table(rows, COLUMNS).splitlines()) == 1 + len(rows)


def test_texts_that_pay_a_training_back_are_those_whose_saved_seconds_make_it_up():
    rows = all_rows()
    faster = next(row for row in rows if row["method"] == "pool + hass")
    faster["tokens_per_s"] = Spread(125.0, 125.0, 125.0)  # 0.8 s for a text, compared with 1 s
    facts = [facts_of(kind, Trained(kind, CARD, 0.1), rows) for kind in KINDS]
    assert [row["pays_back"]["reki"] for row in facts] == [None, None, 300, None]
    assert len(table(facts, OF_DRAFTERS).splitlines()) == 5


def test_every_rule_and_source_is_in_the_table():
    assert {*RULES, *SAMPLING_RULES} == {*BUILT_IN, *installed("verifiers")}
    assert {f"pool + {kind}" for kind in ("medusa", "eagle", "hass")} <= METHODS.keys()


def test_a_text_is_judged_token_by_token_behind_its_prompt():
    def model(input_ids, use_cache):
        return SimpleNamespace(logits=torch.nn.functional.one_hot((input_ids + 1) % 4, 4).float()[None, 0])

    prompts = (np.array([0, 1]), np.array([3]))
    expected = np.array([0.0, 1.0, 1.0]) - np.log(np.e + 3)  # the model expects only the second and third token
    assert own_log_probability(model, prompts, ((3, 0), (0,))) == pytest.approx(expected.mean())
