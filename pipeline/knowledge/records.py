"""The record that a night keeps of each text, as an Arrow schema.

One row an entity and side. The text and its token ids are both kept: the ids are what tomorrow's pools are built
from, and they need not be recoverable from the text. Nothing here depends on the clock, so that the same night
run twice writes the same bytes.
"""

import pyarrow as pa

RECORD_VERSION = 4  # 1 and 2 had no is_stale; 2 and 3 could have alternative_ids


def knowledge_schema(entity_id_type: pa.DataType) -> pa.Schema:
    """Arrow schema of knowledge files, whose `entity_id` keeps the type it has in the input table.

    Parameters
    ----------
    entity_id_type : `pa.string()` or `pa.int64()`.
    """
    return pa.schema(
        [
            pa.field("entity_id", entity_id_type, nullable=False),
            pa.field("side", pa.string(), nullable=False),
            pa.field("framework", pa.string(), nullable=False),
            pa.field("template", pa.string(), nullable=False),  # name@version
            pa.field("text", pa.string(), nullable=False),
            pa.field("token_ids", pa.list_(pa.int32()), nullable=False),  # end token not included
            pa.field("token_sources", pa.list_(pa.uint8()), nullable=False),  # SOURCE_* of retrieval_pools.sources
            pa.field("fields_json", pa.string(), nullable=False),  # the parsed answer: {aspect: text}
            pa.field("fingerprint", pa.string(), nullable=False),
            pa.field("run_id", pa.string(), nullable=False),  # that generated it, not that carried it over
            pa.field("model_id", pa.string(), nullable=False),
            pa.field("pool_version", pa.string()),  # null: no pool was there
            pa.field("pool_group", pa.string()),
            pa.field("decoding_json", pa.string(), nullable=False),  # verifier and its settings
            pa.field("num_prompt_tokens", pa.int32(), nullable=False),
            pa.field("num_history", pa.int32(), nullable=False),
            pa.field("num_history_dropped", pa.int32(), nullable=False),
            pa.field("num_tokens", pa.int32(), nullable=False),
            pa.field("num_steps", pa.int32(), nullable=False),
            pa.field("num_drafted", pa.int32(), nullable=False),
            pa.field("num_accepted", pa.int32(), nullable=False),
            pa.field("finish_reason", pa.string(), nullable=False),
            # the entity's new text failed, and it stands in quarantine: this is the text it had before
            pa.field("is_stale", pa.bool_(), nullable=False),
        ],
        metadata={"laserbatch.record": "knowledge", "laserbatch.version": str(RECORD_VERSION)},
    )


def as_current(table: pa.Table, entity_id_type: pa.DataType, is_stale: bool) -> pa.Table:
    """Knowledge records of this or an earlier version in the form of this one; what was not recorded then is null.

    Parameters
    ----------
    table : rows of knowledge files.
    entity_id_type : that the result is to have.
    is_stale : what the result says of every row, whatever it was before.
    """
    schema = knowledge_schema(entity_id_type)
    if "is_stale" in table.column_names:
        table = table.drop_columns(["is_stale"])
    table = table.append_column("is_stale", pa.repeat(is_stale, table.num_rows))
    for field in schema:
        if field.nullable and field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table.select(schema.names).cast(schema)
