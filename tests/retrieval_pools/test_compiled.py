"""Compiled code is cached on disk, and compiled again after a change of a source file."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from laserbatch.retrieval_pools.index.order import count_first_tokens

PROGRAM = """
import package.index.caller as caller
print(caller.answer(1), sum(caller.answer.stats.cache_hits.values()))
"""
CALLER = """
from package.compiled import cached
from package.index.callee import more

@cached()
def answer(x):
    return more(x)
"""
CALLEE = """
from package.compiled import part

@part
def more(x):
    return x + {}
"""


def made_package(folder: Path) -> Path:
    package = folder / "package"
    (package / "index").mkdir(parents=True)
    source = Path(__file__).resolve().parents[2] / "retrieval_pools" / "compiled.py"
    (package / "compiled.py").write_bytes(source.read_bytes())
    (package / "index" / "caller.py").write_text(CALLER)
    return package


def test_a_change_in_a_callees_file_is_seen(tmp_path):
    package = made_package(tmp_path)

    def run(added):
        (package / "index" / "callee.py").write_text(CALLEE.format(added))
        command = [sys.executable, "-B", "-c", PROGRAM]  # Python's own cache misses a change within a second
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()

    assert run(10) == ["11", "0"]
    assert run(20) == ["21", "0"]  # the next test checks that unchanged functions are not compiled again


def test_where_no_folder_may_be_written_machine_code_goes_to_a_temporary_one_and_this_is_said_once(tmp_path):
    """For example in a container with a read-only root and no HOME; a file in place of the folder also stops root."""
    package = made_package(tmp_path)
    (package / "index" / "callee.py").write_text(CALLEE.format(10))
    (package / "index" / "caller.py").write_text(CALLER + "\n@cached()\ndef other(x):\n    return more(x)\n")
    (package / "index" / "__pycache__").write_text("")
    (tmp_path / "tmp").mkdir()
    inherited = {name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR")}
    environment = inherited | {"HOME": "/proc/none", "TMPDIR": str(tmp_path / "tmp")}

    def run():
        command = [sys.executable, "-c", PROGRAM]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert ran.stderr.count("machine code goes to") == 1, ran.stderr
        assert "NUMBA_CACHE_DIR" in ran.stderr
        return ran.stdout.split()

    assert run() == ["11", "0"]
    assert run() == ["11", "1"]
    (folder,) = (tmp_path / "tmp").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)  # others could have written the code
    assert run() == ["11", "0"]


def test_other_threads_go_on_while_a_compiled_function_runs():
    tokens = np.zeros(5_000_000, np.int32)
    arguments = tokens, np.array([0, len(tokens)], np.int32), np.zeros(60, np.int64), 5  # one text, counted sixty times
    count_first_tokens(*arguments)  # compiles it
    done, turns = threading.Event(), []

    def count() -> None:
        while not done.is_set():
            turns.append(time.perf_counter())

    thread = threading.Thread(target=count)
    thread.start()
    began_s = time.perf_counter()
    count_first_tokens(*arguments)
    ended_s = time.perf_counter()
    done.set()
    thread.join()
    middle = began_s + 0.2 * (ended_s - began_s), began_s + 0.8 * (ended_s - began_s)
    assert any(middle[0] < turn < middle[1] for turn in turns)
