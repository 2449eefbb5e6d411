"""Features exported in other libraries' layouts, and read as those libraries do."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from laserbatch.pipeline.encoding.exports import FORMATS, MISSING_FOR_PANDAS, SideExport
from laserbatch.pipeline.encoding.schema import feature_schema, vector_column
from laserbatch.pipeline.errors import WorkspaceError

VECTORS = np.array([[0.25, -1.5], [3.0, 1e-7]], np.float32)


def sides(user_ids=("u\u00e4 1", "u2")):
    exports = []
    for side, ids in (("user", pa.array(user_ids)), ("item", pa.array([7, 8]))):
        schema = feature_schema(side, ids.type, 2)
        columns = [ids, vector_column(VECTORS), [0, 4], [3, 2], ["2025-01-01-aa"] * 2, ["f", "g"], [0, 0]]
        batch = pa.record_batch([pa.array(column) for column in columns], schema=schema)
        exports.append(SideExport(side, schema, [batch]))
    return exports


def test_merlin_finds_types_tags_and_the_shape_of_vectors(tmp_path):
    FORMATS["merlin"](sides(), tmp_path, tmp_path)
    table = pq.read_table(tmp_path / "item" / "features.parquet")
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 2)
    assert table["item_id"].to_pylist() == [7, 8]
    schema_text = (tmp_path / "item" / "schema.pbtxt").read_text()
    assert schema_text.count("{") == schema_text.count("}")
    assert 'name: "item_id"\n  type: INT' in schema_text
    assert "value_count { min: 2 max: 2 }" in schema_text
    assert 'tag: "item_id"' in schema_text


def test_fuxictr_finds_keys_and_values_by_the_columns_settings(tmp_path):
    FORMATS["fuxictr"](sides(), tmp_path, tmp_path)
    features = yaml.safe_load((tmp_path / "settings.yaml").read_text(encoding="utf-8"))["feature_cols"]
    user, user_cluster, _, item, *_ = features
    table = pq.read_table(user["pretrained_emb"])
    assert table["key"].to_pylist() == ["u\u00e4 1", "u2"]
    assert np.array_equal(table["value"].combine_chunks().flatten().to_numpy().reshape(2, 2), VECTORS)
    assert (user["dtype"], item["dtype"], user["pretrain_dim"]) == ("str", "int", 2)
    assert table[user_cluster["name"]].to_pylist() == [0, 4]


def test_recbole_finds_atomic_files_of_the_folders_name(tmp_path):
    FORMATS["recbole"](sides(), tmp_path, tmp_path / "movies")
    lines = (tmp_path / "movies.useremb").read_text(encoding="utf-8").splitlines()
    assert lines == [
        "user_emb_id:token\tuser_emb:float_seq\tuser_cluster_id:token\tuser_residual_id:token",
        "u\u00e4 1\t0.25 -1.5\t0\t3",
        "u2\t3.0 1e-07\t4\t2",
    ]
    settings = yaml.safe_load((tmp_path / "settings.yaml").read_text())
    assert settings["preload_weight"] == {"user_emb_id": "user_emb", "item_emb_id": "item_emb"}
    assert settings["load_col"] == {
        "inter": ["user_id", "item_id"], "useremb": ["user_emb_id", "user_emb"], "itememb": ["item_emb_id", "item_emb"],
    }  # fmt: skip


@pytest.mark.parametrize("entity_id", ["a\tb", '"a"', "", "NA", "null"])
def test_an_id_that_recbole_cannot_hold_is_named(entity_id, tmp_path):
    with pytest.raises(WorkspaceError, match=f"user {re.escape(repr(entity_id))} cannot be written"):
        FORMATS["recbole"](sides((entity_id, "c")), tmp_path, tmp_path)


def test_missing_values_of_pandas_are_those_of_its_own_list():
    assert pytest.importorskip("pandas._libs.parsers").STR_NA_VALUES == MISSING_FOR_PANDAS
