"""Files and folders appear whole or not at all."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from laserbatch.pipeline.errors import ConfigError, WorkspaceError
from laserbatch.pipeline.storage.atomic import (
    atomic_folder,
    atomic_path,
    copy_mode,
    freed_bytes,
    link_file,
    paths_below,
    read_json,
    remove_leftovers,
    require_sha256,
    sha256_file,
    write_json,
    write_text,
)
from laserbatch.pipeline.tables.findings import FaultyTable
from laserbatch.pipeline.tables.parts import tables_folder


def test_links_are_followed_but_not_in_a_circle(tmp_path):
    (first := tmp_path / "runs" / "first").mkdir(parents=True)
    (second := tmp_path / "disk").mkdir()
    (second / "a.parquet").touch()
    (first / "linked").symlink_to(second)
    (second / "back").symlink_to(tmp_path / "runs")
    assert sorted(path.relative_to(tmp_path).as_posix() for path in paths_below(tmp_path / "runs")) == [
        "runs/first",
        "runs/first/linked",
        "runs/first/linked/a.parquet",
        "runs/first/linked/back",
    ]
    assert list(paths_below(tmp_path / "nowhere")) == []


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "a.txt"
    write_text("old", target)
    with pytest.raises(RuntimeError), atomic_path(target) as temporary:
        temporary.write_text("new")
        raise RuntimeError
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


KILLED_BEFORE_RENAME = """
import os, signal, sys
from laserbatch.pipeline.storage.atomic import atomic_path
with atomic_path(sys.argv[1]) as temporary:
    temporary.write_text("new, whole, but never renamed")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_between_write_and_rename_keeps_the_old_file(tmp_path):
    target = tmp_path / "a.txt"
    write_text("old", target)
    process = subprocess.run([sys.executable, "-c", KILLED_BEFORE_RENAME, str(target)], check=False)
    assert process.returncode == -signal.SIGKILL
    assert target.read_text() == "old"
    assert len(os.listdir(tmp_path)) == 2  # the temporary file, which has a name that readers ignore
    assert not list(tmp_path.glob("*.txt"))[1:]
    assert remove_leftovers(tmp_path) == 1
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_folder_is_replaced_only_when_asked_and_only_when_it_is_complete(tmp_path):
    target = tmp_path / "tables"
    with atomic_folder(target) as folder:
        write_text("1", folder / "a")
    with pytest.raises(ConfigError, match="--overwrite"), atomic_folder(target):
        pass
    other = target.parent / "other"
    with pytest.raises(ConfigError, match="--overwrite"), atomic_folder(other) as folder:
        (folder / "new").touch()
        with atomic_folder(other) as first:  # another process
            (first / "file").touch()
    assert [path.name for path in other.iterdir()] == ["file"]
    with pytest.raises(RuntimeError), atomic_folder(target, overwrite=True) as folder:
        write_text("2", folder / "a")
        raise RuntimeError
    assert (target / "a").read_text() == "1"
    with atomic_folder(target, overwrite=True) as folder:
        write_text("3", folder / "sub" / "b")
    assert [path.name for path in target.iterdir()] == ["sub"]
    assert sorted(os.listdir(tmp_path)) == ["other", "tables"]


KILLED_WHILE_REPLACING = """
import os, signal, sys
from laserbatch.pipeline.storage import atomic
target, num_done, can_exchange = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
if not can_exchange:
    atomic._exchange = lambda one, other: False
seen = 0
def watch(event, arguments):
    global seen
    is_change = event in ("os.rename", "shutil.rmtree", "os.remove", "os.rmdir")
    if is_change and os.path.dirname(target) in str(arguments[0]):
        seen += 1
        if seen > num_done:
            os.kill(os.getpid(), signal.SIGKILL)
with atomic.atomic_folder(target, overwrite=True) as folder:
    (folder / "a").write_text("new")
    sys.addaudithook(watch)
"""


@pytest.mark.parametrize(("can_exchange", "num_done"), [(True, 0), (False, 0), (False, 1), (False, 2)])
def test_a_kill_while_a_folder_is_replaced_leaves_the_earlier_or_the_new_one(tmp_path, can_exchange, num_done):
    target = tmp_path / "tables"
    with atomic_folder(target) as folder:
        write_text("old", folder / "a")
    command = [sys.executable, "-c", KILLED_WHILE_REPLACING, str(target), str(num_done), str(can_exchange)]
    process = subprocess.run(command, check=False)
    assert process.returncode == -signal.SIGKILL
    if (can_exchange, num_done) == (False, 1):  # the only moment without a folder at the path
        remove_leftovers(tmp_path)  # like a night
        with pytest.raises(FaultyTable, match=r"was killed: give it again, or move .*\.replaced to"):
            tables_folder(target)
        with pytest.raises(ConfigError, match="not empty"), atomic_folder(target):
            pass
        assert (target / "a").read_text() == "old"
    assert (target / "a").read_text() == ("new" if can_exchange or num_done == 2 else "old")
    with atomic_folder(target, overwrite=True) as folder:
        write_text("newest", folder / "a")
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["tables"] and (target / "a").read_text() == "newest"


