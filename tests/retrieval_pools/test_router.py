"""The router: collaborative groups for known and active entities, attribute groups for others; baselines."""

import json
from collections import Counter
from dataclasses import replace
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from sklearn.metrics import adjusted_rand_score
from slow_routes import route

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.routing.router import Route, Router, fit_routers, random_group
from laserbatch.retrieval_pools.settings import RoutingSettings, Scheme

NUM_USERS, NUM_ITEMS, NUM_COMMUNITIES = 120, 80, 4
NUM_COLD = 20  # the last users have two interactions each
SETTINGS = RoutingSettings(num_groups=NUM_COMMUNITIES)


def _users(id_type=pa.string()):
    numbers = np.arange(NUM_USERS)
    return pa.table({
        "user_id": _ids("u", numbers, id_type),
        "taste": pa.array([["Mystery", "Harbour" if n % 2 else "Manor"] if n % 3 else ["Romance"] for n in numbers]),
        "age": pa.array([20 + n * 7 % 40 for n in numbers]),
    })  # fmt: skip


def _interactions(id_type=pa.string()):
    rng = np.random.default_rng(0)
    users, items = [], []
    for user in range(NUM_USERS):
        own = np.arange(user % NUM_COMMUNITIES, NUM_ITEMS, NUM_COMMUNITIES)
        chosen = rng.choice(own, 10, replace=False) if user < NUM_USERS - NUM_COLD else rng.choice(own, 2)
        users += [user] * len(chosen)
        items += chosen.tolist()
    return pa.table({"user_id": _ids("u", users, id_type), "item_id": _ids("i", items, id_type)})


def _ids(prefix, numbers, id_type):
    if pa.types.is_integer(id_type):
        return pa.array([int(number) for number in numbers], id_type)
    return pa.array([f"{prefix}{number}" for number in numbers], id_type)


def _counts(entities, interactions):
    counted = {row["values"]: row["counts"] for row in interactions["user_id"].value_counts().to_pylist()}
    return np.array([counted.get(entity_id, 0) for entity_id in entities["user_id"].to_pylist()])


def _route_all(router, entities, counts):
    rows = zip(entities.to_pylist(), counts, strict=True)
    return [route(router, row["user_id"], row, int(count)) for row, count in rows]


@pytest.fixture(scope="module")
def users():
    return _users()


@pytest.fixture(scope="module")
def interactions():
    return _interactions()


@pytest.fixture(scope="module")
def router(users, interactions):
    return Router.fit("user", users, interactions, SETTINGS, seed=1)


@pytest.mark.parametrize("scheme", get_args(Scheme))
def test_all_routes_at_once_are_those_of_each(router, users, interactions, scheme):
    router = replace(router, settings=router.settings.model_copy(update={"scheme": scheme}))
    tastes = [[], None, ["Mystery"], ["Mystery", "new"], ["Romance", None, "x"]] * len(users)
    users = users.set_column(1, "taste", pa.array(tastes[: len(users)]))
    counts = np.array(_counts(users, interactions))
    routes = _route_all(router, users, counts)
    at_once = router.routes(users, counts)
    assert [at_once.of(row) for row in range(len(users))] == routes
    assert at_once.num_by_scheme() == Counter(route.scheme for route in routes)


def test_active_entities_get_their_community_and_cold_ones_their_attributes(router, users, interactions):
    routes = _route_all(router, users, _counts(users, interactions))
    warm, cold = routes[:-NUM_COLD], routes[-NUM_COLD:]
    assert {route.scheme for route in warm} == {"collaborative"}
    assert {route.group for route in warm} == {f"collaborative/{number}" for number in range(NUM_COMMUNITIES)}
    planted = [user % NUM_COMMUNITIES for user in range(len(warm))]
    assert adjusted_rand_score(planted, [route.group for route in warm]) > 0.8
    assert {route.scheme for route in cold} == {"attribute"}
    assert all(route.group.startswith(("attribute/Mystery/", "attribute/Romance")) for route in cold)


def test_unknown_entities_fall_back_to_the_longest_known_prefix(router):
    mystery = {"taste": ["Mystery", "Spaceship"], "age": 30}
    assert route(router, "never seen", mystery, 50) == Route("attribute/Mystery", "attribute")
    assert route(router, "never seen", {"taste": None, "age": None}, 0) == Route("attribute", "attribute")
    assert route(router, "never seen", {}, 0) == Route("attribute", "attribute")


