"""Is this program as fast as an older one? Their benchmarks in turns, and the ratios of all that both measured.

    git worktree add /tmp/old COMMIT
    python benchmarks/compare.py night --old /tmp/old --results /tmp/compared --rounds 2

Each round runs a benchmark with `--quick` in both checkouts, every other round the new one first; both keep their texts
in one cache, which the first round fills. Results are kept by name in the folder of results, and what is there is not
run again: rounds can be added, and a comparison printed again. Of several rounds the medians are compared.

A ratio is new over old, turned round for times, so that less than 1 is worse. Speeds may fall to 0.97, tokens per step
and accepted tokens to 0.99; the exit code is 1 where something fell below.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from common import REPOSITORY, publishable

BENCHMARKS = ("night", "engine", "drafting")
WITH_CACHE = ("night", "engine")
SIZES = ("quick", "smoke", "full")
LEAST_SPEED, LEAST_GAIN = 0.97, 0.99
NAMES = ("model", "task", "batch", "system", "budget", "corpus", "k", "drafter")  # of a row, before what it measured
ROW_GAINS, ROW_SPEEDS, ROW_TIMES = ("tokens_per_step", "aal"), ("tokens_per_s",), ("median_us",)
PEERS = ("transformers", "vllm", "arctic", "prompt-lookup", "pygtrie")  # as fast as ever
GAINS = ("AAL", "tokens per step")  # in a figure's name


class Quantity(NamedTuple):
    """One measured number: is it a gain, which no clock is in, and is less of it better?"""

    value: float
    is_gain: bool
    less_is_better: bool


class Ratio(NamedTuple):
    """A quantity that both measured; `ratio` is below 1 where the new one is worse, `least` what it may be."""

    name: str
    old: float
    new: float
    ratio: float
    least: float

    @property
    def is_kept(self) -> bool:
        return self.ratio >= self.least

    def __str__(self) -> str:
        verdict = "kept " if self.is_kept else "WORSE"
        return f"{verdict} {self.ratio:7.3f}  {self.old:10.4g} -> {self.new:10.4g}  {self.name}"


def quantities_of(result: dict) -> Iterator[tuple[str, Quantity]]:
    """What a result says of our program, by name; two results share the names of what both measured."""
    for figure in result.get("figures", []):
        is_gain = any(word in figure["name"] for word in GAINS)
        yield figure["name"], Quantity(figure["measured"], is_gain, figure["comparison"] in ("<=", "<"))
    for row in result.get("rows", []):
        if str(row.get("system") or row.get("drafter")).startswith(PEERS):
            continue
        where = ", ".join(str(row[name]) for name in NAMES if row.get(name) is not None)
        settled = f"{row['max_draft_tokens']}/{row['min_acceptance']:g}" if row.get("min_acceptance") else ""
        for name in ROW_GAINS:  # another budget accepts other numbers of tokens
            if row.get(name) is not None:
                yield f"{where} {settled}: {name}", Quantity(row[name], True, False)
        for name in (*ROW_SPEEDS, *ROW_TIMES):
            if row.get(name) is not None:
                yield f"{where}: {name}", Quantity(row[name], False, name in ROW_TIMES)


def ratios_of(old: Sequence[dict], new: Sequence[dict]) -> list[Ratio]:
    """What results of both measured, the worst first; of several results a side the medians."""
    sides = [[dict(quantities_of(result)) for result in results] for results in (old, new)]
    shared = [name for name in sides[0][0] if all(name in found for side in sides for found in side)]
    ratios = []
    for name in shared:
        one = sides[1][0][name]
        before, after = (statistics.median(found[name].value for found in side) for side in sides)
        above, below = (before, after) if one.less_is_better else (after, before)
        ratio = above / below if below else (1.0 if above == below else float("inf"))
        ratios.append(Ratio(name, before, after, ratio, LEAST_GAIN if one.is_gain else LEAST_SPEED))
    return sorted(ratios, key=lambda ratio: ratio.ratio / ratio.least)


def run(checkout: Path, benchmark: str, size: str, cache: Path, out: Path) -> None:
    """Run a checkout's benchmark; it finds its own code under both the installed and the folders' names."""
    words = [] if size == "full" else [f"--{size}"]
    words += ["--cache", str(cache)] if benchmark in WITH_CACHE else []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "laserbatch").symlink_to(checkout.resolve(), target_is_directory=True)
        path = os.pathsep.join(filter(None, [folder, str(checkout.resolve()), os.environ.get("PYTHONPATH")]))
        unfinished = out.with_suffix(".unfinished")
        command = [sys.executable, f"benchmarks/{benchmark}.py", *words, "--json", str(unfinished.resolve())]
        subprocess.run(
            command, check=True, cwd=checkout, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.DEVNULL
        )
        unfinished.rename(out)


def compared(benchmark: str, old: Path, results: Path, num_rounds: int, size: str) -> list[Ratio]:
    """Measure what is not among the results yet, in turns; the ratios of all rounds."""
    results.mkdir(parents=True, exist_ok=True)
    checkouts = {"old": old, "new": REPOSITORY}
    found: dict[str, list[dict]] = {"old": [], "new": []}
    for number in range(num_rounds):
        for side in ("old", "new") if number % 2 == 0 else ("new", "old"):
            path = results / f"{benchmark}-{side}-{number}.json"
            if not path.exists():
                run(checkouts[side], benchmark, size, results / "cache", path)
            found[side].append(json.loads(path.read_text(encoding="utf-8")))
    return ratios_of(found["old"], found["new"])


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where something is worse than it may be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", nargs="+", choices=BENCHMARKS)
    parser.add_argument("--old", type=Path, required=True, help="checkout of the older commit")
    parser.add_argument("--results", type=Path, required=True, help="folder of results: read, and added to")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each")
    parser.add_argument("--size", choices=SIZES, default="quick")
    arguments = parser.parse_args(words)
    ratios = []
    for benchmark in arguments.benchmark:
        of_one = compared(benchmark, arguments.old, arguments.results, arguments.rounds, arguments.size)
        print(f"{benchmark}, new over {publishable(str(arguments.old))}", *of_one, "", sep="\n")
        ratios += of_one
    print(f"{sum(ratio.is_kept for ratio in ratios)} of {len(ratios)} kept")
    return int(not all(ratio.is_kept for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())
