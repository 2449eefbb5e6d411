"""Who gets a collaborative group: by interactions, by age, or as the user's own function says."""

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.routing.router import Router
from laserbatch.retrieval_pools.routing.rule import EntityFacts, RoutingRule
from laserbatch.retrieval_pools.routing.settings import LightGCNSettings, RoutingSettings

SETTINGS = RoutingSettings(min_interactions=3, num_groups=2, lightgcn=LightGCNSettings(dim=4, max_steps=2))
FUNCTIONS = """
calls = []

def choose(facts):
    calls.append(facts)
    is_known = facts.num_interactions > 5 or (facts.age_days or 0) > 90
    return "collaborative" if is_known and facts.attributes.get("country") != "FR" else "attribute"

def fails(facts):
    return facts.attributes["absent"]

def maybe(facts):
    return True

def unhashable(facts):
    return ["collaborative"]

constant = "collaborative"
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's on Python's path; the name that the setting calls it by."""
    name = f"routing_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def facts(num_interactions, age_days=None, **attributes):
    return EntityFacts(num_interactions, age_days, attributes)


def router(rule=None, **options):
    ids = [f"u{n}" for n in range(8)]
    users = pa.table({"user_id": ids, "country": ["FR" if n % 2 else "SE" for n in range(8)]})
    pairs = [(user, f"i{n}") for user in ids for n in range(6)]
    interactions = pa.table({"user_id": [user for user, _ in pairs], "item_id": [item for _, item in pairs]})
    return users, Router.fit("user", users, interactions, SETTINGS.model_copy(update={"rule": rule} | options))


def test_by_default_interactions_decide_whatever_the_age():
    rule = RoutingRule.of(RoutingSettings())
    cases = ((4, 900), (5, 0), (5, None), (5, -3))
    assert [rule.prefers_collaborative("u", facts(*case)) for case in cases] == [False, True, True, True]


def test_a_young_entity_is_sent_to_its_attributes_and_an_unknown_age_is_enough():
    rule = RoutingRule.of(RoutingSettings(min_age_days=7))
    found = [rule.prefers_collaborative("u", facts(50, age)) for age in (6.99, 7, 30, None)]
    assert found == [False, True, True, True]
    assert not rule.prefers_collaborative("u", facts(1, 30))


def test_a_table_is_routed_by_age_like_its_rows():
    users, fitted = router(min_age_days=10)
    ages = np.array([0, 9.5, 10, 11, np.nan, 2, 400, 10])
    counts = np.array([6, 6, 6, 6, 6, 2, 2, 3])
    routes = fitted.route_all(users, counts, ages)
    assert [route.scheme == "collaborative" for route in routes] == [False, False, True, True, True, False, False, True]
    assert routes == [
        fitted.route(row["user_id"], row, int(count), None if np.isnan(age) else float(age))
        for row, count, age in zip(users.to_pylist(), counts, ages, strict=True)
    ]


def test_an_own_function_decides_in_place_of_both_limits(module):
    users, fitted = router(f"{module}:choose", min_age_days=1000)
    counts, ages = np.array([6, 6, 0, 0, 0, 0, 6, 0]), np.array([0, 0, 91, 91, 90, np.nan, np.nan, 500])
    routes = fitted.route_all(users, counts, ages)
    assert [route.scheme == "collaborative" for route in routes] == [
        True,
        False,
        True,
        False,
        False,
        False,
        True,
        False,
    ]
    assert fitted.route("u0", {"country": "SE"}, 0, 100).scheme == "collaborative"
    told = fitted.rule.function.__globals__["calls"][-1]
    assert told == EntityFacts(0, 100, {"country": "SE"})
    assert fitted.route("never seen", {"country": "SE"}, 50).scheme == "attribute"


def test_a_saved_router_takes_the_function_from_the_configuration_and_not_from_its_file(module, tmp_path):
    users, fitted = router(f"{module}:choose")
    fitted.save(tmp_path / "r")
    with pytest.raises(PoolError, match=f"was fitted for routing.rule '{module}:choose'; pass a RoutingRule"):
        Router.load(tmp_path / "r")
    loaded = Router.load(tmp_path / "r", RoutingRule.of(fitted.settings))
    counts = np.full(8, 6)
    assert loaded.route_all(users, counts) == fitted.route_all(users, counts)
    limits = Router.load(tmp_path / "r", RoutingRule.of(SETTINGS))
    assert {route.scheme for route in limits.route_all(users, counts)} == {"collaborative"}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("no_such_module:choose", r"routing.rule .*'no_such_module' cannot be imported \(ModuleNotFound.*PYTHONPATH"),
        ("MODULE:absent", "expected a function 'absent' in .*, found nothing of that name"),
        ("MODULE:constant", "expected a function 'constant' in .*, found a str"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_named_with_the_setting(module, rule, message):
    with pytest.raises(PoolError, match=message):
        RoutingRule.of(RoutingSettings(rule=rule.replace("MODULE", module)))


def test_a_module_that_raises_is_named_with_the_setting(tmp_path, monkeypatch):
    (tmp_path / "raises_at_import.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PoolError, match=r"routing.rule 'raises_at_import:f'.*ZeroDivisionError: division by zero"):
        RoutingRule.of(RoutingSettings(rule="raises_at_import:f"))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("fails", r"routing.rule '\w+:fails' raised KeyError: 'absent' for the entity 'u0'"),
        ("maybe", r"'\w+:maybe' returned True for the entity 'u0'; expected 'collaborative' or 'attribute'"),
        ("unhashable", r"returned \['collaborative'\] for the entity 'u0'"),
    ],
)  # fmt: skip
def test_what_the_function_does_wrong_is_named_with_the_setting(module, function, message):
    users, fitted = router(f"{module}:{function}")
    with pytest.raises(PoolError, match=message):
        fitted.route("u0", {}, 9)
    with pytest.raises(PoolError, match=message):
        fitted.route_all(users, np.full(8, 9))


@pytest.mark.parametrize("rule", ["module", "module:", ":f", "a.b", "a..b:f", "a:b:c", "path/to.py:f", "1a:f", "a:f()"])
def test_a_setting_that_names_no_function_is_refused(rule):
    with pytest.raises(ValidationError, match="expected module:function"):
        RoutingSettings(rule=rule)
