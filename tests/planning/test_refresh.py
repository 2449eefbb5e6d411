"""The choice of entities to rewrite tonight: policies, and a budget under which no entity waits forever."""

import numpy as np
import pytest

from laserbatch.pipeline.planning.refresh import Candidates, RefreshSettings, decide


def candidates(**columns) -> Candidates:
    """Users with a text of yesterday that has seen all 10 interactions; arguments replace these values."""
    num = max(len(values) for values in columns.values())
    usual = {"has_text": True, "is_changed_beyond_history": False, "num_interactions": 10, "num_seen": 10,
             "age_days": 1.0, "num_tokens": 100.0}  # fmt: skip
    filled = {name: np.asarray(columns.get(name, [value] * num)) for name, value in usual.items()}
    return Candidates(**filled)


def written(entities: Candidates, max_tokens=None, **settings) -> list[int]:
    return np.flatnonzero(decide(entities, RefreshSettings(**settings), max_tokens).is_written).tolist()


def test_by_default_every_change_is_written():
    assert written(candidates(num_interactions=[10, 11, 30])) == [0, 1, 2]


def test_so_many_interactions_must_have_come_or_gone_since_the_text():
    entities = candidates(num_interactions=[11, 12, 13, 7, 8])
    assert written(entities, min_new_interactions=3) == [2, 3]
    otherwise = candidates(num_interactions=[11, 11], is_changed_beyond_history=[True, False])
    assert written(otherwise, min_new_interactions=3) == [0]
    assert written(candidates(num_interactions=[1, 11], has_text=[False, True]), min_new_interactions=3) == [0]


def test_an_old_text_is_rewritten_however_little_came():
    assert written(candidates(age_days=[6, 7, 8]), min_new_interactions=3, max_age_days=7) == [1, 2]


def test_a_budget_takes_the_most_valuable_and_counts_the_rest():
    entities = candidates(num_interactions=[11, 20, 12, 40], num_seen=[10, 10, 10, 38])
    decision = decide(entities, RefreshSettings(), max_tokens=200)
    assert decision.is_written.tolist() == [False, True, True, False]
    assert decision.is_over_budget.tolist() == [True, False, False, True]
    expected = [np.log2(13) / 11, np.log2(22) / 2, np.log2(14) * 2 / 12, np.log2(42) * 2 / 40]
    assert decision.scores == pytest.approx(np.array(expected) + 1 / 7)  # the formula in the documentation


def test_nobody_waits_for_ever_while_others_have_more_that_is_new():
    """90 nights for 100 users with room for 30 texts: 80 users get many interactions a day, the others one in all."""
    draw, settings = np.random.default_rng(0), RefreshSettings()
    seen, now, written_on = np.full(100, 10), np.full(100, 10), np.zeros(100, int)
    now[80:] += 1
    nights_of: list[set[int]] = []
    for night in range(1, 91):
        now[:80] += draw.integers(5, 30, 80)
        changed = np.flatnonzero(now != seen)
        entities = candidates(
            num_interactions=now[changed], num_seen=seen[changed], age_days=night - written_on[changed]
        )
        picked = changed[decide(entities, settings, max_tokens=3000).is_written]
        assert len(picked) == 30
        seen[picked], written_on[picked] = now[picked], night
        nights_of.append(set(picked.tolist()))
    assert set(range(100)) == set().union(*nights_of)
    assert set(range(80, 100)) <= set().union(*nights_of[:60])


def test_a_changed_template_is_written_over_nights_and_comes_to_an_end():
    """Every text is due and a third of the tokens fit a night: the most active users come first, and none twice."""
    activity, is_old, nights = np.arange(90), np.ones(90, bool), []
    for night in range(1, 5):
        rows = np.flatnonzero(is_old)
        entities = candidates(num_interactions=activity[rows], num_seen=activity[rows], age_days=[night] * len(rows),
                          is_changed_beyond_history=[True] * len(rows)) if len(rows) else None  # fmt: skip
        if entities is None:
            break
        picked = rows[decide(entities, RefreshSettings(min_new_interactions=5), max_tokens=3000).is_written]
        is_old[picked] = False
        nights.append(picked.tolist())
    assert nights == [list(range(60, 90)), list(range(30, 60)), list(range(30))]
