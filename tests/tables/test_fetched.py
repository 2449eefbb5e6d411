"""Tables at a URI: read as local ones are, with the same faults, which name the URI."""

from pathlib import Path
from unittest.mock import Mock

import pyarrow.fs as pafs
import pytest
from destinations import bucket, place  # noqa: F401 (fixtures)

from laserbatch.jobs.failures import exit_code_of
from laserbatch.jobs.settings import load_settings
from laserbatch.pipeline.errors import LaserbatchError
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.pipeline.storage.uris import filesystem_of
from laserbatch.pipeline.tables.check import check_tables
from laserbatch.pipeline.tables.read import describe, read_tables


def bring(folder: Path, uri: str) -> None:
    filesystem, root = filesystem_of(uri)
    if filesystem.type_name == "local":
        filesystem.create_dir(root)
    for path in sorted(folder.rglob("*")):
        within = f"{root}/{path.relative_to(folder).as_posix()}"
        if path.is_dir():
            filesystem.create_dir(within)
            continue
        with filesystem.open_output_stream(within) as out:
            out.write(path.read_bytes())


def test_tables_at_a_uri_are_read_as_local_ones_and_their_faults_name_it(tmp_path, place):  # noqa: F811
    local = tmp_path / "tables"
    local.mkdir()
    write_sample_world(local, num_users=4, num_items=20)
    (local / "other.parquet").write_bytes(b"not ours")
    (local / "interactions" / "year=2025" / "city=K%C3%B6ln").mkdir(parents=True)
    (local / "interactions.parquet").rename(local / "interactions" / "year=2025" / "city=K%C3%B6ln" / "0.parquet")
    (local / "interactions" / "_SUCCESS").touch()
    bring(local, place)
    assert check_tables(place) == check_tables(local)
    assert describe(place) == describe(local)
    assert read_tables(place).interactions.equals(read_tables(local).interactions)

    (local / "interactions" / "_temporary" / "0").mkdir(parents=True)
    (local / "users.parquet").write_bytes(b"damaged")
    (local / "items.parquet").unlink()
    bring(local, f"{place}/damaged")
    pafs_there, root = filesystem_of(f"{place}/damaged")
    assert pafs_there.get_file_info(f"{root}/items.parquet").type == pafs.FileType.NotFound
    kinds = {finding.kind: str(finding) for finding in check_tables(f"{place}/damaged")}
    assert kinds.keys() >= {"unreadable", "missing-table", "unfinished"}
    assert f"{place}/damaged/interactions/_temporary holds" in kinds["unfinished"]
    assert f"{place}/damaged/items.parquet" in kinds["missing-table"]
    missing = [f"{place}/nowhere"] + ["s3://no-such-bucket/tables"] * place.startswith("s3://")
    for uri, named in zip(missing, (f"{place}/nowhere", "bucket or container no-such-bucket of s3://"), strict=False):
        (finding,) = check_tables(uri)
        assert named in finding.found and finding.found.endswith(" is not there")
    with pytest.raises(Exception, match=f"{place}/damaged/users.parquet.*cannot be read"):
        read_tables(f"{place}/damaged")


def test_an_outage_of_the_service_of_a_uri_is_worth_another_try(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for uri, code in ((f"file://{tmp_path}/file", 6), ("no://such/scheme", 3)):
        with pytest.raises(LaserbatchError, match=uri) as error:
            read_tables(uri)
        assert exit_code_of(error.value) == code
    monkeypatch.setattr(pafs, "FileSystem", Mock(from_uri=Mock(side_effect=OSError("AWS Error NETWORK_CONNECTION"))))
    with pytest.raises(LaserbatchError, match="s3://bucket/prefix cannot be opened: AWS Error NET") as error:
        read_tables("s3://bucket/prefix")
    assert exit_code_of(error.value) == 6


def test_a_uri_in_a_configuration_is_no_path_below_its_folder(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("tables: {path: 's3://bucket/tables'}")
    assert load_settings(config).tables.path == "s3://bucket/tables"
