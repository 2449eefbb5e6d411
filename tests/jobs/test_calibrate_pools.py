"""Calibration during the build of pools: the replays of a first and a second night, and too few texts."""

import datetime
import shutil

import numpy as np
import pytest
from planted_night import write_night

from laserbatch.jobs.settings import load_settings
from laserbatch.jobs.stages import pool_texts
from laserbatch.jobs.stages.build_pools import build_pools
from laserbatch.jobs.stages.night import open_night
from laserbatch.jobs.stages.pool_texts import draft_options, drafted_with
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.pipeline.storage.figures import BudgetFigures, BudgetForecast
from laserbatch.retrieval_pools.sources import SOURCE_PREVIOUS

FIRST_DATE, SECOND_DATE = datetime.date(2025, 2, 28), datetime.date(2025, 3, 1)
NUM_ITEMS = 300  # more items than a night replays


@pytest.fixture
def world(tmp_path):
    write_sample_world(tmp_path / "tables", num_users=20, num_items=100)
    return tmp_path


def opened(world, date, routing="{}"):
    path = world / "laserbatch.yaml"
    path.write_text(f"workspace: workspace\ntables: {{path: tables}}\nrouting: {routing}\n")
    return open_night(load_settings(path), date)


@pytest.fixture(scope="module")
def first_night(tmp_path_factory):
    """A world after its first night has written texts and built pools, and the build of the item pool."""
    folder = tmp_path_factory.mktemp("first_night")
    write_sample_world(folder / "tables", num_users=20, num_items=NUM_ITEMS)
    night = opened(folder, FIRST_DATE)
    write_night(night)
    return folder, build_pools(night)["item"]


@pytest.fixture
def after_first_night(first_night, tmp_path):
    """A copy of that world, and the build of its item pool."""
    folder, built = first_night
    return shutil.copytree(folder, tmp_path / "world"), built


def test_a_first_night_replays_texts_held_back_and_its_pool_holds_all(after_first_night):
    world, built = after_first_night
    night = opened(world, FIRST_DATE)
    num_texts = night.tables.items.num_rows
    pool = night.pools.open(night.run.run_id, "item")
    calibration = pool.manifest.calibration
    assert pool.manifest.num_texts == built.num_texts == num_texts
    assert calibration.num_texts == num_texts // 5 and built.is_calibrated
    assert np.array_equal(pool.curves, calibration.curves)
    assert not any(source.source == SOURCE_PREVIOUS for source in calibration.sources)
    assert calibration.budgets == pool.budgets
    assert calibration.budgets.new.num_texts == num_texts // 5 and calibration.budgets.changed is None
    assert max(cell.tokens_per_step for cell in calibration.budgets.new.cells) > 1.5
    assert sorted(path.name for path in pool.folder.parent.iterdir()) == ["checksums.json", "item", "router"]


def test_a_second_night_replays_what_it_wrote_against_the_pool_it_drafted_from(after_first_night):
    world, _ = after_first_night
    night = opened(world, FIRST_DATE)
    next_night = opened(world, SECOND_DATE)
    num_texts = write_night(next_night, 5, night.run.knowledge_folder("item")).num_rows
    build_pools(next_night)
    calibration = next_night.pools.open(next_night.run.run_id, "item").manifest.calibration
    assert calibration.num_texts == num_texts
    new, changed = calibration.budgets.new, calibration.budgets.changed
    assert 0.4 * num_texts < changed.num_texts <= new.num_texts == num_texts // 2  # every other text is replayed
    assert changed.cells[-1].tokens_per_step > new.cells[-1].tokens_per_step
    assert SOURCE_PREVIOUS in {source.source for source in calibration.sources}
    assert calibration.curves[SOURCE_PREVIOUS, :, -1].max() > 0.8


def test_a_night_that_wrote_few_texts_keeps_the_calibration_and_counts_them(world, monkeypatch):
    monkeypatch.setattr(pool_texts, "MAX_SHARE_CHANGED", 2.0)  # of a side's texts, since these nights rewrite all
    nights, dates = [], [FIRST_DATE + datetime.timedelta(days) for days in range(5)]
    for number, date in enumerate(dates):
        nights.append(opened(world, date, "{scheme: attribute}"))  # needs no training
        num_texts = write_night(
            nights[-1], number, nights[-2].run.knowledge_folder("item") if number else None
        ).num_rows
        build_pools(nights[-1])
    known = [night.pools.open(night.run.run_id, "item").manifest.calibration for night in nights]
    first, second, fifth = (nights[number].run.run_id for number in (0, 1, 4))
    # The first night has no previous texts, so the second replays too; its calibration stays until many texts are new.
    assert [calibration.replayed_run for calibration in known] == [first, second, second, second, fifth]
    assert [calibration.num_texts_changed for calibration in known] == [0, 0, num_texts, 2 * num_texts, 0]
    assert known[2].curves.tobytes() == known[1].curves.tobytes() != known[4].curves.tobytes()


def test_building_again_gives_the_same_files(after_first_night):
    world, _ = after_first_night
    night = opened(world, FIRST_DATE)
    folder = night.pools.folder(night.run.run_id) / "item"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    build_pools(night)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_pools_without_replays_believe_relative_counts(world, monkeypatch):
    monkeypatch.setattr(pool_texts, "NUM_CALIBRATION_TEXTS", 1)
    night = opened(world, FIRST_DATE)
    write_night(night)
    build_pools(night)
    assert night.pools.open(night.run.run_id, "item").manifest.calibration is None


def test_replays_draft_by_the_budget_that_the_night_chose(world):
    night = opened(world, FIRST_DATE)
    assert drafted_with(night, "item") is None
    night.manifest.generation.budgets = {
        "user": BudgetFigures(0, 1.0, BudgetForecast("given")),
        "item": BudgetFigures(4, 0.3, BudgetForecast("given")),
    }
    assert drafted_with(night, "user") is None  # nothing was drafted, so replays use the default budget
    assert drafted_with(night, "item") == Budget(4, 0.3)


def test_replays_draft_as_the_run_does():
    options = draft_options(DecodingSettings(max_draft_tokens=8, min_acceptance=0.2, drafters=("pool", "output")))
    assert (options.max_nodes, options.min_acceptance) == (8, 0.2)
    assert (options.use_prompt, options.use_output, options.use_previous) == (False, True, False)
