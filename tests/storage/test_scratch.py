"""Temporary folders are removed with their process, or by the next one if it was killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from laserbatch.pipeline.storage.scratch import MIN_AGE_S, PREFIX, ScratchFolder, remove_dead_scratch

MAKE = """
import os, sys
from laserbatch.pipeline.storage.scratch import ScratchFolder
folder = ScratchFolder("tables")
(folder.path / "users.parquet").write_text("somebody")
print(folder.path, flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def made_long_ago(path):
    when = time.time() - 2 * MIN_AGE_S
    os.utime(path, (when, when))


def test_what_a_killed_process_left_goes_and_what_a_living_one_has_stays(temporary):
    command = [sys.executable, "-c", MAKE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        (folder,) = [type(temporary)(other.stdout.readline().strip())]
        made_long_ago(folder)
        assert remove_dead_scratch() == 0 and (folder / "users.parquet").exists()
        other.send_signal(signal.SIGKILL)
    assert folder.exists()
    with ScratchFolder("tables") as own:
        assert not folder.exists() and own.is_dir()
    assert list(temporary.iterdir()) == []


def test_young_and_foreign_folders_and_links_stay(temporary):
    young, elsewhere = temporary / f"{PREFIX}tables-young", temporary / "elsewhere"
    young.mkdir()
    elsewhere.mkdir()
    (temporary / f"{PREFIX}tables-link").symlink_to(elsewhere)
    made_long_ago(elsewhere)
    assert remove_dead_scratch() == 0
    made_long_ago(young)
    assert remove_dead_scratch() == 1 and elsewhere.is_dir() and not young.exists()


def test_a_caller_may_wait_until_a_young_folder_is_certainly_dead(temporary, monkeypatch):
    young = temporary / f"{PREFIX}tables-young"
    young.mkdir()
    said, waited = [], []
    monkeypatch.setattr("time.sleep", waited.append)
    with ScratchFolder("tables") as own:
        assert remove_dead_scratch(on_wait=said.append) == 1 and own.is_dir() and not young.exists()
    assert remove_dead_scratch(on_wait=said.append) == 0
    assert said == waited and len(waited) == 1 and MIN_AGE_S - 5 < waited[0] < MIN_AGE_S
