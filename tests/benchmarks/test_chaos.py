"""The kills that `chaos.py` draws and the outcomes that it counts; its nights are no part of the tests."""

import random

from chaos import RAY_KINDS, Kill, Outcome, drawn, rows_of

OPERATIONS = ["start", "plan", "plan", "generate", "encode", "pools", "pools", "close", "publish"]


def test_deaths_are_spread_over_kinds_and_stages_and_are_the_same_for_a_seed():
    kills = drawn(OPERATIONS, 40, random.Random(1))
    assert len(kills) == 40 and kills == drawn(OPERATIONS, 40, random.Random(1))
    assert {kill.kind for kill in kills} == {"driver", "sigterm", *RAY_KINDS}
    of_files = [kill for kill in kills if kill.operation]
    assert {kill.stage for kill in of_files} == set(OPERATIONS)
    assert all(OPERATIONS[kill.operation - 1] == kill.stage for kill in of_files)


def test_a_night_that_hung_has_not_survived_whatever_came_after_it():
    kill = Kill("gcs", "start")
    (row,) = rows_of([Outcome(kill, [137, 0], is_identical=True), Outcome(kill, [None, 0], is_identical=True)])
    assert (row["kills"], row["survived"], row["hung"], row["identical"]) == (2, 1, 1, 2)
