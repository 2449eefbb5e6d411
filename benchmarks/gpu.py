"""Everything that only a GPU can show, a stage at a time: is it right, what does a step take, what is gained.

    python benchmarks/gpu.py --stage 1 --json gpu-1.json

Every part is a process of its own with a time limit; none stops the others. Results are in the JSON as they come, so a
run that is cut off has what it had done. `docs/gpu.md` says what a stage answers and how to read it. The exit code is 0
where every part did what it should.
"""

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from common import DEFAULT_MODEL, REPOSITORY, publishable, write_json

STAGE_S = 520.0  # of a stage, so that it ends within nine minutes
LAST_LINES = 25
ON_GPU = "tests/decoding/test_on_gpu.py"
BESIDE = (
    "tests/recommending/test_recommenders.py", "tests/drafter_training/test_training.py",
    "tests/encoding/test_encoder.py", "tests/ctr/test_train.py",
)  # fmt: skip
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
RESULT = "RESULT"
MEASURING_MODEL = str(DEFAULT_MODEL)
STEPS = ("benchmarks/step_profile.py", "--device", "cuda", "--dtype", "bfloat16", "--batches", "1", "32", "64", "256")
ENGINE = ("benchmarks/engine.py", "--quick", "--device", "cuda", "--geometry", "8b-gqa", "--json", RESULT)


@dataclass(frozen=True)
class Part:
    """One process: `words` follow `python`, `RESULT` among them is a file that it writes its JSON to."""

    name: str
    words: tuple[str, ...]
    limit_s: float
    before: tuple[str, ...] = ()  # the command is run by this one
    needs: str | None = None  # a library without which the part is left out


STAGES = {
    1: (
        Part("kernel, compiled", (*PYTEST, ON_GPU, "-k", "kernel or small_pack"), 240),
        Part("kernel, as in the interpreter", (*PYTEST, "tests/decoding/test_triton_attention.py"), 180),
        Part("texts of tiny models", (*PYTEST, ON_GPU, "-k", "greedy_texts"), 180),
        Part("texts of a trained model, graphs", (*PYTEST, ON_GPU, "-k", "trained or graphs"), 180),
        Part("other gpu tests", (*PYTEST, "tests/decoding", "-m", "gpu", "--ignore", ON_GPU), 120),
        Part("beside the engine", (*PYTEST, "-k", "on_a_device", *BESIDE), 180),
        Part(
            "memory accesses of a small pack",
            (*PYTEST, ON_GPU, "-k", "small_pack"),
            150,
            before=("compute-sanitizer", "--error-exitcode", "9"),
        ),
    ),
    2: (
        Part("steps, 8 B", (*STEPS, "--model", MEASURING_MODEL, "--geometry", "8b-gqa", "--json", RESULT), 240),
        Part("steps, 7 B", (*STEPS, "--model", MEASURING_MODEL, "--geometry", "7b-mha", "--json", RESULT), 200),
        Part("block sizes", ("benchmarks/attention.py", "--blocks", "--json", RESULT), 200),
        Part("attention beside torch's", ("benchmarks/attention.py", "--quick", "--json", RESULT), 120),
    ),
    3: (
        Part("engine, long answers", (*ENGINE, "--task", "reki"), 340),
        Part("engine, descriptions", (*ENGINE, "--task", "goodreads-items"), 180),
    ),
    4: tuple(
        Part(f"{peer}, batch {batch}", (*ENGINE, "--task", "reki", "--peer", peer, "--batch", batch), 260, needs="vllm")
        for batch in ("256", "64")
        for peer in ("vllm", "vllm-ngram")
    ),
    5: (Part("lists, drafted beams", ("benchmarks/beams.py", "--quick", "--json", RESULT), 500),),
}


@dataclass(frozen=True)
class Outcome:
    """What came of a part: "ok", "failed", "timed out" or "not here"; `result` is the JSON that it wrote, if any."""

    name: str
    command: str
    outcome: str
    seconds: float
    last_lines: list[str]
    result: dict | None = None


