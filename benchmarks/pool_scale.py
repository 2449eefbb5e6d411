"""Cost of pools of a thousand to a million texts: time, memory, bytes and drafts; and of merging a night's changes.

    python benchmarks/pool_scale.py --quick --json pool_scale.json

Texts are from the sample world's grammar, recombined line by line. Every build is a separate process
(`pool_scale_worker.py`), so that its memory can be measured. No model runs. Figures are only reported: the exit code is
0 whether they are met or not.
"""

import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from common import (
    REPOSITORY,
    SAMPLE_MODEL,
    SEED,
    Figure,
    benchmark_parser,
    finish,
    scale_of,
    show_progress,
)
from entities import world_entities
from pool_scale_worker import TextFile, memory_mb_of
from sample_texts import write_user_text
from transformers import AutoTokenizer

logger = logging.getLogger("benchmarks")

NUM_TEXTS = (1_000, 10_000, 100_000, 1_000_000)
QUICK_NUM_TEXTS = NUM_TEXTS[:3]
SMOKE_NUM_TEXTS = (200,)
NUM_GRAMMAR_USERS = {"full": 4_000, "quick": 4_000, "smoke": 40}
MAX_HISTORY = 24
MAX_LINES = 6  # of the eight lines of a text: about a hundred tokens
NUM_HELD_OUT = 100
CHANGED_EVERY = 20  # 5 %
ROUNDS = ((10_000, 5), (100_000, 3), (1_000_000, 2))  # maximum number of texts -> rounds of a full build and a merge
DRAFT_ROUNDS = 5  # in separate processes: on a shared machine the speed of drafts changes every few seconds
WATCH_S = 0.01
MIN_MTOKENS_PER_S = 1.0
MAX_BYTES_PER_TOKEN = 10.0
MAX_SHARE_OF_FULL = 0.25
MAX_PEAK_MB = 4096
MAX_DRAFT_US = 80.0


def grammar_lines(num_users: int) -> list[list[np.ndarray]]:
    """Token ids of every line of the users' texts: `lines[k]` has the k-th line of each text."""
    tokenizer = AutoTokenizer.from_pretrained(SAMPLE_MODEL)
    rng = np.random.default_rng(SEED)
    users, _ = world_entities(SEED, num_users, 1_000)
    texts = [write_user_text(user, user.history[-MAX_HISTORY:], rng).split("\n")[:MAX_LINES] for user in users]
    return [
        [np.asarray(ids, np.int32) for ids in tokenizer([text[k] + "\n" for text in texts]).input_ids]
        for k in range(MAX_LINES)
    ]


def recombined(
    lines: list[list[np.ndarray]], num_texts: int, seed: int, changed_every: int = 0
) -> Iterator[np.ndarray]:
    """Yield `num_texts` texts; each takes every line from the text of a randomly drawn user.

    With `changed_every`, every `changed_every`-th text is different; the others are the same as without it.
    """
    chosen, others = np.random.default_rng([SEED, seed, 0]), np.random.default_rng([SEED, seed, 1])
    for number in range(num_texts):
        picks = chosen.integers(len(lines[0]), size=len(lines))
        if changed_every and number % changed_every == 0:
            picks = others.integers(len(lines[0]), size=len(lines))
        yield np.concatenate([of_place[pick] for of_place, pick in zip(lines, picks.tolist(), strict=True)])


def measure_size(lines: list, num_texts: int, memory_mb: int, num_rounds: int, folder: Path) -> list[dict]:
    """The rows of one size: a full build, a bounded build, and with 5 % changed texts a full build and a merge."""
    logger.info("writing %s texts", f"{num_texts:,}")
    texts = TextFile.write(folder / "texts", recombined(lines, num_texts, seed=1))
    today = TextFile.write(folder / "today", recombined(lines, num_texts, seed=1, changed_every=CHANGED_EVERY))
    held_out = TextFile.write(folder / "held_out", recombined(lines, NUM_HELD_OUT, seed=2))
    full = measure_build("full", texts, folder / "full")
    full["drafts"] = [measure_drafts(folder / "full", held_out, DRAFT_ROUNDS if num_rounds > 1 else 1)]
    bounded = measure_build("bounded", texts, folder / "bounded", memory_mb)
    require_same_files(folder / "full", folder / "bounded")
    return [full, bounded, *measure_rounds(today, folder, num_rounds)]


