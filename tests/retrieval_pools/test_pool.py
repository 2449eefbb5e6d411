"""Opening a pool: shared, checked, and refused with advice."""

import hashlib
import json

import numpy as np
import pytest
from pydantic import ValidationError

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.manifest import FORMAT_VERSION
from laserbatch.retrieval_pools.index.pool import EMPTY_POOL, Pool
from laserbatch.retrieval_pools.settings import DraftSettings


@pytest.fixture
def folder(tmp_path):
    rows = [PoolText(np.array([1, 2, 3], np.int32), "a"), PoolText(np.array([1, 4], np.int32), "b")]
    build_pool(rows, tmp_path / "p", side="item", tokenizer_hash="t1", model_id="m1")
    return tmp_path / "p"


def change_manifest(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_arrays_are_mapped_and_read_only(folder):
    pool = Pool.open(folder, "t1")
    for array in (pool.index.tokens, pool.index.order, pool.index.group_codes, pool.index.starts):
        assert not array.flags.writeable
        assert not array.flags.owndata
        assert type(array) is np.ndarray


def test_other_tokenizer_is_refused_with_the_command_that_builds_its_pools(folder):
    with pytest.raises(PoolError, match=r"tokenizer t1 \(model m1\); expected t2.*laserbatch nightly"):
        Pool.open(folder, "t2")


@pytest.mark.parametrize("version", [0, FORMAT_VERSION - 1, FORMAT_VERSION + 1, None, str(FORMAT_VERSION)])
def test_other_format_is_refused(folder, version):
    change_manifest(folder, format_version=version)
    with pytest.raises(PoolError, match=rf"is a pool of format .*expects {FORMAT_VERSION}.*laserbatch pools rebuild"):
        Pool.open(folder)


@pytest.mark.parametrize("name", ["tokens", "order", "group_codes", "starts"])
def test_missing_and_cut_files_are_found_at_once(folder, name):
    path = folder / f"{name}.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PoolError, match=rf"{name}.npy is damaged: .*pools rebuild"):
        Pool.open(folder)
    path.unlink()
    with pytest.raises(PoolError, match=rf"{name}.npy is missing.*pools rebuild"):
        Pool.open(folder)


def test_changed_bytes_are_found_by_checksum(folder):
    path = folder / "order.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    Pool.open(folder)  # a check of sizes does not notice it
    with pytest.raises(PoolError, match=r"order.npy is damaged: .*sha256"):
        Pool.open(folder, verify=True)


def test_file_that_is_no_array_is_damaged(folder):
    path = folder / "order.npy"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(PoolError, match=r"order.npy is damaged"):
        Pool.open(folder)


@pytest.mark.parametrize("changes", [{"num_texts": 3}, {"num_tokens": 1}, {"vocab_size": 9}])
def test_manifest_that_lies_about_its_arrays(folder, changes):
    change_manifest(folder, **changes)
    with pytest.raises(PoolError, match="arrays do not fit its manifest"):
        Pool.open(folder)


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"length": 99}, r"order\.npy is damaged: .*length=7 .*; the manifest says .*length=99"),
        ({"size_bytes": 99}, r"order\.npy is damaged: .*size_bytes=156 .*says .*size_bytes=99"),
        ({"dtype": "|u1"}, r"order\.npy is damaged: dtype='<i4'.*says dtype='\|u1'"),
        ({"dtype": "<f8"}, r"manifest\.json is damaged: arrays\.order\.dtype"),
    ],
)
def test_manifest_that_lies_about_one_array(folder, lie, message):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["arrays"]["order"] |= lie
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(PoolError, match=message + ".*pools rebuild"):
        Pool.open(folder, verify=True)


def test_manifest_that_lies_about_its_groups(folder):
    groups = json.loads((folder / "manifest.json").read_text())["groups"]
    for wrong in ({"a": groups["a"]}, groups | {"a": {"num_texts": 2, "num_tokens": 3}}):
        change_manifest(folder, groups=wrong)
        with pytest.raises(PoolError, match=r"arrays do not fit its manifest.*pools rebuild"):
            Pool.open(folder)


@pytest.mark.parametrize(("name", "value"), [("order", 7), ("order", -1), ("tokens", 9), ("tokens", -1)])
def test_arrays_that_are_no_index_of_texts_are_found_by_verifying(folder, name, value):
    """Written by another program than a builder, with the right checksum."""
    path, manifest = folder / f"{name}.npy", json.loads((folder / "manifest.json").read_text())
    array = np.load(path)
    array[2] = value
    np.save(path, array)
    manifest["arrays"][name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(PoolError, match=r"texts do not fit its manifest.*pools rebuild"):
        Pool.open(folder, verify=True)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_manifest_that_is_none(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(PoolError, match="pools rebuild"):
        Pool.open(folder)


def test_manifest_with_a_wrong_field(folder):
    change_manifest(folder, num_texts=-1)
    with pytest.raises(PoolError, match=r"manifest.json is damaged: num_texts"):
        Pool.open(folder)


def test_folder_that_is_no_pool(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(PoolError, match="is not a pool"):
            Pool.open(path)


def test_settings_of_a_query_can_change_but_not_the_index(folder):
    pool = Pool.open(folder)
    assert pool.with_settings(scope="group").settings == DraftSettings(scope="group")
    assert pool.settings == DraftSettings()
    for fixed in ({"index_depth": 16}, {"min_support": 2}):
        with pytest.raises(PoolError, match="is fixed when a pool is built"):
            pool.with_settings(**fixed)
    with pytest.raises(ValidationError):
        pool.with_settings(group_weigth=2)


def test_misspelled_and_impossible_settings_are_refused():
    for wrong in (
        {"scop": "side"},
        {"scope": "wall"},
        {"group_weight": 0.5},
        {"index_depth": 40},
        {"pool_escape_per_token": 0},
    ):
        with pytest.raises(ValidationError):
            DraftSettings(**wrong)


def test_manifest_cannot_take_min_support_back(tmp_path):
    rows = [PoolText(np.array([1, 2, 3], np.int32))] * 2
    limited = DraftSettings(min_support=2)
    build_pool(rows, tmp_path / "p", side="item", tokenizer_hash="t1", model_id="m1", settings=limited)
    assert len(Pool.open(tmp_path / "p", verify=True).index.support) == 8
    change_manifest(tmp_path / "p", settings=DraftSettings().model_dump())
    with pytest.raises(PoolError, match="arrays do not fit its manifest"):
        Pool.open(tmp_path / "p")


def test_min_support_without_its_array_is_damaged(folder):
    change_manifest(folder, settings=DraftSettings(min_support=2).model_dump())
    with pytest.raises(PoolError, match=r"support\.npy is missing.*pools rebuild"):
        Pool.open(folder)


def test_lengths_of_texts(folder):
    pool = Pool.open(folder, "t1")
    assert [pool.length_of(share) for share in (0.0, 0.5, 0.51, 1.0)] == [2, 2, 3, 3]
    assert EMPTY_POOL.length_of(0.99) == 0
