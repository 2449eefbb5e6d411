"""The memory that training takes for each row of its log, from Parquet files to weights."""

import subprocess
import sys
from pathlib import Path

import pytest

FEW_ROWS, NUM_ROWS = 70_000, 320_000
MAX_BYTES = 200  # per row, at the peak, while rows are sorted; 55 of them stay

TRAINING = f"""
import datetime, sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np, pyarrow as pa, pyarrow.dataset as ds, pyarrow.parquet as pq
from laserbatch.ctr import log
from laserbatch.ctr.dataset import build_dataset
from laserbatch.ctr.settings import CtrSettings
from laserbatch.ctr.training import train_model

log.BATCH_ROWS = 1 << 16
folder = Path(sys.argv[1])

def ids(prefix, num):
    return pa.array([f"{{prefix}}{{number}}" for number in range(num)])

def world(num):
    users, items, rng = ids("u", 2000), ids("i", 500), np.random.default_rng(0)
    start = 1_700_000_000
    schema = pa.schema(
        [("user_id", pa.string()), ("item_id", pa.string()), ("timestamp", pa.timestamp("s", "UTC")),
         ("liked", pa.bool_())])
    with pq.ParquetWriter(folder / f"{{num}}.parquet", schema) as writer:
        for first in range(0, num, 50_000):
            many = min(50_000, num - first)
            writer.write_table(pa.table([
                users.take(pa.array(rng.integers(2000, size=many))), items.take(pa.array(rng.integers(500, size=many))),
                pa.array(start + np.sort(rng.integers(10 * 86400, size=many)), pa.timestamp("s", "UTC")),
                pa.array(rng.random(many) < 0.4),
            ], schema=schema))
    return SimpleNamespace(
        users=pa.table({{"user_id": users}}), items=pa.table({{"item_id": items}}),
        interactions=ds.dataset(folder / f"{{num}}.parquet"),
    )

def train(num):
    settings = CtrSettings(label="liked", max_epochs=1, embedding_dim=1, hidden_sizes=(2,), max_history=1)
    data = build_dataset(world(num), datetime.date(2023, 11, 22), settings)
    train_model("dcnv2", data, None, settings, 0)

def kilobytes(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

train({FEW_ROWS})  # what libraries take is in both
before = kilobytes("VmHWM")
train({NUM_ROWS})
print((kilobytes("VmHWM") - before) * 1024 / ({NUM_ROWS} - {FEW_ROWS}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="tells peaks as Linux does")
def test_a_log_is_read_and_trained_within_a_stated_number_of_bytes(tmp_path):
    done = subprocess.run([sys.executable, "-c", TRAINING, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < MAX_BYTES, done.stdout