def measure_build(
    kind: str, texts: TextFile, out: Path, memory_mb: int | None = None, previous: Path | None = None
) -> dict:
    """The row of one build. Writes of earlier builds are flushed to disk before, so that it does not pay for them."""
    os.sync()
    task = {"texts": str(texts.folder), "out": str(out), "memory_mb": memory_mb}
    row = watched({"measure": "build", **task, "previous": None if previous is None else str(previous)})
    logger.info("%s texts, %s: %.2f s", f"{row['num_texts']:,}", kind, row["build_s"])
    return {
        "kind": kind,
        "memory_mb": memory_mb,
        **row,
        "mtokens_per_s": row["num_tokens"] / row["build_s"] / 1e6,
        "bytes_per_token": row["bytes"] / row["num_tokens"],
    }


def measure_rounds(texts: TextFile, folder: Path, num_rounds: int) -> list[dict]:
    """The rows of a full build and a merge of the same texts, alternately `num_rounds` times; each row is a median one.

    `share_of_full` is the median of the rounds' ratios.
    """
    full, merged = [], []
    out_full, out_merged = folder / "today-full", folder / "today-merged"
    for _ in range(num_rounds):
        for out in (out_full, out_merged):
            shutil.rmtree(out, ignore_errors=True)
        full.append(measure_build("full, 5 % changed", texts, out_full))
        merged.append(measure_build("merged, 5 % changed", texts, out_merged, previous=folder / "full"))
        require_same_files(out_full, out_merged)
    shares = sorted(of_merge["build_s"] / of_full["build_s"] for of_full, of_merge in zip(full, merged, strict=True))
    rows = [of_median_time(full), of_median_time(merged)]
    rows[1] |= {"share_of_full": statistics.median(shares), "share_of_full_range": [shares[0], shares[-1]]}
    return rows


