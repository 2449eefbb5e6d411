"""The benchmark of a night's work outside of forwards: four nights of a tiny world, and their goals."""

import orchestration
import pytest
from orchestration import figures_of


def test_the_second_night_writes_nothing_and_the_others_one_entity_in_twenty(run_benchmark, monkeypatch):
    monkeypatch.setattr(orchestration, "night_apart", orchestration.watched_night)
    rows = run_benchmark("orchestration", "--entities", 60)["rows"]
    assert {row["changed_share"] for row in rows} == {1.0, 0.0, 0.01, 0.05}
    assert {row["entities"] for row in rows} == {60}
    written = [row["night"] for row in rows if row["stage"] == "write"]
    assert written == ["all", "some", "again"]
    for row in rows:
        assert row["peak_mb"] > 0 and row["seconds"] >= 0 and row["cpu_seconds"] >= 0


def test_figures_are_of_the_largest_size_without_what_is_written():
    def night(size, name, seconds, own_mb):
        row = {"entities": size, "night": name, "cpu_seconds": seconds, "text_tokens": 150}
        return [
            row | {"stage": "plan", "seconds": seconds, "own_mb": own_mb},
            row | {"stage": "write", "seconds": 1e6, "cpu_seconds": 1e6, "own_mb": 1},
        ]

    rows = night(1000, "none", 10, 2100) + night(4000, "none", 44, 500)
    rows += night(4000, "some", 3, 600) + night(4000, "again", 1, 600)  # half of the nights each
    by_name = {figure.name: (figure.measured, figure.met) for figure in figures_of(rows)}
    assert by_name == {
        "processor seconds of a night of 4,000 unchanged": (44, False),
        "own memory of a process, MB, in any night of 4,000": (600, True),
        "share of the driver where 5 % changed": (2 / (2 + 4000 * 0.05 * 150 / 5000), False),
        "processor seconds an entity, 4,000 beside 1,000": (pytest.approx(1.1), True),
    }
    assert [figure.name for figure in figures_of(night(60, "all", 1, 1))] == [
        "own memory of a process, MB, in any night of 60"
    ]