def test_a_known_entity_with_too_few_interactions_now_is_cold(router):
    assert route(router, "u0", {"taste": ["Romance"]}, SETTINGS.min_interactions).scheme == "collaborative"
    assert route(router, "u0", {"taste": ["Romance"]}, SETTINGS.min_interactions - 1).scheme == "attribute"


def test_an_entity_that_became_active_after_the_fit_stays_with_its_attributes(router):
    assert route(router, f"u{NUM_USERS - 1}", {"taste": ["Mystery"]}, 500) == Route("attribute/Mystery", "attribute")


@pytest.mark.parametrize("scheme", ["router", "collaborative", "attribute", "random", "global"])
@pytest.mark.parametrize("id_type", [pa.string(), pa.large_string(), pa.int64(), pa.int32()], ids=str)
def test_saved_router_routes_identically(scheme, id_type, tmp_path):
    users, interactions = _users(id_type), _interactions(id_type)
    settings = SETTINGS.model_copy(update={"scheme": scheme})
    router = Router.fit("user", users, interactions, settings, seed=1)
    router.save(tmp_path)
    loaded = Router.load(tmp_path)
    strangers = users.slice(0, 10).set_column(0, "user_id", _ids("new", range(900, 910), id_type))
    entities = pa.concat_tables([users, strangers])
    counts = np.r_[_counts(users, interactions), np.full(10, 99)]
    routes = _route_all(router, entities, counts)
    assert routes == _route_all(loaded, entities, counts)
    expected = {
        "router": {"collaborative", "attribute"}, "collaborative": {"collaborative", "global"},
        "attribute": {"attribute"}, "random": {"random"}, "global": {"global"},
    }  # fmt: skip
    assert {route.scheme for route in routes} == expected[scheme]


def test_int_and_string_ids_give_the_same_groups(users, interactions, router):
    numbered = Router.fit("user", _users(pa.int64()), _interactions(pa.int64()), SETTINGS, seed=1)
    counts = _counts(users, interactions)
    planted = [route.group for route in _route_all(numbered, _users(pa.int64()), counts)]
    assert adjusted_rand_score(planted, [route.group for route in _route_all(router, users, counts)]) > 0.9


def test_equal_arguments_give_equal_files_whatever_the_order_of_rows(users, interactions, router, tmp_path):
    rng = np.random.default_rng(3)
    shuffled = Router.fit(
        "user", users.take(rng.permutation(users.num_rows)), interactions.take(rng.permutation(interactions.num_rows)),
        SETTINGS, seed=1,
    )  # fmt: skip
    router.save(tmp_path / "a")
    shuffled.save(tmp_path / "b")
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["attribute_groups.parquet", "collaborative.parquet", "router.json"]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_both_sides_at_once_equal_two_fits(users, interactions, router):
    items = pa.table({"item_id": _ids("i", range(NUM_ITEMS), pa.string())})
    both = fit_routers(users, items, interactions, SETTINGS, seed=1)
    counts = _counts(users, interactions)
    assert _route_all(both["user"], users, counts) == _route_all(router, users, counts)
    alone = Router.fit("item", items, interactions, SETTINGS, seed=1)
    assert both["item"].collaborative.groups.tolist() == alone.collaborative.groups.tolist()
    assert route(both["item"], "i0", {}, 25).scheme == "collaborative"


def test_defaults_work_on_tables_without_attributes_and_without_interactions(users, interactions):
    ids_only = users.select(["user_id"])
    assert route(Router.fit("user", ids_only, interactions), "u0", {}, 10).scheme == "collaborative"
    nothing_yet = Router.fit("user", ids_only, interactions.slice(0, 0))
    assert _route_all(nothing_yet, ids_only, np.zeros(NUM_USERS)) == [Route("attribute", "attribute")] * NUM_USERS
    nobody = Router.fit("user", users.slice(0, 0), interactions)
    assert _route_all(nobody, users.slice(0, 0), np.zeros(0)) == []
    assert route(nobody, "u0", {"taste": ["Romance"]}, 10) == Route("attribute", "attribute")


def test_interactions_of_entities_outside_the_table_are_not_grouped(users, interactions):
    router = Router.fit("user", users.slice(0, 50), interactions, SETTINGS)
    assert len(router.collaborative.ids) == 50
    assert route(router, "u60", {}, 10).scheme == "attribute"


