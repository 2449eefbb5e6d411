"""Statistics that all benchmarks use: spreads, intervals, rounds, figures, and the published form of a command."""

import itertools
import json
from dataclasses import dataclass

import numpy as np
import pytest
from common import (
    DEFAULT_MODEL,
    REPOSITORY,
    Figure,
    Interval,
    Spread,
    benchmark_parser,
    finish,
    jsonable,
    publishable,
    resampled_totals,
    scale_of,
    turns,
)


def test_a_spread_is_median_and_range():
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)
    assert str(Spread.of([1.0])) == "1.00 (1.00 to 1.00)"


def test_totals_are_of_all_texts_and_then_of_texts_drawn_again():
    values = np.array([1.0, 2.0, 3.0, 10.0])
    totals = resampled_totals(values)
    assert totals[0] == 16 and totals[1:].min() >= 4 and totals[1:].max() <= 40
    assert totals[1:].mean() == pytest.approx(16, rel=0.05)
    assert totals[1:].std() == pytest.approx(np.sqrt(4 * values.var()), rel=0.1)  # of four draws
    assert (resampled_totals(2 * values) / totals == 2).all()  # the same draws
    interval = Interval.of(totals)
    assert interval.value == 16 and interval.low < 10 and interval.high > 24


def test_an_interval_leaves_out_what_is_no_number():
    samples = np.array([2.0, 1.0, np.nan, np.inf, 3.0])
    assert Interval.of(samples) == Interval(2.0, pytest.approx(1.05), pytest.approx(2.95))
    assert Interval.of(np.array([2.0, np.nan])) == Interval(2.0, 2.0, 2.0)


def test_in_turns_everybody_comes_once_a_round_and_nobody_always_after_the_same():
    rounds = list(itertools.islice(turns("abc"), 200))
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len({tuple(order) for order in rounds}) == 6
    assert rounds == list(itertools.islice(turns("abc"), 200))


def test_figures_are_met_or_not():
    assert [Figure.at_least("a", value, 1.0).met for value in (0.9, 1.0, 1.1)] == [False, True, True]
    assert [Figure.at_most("a", value, 1.0).met for value in (0.9, 1.0, 1.1)] == [True, True, False]
    assert [Figure.under("a", value, 1.0).met for value in (0.9, 1.0, 1.1)] == [True, False, False]


def test_a_result_begins_with_command_and_machine_and_unmet_figures_are_told_first(tmp_path, capsys):
    figures = [Figure.at_least("good", 2.0, 1.0), Figure.at_least("bad", 0.5, 1.0)]
    finish(tmp_path / "out.json", figures, ["a table"], {"rows": [1]})
    printed = capsys.readouterr().out
    assert printed.index("NOT MET  bad: 0.50 (wanted >= 1)") < printed.index("met      good") < printed.index("a table")
    written = json.loads((tmp_path / "out.json").read_text())
    assert list(written) == ["command", "machine", "met", "figures", "rows", "wall_s"]
    assert written["met"] is False and written["machine"]["num_cpus"] > 0


def test_what_is_written_has_four_digits_and_no_folder_of_the_machine():
    @dataclass
    class Row:
        speed: float

    assert jsonable({"a": (Row(1.23456),), "b": None}) == {"a": [{"speed": 1.235}], "b": None}
    assert publishable("--quick") == "--quick" and publishable("/home/somebody/model") == "model"
    assert publishable(str(REPOSITORY / "models" / "sample")) == "models/sample"


def test_the_command_line_has_a_size_and_the_options_asked_for():
    arguments = benchmark_parser("about", "model", "threads").parse_args(["--quick", "--threads", "3"])
    assert (arguments.size, arguments.threads, arguments.model) == ("quick", 3, DEFAULT_MODEL)
    assert scale_of(arguments, "f", "q", "s") == "q" and not hasattr(arguments, "data")
