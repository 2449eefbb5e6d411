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

from laserbatch.pipeline.errors import PipelineError, WorkspaceError
from laserbatch.pipeline.storage.atomic import (
    atomic_folder,
    atomic_path,
    read_json,
    remove_leftovers,
    write_json,
    write_text,
)


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
    assert len(os.listdir(tmp_path)) == 2  # the temporary file, under a name that no reader takes
    assert not list(tmp_path.glob("*.txt"))[1:]
    assert remove_leftovers(tmp_path) == 1
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_folder_is_replaced_only_when_asked_and_only_when_it_is_complete(tmp_path):
    target = tmp_path / "tables"
    with atomic_folder(target) as folder:
        write_text("1", folder / "a")
    with pytest.raises(PipelineError, match="--overwrite"), atomic_folder(target):
        pass
    with pytest.raises(RuntimeError), atomic_folder(target, overwrite=True) as folder:
        write_text("2", folder / "a")
        raise RuntimeError
    assert (target / "a").read_text() == "1"
    with atomic_folder(target, overwrite=True) as folder:
        write_text("3", folder / "sub" / "b")
    assert [path.name for path in target.iterdir()] == ["sub"]
    assert os.listdir(tmp_path) == ["tables"]


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
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as worker:  # whose errors travel
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


def test_the_current_folder_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (".", tmp_path, ".."):
        with pytest.raises(PipelineError, match="folder that this command runs in"), atomic_folder(path, True):
            pass
