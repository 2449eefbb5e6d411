"""One measurement of `pool_scale.py`, in a process of its own: reads its task from the command line, prints JSON."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from pool_scale_texts import TextFile

from laserbatch.retrieval_pools.calibration.replay import DraftOptions, ReplayText, pool_steps
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.merge_runs import RunChunk, merge_runs, shared_with_previous
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.settings import PoolBuildSettings

MAX_NODES = 32
MIN_PROBABILITY = 1e-3
SAMPLE_OPTIONS = {"side": "user", "tokenizer_hash": "benchmark", "model_id": "benchmark"}


def measure_build(texts: str, out: str, memory_mb: int | None, previous: str | None) -> dict:
    """Build a pool of a file's texts; the process tells its memory before and after, its parent watches it between."""
    options = SAMPLE_OPTIONS | {"building": PoolBuildSettings(memory_mb=memory_mb)}
    warm_up(options)
    older = Pool.open(previous) if previous else None
    print(json.dumps({"before_own_mb": own_memory_mb()}), flush=True)
    counts = []
    rows = (PoolText(text, f"g{number % 200}") for number, text in enumerate(TextFile(Path(texts))))
    start_s = time.perf_counter()
    pool = build_pool(rows, out, previous=older, on_counts=counts.append, **options)
    build_s = time.perf_counter() - start_s
    return {
        "num_texts": pool.manifest.num_texts,
        "num_tokens": pool.manifest.num_tokens,
        "build_s": build_s,
        "bytes": sum(path.stat().st_size for path in Path(out).iterdir()),
        "num_texts_sorted": counts[0].num_texts_sorted,
        "num_runs": counts[0].num_runs,
    }


def warm_up(options: dict) -> None:
    """Compile everything that a build calls."""
    texts = [np.arange(number, number + 30, dtype=np.int32) % 50 for number in range(40)]
    with tempfile.TemporaryDirectory() as folder:
        rows = [PoolText(text) for text in texts]
        pool = build_pool(rows, Path(folder, "one"), **options)
        today = [PoolText(texts[0][1:]), *rows[::2], PoolText(texts[1][1:]), rows[-1]]
        build_pool(today, Path(folder, "two"), previous=pool, **options)
    orders = [np.array([place], np.int32) for place in (0, 1)]
    runs = [[RunChunk(order, shared_with_previous(pool.index.tokens, order, pool.index.depth))] for order in orders]
    list(merge_runs(pool.index.tokens, list(map(iter, runs)), pool.index.depth))


def measure_drafts(pool: str, texts: str, cold: bool, resident: bool) -> dict:
    """Microseconds a draft along texts that the pool does not hold; greedy replay, as `drafting.py` does.

    Parameters
    ----------
    cold : take the pool's files out of the page cache first.
    resident : open it as a worker does, which asks for its pages; without, each page is fetched when it is touched.
    """
    options = DraftOptions(MAX_NODES, MIN_PROBABILITY)
    no_prompt = np.empty(0, np.int32)
    rows = list(map(np.array, TextFile(Path(texts))))
    compile_query(rows[0], options)
    if cold:
        drop_from_cache(Path(pool))
    start_s = time.perf_counter()
    opened = Pool.open(pool, max_resident_bytes=1 << 40 if resident else 0)
    open_s = time.perf_counter() - start_s
    draft_us, accepted = [], []
    for number, text in enumerate(rows):
        for step in pool_steps(opened, ReplayText(no_prompt, text, None, f"g{number % 200}"), options):
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


def compile_query(text: np.ndarray, options: DraftOptions) -> None:
    """Draft from a pool of one text, of the kind that the measured one is."""
    with tempfile.TemporaryDirectory() as folder:
        pool = build_pool([PoolText(text)], Path(folder, "pool"), **SAMPLE_OPTIONS)
        for _ in pool_steps(pool, ReplayText(text[:0], text), options):
            pass


def drop_from_cache(folder: Path) -> None:
    """Have the kernel forget what it holds of a folder's files; nobody else may have them mapped."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # what is not on the disk yet is not let go
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def own_memory_mb() -> float:
    """What this process holds in memory, mapped files left out."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    measure = {"build": measure_build, "drafts": measure_drafts}[task.pop("measure")]
    print(json.dumps(measure(**task)), flush=True)
