"""Nights with planted plans and texts: no model runs, and the acceptance of drafts from the texts is known."""

import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
from planned_side import plan_side

from laserbatch.pipeline.knowledge.templates import load_template
from laserbatch.pipeline.planning.plan import save_plan


class Encoder:
    """Unit vectors that depend on the text alone."""

    dim, encoder_id = 8, "hash"

    def encode(self, texts, on_batch):
        seeds = [zlib.crc32(text.encode()) for text in texts]
        vectors = np.array([np.random.default_rng(seed).normal(size=8) for seed in seeds], np.float32).reshape(-1, 8)
        return SimpleNamespace(vectors=vectors / np.linalg.norm(vectors, axis=1, keepdims=True), num_truncated=0)


def invented_text(seed: int, num_changed: int = 0) -> np.ndarray:
    """A random text with two possible successors of each word; texts with one seed differ in their last words only."""
    rng = np.random.default_rng(seed)
    tokens = [int(rng.integers(0, 50))]
    for _ in range(39):
        tokens.append((3 * tokens[-1] + 7 * int(rng.integers(0, 4) == 0)) % 50)
    return np.array(tokens[: len(tokens) - num_changed] + [60 + seed % 7] * num_changed, np.int32)


def write_night(night, num_changed: int = 0, previous: Path | None = None) -> pa.Table:
    """Write a plan of the items and a text for each, as generation does; users get none."""
    ids = night.tables.items["item_id"].to_pylist()
    plan = plan_side(
        night.tables,
        "item",
        load_template("kar_item"),
        f"{night.date:%Y%m%d}-p-m-d",
        night.run.root,
        previous,
        shard_size=32,
        batch_size=16,
    )
    save_plan(plan, night.run.root)
    token_ids = [invented_text(zlib.crc32(key.encode()), num_changed) for key in ids]
    texts = pa.table(
        {
            "entity_id": ids,
            "model_id": ["m"] * len(ids),
            "run_id": [night.run.run_id] * len(ids),
            "fingerprint": [f"{night.date:%Y%m%d}-p-m-d"] * len(ids),
            "is_stale": [False] * len(ids),
            "token_ids": pa.array(token_ids, pa.list_(pa.int32())),
        }
    )
    night.run.shards("item").write("00000", texts)
    night.run.shards("user").write("00000", texts.slice(0, 0))
    return texts
