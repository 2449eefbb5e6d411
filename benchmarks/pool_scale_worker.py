"""The process of one measurement of `pool_scale.py`: reads its task from the command line, prints JSON.

It imports little, since its memory is measured too.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from laserbatch.retrieval_pools.calibration.replay import ReplayText, pool_steps
from laserbatch.retrieval_pools.draft import DraftOptions
from laserbatch.retrieval_pools.index import build as index_build
from laserbatch.retrieval_pools.index.arrays import ArrayWriter, map_array
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.pool import Pool

DRAFTS = DraftOptions(max_nodes=32, min_acceptance=1e-3)
build = partial(build_pool, side="user", tokenizer_hash="benchmark", model_id="benchmark")
NUM_GROUPS = 200


@dataclass(frozen=True)
class TextFile:
    """Texts on disk: `tokens.npy` has all tokens end to end, `lengths.npy` the length of each text."""

    folder: Path

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the token ids of each text, int32, memory-mapped."""
        tokens, place = map_array(self.folder / "tokens.npy"), 0
        for length in np.load(self.folder / "lengths.npy").tolist():
            yield tokens[place : place + length]
            place += length

    @classmethod
    def write(cls, folder: Path, texts: Iterator[np.ndarray]) -> "TextFile":
        """Write texts to a new folder, with one text in memory at a time."""
        folder.mkdir(parents=True)
        lengths = []
        with ArrayWriter(folder / "tokens.npy", np.int32) as writer:
            for text in texts:
                writer.write(text)
                lengths.append(len(text))
        np.save(folder / "lengths.npy", np.array(lengths, np.int32))
        return cls(folder)


def measure_build(texts: str, out: str, memory_mb: int | None, previous: str | None) -> dict:
    """Build a pool of a file's texts; prints this process' memory before, and the parent watches the peak."""
    index_build.SORT_MEMORY_BYTES = sys.maxsize if memory_mb is None else memory_mb << 20
    with tempfile.TemporaryDirectory() as folder:  # compiles the functions of a build and a merge
        few = [PoolText(np.arange(number, number + 30, dtype=np.int32) % 50) for number in range(40)]
        pool = build(few, Path(folder, "one"))
        build([PoolText(few[0].token_ids[1:]), *few[::2]], Path(folder, "two"), previous=pool)
    older = Pool.open(previous) if previous else None
    print(json.dumps({"before_own_mb": memory_mb_of(os.getpid())[0]}), flush=True)
    rows = (PoolText(text, f"g{number % NUM_GROUPS}") for number, text in enumerate(TextFile(Path(texts))))
    start_s = time.perf_counter()
    pool = build(rows, out, previous=older)
    build_s = time.perf_counter() - start_s
    return {
        "num_texts": pool.manifest.num_texts,
        "num_tokens": pool.manifest.num_tokens,
        "build_s": build_s,
        "bytes": sum(path.stat().st_size for path in Path(out).iterdir()),
        "num_texts_sorted": pool.num_sorted,
    }


def measure_drafts(pool: str, texts: str) -> dict:
    """Times of drafts along texts that are not in the pool; the pool is opened like by a night's worker."""
    no_prompt = np.empty(0, np.int32)
    rows = [
        ReplayText(no_prompt, np.array(text), None, f"g{number % NUM_GROUPS}")
        for number, text in enumerate(TextFile(Path(texts)))
    ]
    with tempfile.TemporaryDirectory() as folder:  # compiles the query
        list(pool_steps(build([PoolText(rows[0].text_ids)], Path(folder, "pool")), rows[0], DRAFTS))
    start_s = time.perf_counter()
    opened = Pool.open(pool, max_resident_bytes=1 << 40)
    open_s = time.perf_counter() - start_s
    draft_us, accepted = [], []
    for row in rows:
        for step in pool_steps(opened, row, DRAFTS):
            draft_us.append(step.draft_us)
            accepted.append(len(step.path))
    return {
        "open_s": open_s,
        "num_drafts": len(draft_us),
        "draft_median_us": float(np.median(draft_us)),
        "draft_p99_us": float(np.quantile(draft_us, 0.99)),
        "draft_max_us": float(np.max(draft_us)),
        "aal": float(np.mean(accepted)),
    }


def memory_mb_of(pid: int) -> tuple[float, float]:
    """A process' memory in MiB: anonymous, and mapped files, which the kernel may take back; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0.0
    mebibytes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith("Rss")}
    return mebibytes.get("RssAnon", 0.0), mebibytes.get("RssFile", 0.0) + mebibytes.get("RssShmem", 0.0)


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    measure = {"build": measure_build, "drafts": measure_drafts}[task.pop("measure")]
    print(json.dumps(measure(**task)), flush=True)
