"""A trained model's folder: it reproduces its scores, names its origin, and survives interruptions."""

import datetime
import errno
import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ctr_world import AS_OF, make_features, make_world
from safetensors import SafetensorError
from sklearn.metrics import roc_auc_score

from laserbatch.ctr.adaptors import rlmrec, trawl
from laserbatch.ctr.dataset import build_dataset
from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.settings import CtrSettings
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages.train_ctr import (
    CHECKPOINT,
    _only_training,
    evaluate_folder,
    predict_pairs,
    train_to_folder,
    trained_on,
)
from laserbatch.pipeline.errors import LaserbatchError
from laserbatch.pipeline.storage.figures import FeatureFile
from laserbatch.pipeline.storage.parquet import write_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder

SETTINGS = CtrSettings(max_epochs=3, patience=3)


@pytest.fixture(scope="module")
def world():
    return make_world(num_users=60, num_items=40, num_interactions=900, num_cold=10)


@pytest.fixture
def night(world, tmp_path):
    """A run with features of all users but one, and its tables."""
    tables = tmp_path / "tables"
    tables.mkdir()
    for name, table in (("users", world.users), ("items", world.items), ("interactions", world.interactions)):
        pq.write_table(table, tables / f"{name}.parquet")
    run = RunFolder(tmp_path / "runs" / "2025-03-01-0123abcd")
    features = make_features(world)
    features["user"] = features["user"].slice(1)
    figures = {}
    for side, table in features.items():
        written = write_parquet(table, run.features_folder(side) / "00000.parquet")
        part = FeatureFile(f"features/{side}/00000.parquet", table.num_rows, written.sha256)
        figures[side] = SimpleNamespace(encoder="minilm", parts=[part])
    manifest = SimpleNamespace(features=figures)
    return SimpleNamespace(run=run, date=AS_OF, manifest=manifest, tables=str(tables), settings=Settings())


def train(night, out, model="dcnv2", features="own", settings=SETTINGS):
    return train_to_folder(night, model, features, 0, night.tables, settings, out)


@pytest.mark.parametrize(
    ("model", "features", "adaptor"),
    [("din", "own", "rlmrec"), ("din", "own", "trawl"), ("dcnv2", "none", "linear"), ("gbdt", "own", "linear")],
)
def test_a_model_is_judged_and_asked_again_as_when_it_was_trained(
    world, night, tmp_path, caplog, monkeypatch, model, features, adaptor
):
    for module in (rlmrec, trawl):
        monkeypatch.setattr(module, "NUM_STEPS", 5)
    metrics = train(night, tmp_path / "model", model, features, CtrSettings(max_epochs=3, patience=3, adaptor=adaptor))
    if features == "own":
        assert "users have none and get a learned default" in caplog.text
    again = evaluate_folder(tmp_path / "model", night, night.tables)
    assert ("rows have users without features in the run" in caplog.text) == (features == "own")
    assert again == pytest.approx({name: metrics[name] for name in again}, abs=1e-6)
    data = build_dataset(world, AS_OF, SETTINGS)
    test = world.interactions.take(pa.array(data.test))  # rows of the world are in the order of the dataset's
    pairs = test.select(["item_id", "user_id", "timestamp"]).append_column("note", pa.array(["x"] * len(test)))
    order = np.random.default_rng(0).permutation(len(test))
    pq.write_table(pairs.take(pa.array(order)), tmp_path / "pairs.parquet")
    out = tmp_path / "scores.parquet"
    assert predict_pairs(tmp_path / "model", night, night.tables, tmp_path / "pairs.parquet", out) == len(test)
    scores = pq.read_table(out)
    assert scores.column_names == ["item_id", "user_id", "timestamp", "note", "score"]
    labels = (test["rating"].to_numpy() >= 4)[order]
    assert roc_auc_score(labels, scores["score"].to_numpy()) == pytest.approx(metrics["auc"], abs=1e-6)
    if features == "none":  # milliseconds are recognised, too
        times = pa.array([int(time.timestamp() * 1000) for time in pairs["timestamp"].to_pylist()])
        in_ms = pairs.set_column(2, "timestamp", times).take(pa.array(order))
        pq.write_table(in_ms, tmp_path / "pairs.parquet")
        predict_pairs(tmp_path / "model", night, night.tables, tmp_path / "pairs.parquet", out)
        assert np.allclose(pq.read_table(out)["score"].to_numpy(), scores["score"].to_numpy())
    pq.write_table(pairs.select(["user_id", "item_id"]), tmp_path / "pairs.parquet")  # by all that is known
    predict_pairs(tmp_path / "model", night, night.tables, tmp_path / "pairs.parquet", out)
    assert not np.array_equal(pq.read_table(out)["score"].to_numpy(), scores["score"].to_numpy())
    assert "which the texts of run" not in caplog.text
    early = datetime.datetime.combine(AS_OF, datetime.time(23))
    pq.write_table(pairs.set_column(2, "timestamp", pa.array([early] * len(pairs))), tmp_path / "pairs.parquet")
    predict_pairs(tmp_path / "model", night, night.tables, tmp_path / "pairs.parquet", out)
    said = f"{len(pairs)} of {len(pairs)} pairs have times up to the end of {AS_OF}, which the texts of run"
    assert (said in caplog.text) == (features == "own")
    card = json.loads((tmp_path / "model" / "model.json").read_text())
    assert card["num_threads"] == torch.get_num_threads()
    assert card["provenance"]["run_id"] == "2025-03-01-0123abcd" and len(card["provenance"]["inputs"]["users"]) == 64


