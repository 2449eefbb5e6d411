"""Several ways of prompting on the same rows, each with its own encoder and use of texts; "none" is trained once."""

import pyarrow as pa
import pytest
from ctr_world import AS_OF, make_features, make_world

from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.lift import Way, num_trainings, train_ways
from laserbatch.ctr.settings import CtrSettings
from laserbatch.pipeline.encoding.schema import feature_schema

SETTINGS = CtrSettings(models=("gbdt",), num_seeds=2)


@pytest.fixture(scope="module")
def world():
    return make_world(num_users=80, num_items=50, num_interactions=1500, num_cold=20)


def narrower(features, dim):
    """Features cut to `dim` dimensions, like those of another encoder."""
    narrow = {}
    for side, table in features.items():
        flat = table["vector"].combine_chunks().flatten().to_numpy().reshape(table.num_rows, -1)[:, :dim]
        columns = [*table.columns]
        columns[1] = pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), dim)
        narrow[side] = pa.Table.from_arrays(columns, schema=feature_schema(side, table.schema.types[0], dim))
    return narrow


def test_each_way_has_its_own_width_and_is_judged_against_none_and_each_other(world):
    useful, noise = make_features(world), narrower(make_features(world, noise=50.0), 8)
    ways = {"useful": Way(useful, SETTINGS), "noise": Way(noise, SETTINGS.model_copy(update={"vector_dim": 4}))}
    fitted = []
    lifts = train_ways(world, ways, AS_OF, fitted.append)
    assert len(fitted) == num_trainings(ways) == 6  # "none" is trained once, since it sees no vectors
    assert lifts.ways["useful"].over_none["all"].verdict == "better"
    assert lifts.ways["noise"].over_none["LightGBM"].verdict != "better"
    assert lifts.between["useful", "noise"].verdict == "better" and lifts.between["noise", "useful"].verdict == "worse"
    assert [row.variant for row in lifts.ways["useful"].rows] == ["none", "useful"]
    again = train_ways(world, {"twin": ways["useful"], "useful": ways["useful"]}, AS_OF)
    assert again.between["twin", "useful"].mean_difference == 0
    assert again.ways["twin"].over_none == lifts.ways["useful"].over_none


def test_ways_that_would_be_judged_on_other_rows_are_refused_by_key(world):
    features = make_features(world)
    for changed in ({"label": "rating >= 3"}, {"num_seeds": 3}, {"history": "split"}):
        ways = {"a": Way(features, SETTINGS), "b": Way(features, SETTINGS.model_copy(update=changed))}
        with pytest.raises(CtrError, match=rf"ctr\.{next(iter(changed))} "):
            train_ways(world, ways, AS_OF)
    other = {"a": Way(features, SETTINGS), "b": Way(features, SETTINGS.model_copy(update={"max_history": 5}))}
    assert num_trainings(other) == 8  # here the two "none" models differ
