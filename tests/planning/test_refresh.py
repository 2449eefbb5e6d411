"""Who is worth a new text tonight: policies, and a budget under which nobody waits for ever."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from laserbatch.pipeline.planning.drift import ItemClusters, history_drift
from laserbatch.pipeline.planning.refresh import Candidates, RefreshSettings, decide
from laserbatch.pipeline.storage.parquet import write_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder


def candidates(**columns) -> Candidates:
    """Users with a text of yesterday that has seen 10 of 10 interactions, unless said otherwise."""
    num = max(len(values) for values in columns.values())
    usual = {"has_text": True, "is_changed_beyond_history": False, "num_interactions": 10, "num_seen": 10,
             "age_days": 1.0, "num_tokens": 100.0}  # fmt: skip
    filled = {name: np.asarray(columns.get(name, [value] * num)) for name, value in usual.items()}
    return Candidates(**filled, drift=np.array(columns["drift"]) if "drift" in columns else None)


def written(some: Candidates, max_tokens=None, **settings) -> list[int]:
    return np.flatnonzero(decide(some, RefreshSettings(**settings), max_tokens).is_written).tolist()


def test_by_default_every_change_is_written():
    assert RefreshSettings().is_off
    assert written(candidates(num_interactions=[10, 11, 30])) == [0, 1, 2]


def test_so_many_interactions_must_have_come_or_gone_since_the_text():
    some = candidates(num_interactions=[11, 12, 13, 7, 8])
    assert written(some, min_new_interactions=3) == [2, 3]
    otherwise = candidates(num_interactions=[11, 11], is_changed_beyond_history=[True, False])
    assert written(otherwise, min_new_interactions=3) == [0]
    assert written(candidates(num_interactions=[1, 11], has_text=[False, True]), min_new_interactions=3) == [0]


def test_an_old_text_is_rewritten_however_little_came():
    assert written(candidates(age_days=[6, 7, 8]), min_new_interactions=3, max_age_days=7) == [1, 2]


def test_a_history_that_stayed_where_it_was_waits_unless_that_is_not_known():
    some = candidates(
        num_interactions=[12, 12, 12, 11, 12], drift=[0.1, 0.3, np.nan, 0.3, 0.1], age_days=[1, 1, 1, 1, 9]
    )
    assert written(some, min_new_interactions=2, min_drift=0.2, max_age_days=7) == [1, 2, 4]


def test_drift_is_the_angle_between_the_means_of_what_the_text_has_seen_and_of_all(tmp_path):
    draw = np.random.default_rng(0)
    centroids, of_items = draw.normal(size=(3, 4)).astype(np.float32), np.array([0, 1, 2, -1, 1])
    starts, items = np.array([0, 4, 4, 9, 10]), np.array([0, 3, 1, 2, 2, 2, 1, 0, 4, 3])
    histories = SimpleNamespace(starts=starts, items=lambda places: items[places])
    users, num_seen = np.array([2, 0, 1, 3]), np.array([2, 3, 0, 1])
    found = history_drift(histories, users, num_seen, ItemClusters(of_items, centroids))
    for value, user, seen in zip(found[:2], users, num_seen, strict=False):
        of_user = [of_items[item] for item in items[starts[user] : starts[user + 1]]]
        then, now = (np.mean([centroids[k] for k in part if k >= 0], axis=0) for part in (of_user[:seen], of_user))
        assert value == pytest.approx(1 - then @ now / np.linalg.norm(then) / np.linalg.norm(now))
    assert np.isnan(found[2:]).all()  # of no event, and of an item without a cluster

    run = RunFolder(tmp_path)
    write_parquet(
        pa.table({"item_id": ["b", "a"], "cluster_id": pa.array([1, 0], pa.int32())}), run.features_path("item")
    )
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(centroids[:2].reshape(-1)), 4)
    codes = {"level": ["cluster_id", "cluster_id"], "code": pa.array([0, 1], pa.int32()), "vector": vectors}
    write_parquet(pa.table(codes), run.centroids_path("item"))
    known = ItemClusters.of_run(run, pa.table({"item_id": ["a", "new", "b"]}))
    assert known.of_items.tolist() == [0, -1, 1] and np.array_equal(known.centroids, centroids[:2])
    assert ItemClusters.of_run(run, pa.table({"item_id": [1, 2]})) is None
    assert ItemClusters.of_run(RunFolder(tmp_path / "none"), pa.table({"item_id": ["a"]})) is None


def test_a_budget_takes_the_most_valuable_and_counts_the_rest():
    some = candidates(num_interactions=[11, 20, 12, 40], num_seen=[10, 10, 10, 38])
    decision = decide(some, RefreshSettings(), max_tokens=200)
    assert decision.is_written.tolist() == [False, True, True, False]
    assert decision.is_over_budget.tolist() == [True, False, False, True] and decision.num_tokens(some) == 200
    expected = [np.log2(13) / 11, np.log2(22) / 2, np.log2(14) * 2 / 12, np.log2(42) * 2 / 40]
    assert decision.scores == pytest.approx(np.array(expected) + 1 / 7)  # as the documentation writes it


def test_nobody_waits_for_ever_while_others_have_more_that_is_new():
    """90 nights of 100 users of whom 80 get many interactions a day, and the others one once; 30 texts a night."""
    draw, settings = np.random.default_rng(0), RefreshSettings()
    seen, now, written_on = np.full(100, 10), np.full(100, 10), np.zeros(100, int)
    now[80:] += 1
    nights_of: list[set[int]] = []
    for night in range(1, 91):
        now[:80] += draw.integers(5, 30, 80)
        changed = np.flatnonzero(now != seen)
        some = candidates(num_interactions=now[changed], num_seen=seen[changed], age_days=night - written_on[changed])
        picked = changed[decide(some, settings, max_tokens=3000).is_written]
        assert len(picked) == 30
        seen[picked], written_on[picked] = now[picked], night
        nights_of.append(set(picked.tolist()))
    assert set(range(100)) == set().union(*nights_of)
    assert set(range(80, 100)) <= set().union(*nights_of[:60])


def test_a_changed_template_is_written_over_nights_and_comes_to_an_end():
    """Everybody is due; a third of the tokens fit a night; the most active come first, and nobody twice."""
    activity, is_old, nights = np.arange(90), np.ones(90, bool), []
    for night in range(1, 5):
        rows = np.flatnonzero(is_old)
        some = candidates(num_interactions=activity[rows], num_seen=activity[rows], age_days=[night] * len(rows),
                          is_changed_beyond_history=[True] * len(rows)) if len(rows) else None  # fmt: skip
        if some is None:
            break
        picked = rows[decide(some, RefreshSettings(min_new_interactions=5), max_tokens=3000).is_written]
        is_old[picked] = False
        nights.append(picked.tolist())
    assert nights == [list(range(60, 90)), list(range(30, 60)), list(range(30))]