def test_a_training_that_is_killed_goes_on_and_ends_with_the_same_bytes(night, tmp_path, monkeypatch, capsys):
    train(night, tmp_path / "whole")
    from laserbatch.jobs.stages import train_ctr

    keep = train_ctr._keep

    def keep_and_die(path, spec_hash, progress):
        keep(path, spec_hash, progress)
        if progress.epoch == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(train_ctr, "_keep", keep_and_die)
    with pytest.raises(KeyboardInterrupt):
        train(night, tmp_path / "killed")
    assert not (tmp_path / "killed").exists()
    assert (tmp_path / ".killed.unfinished" / CHECKPOINT).is_file()
    monkeypatch.setattr(train_ctr, "_keep", keep)
    train(night, tmp_path / "killed")
    assert "continuing after epoch 2" in capsys.readouterr().err and not (tmp_path / ".killed.unfinished").exists()
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "killed" / path.relative_to(tmp_path / "whole")).read_bytes(), path
    before = (tmp_path / "whole" / "model.safetensors").stat().st_mtime_ns
    train(night, tmp_path / "whole")  # it is complete, so nothing is trained again
    assert (tmp_path / "whole" / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(CtrError, match="not from this training"):
        train(night, tmp_path / "whole", "din")


def test_a_model_names_its_tables_wherever_it_is_used(night, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_to_folder(night, "gbdt", "none", 0, "tables", SETTINGS, tmp_path / "model")
    assert trained_on(tmp_path / "model")["tables"] == str(tmp_path / "tables")
    train(night, tmp_path / "model", "gbdt", "none")  # the same tables under another name, so nothing is trained again


def test_pairs_are_read_as_a_log_is(night, tmp_path):
    train(night, tmp_path / "model", "gbdt", "none")
    pairs, out = tmp_path / "pairs.parquet", tmp_path / "out.parquet"

    def scores(timestamp, **columns):
        rows = {"user_id": pa.array(["u1", "u20"], pa.string_view()), "item_id": ["i1", "i2"], "timestamp": timestamp}
        columns = {name: values for name, values in (rows | columns).items() if values is not None}
        pq.write_table(pa.table(columns), pairs)
        predict_pairs(tmp_path / "model", night, night.tables, pairs, out)
        return pq.read_table(out)["score"].to_pylist()

    def refused(match, timestamp, **columns):
        with pytest.raises(LaserbatchError, match=match):
            scores(timestamp, **columns)

    days = [AS_OF, AS_OF]
    midnight = datetime.datetime.combine(AS_OF, datetime.time())
    of_days = scores(days)
    assert of_days == scores([midnight, midnight]) == scores(pa.array([midnight] * 2, pa.timestamp("ns")))
    early = datetime.datetime(1999, 1, 1)
    assert of_days != scores([early, early])
    refused("the integers from 20250228 to 20250301 look like dates", [20250228, 20250301])
    refused(r"timestamp \(.*pairs.parquet\): the column is of type double", [1.5, 2.5])
    refused("pairs.parquet, column timestamp, row 1: found null", [midnight, None])
    refused("there are item_id, timestamp, User", days, user_id=None, User=["u1", "u2"])
    for ids in (pa.array([1, 2**63], pa.uint64()), pa.array([1, 2**63], pa.uint64()).dictionary_encode()):
        refused(r"user_id \(.*pairs.parquet, row 1\): the id is too large: 9223372036854775808", days, user_id=ids)
    refused("already has a column 'score'", days, score=[0.0, 0.0])
    rows = pq.read_table(tmp_path / "tables" / "interactions.parquet")
    pq.write_table(rows.slice(0, 0), tmp_path / "tables" / "interactions.parquet")
    refused("no interaction of .*tables has a label", days)


def test_columns_of_any_name_are_kept_and_the_umask_says_who_reads_the_model(night, tmp_path):
    path = tmp_path / "tables" / "users.parquet"
    users = pq.read_table(path)
    for name in ("50%/age", "50%25", "regiön" * 50):
        users = users.append_column(name, users["region"])
    pq.write_table(users, path)
    before = os.umask(0o027)
    try:
        metrics = train(night, tmp_path / "model")
    finally:
        os.umask(before)
    again = evaluate_folder(tmp_path / "model", night, night.tables)
    assert again == pytest.approx({name: metrics[name] for name in again}, abs=1e-6)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "model").rglob("*.*")} == {0o640}


