"""Vectors of a team's own recommender: used in place of LightGCN, or refused with file, column and row."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import adjusted_rand_score
from slow_routes import route

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.routing.embeddings import EntityEmbeddings, read_embeddings
from laserbatch.retrieval_pools.routing.router import Router, fit_routers
from laserbatch.retrieval_pools.settings import RoutingSettings

ROOT = Path(__file__).resolve().parents[2]
NUM_USERS, NUM_ITEMS = 24, 12
IDS = pa.array([f"u{n}" for n in range(NUM_USERS)], pa.large_string())
VECTORS = [[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [0.0, 0.0, -1.0]]
FLOATS = pa.list_(pa.float32())


def write(path, ids, vectors, kind=FLOATS, side="user", **more):
    table = pa.table({f"{side}_id": ids, "vector": pa.array(vectors, kind)} | more)
    pq.write_table(table, path, row_group_size=4)
    return path


@pytest.mark.parametrize(
    "kind", [FLOATS, pa.large_list(pa.float64()), pa.list_(pa.float32(), 3), pa.list_(pa.float16())], ids=str
)
def test_lists_of_any_kind_are_read(tmp_path, kind):
    path = write(tmp_path / "e.parquet", ["u3", "u1", "u2"], VECTORS, kind, score=[1, 2, 3])
    embeddings = read_embeddings(path, "user", IDS)
    assert embeddings.ids.to_pylist() == ["u3", "u1", "u2"]
    assert embeddings.vectors.dtype == np.float32
    assert embeddings.vectors.tolist() == VECTORS


def test_unknown_ids_are_passed_over_over_many_row_groups(tmp_path):
    ids = [f"u{n}" for n in range(40)]
    path = write(tmp_path / "e.parquet", ids, [[float(n), 1.0] for n in range(40)])
    embeddings = read_embeddings(path, "user", IDS)
    assert embeddings.ids.to_pylist() == ids[:NUM_USERS]
    assert embeddings.vectors[:, 0].tolist() == list(range(NUM_USERS))


def test_integer_ids_of_another_width_are_the_same_ids(tmp_path):
    path = write(tmp_path / "e.parquet", pa.array([2, 1, 7], pa.int32()), VECTORS)
    assert read_embeddings(path, "user", pa.array([1, 2, 3])).ids.to_pylist() == [2, 1]


def test_a_file_without_rows_has_no_vectors(tmp_path):
    path = write(tmp_path / "e.parquet", pa.array([], pa.string()), [])
    assert len(read_embeddings(path, "user", IDS).ids) == 0


@pytest.mark.parametrize(
    ("ids", "vectors", "message"),
    [
        (["u0", "u1", "u2"], [[1.0, 2.0], [1.0, 2.0], [1.0]], "column vector, row 2: expected a vector of 2 finite"),
        (["u0", "u1", "u2"], [[1.0], None, [1.0]], r"column vector, row 1: expected a vector .*found None\)"),
        (["u0", "u1", "u2"], [[1.0], [None], [1.0]], r"column vector, row 1: expected .*found \[None\]"),
        (["u0", "u1", "u2"], [[1.0], [1.0], [np.nan]], r"column vector, row 2: expected .*found \[nan\]"),
        (["u0", "u1", "u2"], [[1.0], [np.inf], [1.0]], "column vector, row 1: .* finite"),
        (["u0", "u1", "u2"], [[], [], []], "column vector, row 0: expected a vector of 1 finite numbers"),
        (["u0", "u1", "u0"], [[1.0], [2.0], [3.0]], r"column user_id, row 2: the id was in an earlier row .*u0"),
    ],
)  # fmt: skip
def test_a_row_that_is_wrong_is_named(tmp_path, ids, vectors, message):
    path = write(tmp_path / "e.parquet", ids, vectors)
    with pytest.raises(PoolError, match=f"routing.user_embeddings: {re.escape(str(path))}, {message}"):
        read_embeddings(path, "user", IDS)


def test_a_number_too_large_for_float32_is_not_finite(tmp_path):
    path = write(tmp_path / "e.parquet", ["u0"], [[1e300]], pa.list_(pa.float64()))
    with pytest.raises(PoolError, match="row 0: expected a vector of 1 finite numbers"):
        read_embeddings(path, "user", IDS)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": ["u0"], "vector": [[1.0]]}, "has no column 'user_id'; its columns are id, vector"),
        ({"user_id": ["u0"], "embedding": [[1.0]]}, "has no column 'vector'; its columns are user_id, embedding"),
        ({"user_id": ["u0"], "vector": [1.0]}, "cannot be read"),
        ({"user_id": [None], "vector": [[1.0]]}, "is of type null; expected strings or integers"),
        ({"user_id": pa.array(["u0", None]), "vector": [[1.0], [1.0]]}, "has 1 nulls; expected an id in every row"),
        ({"user_id": pa.array([2**63], pa.uint64()), "vector": [[1.0]]}, r"user_id: .*2\*\*63"),
        (
            {"user_id": [1], "vector": [[1.0]]},
            "are int64, but ids of the users are large_string; write both in one type",
        ),
    ],
)
def test_a_column_that_is_wrong_is_named(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "e.parquet")
    with pytest.raises(PoolError, match=f"e.parquet.*{message}"):
        read_embeddings(tmp_path / "e.parquet", "user", IDS)


def test_a_file_that_is_missing_or_damaged_is_named(tmp_path):
    with pytest.raises(PoolError, match=r"routing.user_embeddings: .*absent.parquet cannot be read"):
        read_embeddings(tmp_path / "absent.parquet", "user", IDS)
    (tmp_path / "e.parquet").write_bytes(b"PAR1 not parquet")
    with pytest.raises(PoolError, match=r"routing.item_embeddings: .*e.parquet cannot be read"):
        read_embeddings(tmp_path / "e.parquet", "item", IDS)


@pytest.fixture(scope="module")
def world():
    """Users with the same interactions, so that only the given vectors distinguish them."""
    items = [f"i{n}" for n in range(NUM_ITEMS)]
    pairs = [(user, item) for user in IDS.to_pylist() for item in items]
    interactions = pa.table({"user_id": [user for user, _ in pairs], "item_id": [item for _, item in pairs]})
    return pa.table({"user_id": IDS}), pa.table({"item_id": items}), interactions


def test_groups_are_those_of_the_files_vectors_and_who_has_none_is_not_warm(world, tmp_path):
    users, _, interactions = world
    order = np.random.default_rng(0).permutation(NUM_USERS - 1)
    path = write(tmp_path / "e.parquet", [f"u{n}" for n in order], [VECTORS[n % 3] for n in order])
    settings = RoutingSettings(num_groups=3, user_embeddings=path)
    router = Router.fit("user", users, interactions, settings)
    routes = [route(router, user, {}, NUM_ITEMS) for user in IDS.to_pylist()]
    assert adjusted_rand_score([n % 3 for n in range(NUM_USERS - 1)], [route.group for route in routes[:-1]]) == 1
    assert routes[-1].scheme == "attribute"
    embeddings = EntityEmbeddings(IDS.take(pa.array(order)), np.array(VECTORS, np.float32)[order % 3])
    same = Router.fit("user", users, interactions, settings, embeddings=embeddings)
    assert [route(same, user, {}, NUM_ITEMS) for user in IDS.to_pylist()] == routes
    router.save(tmp_path / "router")
    assert Router.load(tmp_path / "router").settings.user_embeddings == path


def test_a_side_without_a_file_is_trained_and_equals_its_own_fit(world, tmp_path):
    users, items, interactions = world
    path = write(tmp_path / "e.parquet", IDS, [VECTORS[n % 3] for n in range(NUM_USERS)])
    settings = RoutingSettings(num_groups=3, user_embeddings=path)
    both = fit_routers(users, items, interactions, settings, seed=1)
    for side, entities in (("user", users), ("item", items)):
        alone = Router.fit(side, entities, interactions, settings, seed=1)
        assert both[side].collaborative.groups.tolist() == alone.collaborative.groups.tolist()
        assert len(alone.collaborative.ids) == len(entities)


def test_with_both_files_nothing_is_trained_and_neither_that_nor_a_loaded_router_needs_torch(world, tmp_path):
    users, items, interactions = world
    pq.write_table(users, tmp_path / "users.parquet")
    pq.write_table(items, tmp_path / "items.parquet")
    pq.write_table(interactions, tmp_path / "interactions.parquet")
    write(tmp_path / "u.parquet", IDS, [VECTORS[n % 3] for n in range(NUM_USERS)])
    write(tmp_path / "i.parquet", items["item_id"], [VECTORS[n % 3] for n in range(NUM_ITEMS)], side="item")
    program = (
        "import sys, numpy as np, pyarrow.parquet as pq\n"
        "from pathlib import Path\n"
        "from laserbatch.retrieval_pools.routing.router import Router, fit_routers\n"
        "from laserbatch.retrieval_pools.settings import RoutingSettings\n"
        "settings = RoutingSettings(user_embeddings='u.parquet', item_embeddings='i.parquet')\n"
        "tables = [pq.read_table(name + '.parquet') for name in ('users', 'items', 'interactions')]\n"
        "router, counts = fit_routers(*tables, settings)['item'], np.full(tables[1].num_rows, 9)\n"
        "router.save(Path('router'))\n"
        "for each in (router, Router.load(Path('router'))):\n"
        "    assert set(each.routes(tables[1], counts).schemes.to_pylist()) == {'collaborative'}\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
