"""Nothing of the test period reaches training: tests plant a leak or change the future, and look for traces."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from ctr_world import AS_OF, make_features

from laserbatch.ctr.compare import train_ctr
from laserbatch.ctr.dataset import build_dataset
from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.knowledge import build_knowledge
from laserbatch.ctr.loop import fit
from laserbatch.ctr.settings import CtrSettings
from laserbatch.ctr.training import build_network

SETTINGS = CtrSettings(num_seeds=1, max_epochs=2)


def with_other_future(world, part, data):
    """The same world with other ratings, users and items in the rows of one part of the split."""
    rows = getattr(data, part)
    rng = np.random.default_rng(1)
    ratings = world.interactions["rating"].to_numpy().copy()
    ratings[rows] = 8.0 - ratings[rows]
    columns = {"rating": pa.array(ratings)}
    for name in ("user_id", "item_id"):
        order = np.arange(world.interactions.num_rows)
        order[rows] = rng.permutation(rows)
        columns[name] = world.interactions[name].take(order)
    interactions = world.interactions
    for name, column in columns.items():
        interactions = interactions.set_column(interactions.schema.get_field_index(name), name, column)
    return dataclasses.replace(world, interactions=interactions)


def trace(world, features):
    """The bytes of all arrays that training reads."""
    data = build_dataset(world, AS_OF, SETTINGS)
    arrays = [array[data.train] for array in (data.users, data.items, data.past, data.labels, data.times_us)]
    arrays += [data.liked[data.starts[row] : data.ends[row]] for row in data.train]
    arrays += [data.train] + [field.codes for field in (*data.user_fields, *data.item_fields)]
    knowledge = build_knowledge(world, data, {"relaxed": features}, AS_OF, SETTINGS)["relaxed"]
    arrays += [array for side in (knowledge.user, knowledge.item) for array in (side.vectors, side.codes)]
    return [(array.dtype.str, array.shape, array.tobytes()) for array in arrays]


def test_changing_everything_after_the_date_leaves_training_byte_identical(world):
    data = build_dataset(world, AS_OF, SETTINGS)
    features = make_features(world)
    before = trace(world, features)
    for part in ("validation", "test"):
        changed = with_other_future(world, part, data)
        assert not changed.interactions.equals(world.interactions)
        assert trace(changed, features) == before


def test_new_entities_of_the_future_leave_training_byte_identical(world):
    """Users and items that appear after the date add rows at the end, and no category, bin or basis."""
    before = build_dataset(world, AS_OF, SETTINGS)
    new_item = pa.table(
        {"item_id": ["new"], "title": ["New"], "path": [["all", "a kind of the future"]], "is_new": [True]}
    ).cast(world.items.schema)
    grown = dataclasses.replace(world, items=pa.concat_tables([world.items, new_item]))
    after = build_dataset(grown, AS_OF, SETTINGS)
    for old, new in zip(before.item_fields, after.item_fields, strict=True):
        assert old.num_codes == new.num_codes and np.array_equal(old.codes, new.codes[:-1])


def test_early_stopping_never_sees_the_test_part(world):
    data = build_dataset(world, AS_OF, SETTINGS)
    changed = build_dataset(with_other_future(world, "test", data), AS_OF, SETTINGS)
    outcomes = []
    for of_world in (data, changed):
        network = build_network("dcnv2", of_world, None, SETTINGS, seed=0)
        fitted = fit(network, of_world, SETTINGS, seed=0)
        outcomes.append(((fitted.best_epoch, fitted.best_auc), network.state_dict()))
    (first, first_weights), (second, second_weights) = outcomes
    assert first == second
    assert all(np.array_equal(first_weights[name].numpy(), second_weights[name].numpy()) for name in first_weights)


def test_one_row_of_a_later_run_is_enough_to_be_refused(world):
    features = make_features(world)
    run_ids = features["user"]["run_id"].to_pylist()
    run_ids[17] = "2025-03-02-0123abcd"
    user = features["user"].set_column(4, features["user"].schema.field("run_id"), pa.array(run_ids))
    with pytest.raises(CtrError, match=r"2025-03-02.*but training ends on 2025-03-01"):
        train_ctr(world, {"relaxed": features | {"user": user}}, AS_OF, SETTINGS)


def test_features_of_no_date_are_refused(world):
    with pytest.raises(CtrError, match="does not begin with a date"):
        train_ctr(world, {"relaxed": make_features(world, run_id="latest")}, AS_OF, SETTINGS)


def test_features_carried_over_from_earlier_runs_are_fine(world):
    data = build_dataset(world, AS_OF, SETTINGS)
    features = {"relaxed": make_features(world, run_id="2025-02-20-0123abcd")}
    build_knowledge(world, data, features, AS_OF, SETTINGS)
