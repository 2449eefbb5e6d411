"""Columns are encoded by the training rows alone."""

import numpy as np
import pyarrow as pa
import pytest

from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.fields import ABSENT, MAX_SLOTS, NUM_RESERVED, UNKNOWN, fit_encoders


def fields_of(columns, is_trained=None):
    table = pa.table({"item_id": [f"i{n}" for n in range(len(next(iter(columns.values()))))], **columns})
    trained = np.ones(table.num_rows, bool) if is_trained is None else np.array(is_trained)
    encoders = fit_encoders(table, "item_id", trained.astype(int), min_seen=1)[1:]
    return {encoder.name: encoder.encode(table) for encoder in encoders}


def test_rare_and_unseen_ids_share_the_unknown_bucket():
    table = pa.table({"item_id": ["a", "b", "c", "d"]})
    field = fit_encoders(table, "item_id", np.array([5, 0, 2, 3]), min_seen=3)[0].encode(table)
    assert field.codes[:, 0].tolist() == [NUM_RESERVED, UNKNOWN, UNKNOWN, NUM_RESERVED + 1]
    assert field.num_codes == NUM_RESERVED + 2


def test_a_category_that_training_never_saw_is_unknown_and_null_is_absent():
    codes = fields_of({"kind": ["b", "a", None, "z"]}, [True, True, True, False])["kind"].codes[:, 0]
    assert codes.tolist() == [NUM_RESERVED + 1, NUM_RESERVED, ABSENT, UNKNOWN]


def test_nearly_unique_text_is_no_category_and_timestamps_are_left_out():
    columns = {
        "title": [f"Title {n}" for n in range(40)],
        "kind": ["x", "y"] * 20,
        "created_at": pa.array([0] * 40, pa.timestamp("us", "UTC")),
    }
    assert list(fields_of(columns)) == ["kind"]


def test_a_path_is_a_bag_of_its_levels():
    field = fields_of({"path": [["a", "b"], ["a"], None, [], ["a", "never"]]}, [True, True, True, True, False])["path"]
    a, b = NUM_RESERVED, NUM_RESERVED + 1
    assert field.codes.tolist() == [[a, b], [a, 0], [0, 0], [0, 0], [a, UNKNOWN]]


def test_a_long_list_is_cut_with_a_warning_and_trees_keep_the_slots_of_training(caplog):
    def tags(*lengths):
        return pa.table({"item_id": ["i0", "i1"], "tags": [["a"] * length for length in lengths]})

    encoder = fit_encoders(tags(1, 3), "item_id", np.ones(2, int), min_seen=1)[1]
    for lengths, num_slots in (((1, 1), 3), ((3, 1), 3), ((5, 1), 5), ((1, MAX_SLOTS), MAX_SLOTS)):
        field = encoder.encode(tags(*lengths))
        assert field.codes.shape == (2, num_slots) and field.tree_slots == 3
        assert (field.codes > 0).sum(axis=1).tolist() == list(lengths)
    assert not caplog.records
    assert encoder.encode(tags(1, 10_000)).codes.shape == (2, MAX_SLOTS)
    assert f"column tags: of 1 long lists, models read only the first {MAX_SLOTS} elements" in caplog.text


def test_numbers_fall_into_quantile_bins_of_the_trained():
    values = pa.array([*range(100), 10_000, None], pa.int64())
    field = fields_of({"year": values}, [True] * 100 + [False] * 2)["year"]
    codes = field.codes[:, 0]
    assert np.bincount(codes[:100])[NUM_RESERVED:].tolist() == [10] * 10
    assert codes[100] == NUM_RESERVED + 9 and codes[101] == ABSENT
    assert codes.max() < field.num_codes


def test_whole_numbers_that_no_float_holds_exactly_are_numbers():
    """For example article or account numbers that exporters write as integers."""
    assert fields_of({"account": pa.array([10**18 + 1, 5, 2**63 - 1])})["account"].codes.max() > NUM_RESERVED


def test_booleans_are_categories_and_what_is_neither_is_left_out():
    columns = {"flag": [True, False, None], "blob": pa.array([b"1", b"2", b"3"])}
    assert list(fields_of(columns)) == ["flag"]


def test_columns_that_say_nothing_do_no_harm():
    columns = {
        "nulls": pa.nulls(4, pa.string()),
        "nans": [float("nan")] * 4,
        "empty": pa.nulls(4, pa.list_(pa.string())),
    }
    for field in fields_of(columns).values():
        assert (field.codes == ABSENT).all()


def test_a_list_that_became_a_text_is_refused_with_the_type_in_training():
    (encoder,) = fit_encoders(pa.table({"item_id": ["i"], "path": [["a"]]}), "item_id", np.ones(1, int), 1)[1:]
    with pytest.raises(CtrError, match=r"path is of type string; the model was trained with list<"):
        encoder.encode(pa.table({"path": ["a"]}))
