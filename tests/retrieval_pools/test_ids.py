"""Codes of ids equal those of a Python dictionary, for any batches."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laserbatch.retrieval_pools import ids as codes
from laserbatch.retrieval_pools.ids import IdCodes, rows_among

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
KINDS = {pa.string(): TEXT, pa.int64(): INTEGERS}


def code_plainly(batches: list[list]) -> tuple[list[list[int]], list]:
    """The codes of each batch, and the distinct ids."""
    code_of: dict = {}
    return [[-1 if id_ is None else code_of.setdefault(id_, len(code_of)) for id_ in ids] for ids in batches], [
        *code_of
    ]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_ids_have_the_codes_that_a_dictionary_gives(kind, data):
    pool = data.draw(st.lists(KINDS[kind], min_size=1, max_size=9))
    some = st.lists(st.one_of(st.none(), st.sampled_from(pool)), max_size=12)
    batches, others = data.draw(st.lists(some, max_size=4)), data.draw(st.lists(KINDS[kind], max_size=4))
    start = data.draw(st.integers(0, 2))  # slices of an array, like batches of files
    ids = IdCodes(kind)
    expected, distinct = code_plainly([batch[start:] for batch in batches])
    assert [ids.add(pa.array(batch, kind).slice(start)).tolist() for batch in batches] == expected
    assert (ids.values().to_pylist(), len(ids)) == (distinct, len(distinct))
    assert ids.find(pa.array([*others, None], kind)).tolist() == [
        *(distinct.index(id_) if id_ in distinct else -1 for id_ in others), -1,
    ]  # fmt: skip
    assert len(ids) == len(distinct)


@pytest.mark.parametrize("kind", KINDS)
def test_many_ids_stay_what_they_are_while_the_table_grows(kind):
    rng = np.random.default_rng(0)
    batches = [rng.integers(60_000, size=10_000) for _ in range(20)]
    as_ids = [pa.array(batch).cast(kind) for batch in batches]
    ids = IdCodes(kind)
    expected, distinct = code_plainly([batch.to_pylist() for batch in as_ids])
    assert [ids.add(batch).tolist() for batch in as_ids] == expected
    assert ids.values().to_pylist() == distinct
    assert ids.find(pa.array(range(60_000)).cast(kind)).max() == len(distinct) - 1


@given(
    known=st.lists(st.lists(st.none() | st.integers(-9, 9)), max_size=3),
    values=st.lists(st.none() | st.integers(-12, 12)),
)
@pytest.mark.parametrize("kind", [pa.int64(), pa.string(), pa.large_string()])
@pytest.mark.parametrize("fewer", [0.01, 100])  # the table is built from the values or from the known ids
def test_the_row_of_an_id_is_the_first_that_has_it(known, values, kind, fewer):
    flat, chunks = [id_ for chunk in known for id_ in chunk], [pa.array(chunk, pa.int64()) for chunk in known]
    column, values = pa.chunked_array(chunks, pa.int64()).cast(kind), pa.array(values, pa.int64())
    expected = [flat.index(id_) if id_ is not None and id_ in flat else -1 for id_ in values.to_pylist()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codes, "FEWER", fewer)
        patch.setattr(codes, "ROWS_AT_ONCE", 3)
        rows = rows_among(values.cast(kind), column)
        assert rows.tolist() == rows_among(pa.chunked_array([values.cast(kind)]), column).tolist() == expected
    assert rows.dtype == np.int64


def test_ids_of_another_type_are_none_of_them():
    assert rows_among(pa.array([1, 2]), pa.array(["1", "2"])).tolist() == [-1, -1]
    assert rows_among(pa.array(["1", "2"], pa.large_string()), pa.array(["2"])).tolist() == [-1, 0]


def test_more_bytes_of_ids_than_offsets_of_strings_reach_are_large_strings(monkeypatch):
    monkeypatch.setattr(codes, "MAX_BYTES", 10)
    ids = IdCodes(pa.string())
    ids.add(pa.array(["12345"]))
    assert ids.values().type == pa.string()
    assert ids.add(pa.array(["123456", "12345"])).tolist() == [1, 0]
    assert ids.values() == pa.array(["12345", "123456"], pa.large_string())
