"""LASER's experiments: figures of the decoding rules, and our rows next to the paper's."""

import pytest
from common import Interval, Spread
from laser import compared, nights_figures, texts_figures
from systems import Pass


def test_a_rule_is_compared_with_plain_decoding_of_the_same_prompts():
    plain = [(Pass(4.0, 10, 10, ((1, 2), (3,)), text_tokens=(6, 4)),), (Pass(6.0, 10, 10, ((1, 2), (3,))),)]
    own = [
        (Pass(1.0, 12, 4, ((1, 2), (4,)), num_accepted=8, drafting_s=0.1, text_tokens=(2, 1024)),),
        (Pass(2.0, 12, 4, ((1, 2), (4,)), num_accepted=8, drafting_s=0.4),),
    ]
    comparison = compared(own, plain)
    assert comparison["speed"] == Spread.of([12 / 2.5, 6 / (10 / 6)])
    assert comparison["time"] == Spread.of([1 / 4, 2 / 6])
    assert (comparison["aal"], comparison["tokens_per_step"], comparison["length"]) == (2, 3, 1.2)
    assert (comparison["share_as_plain"], comparison["share_cut"]) == (0.5, 0.5)
    assert comparison["retrieval_ms"] == pytest.approx(125)


def test_texts_agree_where_the_whole_interval_does():
    none = {"texts": "none", "form": "both"}
    sure = {"texts": "relaxed", "form": "both", "over_none": Interval(0.03, 0.01, 0.05)}
    rows = [none, sure | {"over_greedy": Interval(0.001, -0.002, 0.004)}]
    assert [figure.met for figure in texts_figures("a", "", "", rows)] == [True, True]
    rows = [none, sure | {"over_greedy": Interval(0.0, -0.006, 0.006)}]
    assert [figure.met for figure in texts_figures("a", "", "", rows)] == [True, False]


def test_nights_are_told_beside_the_paper():
    row = {"grouping_s": 0.5, "pools_s": 1.5, "generation_s": 10.0}
    nights = {"vanilla": row | {"generation_s": 40.0}, "resd": row, "laser": row}
    figures = {figure.name: figure.measured for figure in nights_figures([{"night": n} | r for n, r in nights.items()])}
    assert list(figures.values()) == [0.2, 0.2, 1.0, 0.25, 0.25]
