"""The benchmark of what a night does beside its forwards: four nights of a tiny world, and what is asked of them."""

import orchestration
import pytest
from orchestration import figures_of


def test_the_second_night_writes_nothing_and_the_others_one_entity_in_twenty(run_benchmark, monkeypatch):
    monkeypatch.setattr(orchestration, "night_apart", orchestration.watched_night)
    rows = run_benchmark("orchestration", "--entities", 60)["rows"]
    assert {(row["entities"], row["changed_share"]) for row in rows} == {(60, 1.0), (60, 0.0), (60, 0.05)}
    written = [row["night"] for row in rows if row["stage"] == "write"]
    assert written == ["all", "some", "again"]
    for row in rows:
        assert row["peak_mb"] > 0 and row["seconds"] >= 0 and row["cpu_seconds"] >= 0


def test_figures_are_of_the_largest_size_without_what_is_written():
    def night(size, name, seconds, peak_mb):
        row = {"entities": size, "night": name, "cpu_seconds": seconds}
        return [
            row | {"stage": "plan", "seconds": seconds, "peak_mb": peak_mb},
            row | {"stage": "write", "seconds": 1e6, "peak_mb": 1},
        ]

    rows = night(1000, "none", 10, 500) + night(4000, "none", 44, 2000)
    rows += night(4000, "some", 3, 600) + night(4000, "again", 1, 600)  # half of the nights as either
    by_name = {figure.name: (figure.measured, figure.met) for figure in figures_of(rows)}
    assert by_name == {
        "seconds of a night of 4,000 unchanged": (44, True),
        "its peak memory, MB, of 4,000": (2000, False),
        "share of the driver where 5 % changed": (2 / (2 + 4000 * 0.05 * 150 / 5000), False),
        "seconds an entity, 4,000 beside 1,000": (pytest.approx(1.1), True),
    }
