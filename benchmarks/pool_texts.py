"""Write on a CPU the texts from which `gpu_first.py` builds its pools: the GPU's minutes are too few to write them.

    python benchmarks/pool_texts.py --out .dev/texts

A widened model computes the same function as its source (`widen.py`), so except for rounding the small model's float32
texts are also the large model's. Each task has a Parquet file with a row per prompt: its role, its tokens, its group of
similar prompts, and its text. Plain texts fill the pool. Texts of the earlier prompts are drafted from that pool,
verified with the relaxed rule, and calibrate the pool for this rule. Held-out prompts are measured on the GPU and have
no text here; a held-out prompt whose plain text begins like a text of the pool is left out.
"""

import argparse
import logging
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import DEFAULT_DATA, DEFAULT_MODEL, begin
from engine_pools import GroupedPool, calibrated_by, calibrated_pool, like_groups
from engine_systems import WITH_POOL, drafting
from tasks import Task, TaskSize, goodreads_items_task, plain_texts, reki_task

from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.load import load_model
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.retrieval_pools.settings import PoolSettings

logger = logging.getLogger("benchmarks")

BATCH = 16
MAKERS = {"reki": reki_task, "goodreads-items": goodreads_items_task}
SIZES = {"reki": TaskSize(512, 400, 0, 128), "goodreads-items": TaskSize(320, 1000, 0, 128)}
SMOKE_SIZE = TaskSize(4, 6, 0, 2)
MEASURED_TOKENS = {"reki": 192, "goodreads-items": 128}  # length of a held-out prompt's text on the GPU
HELD_OUT, POOL, EARLIER = "held_out", "pool", "earlier"
SCHEMA = pa.schema(
    [
        ("role", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("group", pa.string()),
    ]
)


@dataclass(frozen=True)
class SavedTask:
    """A task with the texts that were written for it."""

    task: Task
    pool_texts: list[np.ndarray]
    earlier_texts: list[np.ndarray]
    groups: dict[bytes, str]

    def pools(self, folder: Path) -> dict[str, GroupedPool]:
        """The pools to draft from, by the name of their verifier: "greedy" and "relaxed"."""
        greedy = calibrated_pool(self.task, self.pool_texts, None, PoolSettings(), folder / "global")
        like = calibrated_pool(self.task, self.pool_texts, self.groups, PoolSettings(), folder / "preference")
        return {"greedy": greedy, "relaxed": calibrated_by(like, self.task.earlier_prompts, self.earlier_texts)}


def write_task(engine: Engine, task: Task, path: Path) -> None:
    """Write one task's Parquet file."""
    logger.info("%s: writing the texts of the pool", task.name)
    pool_texts = plain_texts(engine, task.pool_prompts, task.max_new_tokens)
    measured = MEASURED_TOKENS[task.name]
    beginnings = {text[:measured].tobytes() for text in pool_texts}
    logger.info("%s: writing the texts of held-out prompts", task.name)
    answers = plain_texts(engine, task.held_out, measured)
    held_out = tuple(p for p, text in zip(task.held_out, answers, strict=True) if text.tobytes() not in beginnings)
    logger.info("%s: texts of %d of %d held-out prompts are not in the pool", task.name, len(held_out), len(answers))
    groups = like_groups(task)
    with tempfile.TemporaryDirectory() as folder:
        pool = calibrated_pool(task, pool_texts, groups, PoolSettings(), Path(folder) / "pool").pool
        night = drafting(engine, pool, WITH_POOL, groups, Budget(), "relaxed")
        logger.info("%s: writing relaxed texts of earlier prompts", task.name)
        earlier = night.timed(task.earlier_prompts, task.max_new_tokens).texts
    rows = [
        *((HELD_OUT, prompt, None) for prompt in held_out),
        *((POOL, prompt, text) for prompt, text in zip(task.pool_prompts, pool_texts, strict=True)),
        *((EARLIER, prompt, text) for prompt, text in zip(task.earlier_prompts, earlier, strict=True)),
    ]
    columns = dict(zip(("role", "prompt_ids", "token_ids"), zip(*rows, strict=True), strict=True))
    table = pa.table(columns | {"group": [groups[prompt.tobytes()] for _, prompt, _ in rows]}, SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, compression="zstd")


def read_task(folder: Path, name: str) -> SavedTask:
    """Read the task and the texts that `write_task` wrote to `folder`."""
    rows = pq.read_table(folder / f"{name}.parquet").to_pylist()
    prompts: dict[str, list[np.ndarray]] = {HELD_OUT: [], POOL: [], EARLIER: []}
    texts: dict[str, list[np.ndarray]] = {HELD_OUT: [], POOL: [], EARLIER: []}
    groups = {}
    for row in rows:
        prompt = np.asarray(row["prompt_ids"], np.int32)
        prompts[row["role"]].append(prompt)
        texts[row["role"]].append(np.asarray(row["token_ids"] or (), np.int32))
        groups[prompt.tobytes()] = row["group"]
    side = "user" if name == "reki" else "item"
    ordered = (tuple(prompts[role]) for role in (HELD_OUT, POOL, EARLIER))
    held_out, pool, earlier = ordered
    task = Task(name, side, held_out, pool, MEASURED_TOKENS[name], name == "reki", earlier)
    return SavedTask(task, texts[POOL], texts[EARLIER], groups)


def main(words: list[str] | None = None) -> None:
    """Write the files of all tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the Parquet files")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of the small model")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder of public texts")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--smoke", action="store_true", help="a few short texts")
    options = parser.parse_args(words)
    begin(options.threads)
    loaded = load_model(options.model, "float32", "cpu")
    engine = Engine(loaded, DecodingSettings(dtype="float32", batch_size=BATCH))
    for name, make in MAKERS.items():
        task = make(loaded.tokenizer, options.data, SMOKE_SIZE if options.smoke else SIZES[name])
        write_task(engine, replace(task, max_new_tokens=24) if options.smoke else task, options.out / f"{name}.parquet")


if __name__ == "__main__":
    main()