def test_a_folder_is_trained_into_by_one_process_at_a_time(night, tmp_path, monkeypatch):
    work = tmp_path / ".model.unfinished"
    work.mkdir()
    descriptor = os.open(work, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # another process holds the lock
    with pytest.raises(CtrError, match=r"another process trains into .*model"):
        train(night, tmp_path / "model", "gbdt", "none")
    assert work.is_dir()
    os.close(descriptor)
    train(night, tmp_path / "model", "gbdt", "none")
    assert not work.exists()
    train(night, tmp_path / "model", "gbdt", "none")  # it is complete
    assert not work.exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CtrError, match="is the current folder, or contains it"):
        train(night, Path("."), "gbdt", "none")


def test_a_full_disk_is_no_unexpected_error(tmp_path):
    with pytest.raises(OSError, match="No space left") as raised, _only_training(tmp_path / "model"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / "model"))


def test_bad_input_is_named_and_leaves_nothing_half_trained(world, night, tmp_path):
    def refused(match, **changes):
        with pytest.raises(CtrError, match=match):
            train(night, tmp_path / "model", **changes)
        assert not any(path.name.endswith("model") or "unfinished" in path.name for path in tmp_path.iterdir())

    refused("both labels are needed", settings=CtrSettings(label="rating >= 1"))
    refused("no column 'clicked'", settings=CtrSettings(label="clicked"))
    path = night.run.features_folder("user") / "00000.parquet"
    good = pq.read_table(path)

    def write_features(table):
        parts = night.manifest.features["user"].parts
        parts[0] = replace(parts[0], sha256=write_parquet(table, path).sha256)

    with pytest.raises(LaserbatchError, match=r"plain/features is missing: .*compare_with_plain: true"):
        train(night, tmp_path / "model", features="plain")
    pq.write_table(good.take(pa.array(range(len(good))[::-1])), path)
    with pytest.raises(LaserbatchError, match=r"user/00000.parquet is damaged or was changed"):
        train(night, tmp_path / "model")
    write_features(pa.concat_tables([good.slice(1), good.slice(3, 1)]))
    refused("2 times .*features of several runs are mixed")
    broken = np.array(good["vector"].to_pylist(), np.float32)
    broken[5, 2] = np.nan
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(broken.reshape(-1)), broken.shape[1])
    write_features(good.set_column(1, good.schema.field("vector"), vectors))
    refused("vector of user 'u6' has a value that is not finite")
    narrow = pa.FixedSizeListArray.from_arrays(pa.array(broken[:, 3:].reshape(-1)), broken.shape[1] - 3)
    field = pa.field("vector", narrow.type, nullable=False)
    write_features(good.set_column(1, field, narrow))
    refused("vectors have the lengths")
    write_features(good)
    train(night, tmp_path / "model")
    night.manifest.features["user"].encoder = "other"
    with pytest.raises(CtrError, match="come from the encoder other, but the model was trained with minilm"):
        evaluate_folder(tmp_path / "model", night, night.tables)
    night.manifest.features["user"].encoder = "minilm"
    pq.write_table(pa.table({"user_id": ["u1", "nobody"], "item_id": ["i1", "i1"]}), tmp_path / "pairs.parquet")
    with pytest.raises(CtrError, match=r"not in the table of users \(the first: 'nobody'"):
        predict_pairs(tmp_path / "model", night, night.tables, tmp_path / "pairs.parquet", tmp_path / "out.parquet")
    pq.write_table(pa.table({"user_id": ["u1"]}), tmp_path / "pairs.parquet")
    with pytest.raises(LaserbatchError, match=r"^pairs.item_id .*the column is missing"):
        predict_pairs(tmp_path / "model", night, night.tables, tmp_path / "pairs.parquet", tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()
    for name in ("model.safetensors", "basis.safetensors", "metrics.json"):
        content = (tmp_path / "model" / name).read_bytes()
        (tmp_path / "model" / name).write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        with pytest.raises(CtrError, match=rf"model/{name} is damaged, or of another model"):
            evaluate_folder(tmp_path / "model", night, night.tables)
        (tmp_path / "model" / name).write_bytes(content)
    card = tmp_path / "model" / "model.json"
    card.write_text(card.read_text(encoding="utf-8").replace('"prior": 0.', '"prior": 0.1'), encoding="utf-8")
    with pytest.raises(CtrError, match=r"model.json was changed or is damaged; .*train again into a new folder"):
        evaluate_folder(tmp_path / "model", night, night.tables)
    (tmp_path / "model" / "model.json").write_text("{}")
    with pytest.raises(CtrError, match="or is damaged"):
        evaluate_folder(tmp_path / "model", night, night.tables)


def test_trees_score_tables_whose_lists_grew_or_shrank(world, night, tmp_path):
    metrics = train(night, tmp_path / "model", "gbdt", "none")
    paths = world.items["path"].to_pylist()
    place = world.items.schema.get_field_index("path")
    for changed in ([*paths[:-1], [*paths[-1], "a", "b"]], [path[:1] for path in paths]):
        items = world.items.set_column(place, "path", pa.array(changed))
        pq.write_table(items, Path(night.tables) / "items.parquet")
        assert evaluate_folder(tmp_path / "model", night, night.tables)["num_test"] == metrics["num_test"]
