import datetime
import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from sample_lore import about_themes, title_themes

from laserbatch.pipeline.sample import world as sample_world
from laserbatch.pipeline.sample.catalogue import WeightedGroups, make_catalogue
from laserbatch.pipeline.sample.lore import CATEGORY_PATHS, THEMES
from laserbatch.pipeline.sample.world import LAST_DATE, write_sample_world
from laserbatch.pipeline.tables.check import check_tables
from laserbatch.pipeline.tables.read import read_tables


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_sample_world(folder)
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.parquet"))}


def test_same_seed_same_bytes_and_another_seed_another_world(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_sample_world(tmp_path / name, num_users=60, num_items=40, seed=seed)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert set(digests(tmp_path / "a").values()).isdisjoint(digests(tmp_path / "c").values())


def test_users_are_streamed_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_world, "USERS_PER_CHUNK", 25)
    seen = []
    write_sample_world(tmp_path, num_users=60, num_items=40, progress=seen.append)
    assert seen == [25, 25, 10]
    assert pq.ParquetFile(tmp_path / "users.parquet").num_row_groups == 3
    assert pq.ParquetFile(tmp_path / "interactions.parquet").num_row_groups == 3
    ids = pq.read_table(tmp_path / "users.parquet")["user_id"].to_pylist()
    assert len(set(ids)) == 60


def test_the_world_passes_the_check(world):
    assert not [finding for finding in check_tables(world) if getattr(finding, "fatal", True)]


def test_the_last_day_brings_new_users_items_and_behaviour(world):
    before = read_tables(world, LAST_DATE - datetime.timedelta(days=1))
    after = read_tables(world, LAST_DATE)
    assert 5 <= after.users.num_rows - before.users.num_rows <= 40
    assert 5 <= after.items.num_rows - before.items.num_rows <= 20
    new_events = after.interactions.slice(before.interactions.num_rows)
    active = len(pc.unique(new_events["user_id"]))
    assert 0.15 <= active / after.users.num_rows <= 0.25
    new_items = set(after.items["item_id"].to_pylist()) - set(before.items["item_id"].to_pylist())
    assert new_items & set(new_events["item_id"].to_pylist())


def test_the_future_has_many_rows_of_cold_users(world):
    night, everything = read_tables(world, LAST_DATE), read_tables(world)
    assert night.users.num_rows == 400 == everything.users.num_rows
    counts = Counter(night.interactions["user_id"].to_pylist())
    future = everything.interactions.slice(night.interactions.num_rows)
    cold = [counts[user] <= sample_world.MAX_COLD_RATINGS for user in future["user_id"].to_pylist()]
    assert future.num_rows > 1_000
    assert 0.3 < np.mean(cold) < 0.7
    assert everything.interactions["timestamp"][-1].as_py().date() == LAST_DATE + datetime.timedelta(days=7)


def test_ratings_are_once_an_item_and_after_both_appeared(world):
    tables = read_tables(world)
    pairs = list(
        zip(tables.interactions["user_id"].to_pylist(), tables.interactions["item_id"].to_pylist(), strict=True)
    )
    assert len(set(pairs)) == len(pairs)
    users = dict(zip(tables.users["user_id"].to_pylist(), tables.users["created_at"].to_pylist(), strict=True))
    items = dict(zip(tables.items["item_id"].to_pylist(), tables.items["created_at"].to_pylist(), strict=True))
    for (user, item), when in zip(pairs, tables.interactions["timestamp"].to_pylist(), strict=True):
        assert users[user] < when and items[item] < when
    ratings = Counter(tables.interactions["rating"].to_pylist())
    assert set(ratings) == {1, 2, 3, 4, 5}
    assert 0.35 < (ratings[4] + ratings[5]) / len(pairs) < 0.65


def test_liked_themes_are_told_by_the_statement_and_by_no_column(world):
    tables = read_tables(world)
    users = tables.users.to_pylist()
    assert all(1 <= len(about_themes(user["about"])) <= 2 for user in users)
    columns = [value for user in users for name, value in user.items() if isinstance(value, str) and name != "user_id"]
    assert not any(theme.name in value for theme in THEMES for value in columns)
    liked = {user["user_id"]: about_themes(user["about"])[0] for user in users}
    themes = {item["item_id"]: title_themes(item["title"]).main for item in tables.items.to_pylist()}
    rated = {True: [], False: []}
    for row in tables.interactions.to_pylist():
        rated[themes[row["item_id"]] == liked[row["user_id"]]].append(row["rating"])
    assert np.mean(rated[True]) > np.mean(rated[False]) + 0.8


def test_words_of_titles_belong_to_one_theme():
    words = [word for theme in THEMES for word in theme.nouns + theme.adjectives]
    assert len(set(words)) == len(words)
    cues = [cue for theme in THEMES for cue in theme.cues]
    assert len(set(cues)) == len(cues)
    catalogue = make_catalogue(200, 60, np.random.default_rng(0))
    for title, main, undertone in zip(catalogue.titles, catalogue.theme, catalogue.undertone, strict=True):
        assert (title_themes(title).main, title_themes(title).undertone) == (main, undertone)


def test_empty_statement_has_no_theme():
    assert about_themes("") == ()


def test_weighted_groups_draw_by_weight_within_the_group():
    groups = WeightedGroups(np.array([0, 1, 0, -1]), np.array([1.0, 1.0, 3.0, 5.0]), 3)
    rng = np.random.default_rng(0)
    drawn = Counter(groups.draw(np.zeros(4_000, int), rng).tolist())
    assert set(drawn) == {0, 2}
    assert drawn[2] / drawn[0] == pytest.approx(3.0, rel=0.15)
    assert set(groups.draw(np.full(500, 1), rng).tolist()) == {1}
    assert set(groups.draw(np.full(500, 2), rng).tolist()) == {0, 1, 2, 3}  # the group is empty, so any item is drawn
    assert set(groups.draw(np.full(500, 3), rng).tolist()) == {0, 1, 2, 3}


def test_smallest_world_and_no_future(tmp_path):
    write_sample_world(tmp_path, num_users=1, num_items=20, days=2, future_days=0)
    tables, everything = read_tables(tmp_path, LAST_DATE), read_tables(tmp_path)
    assert tables.users.num_rows == 1 and tables.interactions.num_rows == everything.interactions.num_rows


def test_category_paths_have_three_levels():
    assert len(CATEGORY_PATHS) == 72 and all(len(path) == 3 for path in CATEGORY_PATHS)


def test_ratings_that_are_asked_for_add_to_the_future_and_change_nothing_else(tmp_path):
    write_sample_world(tmp_path / "as before", num_users=60, num_items=40)
    write_sample_world(tmp_path / "asked", num_users=60, num_items=40, num_asked=12)
    before, with_asked = (set(map(tuple, rows_of(tmp_path / name))) for name in ("as before", "asked"))
    added = with_asked - before
    assert before <= with_asked and len(added) > 200
    assert all(moment.date() > LAST_DATE for _, _, moment, _ in added)
    assert len({(user, moment) for user, _, moment, _ in added}) == 60  # all additions of a user have the same time
    assert len({(user, item) for user, item, *_ in with_asked}) == len(with_asked)


def rows_of(folder):
    return [list(row.values()) for row in pq.read_table(folder / "interactions.parquet").to_pylist()]