def test_a_link_to_a_folder_stays_one_when_the_folder_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "tables").symlink_to(tmp_path / "disk")
    for text in ("1", "2"):
        with atomic_folder(tmp_path / "tables", overwrite=True) as folder:
            write_text(text, folder / "a")
    assert (tmp_path / "tables").is_symlink() and (tmp_path / "disk" / "a").read_text() == "2"
    assert sorted(os.listdir(tmp_path)) == ["disk", "tables"]


def test_damaged_json_is_named(tmp_path):
    path = tmp_path / "a.json"
    write_json({"b": 1, "a": "ü"}, path)
    assert list(read_json(path)) == ["b", "a"]
    path.write_text('{"b": 1')
    with pytest.raises(WorkspaceError, match=r"a\.json is damaged"):
        read_json(path)
    path.write_text("[1]")
    with pytest.raises(WorkspaceError, match="holds a list; expected a JSON object"):
        read_json(path)
    with pytest.raises(WorkspaceError, match="missing"):
        read_json(tmp_path / "b.json")


def test_json_refuses_numbers_that_json_does_not_have(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json({"auc": float("nan")}, tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


def write_on_a_full_disk(path: Path) -> None:
    with atomic_path(path):
        raise OSError(errno.ENOSPC, "as pyarrow raises it")


def test_a_write_that_fails_names_the_path_that_was_to_be_written(tmp_path, monkeypatch):
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as worker:  # which sends its errors back
        of_file = worker.submit(write_on_a_full_disk, tmp_path / "a.parquet").exception()
    with pytest.raises(OSError) as of_folder, atomic_folder(tmp_path / "tables") as folder:
        (folder / "users" / "0").write_text("")
    assert (of_file.filename, of_folder.value.filename) == (f"{tmp_path}/a.parquet", f"{tmp_path}/tables/users/0")
    assert not list(tmp_path.iterdir())

    def read_only(path, **_):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(OSError) as refused, atomic_path(tmp_path / "b") as temporary:
        read_only(temporary)
    assert refused.value.filename == f"{tmp_path}/b"


def test_what_a_symlink_names_is_linked_and_bytes_are_freed_with_the_last_link(tmp_path):
    (tmp_path / "archive").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "archive" / "a").write_bytes(b"12345")
    (tmp_path / "a").symlink_to("archive/a")
    link_file(tmp_path / "a", tmp_path / "run" / "a")
    assert not (tmp_path / "run" / "a").is_symlink() and (tmp_path / "run" / "a").read_bytes() == b"12345"
    (tmp_path / "run" / "own").write_bytes(b"67")
    assert freed_bytes([tmp_path / "run"]) == 2
    assert freed_bytes([tmp_path / "run", tmp_path / "archive"]) == 7


def test_a_file_system_without_links_and_modes_gets_copies(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(1, "Operation not permitted")

    (tmp_path / "a").write_bytes(b"12345")
    os.utime(tmp_path / "a", ns=(1, 2_000))
    for name in ("link", "chmod"):
        monkeypatch.setattr(os, name, refuse)
    link_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"12345" and (tmp_path / "b").stat().st_mtime_ns == 2_000
    copy_mode(tmp_path / "a", tmp_path / "b")


def test_the_current_folder_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (".", tmp_path, ".."):
        with pytest.raises(ConfigError, match="folder that this command runs in"), atomic_folder(path, True):
            pass


def test_what_killed_writers_left_behind_links_is_removed_too(tmp_path):
    elsewhere, workspace = tmp_path / "elsewhere", tmp_path / "workspace"
    (elsewhere / "run" / ".torn.1-ab.tmp").mkdir(parents=True)
    (elsewhere / "run" / "whole").write_text("")
    workspace.mkdir()
    (workspace / "runs").symlink_to(elsewhere)
    assert remove_leftovers(workspace) == 1
    assert [path.name for path in (elsewhere / "run").iterdir()] == ["whole"]
    (workspace / ".runs.1-ab.tmp").symlink_to(elsewhere / "run")  # left by a killed removal
    assert remove_leftovers(workspace) == 1
    assert not (elsewhere / "run").exists() and (workspace / "runs").is_symlink()


def test_a_file_that_is_missing_or_changed_is_named_with_what_to_do(tmp_path):
    (path := tmp_path / "features.parquet").write_text("as recorded")
    recorded = sha256_file(path)
    require_sha256(path, recorded)
    path.write_text("changed")
    with pytest.raises(WorkspaceError, match=r"features.parquet is damaged .* Restore it from a copy, or run again\."):
        require_sha256(path, recorded, ", or run again")
    path.unlink()
    with pytest.raises(WorkspaceError, match=r"features.parquet is missing\. Restore it from a copy\."):
        require_sha256(path, recorded)
