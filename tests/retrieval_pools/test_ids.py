"""Where ids stand among others: the same whether they are sought at once, range by range, or the other way round."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laserbatch.retrieval_pools.routing import embeddings
from laserbatch.retrieval_pools.routing.embeddings import rows_among


@settings(deadline=None)
@given(known=st.sets(st.integers(-50, 50)), values=st.lists(st.integers(-60, 60)), size=st.integers(1, 60))
@pytest.mark.parametrize("kind", [pa.int64(), pa.string(), pa.large_string()])
@pytest.mark.parametrize("fewer", [4, 1 << 30])
def test_rows_are_those_of_a_dictionary(known, values, size, kind, fewer):
    known = [str(value) if kind != pa.int64() else value for value in known]
    values = [str(value) if kind != pa.int64() else value for value in values]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embeddings, "MAX_HASHED", size)
        patch.setattr(embeddings, "FEWER", fewer)
        chunks = pa.chunked_array([pa.array(part, kind) for part in (known[:7], known[7:])])
        of_chunks = rows_among(pa.chunked_array([pa.array(values, kind)]), chunks)
        of_arrays = rows_among(pa.array(values, kind), pa.array(known, kind))
    place_of = {value: place for place, value in enumerate(known)}
    expected = [place_of.get(value, -1) for value in values]
    assert of_arrays.tolist() == of_chunks.tolist() == expected and of_arrays.dtype == np.int64


def test_ids_of_another_type_are_none_of_them():
    assert rows_among(pa.array([1, 2]), pa.array(["1", "2"])).tolist() == [-1, -1]
