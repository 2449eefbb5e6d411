"""The memory for matching texts with earlier features, measured in a separate process."""

import subprocess
import sys
from pathlib import Path

import pytest

MATCHER = """
import sys, threading, time
from pathlib import Path
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from laserbatch.pipeline.encoding.features import _Texts
from laserbatch.pipeline.storage.parquet import write_parquet

def table(id_name, numbers):
    ids = pc.binary_join_element_wise("user-", pc.utf8_lpad(pa.array(numbers).cast(pa.string()), 9, "0"), "")
    fingerprints = pc.binary_join_element_wise(ids, *5 * [pc.utf8_lpad(ids, 16, "f")], "-")
    return pa.table({id_name: ids, "run_id": pa.repeat("2025-03-01-0123abcd", len(ids)), "fingerprint": fingerprints})

def own_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))

num_rows, folder = int(sys.argv[1]), Path(sys.argv[2])
for size in (20_000, num_rows):  # the first makes what does not grow with rows
    paths = folder / f"{size}-knowledge.parquet", folder / f"{size}-features.parquet"
    write_parquet(table("entity_id", np.random.default_rng(0).permutation(size)), paths[0])
    write_parquet(table("user_id", np.arange(size)), paths[1])
    pa.default_memory_pool().release_unused()
    before = most = own_mb()
    is_done = threading.Event()

    def watch():
        global most
        while not is_done.wait(0.002):
            most = max(most, own_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    texts = _Texts.read(*paths, "user_id", folder)
    is_done.set()
    watcher.join()
    assert texts.num_new == 0
print(most - before)
"""
NUM_ROWS, BYTES_A_ROW, BATCHES_MB = 400_000, 48, 40


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell a process's memory")
def test_matching_takes_a_few_numbers_a_text(tmp_path):
    command = [sys.executable, "-c", MATCHER, str(NUM_ROWS), str(tmp_path)]
    grown_mb = float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert grown_mb <= NUM_ROWS * BYTES_A_ROW / 2**20 + BATCHES_MB
