"""The benchmark of the night: every system's row, what a replay predicts, its figures."""

import night
import pytest
from common import SAMPLE_MODEL, Spread
from night import figures_of, row_of
from systems import Pass
from tasks import tasks_of

SYSTEMS = ["transformers-generate", "plain", "greedy", "relaxed"]


def test_the_command_measures_every_system_on_the_same_prompts(run_benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr(night, "tasks_of", lambda *asked: tasks_of(*asked)[1:])  # descriptions, which are short
    words = ["--model", SAMPLE_MODEL, "--threads", 1, "--cache", tmp_path / "cache", "--data", tmp_path]
    rows = run_benchmark("night", "--smoke", *words)["rows"]
    assert [row["system"] for row in rows] == SYSTEMS * 2
    for row in rows:
        assert row["tokens_per_s"] > 0 and row["num_repetitions"] == 1
        if row["system"] in ("plain", "greedy"):
            assert row["num_texts_as_plain"] == row["num_texts"]
    replayed = [row for row in rows if "replayed_accepted" in row]
    assert [(row["system"], row["batch"]) for row in replayed] == [("greedy", 16)]
    for row in replayed:  # a greedy run accepts what a replay of its texts does
        assert row["replayed_accepted"] == pytest.approx(row["accepted_per_step"], rel=0.02)


def test_ratios_are_of_one_repetition():
    measured = {
        "plain": ((1.0, 4.0, 2.0), 10),
        "greedy": ((0.5, 1.0, 2.0), 4),
        "transformers-generate": ((2.0, 4.0, 4.0), 10),
    }
    passes = {
        name: [Pass(wall_s, 10, num_steps, ((1, 2), (3,))) for wall_s in seconds]
        for name, (seconds, num_steps) in measured.items()
    }
    row = row_of("greedy", "reki", 1, passes)
    assert row["ratio_to_plain"] == Spread(2.0, 1.0, 4.0) and row["ratio_to_transformers"] == Spread(4.0, 2.0, 4.0)
    assert (row["tokens_per_s"], row["tokens_per_step"], row["num_texts_as_plain"]) == (10.0, 2.5, 2)


def test_figures_take_the_rows_that_were_asked_for():
    one = {"model": "m", "task": "reki", "batch": 1, "system": "relaxed", "tokens_per_step": 6.0}
    one |= {"ratio_to_plain": Spread.of([3.5]), "ratio_to_transformers": Spread.of([0.9])}
    rows = [one, one | {"batch": 16}, one | {"batch": 16, "system": "plain"}]
    rows.append(one | {"batch": 16, "system": "greedy", "replayed_accepted": 4.0, "accepted_per_step": 3.9})
    found = {figure.name: (figure.measured, figure.met) for figure in figures_of(rows)}
    assert found == {
        "m, reki, batch 1: relaxed over plain, tokens per second": (3.5, True),
        "m, reki, batch 16: relaxed, tokens per step": (6.0, False),
        "m, reki, batch 16: plain over transformers-generate, tokens per second": (0.9, False),
        "m, reki, batch 16: greedy, accepted tokens that replays of plain texts predict, error in percent": (
            pytest.approx(2.564, abs=0.001), False
        ),
    }  # fmt: skip