def run_part(part: Part, limit_s: float) -> Outcome:
    """Run a part to its end or its limit, whatever it does."""
    if part.before and shutil.which(part.before[0]) is None:
        return Outcome(part.name, "", "not here", 0.0, [f"{part.before[0]} is not on the PATH"])
    if part.needs and importlib.util.find_spec(part.needs) is None:
        return Outcome(part.name, "", "not here", 0.0, [f"{part.needs} is not installed"])
    with tempfile.TemporaryDirectory() as folder:
        result_path, log_path = Path(folder, "result.json"), Path(folder, "log.txt")
        python_path = str(REPOSITORY), os.environ.get("PYTHONPATH")
        words = [str(result_path) if word == RESULT else word for word in part.words]
        start_s = time.perf_counter()
        with open(log_path, "wb") as log:
            process = subprocess.Popen(
                [*part.before, sys.executable, *words],
                cwd=REPOSITORY,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, python_path))},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that what it started ends with it
            )
            try:
                outcome = "ok" if process.wait(min(part.limit_s, limit_s)) == 0 else "failed"
            except subprocess.TimeoutExpired:
                outcome = "timed out"
            finally:
                _kill_group(process)
        lines = log_path.read_text(errors="replace").replace(f"{REPOSITORY}/", "").splitlines()[-LAST_LINES:]
        command = shlex.join([*part.before, "python", *map(publishable, part.words)])
        seconds = time.perf_counter() - start_s
        return Outcome(part.name, command, outcome, seconds, lines, _read(result_path))


def _kill_group(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):  # it has ended, with all that it started
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def run_stage(parts: Sequence[Part], limit_s: float = STAGE_S) -> Iterator[Outcome]:
    """The outcome of each part as it ends; what has no time left is "timed out" at once."""
    end_s = time.perf_counter() + limit_s
    for part in parts:
        left_s = end_s - time.perf_counter()
        if left_s > 0:
            yield run_part(part, left_s)
        else:
            yield Outcome(part.name, "", "timed out", 0.0, ["the parts before took all the time of the stage"])


def figures_in(result: dict | None) -> list[str]:
    """The lines of a result that say whether what was asked for is met."""
    figures = (result or {}).get("figures", [])
    verdicts = {True: "met    ", False: "NOT MET"}
    return [
        f"{verdicts[one['met']]}  {one['name']}: {one['measured']} ({one['comparison']} {one['wanted']})"
        for one in sorted(figures, key=lambda one: one["met"])
    ]


def describe(outcomes: Sequence[Outcome]) -> str:
    """The table that a run ends with; of what went wrong the last lines too."""
    lines = []
    for one in outcomes:
        if one.outcome in ("failed", "timed out"):
            lines += [f"--- {one.name}: {one.outcome}", *one.last_lines, ""]
    lines += [line for one in outcomes for line in figures_in(one.result)]
    return "\n".join([*lines, *(f"{one.outcome:10}{one.seconds:6.0f} s  {one.name}" for one in outcomes)])


def main() -> int:
    """Run a stage, print its table, keep its JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = "1 right, 2 a step, 3 gains, 4 vLLM, 5 lists"
    parser.add_argument("--stage", type=int, choices=STAGES, required=True, help=stages)
    parser.add_argument("--json", type=Path, help="write machine, command, every part's outcome and JSON here")
    parser.add_argument("--part", nargs="+", help="only parts whose name begins with one of these")
    arguments = parser.parse_args()
    parts = STAGES[arguments.stage]
    if arguments.part:
        parts = [part for part in parts if part.name.startswith(tuple(arguments.part))]
    if not torch.cuda.is_available():
        print("gpu.py: this machine has no CUDA device, nothing was run", file=sys.stderr)
        return 1
    outcomes: list[Outcome] = []
    for outcome in run_stage(parts):
        outcomes.append(outcome)
        print(f"{outcome.outcome}: {outcome.name}, {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
        if arguments.json:
            write_json(arguments.json, {"stage": arguments.stage, "parts": outcomes})
    print(describe(outcomes))
    return 0 if all(one.outcome in ("ok", "not here") for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
