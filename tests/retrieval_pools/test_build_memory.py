"""The memory of a build, measured from outside in separate processes."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

BUILDER = """
import sys, tempfile
from pathlib import Path
import numpy as np
from laserbatch.retrieval_pools.index import build as index_build
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.pool import Pool

tokens = np.random.default_rng(0).integers(0, 1000, 100_000).astype(np.int32)

def texts(num_texts, changed_every=1 << 30):
    for number in range(num_texts):
        place = number * 7919 % 99_000 + (number % changed_every == 1)
        yield PoolText(tokens[place : place + 40 + number % 20])

def build(num_texts, memory_mb, out, previous):
    index_build.SORT_MEMORY_BYTES = memory_mb << 20
    older = Pool.open(previous) if previous else None
    rows = texts(num_texts, 20 if previous else 1 << 30)
    return build_pool(rows, out, side="item", tokenizer_hash="t", model_id="m", previous=older).num_sorted

with tempfile.TemporaryDirectory() as folder:  # compiles
    options = {"side": "item", "tokenizer_hash": "t", "model_id": "m"}
    pool = build_pool(texts(100), Path(folder, "p"), **options)
    build_pool(list(texts(110))[::2], Path(folder, "q"), previous=pool, **options)
print("ready", flush=True)
input()
print(build(32_000, int(sys.argv[1]), *sys.argv[2:]), flush=True)
"""


CHUNKS_MB = 12  # chunks in work by the threads of a build


def own_mb(pid: int) -> float:
    """Memory of a process in MiB, without mapped files; 0 after its end."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), 0.0)


def build_watched(memory_mb, out: Path, previous: Path | str = "") -> tuple[float, int]:
    """The growth in MiB of a process that builds a pool of 1.6 million tokens, and the number of sorted texts."""
    command = [sys.executable, "-c", BUILDER, str(memory_mb), str(out), str(previous)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    before = most = own_mb(process.pid)
    process.stdin.write("\n")
    process.stdin.flush()
    while process.poll() is None:
        most = max(most, own_mb(process.pid))
        time.sleep(0.002)
    assert process.returncode == 0
    return most - before, int(process.stdout.read())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell a process's memory")
def test_limit_is_kept_to(tmp_path):
    own_mb = 32_000 * 100 / 2**20
    limited_mb, _ = build_watched(2, tmp_path / "limited")
    assert limited_mb <= 2 + own_mb + CHUNKS_MB
    merged_mb, num_sorted = build_watched(2, tmp_path / "merged", tmp_path / "limited")
    assert 1_500 < num_sorted <= 1_600  # a changed text may equal another one
    assert merged_mb <= 2 + own_mb + CHUNKS_MB
