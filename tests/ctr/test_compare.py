"""The CTR table end to end: planted knowledge helps, and equal seeds give equal tables."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from ctr_world import AS_OF, make_features, make_world

from laserbatch.ctr.compare import train_ctr
from laserbatch.ctr.dataset import build_dataset
from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.feature_set import read_feature_set
from laserbatch.ctr.gbdt import GbdtColumns, fit_gbdt
from laserbatch.ctr.knowledge import build_knowledge
from laserbatch.ctr.log import read_log
from laserbatch.ctr.settings import CtrOptions, CtrSettings


def small_world(**options):
    return make_world(num_users=60, num_items=40, num_interactions=900, num_cold=10, **options)


def test_knowledge_raises_auc_and_for_cold_users_most(world):
    features = {"none": None, "relaxed": make_features(world, noise=0.02)}
    comparison = train_ctr(world, features, AS_OF, CtrSettings(num_seeds=1, max_epochs=2))
    by_cell = {(row.model, row.variant): row for row in comparison.rows}
    for model in ("DIN", "DCNv2", "LightGBM"):
        none, relaxed = by_cell[model, "none"], by_cell[model, "relaxed"]
        assert relaxed.auc > none.auc + 0.08
        assert relaxed.logloss < none.logloss
        assert relaxed.auc_cold - none.auc_cold > relaxed.auc - none.auc


def test_the_manifest_section_is_plain_json():
    world = small_world()
    features = {"none": None, "plain": make_features(world, seed=1), "relaxed": make_features(world)}
    settings = CtrSettings(models=("din", "gbdt"), num_seeds=2, max_epochs=1)
    comparison = train_ctr(world, features, AS_OF, settings)
    section = json.loads(json.dumps(dataclasses.asdict(comparison), allow_nan=False))
    assert section["skipped"] is None
    assert section["split"]["train"] == 720 and section["split"]["test_cold"] > 0
    assert len(section["rows"]) == 7 and len(section["seeds"]) == 12
    assert set(section["equivalence"]) == {"DIN", "LightGBM", "all"}
    assert section["equivalence"]["all"]["num_pairs"] == 4
    assert len({row["auc"] for row in section["seeds"] if row["model"] == "DIN"}) == 4  # equal texts give equal models


def test_the_margin_that_is_configured_decides_the_verdict():
    world, options = small_world(), CtrOptions(models=("din",), num_seeds=2)
    features = {"plain": make_features(world, noise=0.5), "relaxed": make_features(world)}
    verdicts = {}
    for margin in (0.5, 1e-9):
        settings = CtrSettings.of(options.model_copy(update={"equivalence_margin": margin}))
        settings = settings.model_copy(update={"max_epochs": 1})
        verdicts[margin] = train_ctr(world, features, AS_OF, settings).equivalence["all"]
    assert verdicts[0.5].verdict == "equivalent" != verdicts[1e-9].verdict
    assert [verdict.margin for verdict in verdicts.values()] == [0.5, 1e-9]


def test_the_same_seed_gives_the_same_table():
    world = small_world()
    settings = CtrSettings(num_seeds=1, max_epochs=2)
    tables = [train_ctr(world, {"relaxed": make_features(world)}, AS_OF, settings) for _ in range(2)]
    for first, second in zip(tables[0].seeds, tables[1].seeds, strict=True):
        assert first | {"train_s": 0} == second | {"train_s": 0}


def test_integer_ids_entities_without_features_and_defaults():
    world = small_world(string_ids=False)
    features = make_features(world)
    features = {"user": features["user"].slice(0, 30), "item": features["item"].slice(0, 0)}
    settings = CtrSettings(models=("dcnv2", "gbdt"), num_seeds=1, max_epochs=1)
    comparison = train_ctr(world, {"relaxed": features}, AS_OF, settings)
    assert all(np.isfinite(row.auc) for row in comparison.rows)
    assert comparison.rows[0].auc_std is None and comparison.equivalence == {}


def test_the_tree_baseline_is_stopped_by_validation_alone(world):
    from test_leak import with_other_future

    settings = CtrSettings()
    data = build_dataset(world, AS_OF, settings)
    texts = []
    for of_world in (data, build_dataset(with_other_future(world, "test", data), AS_OF, settings)):
        columns = GbdtColumns(of_world, None)
        texts.append(fit_gbdt(columns, of_world, seed=0).model_to_string())
    assert texts[0] == texts[1]


def test_what_is_of_entities_that_left_the_tables_is_left_out(world, caplog):
    is_left = pc.equal(world.interactions["item_id"], "i0")
    fewer = dataclasses.replace(world, items=world.items.slice(1))
    log = read_log(fewer, CtrSettings().label)
    assert f"{pc.sum(is_left).as_py()} of {len(is_left)} interactions" in caplog.text
    without = dataclasses.replace(fewer, interactions=world.interactions.filter(pc.invert(is_left)))
    for actual, expected in zip(vars(log).values(), vars(read_log(without, CtrSettings().label)).values(), strict=True):
        assert np.array_equal(actual, expected)


def test_features_whose_ids_are_all_of_other_entities_are_refused_and_missing_ones_counted(world, caplog):
    data, features = build_dataset(world, AS_OF, CtrSettings()), make_features(world)
    some = {**features, "item": features["item"].slice(9)}
    build_knowledge(world, data, {"own": some}, AS_OF, CtrSettings())
    assert "features (own): 9 of 150 items have none and get a learned default; 0 features of no item" in caplog.text
    ids = pc.utf8_upper(features["user"]["user_id"])
    other = {**features, "user": features["user"].set_column(0, "user_id", ids)}
    with pytest.raises(CtrError, match=r"features \(own\) have 250 user ids, but the users table has none of them"):
        build_knowledge(world, data, {"own": other}, AS_OF, CtrSettings())


def test_other_id_types_are_named(world):
    other = make_features(small_world(string_ids=False))
    with pytest.raises(CtrError, match="ids of type int64, but the users table has ids of type string"):
        train_ctr(world, {"relaxed": other}, AS_OF)


def test_feature_files_are_read_and_their_version_checked(world, tmp_path):
    import pyarrow.parquet as pq

    with pytest.raises(CtrError, match="user has no files; `laserbatch nightly"):
        read_feature_set(tmp_path)
    features = make_features(world)
    for side, table in features.items():
        (tmp_path / side).mkdir()
        for number, rows in enumerate((table[:7], table[7:])):
            pq.write_table(rows, tmp_path / side / f"{number:05}.parquet")
    assert all(table.equals(features[side]) for side, table in read_feature_set(tmp_path).items())
    pq.write_table(features["user"].drop_columns("valid_from"), tmp_path / "user/00001.parquet")
    with pytest.raises(CtrError, match=r"user/00001.parquet has other columns than 00000.parquet in the same folder"):
        read_feature_set(tmp_path)
    for side, table in features.items():  # the layout of an earlier version
        pq.write_table(table, tmp_path / f"{side}.parquet")
    assert all(table.equals(features[side]) for side, table in read_feature_set(tmp_path).items())
    metadata = {**features["user"].schema.metadata, b"laserbatch.version": b"99"}
    pq.write_table(features["user"].replace_schema_metadata(metadata), tmp_path / "user.parquet")
    with pytest.raises(CtrError, match="version 99"):
        read_feature_set(tmp_path)
    pq.write_table(pa.table({"x": [1]}), tmp_path / "user.parquet")
    with pytest.raises(CtrError, match="record None"):
        read_feature_set(tmp_path)
