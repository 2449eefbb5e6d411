"""Machine code that is kept on disk: found again, and made anew when a file that it was made of has changed."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import package.index.caller as caller
print(caller.answer(1), sum(caller.answer.stats.cache_hits.values()))
"""
CALLER = """
from package.compiled import cached
from package.index.callee import more

@cached(nogil=True)
def answer(x):
    return more(x)
"""
CALLEE = """
from package.compiled import part

@part
def more(x):
    return x + {}
"""


def test_a_change_in_a_callees_file_is_seen(tmp_path):
    package = tmp_path / "package"
    (package / "index").mkdir(parents=True)
    source = Path(__file__).resolve().parents[2] / "retrieval_pools" / "compiled.py"
    (package / "compiled.py").write_bytes(source.read_bytes())
    (package / "index" / "caller.py").write_text(CALLER)

    def run(added):
        (package / "index" / "callee.py").write_text(CALLEE.format(added))
        command = [sys.executable, "-c", PROGRAM]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()

    assert run(10) == ["11", "0"]
    assert run(10) == ["11", "1"]
    assert run(20) == ["21", "0"]
