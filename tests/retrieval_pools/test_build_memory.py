"""The memory that building takes, watched from outside in processes of their own."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

BUILDER = """
import sys, tempfile
from pathlib import Path
import numpy as np
import retrieval_pools.build as builds
from retrieval_pools.build import PoolText, build_pool
from retrieval_pools.settings import PoolBuildSettings

tokens = np.random.default_rng(0).integers(0, 1000, 100_000).astype(np.int32)

def texts(num_texts):
    for number in range(num_texts):
        place = number * 7919 % 99_000
        yield PoolText(tokens[place : place + 40 + number % 20])

def build(num_texts, memory_mb):
    with tempfile.TemporaryDirectory() as folder:
        building = PoolBuildSettings(memory_mb=memory_mb)
        counts = []
        build_pool(texts(num_texts), Path(folder, "p"), side="item", tokenizer_hash="t", model_id="m",
                   building=building, on_counts=lambda done: counts.append(done.num_runs))
        return counts[0]

with tempfile.TemporaryDirectory() as folder:  # compiles
    options = {"side": "item", "tokenizer_hash": "t", "model_id": "m"}
    pool = build_pool(texts(100), Path(folder, "p"), **options)
    build_pool(list(texts(110))[::2], Path(folder, "q"), previous=pool, **options)
    usual, builds.SORT_BYTES_PER_POSITION = builds.SORT_BYTES_PER_POSITION, 1 << 20  # a run for each text
    build_pool(texts(9), Path(folder, "r"), building=PoolBuildSettings(memory_mb=16), **options)
    builds.SORT_BYTES_PER_POSITION = usual
print("ready", flush=True)
input()
print(build(60_000, int(sys.argv[1]) if sys.argv[1] != "None" else None), flush=True)
"""


def own_mb(pid: int) -> float:
    """Memory of a process, mapped files left out; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), 0.0)


def build_watched(memory_mb) -> tuple[float, int]:
    """How much a build of three million tokens grew its process by, in MiB, and its runs."""
    command = [sys.executable, "-c", BUILDER, json.dumps(memory_mb).replace("null", "None")]
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
def test_limit_is_kept_to_and_more_is_taken_without_one():
    limited_mb, num_runs = build_watched(16)
    assert num_runs > 4
    assert limited_mb <= 16 + 60_000 * 100 / 2**20
    unlimited_mb, num_runs = build_watched(None)
    assert num_runs == 1
    assert unlimited_mb > 2 * limited_mb