def test_random_groups_are_readable_and_about_equal_in_size():
    counts = Counter(random_group(number, 4, seed=0) for number in range(4000))
    assert set(counts) == {"random/0", "random/1", "random/2", "random/3"}
    assert min(counts.values()) > 850


def test_random_groups_are_the_same_in_another_process():
    assert (random_group("ä", 1000, 3), random_group(17, 1000, 3)) == ("random/695", "random/918")


def test_random_groups_depend_on_the_seed_only(users, interactions):
    settings = SETTINGS.model_copy(update={"scheme": "random"})
    first, second, other = (Router.fit("user", users, interactions, settings, seed) for seed in (1, 1, 2))
    counts = np.zeros(NUM_USERS)
    assert _route_all(first, users, counts) == _route_all(second, users, counts)
    assert _route_all(first, users, counts) != _route_all(other, users, counts)
    assert route(first, "never seen", {}, 0).group.startswith("random/")


@pytest.mark.parametrize("side", ["user", "item"])
def test_the_attributes_that_are_named_for_a_side_decide_its_groups(side):
    entities, groups = _users().rename_columns([f"{side}_id", "taste", "age"]), {}
    for column in ("taste", "age"):
        settings = RoutingSettings(scheme="attribute", **{f"{side}_attributes": (column,)})
        routes = Router.fit(side, entities, _interactions(), settings).routes(entities, np.zeros(NUM_USERS, int))
        groups[column] = set(routes.groups.to_pylist())
    assert groups["taste"] == {f"attribute/{path}" for path in ("Mystery/Harbour", "Mystery/Manor", "Romance")}
    assert len(groups["age"]) > 1 and all(group.startswith("attribute/age=") for group in groups["age"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("shop", _users(), _interactions()), "the side is 'shop'"),
        (("item", _users(), _interactions()), "entities has no column 'item_id'; its columns are user_id, taste, age"),
        (("user", _users(), _interactions().select(["item_id"])), "interactions has no column 'user_id'"),
        (("user", _users(), _interactions(pa.int64())), "ids of interactions are int64, but ids of entities are"),
        (("user", pa.table({"user_id": [1.5]}), _interactions()), "entities.user_id is of type double"),
        (("user", pa.table({"user_id": ["a", None]}), _interactions()), "entities.user_id has 1 nulls"),
        (("user", _users(), _interactions(), RoutingSettings(user_attributes=("taste", "tast"))), "attribute 'tast'"),
    ],
)
def test_input_that_a_user_can_fix_is_named(arguments, message):
    with pytest.raises(PoolError, match=message):
        Router.fit(*arguments)


def test_missing_damaged_and_foreign_files_are_refused(router, tmp_path):
    with pytest.raises(PoolError, match=r"cannot be read .*No such file.*router.json.*rebuild"):
        Router.load(tmp_path)
    router.save(tmp_path)
    (tmp_path / "collaborative.parquet").write_bytes(b"not parquet")
    with pytest.raises(PoolError, match="cannot be read"):
        Router.load(tmp_path)
    shorter = replace(router.collaborative, ids=router.collaborative.ids[:5], groups=router.collaborative.groups[:5])
    pq.write_table(pa.table({"entity_id": shorter.ids, "group": shorter.groups}), tmp_path / "collaborative.parquet")
    with pytest.raises(PoolError, match="damaged"):
        Router.load(tmp_path)
    router.save(tmp_path)
    (tmp_path / "attribute_groups.parquet").unlink()
    with pytest.raises(PoolError, match=r"cannot be read .*attribute_groups.parquet.*rebuild"):
        Router.load(tmp_path)
    router.save(tmp_path)
    description = json.loads((tmp_path / "router.json").read_text())
    (tmp_path / "router.json").write_text(json.dumps({**description, "format_version": 99}))
    with pytest.raises(PoolError, match="has format 99; expected 4"):
        Router.load(tmp_path)
    (tmp_path / "router.json").write_text("{")
    with pytest.raises(PoolError, match="cannot be read"):
        Router.load(tmp_path)


@pytest.mark.parametrize("wrong", [{"sheme": "random"}, {"scheme": "lda"}])
def test_wrong_settings_fail_at_once(wrong):
    with pytest.raises(ValidationError):
        RoutingSettings(**wrong)