def of_median_time(rounds: Sequence[dict]) -> dict:
    """The round with the median time (of two in the middle the slower), with the range of all rounds."""
    by_time = sorted(rounds, key=lambda row: row["build_s"])
    return by_time[len(rounds) // 2] | {"build_s_range": [by_time[0]["build_s"], by_time[-1]["build_s"]]}


def measure_drafts(pool: Path, held_out: TextFile, num_rounds: int) -> dict:
    """Times of drafts from a pool whose pages are resident in a worker's memory."""
    task = {"measure": "drafts", "pool": str(pool), "texts": str(held_out.folder)}
    return {"opened": "resident"} | medians_of([watched(task) for _ in range(num_rounds)])


def medians_of(rows: Sequence[dict]) -> dict:
    """One row for all rounds: medians of floats, the first round's counts, and the range of the times of a draft."""
    medians = {
        name: statistics.median(row[name] for row in rows) if isinstance(value, float) else value
        for name, value in rows[0].items()
    }
    for name in ("draft_median_us", "draft_p99_us"):
        times = [row[name] for row in rows]
        medians[f"{name}_range"] = [min(times), max(times)]
    return medians


def watched(task: dict) -> dict:
    """Run a task in a process and add its peak memory in MiB: its own, and with mapped files."""
    command = [sys.executable, str(Path(__file__).with_name("pool_scale_worker.py")), json.dumps(task)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    own_mb = with_files_mb = 0.0
    while process.poll() is None:
        own, of_files = memory_mb_of(process.pid)
        own_mb, with_files_mb = max(own_mb, own), max(with_files_mb, own + of_files)
        time.sleep(WATCH_S)
    if process.returncode:
        raise RuntimeError(f"a measurement ended with exit code {process.returncode}: {task}")
    result = {}
    for line in process.stdout.read().splitlines():
        result |= json.loads(line)
    return result | {"peak_own_mb": own_mb, "peak_mb": with_files_mb}


def require_same_files(first: Path, other: Path) -> None:
    """Raise unless two builds wrote the same bytes; otherwise their times could not be compared."""
    manifests = [json.loads((folder / "manifest.json").read_text(encoding="utf-8")) for folder in (first, other)]
    if manifests[0] != manifests[1]:
        raise RuntimeError(f"{first.name} and {other.name} have different files; expected equal ones")


def figures_of(rows: Sequence[dict]) -> list[Figure]:
    """The figures, at the largest size and, for merging, at every size from 100,000 texts on."""
    largest = max(row["num_texts"] for row in rows)
    at_largest = {row["kind"]: row for row in rows if row["num_texts"] == largest}
    full, bounded = at_largest["full"], at_largest["bounded"]
    where, draft_us = f"{largest:,} texts", full["drafts"][0]["draft_median_us"]
    figures = [
        Figure.at_least(f"{where}: million tokens a second built", full["mtokens_per_s"], MIN_MTOKENS_PER_S),
        Figure.at_least(f"{where}, bounded: million tokens a second", bounded["mtokens_per_s"], MIN_MTOKENS_PER_S),
        Figure.at_most(f"{where}: MiB at the most", full["peak_mb"], MAX_PEAK_MB),
        Figure.at_most(
            f"{where}, bounded to {bounded['memory_mb']} MiB: MiB of its own beyond those before",
            bounded["peak_own_mb"] - bounded["before_own_mb"],
            bounded["memory_mb"],
        ),
        Figure.at_most(f"{where}, resident: microseconds a draft, median", draft_us, MAX_DRAFT_US),
        Figure.at_most(f"{where}: bytes a token on disk", full["bytes_per_token"], MAX_BYTES_PER_TOKEN),
    ]
    merge = "texts, 5 % changed: time of a merge over a full build"
    return figures + [
        Figure.at_most(f"{row['num_texts']:,} {merge}", row["share_of_full"], MAX_SHARE_OF_FULL)
        for row in rows
        if "share_of_full" in row and row["num_texts"] >= min(100_000, largest)
    ]


def describe_row(row: dict) -> str:
    """One row as a line for a terminal."""
    line = (
        f"{row['num_texts']:>9,} texts {row['num_tokens']:>11,} tokens  {row['kind']:20}{row['build_s']:8.2f} s"
        f"{row['mtokens_per_s']:7.2f} M/s{row['peak_own_mb']:8.0f} MiB own{row['peak_mb']:8.0f} with files"
        f"{row['bytes_per_token']:7.2f} B/token"
    )
    for drafts in row.get("drafts", ()):
        least, most = drafts["draft_median_us_range"]
        line += (
            f"\n    {drafts['opened']}: opened in {drafts['open_s']:.3f} s, drafts {drafts['draft_median_us']:.1f} us"
            f" ({least:.1f} to {most:.1f}), p99 {drafts['draft_p99_us']:.1f}, longest {drafts['draft_max_us']:.0f}"
        )
    if "share_of_full" not in row:
        return line
    least, most = row["share_of_full_range"]
    return line + f"  {row['share_of_full']:.0%} of a full build ({least:.0%} to {most:.0%})"


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--num-texts", type=int, nargs="+", help="numbers of texts, instead of the default sizes")
    parser.add_argument("--memory-mb", type=int, help="limit of the bounded builds; default: an eighth of the need")
    arguments = parser.parse_args()
    show_progress()
    lines = grammar_lines(NUM_GRAMMAR_USERS[arguments.size])
    rows = []
    for num_texts in arguments.num_texts or scale_of(arguments, NUM_TEXTS, QUICK_NUM_TEXTS, SMOKE_NUM_TEXTS):
        limit_mb = arguments.memory_mb or max(16, num_texts // 2_500)
        of_size = next((number for most, number in ROUNDS if num_texts <= most), ROUNDS[-1][1])
        num_rounds = 1 if arguments.size == "smoke" else of_size
        with tempfile.TemporaryDirectory() as folder:
            rows += measure_size(lines, num_texts, limit_mb, num_rounds, Path(folder))
    finish(arguments.json, figures_of(rows), ["\n".join(map(describe_row, rows))], {"rows": rows})


if __name__ == "__main__":
    main()
