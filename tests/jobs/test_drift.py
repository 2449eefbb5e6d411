"""Drift: a night that accepts notably less than its budget was chosen for says so, and what to do."""

import copy

import pytest
from manifest_fixture import Undrawn, figures_of, manifest_of, night_manifest, night_of

from laserbatch.jobs.drift import MIN_STEPS, MOST_MISSING, drift_of, note_step_costs
from laserbatch.jobs.generate import night_counts
from laserbatch.jobs.report import charts
from laserbatch.jobs.report.page import page_of, render_page
from laserbatch.pipeline.storage.run_folder import ExpectedTime, ShardInfo, ShardRecord
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.retrieval_pools.step_cost import computed_step_cost, read_step_cost


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    monkeypatch.setattr(charts, "_Chart", Undrawn)


@pytest.fixture
def manifest() -> dict:
    return night_manifest()


def with_forecast(side_data: dict, share: float) -> dict:
    """A side that accepted so much of what was forecast."""
    side_data = copy.deepcopy(side_data)
    stats = side_data["stats"]
    side_data["budget"]["forecast"]["tokens_per_step"] = 1 + stats["num_accepted"] / stats["num_steps"] / share
    return side_data


@pytest.mark.parametrize(("share", "is_notable"), [(1.3, False), (0.81, False), (0.79, True), (0.1, True)])
def test_only_notably_less_than_forecast_is_drift(manifest, share, is_notable):
    side = with_forecast(manifest["sides"]["user"], share)
    drift = drift_of(figures_of(side))
    assert drift.missing == pytest.approx(1 - share)
    assert drift.is_notable is is_notable
    counts = night_counts(night_of(side))["users"]
    assert ("warning" in counts) is is_notable
    manifest["sides"]["user"] = side
    page = render_page(page_of(manifest_of(manifest)))
    assert ("laserbatch pools rebuild" in page) is is_notable
    assert "How much was drafted" in page and "the fastest of the replays" in page
    assert "whole run" in page and "1.4×" in page  # 1.37, prompts and the ends of shards counted
    if is_notable:
        assert f"{drift.missing:.0%} less" in counts["warning"] and f"{MOST_MISSING:.0%}" in counts["warning"]


def test_few_steps_say_nothing(manifest):
    side = with_forecast(manifest["sides"]["user"], 0.1)
    side["stats"] |= {"num_steps": MIN_STEPS - 1, "num_accepted": 1}
    assert not drift_of(figures_of(side)).is_notable


def test_no_forecast_and_no_drafts_have_no_drift(manifest):
    side = manifest["sides"]["user"]
    budget = side["budget"]
    for changes in (
        {"budget": None},
        {"budget": budget | {"max_draft_tokens": 0}},
        {"budget": budget | {"forecast": None}},
        {"stats": side["stats"] | {"num_steps": 0}},
    ):
        assert drift_of(figures_of(side | changes)) is None
    del manifest["sides"]["user"]["budget"], manifest["sides"]["item"]["budget"]
    assert "How much was drafted" not in render_page(page_of(manifest_of(manifest)))


@pytest.mark.parametrize(
    ("wall_s", "taken", "is_doubted"), [(50.0, None, False), (65.0, 1.3, False), (90.0, 1.8, True)]
)
def test_a_step_cost_that_shards_refute_is_measured_again_by_the_next_run(tmp_path, capsys, wall_s, taken, is_doubted):
    known = computed_step_cost()
    (tmp_path / "cost.json").write_text(known.model_dump_json())
    expected = ExpectedTime(known.name, 25.0 if taken else 14.0)  # too little to say anything
    infos = [ShardInfo("", "", DecodingStats(wall_s=wall_s / 2), None, 1, expected)] * 2
    infos += [ShardInfo("", "", DecodingStats(wall_s=9.0), None, 1)]
    note_step_costs(tmp_path, [ShardRecord(str(n), "f", 1, "0", info=info) for n, info in enumerate(infos)])
    assert read_step_cost(tmp_path / "cost.json").taken == taken
    assert ("measures again" in capsys.readouterr().err + capsys.readouterr().out) == is_doubted
