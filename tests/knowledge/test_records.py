"""Knowledge records of an earlier version stay readable."""

import pyarrow as pa

from laserbatch.pipeline.knowledge.records import RECORD_VERSION, as_current, knowledge_schema


def table_of(num_rows: int) -> pa.Table:
    schema = knowledge_schema(pa.string())
    values = {pa.string(): "x", pa.int32(): 1, pa.bool_(): False, pa.list_(pa.int32()): [1], pa.list_(pa.uint8()): [0]}
    return pa.Table.from_pylist([{field.name: values[field.type] for field in schema}] * num_rows, schema=schema)


def test_records_of_an_earlier_version_are_read():
    old = table_of(3).drop_columns(["is_stale"]).replace_schema_metadata({"laserbatch.version": "2"})
    old = old.append_column("alternative_ids", pa.nulls(3, pa.list_(pa.int32())))
    current = as_current(old, pa.string(), is_stale=False)
    assert current.schema.equals(knowledge_schema(pa.string()), check_metadata=True)
    assert current.schema.metadata[b"laserbatch.version"] == str(RECORD_VERSION).encode()
    assert as_current(old, pa.string(), is_stale=True)["is_stale"].to_pylist() == [True] * 3
    assert current.drop_columns(["is_stale"]).to_pylist() == old.drop_columns(["alternative_ids"]).to_pylist()


def test_current_records_stay_as_they_are():
    assert as_current(table_of(2), pa.string(), is_stale=False).equals(table_of(2))
