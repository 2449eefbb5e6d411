"""What training takes of memory for a log of millions of rows: made-up tables, models in forks of who read them."""

import dataclasses
import datetime
import json
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from laserbatch.ctr import gbdt
from laserbatch.ctr.dataset import CtrData, build_dataset
from laserbatch.ctr.settings import CtrSettings
from laserbatch.ctr.training import train_model
from laserbatch.pipeline.tables.read import open_tables

ROWS_A_USER, ROWS_AN_ITEM = 40, 400
DAYS, AS_OF = 100, datetime.date(2024, 4, 4)  # 95 of 100 days train
START_S = 1_704_067_200  # 2024-01-01
TRAINED_EVERY = 10  # training rows; all are read, sorted and kept
ROUNDS = 10  # of LightGBM, which takes all rows
CHUNK_ROWS = 1 << 20


def scale_rows(num_rows: int) -> list[dict]:
    """A row for each model: seconds, and the most memory that building the data set and its own training had."""
    torch.set_num_threads(1)  # so that processes can be forked
    gbdt.MAX_ROUNDS = ROUNDS
    settings, rows, forked = CtrSettings(max_epochs=1), [], multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        write_tables(Path(folder), num_rows)
        start_s = time.process_time()
        data = build_dataset(open_tables(folder), AS_OF, settings)
        built = {"build_cpu_s": time.process_time() - start_s, "build_peak_mb": peak_mb()}
        for model in settings.models:
            ours, childs = forked.Pipe(duplex=False)
            child = forked.Process(target=train, args=(model, data, settings, childs))
            child.start()
            childs.close()
            rows.append({"model": model, "rows": num_rows} | built | ours.recv())
            child.join()
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def train(model: str, data: CtrData, settings: CtrSettings, told: Connection) -> None:
    """Train a part of an epoch, or a few rounds of trees, in a process that begins with the data set."""
    if model != "gbdt":
        data = dataclasses.replace(data, train=data.train[::TRAINED_EVERY])
    start_s = time.process_time()
    found = train_model(model, data, None, settings, 0)
    train_s = time.process_time() - start_s
    row = {"train_cpu_s": train_s, "peak_mb": peak_mb(), "rows_trained": len(data.train)}
    told.send(row | {"validation_auc": found.validation_auc})


def write_tables(folder: Path, num_rows: int) -> None:
    """Users and items of a few attributes, and ratings in order of time, a chunk at a time."""
    rng = np.random.default_rng(0)
    ids = {}
    for side, a_row in (("user", ROWS_A_USER), ("item", ROWS_AN_ITEM)):
        num = max(num_rows // a_row, 100)
        ids[side] = pa.array([f"{side}{number:09}" for number in range(num)])
        columns = {f"{side}_id": ids[side], "title": ids[side]}
        columns |= {f"kind_{size}": pa.array(rng.integers(size, size=num)).cast(pa.string()) for size in (10, 100)}
        pq.write_table(pa.table(columns), folder / f"{side}s.parquet")
    schema = pa.schema([("user_id", pa.string()), ("item_id", pa.string()), ("timestamp", pa.timestamp("s", "UTC")),
                        ("rating", pa.int8())])  # fmt: skip
    with pq.ParquetWriter(folder / "interactions.parquet", schema) as writer:
        for first in range(0, num_rows, CHUNK_ROWS):
            num = min(CHUNK_ROWS, num_rows - first)
            times = START_S + (first + np.arange(num)) * (DAYS * 86_400) // num_rows
            numbers = {side: rng.integers(len(of_side), size=num) for side, of_side in ids.items()}
            ratings = 1 + (numbers["user"] % 7 + numbers["item"] % 11 + rng.integers(8, size=num)) // 5
            columns = [ids[side].take(pa.array(of_side)) for side, of_side in numbers.items()]
            columns += [pa.array(times).cast(schema.types[2]), pa.array(ratings.astype(np.int8))]
            writer.write_table(pa.table(columns, schema=schema))


def peak_mb() -> int:
    """The most memory that this process has had."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024
