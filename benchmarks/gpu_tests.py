"""Phase A of `gpu_first.py`, the correctness of the CUDA path: tests on the device and a check of memory accesses."""

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from block_override import VARIABLE as BLOCKS
from gpu_run import Run, tail_of, wait_for

ON_GPU = "tests/decoding/test_on_gpu.py"
DEVICE_TESTS = (
    ON_GPU, "tests/decoding/test_cuda_layers.py", "tests/decoding/test_cuda_graphs.py",
    "tests/decoding/test_triton_attention.py",
)  # fmt: skip
SHORT_TESTS = DEVICE_TESTS[:2]
BESIDE = (
    "tests/research/test_training.py", "tests/research/test_recommenders.py", "tests/ctr/test_train.py",
    "tests/encoding/test_encoder.py",
)  # fmt: skip
BESIDE_TESTS = "on_a_device and not medusa2"  # medusa2 needs peft
SMOKE_TESTS = ("tests/decoding/test_prefix_index.py", "tests/decoding/test_token_tree.py")
NUM_TEST_PROCESSES = 12
SANITIZER_S = 80.0
SANITIZER_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
OF_XDIST = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED) (tests/\S+::.+)$")
ALONE = re.compile(r"^(tests/\S+::.+) (PASSED|FAILED|ERROR|SKIPPED)(?: \(.*\))?(?: +\[ *\d+%\])?$")


def pytest_words(files: Sequence[str], junit: Path | None, num_processes: int, *more: str) -> list[str]:
    """The command of a test run that prints one line per test."""
    words = [sys.executable, "-m", "pytest", "-v", "-rN", "--tb=short", "-p", "no:cacheprovider"]
    words += ["-p", "block_override"]
    if num_processes > 1:
        words += ["-n", str(num_processes), "--dist", "worksteal"]
    return [*words, *([f"--junitxml={junit}"] if junit else []), *more, *files]


def results_of(log: str) -> dict[str, str]:
    """The outcome of each test in the log of `pytest -v`, also if the run did not finish."""
    outcomes: dict[str, str] = {}
    for line in log.splitlines():
        if match := ALONE.match(line):
            outcomes[match[1].strip()] = match[2]
        elif match := OF_XDIST.search(line):
            outcomes[match[2].strip()] = match[1]
    return outcomes


def judge_tests(results: dict[str, str], files: Sequence[str], status: int | None) -> tuple[str, list[str]]:
    """The outcome of a test run and its faults; a file in which no test passed is a fault too."""
    red = [f"{outcome} {name}" for name, outcome in results.items() if outcome in ("FAILED", "ERROR")]
    for file in files:
        if not any(name.startswith(file) and outcome == "PASSED" for name, outcome in results.items()):
            red.append(f"nothing passed in {file}: all its tests were skipped or none was run")
    if ON_GPU in files:
        red += [f"SKIPPED {name}" for name, outcome in results.items() if outcome == "SKIPPED" and ON_GPU in name]
    if status is None:
        return "timed out", red
    return ("ok" if status == 0 and not red else "failed"), red


def run_tests(
    run: Run, item: str, files: Sequence[str], limit_s: float, *more: str, phase: str = "a"
) -> dict[str, str]:
    """Run tests, write their row, and return the outcome of each."""
    if not limit_s:
        run.fail(phase, item, "no time left")
        return {}
    smoke, log = run.options.smoke, run.log_path
    start, start_s = run.log_size(), time.monotonic()
    junit = None if item.startswith("red-cases") else run.options.out / f"{item}.xml"
    process = run.start(pytest_words(files, junit, 1 if smoke else NUM_TEST_PROCESSES, *more), log)
    status = wait_for(process, limit_s)
    results = results_of(tail_of(log, start, 10_000_000))
    outcome, red = judge_tests(results, files, status)
    counts = {name: list(results.values()).count(name.upper()) for name in ("passed", "skipped")}
    counts["failed_tests"] = sum(outcome in ("FAILED", "ERROR") for outcome in results.values())
    seconds = time.monotonic() - start_s
    run.rows.add(phase, item, outcome=outcome, seconds=seconds, red=red[:60], **counts)
    run.say(f"{item}: {outcome}, {counts}, {seconds:.0f} s" + "".join(f"\n    {line}" for line in red[:12]))
    return results


def sanitizer_words(find: Callable[..., str | None] = shutil.which) -> list[str] | None:
    """The command that checks the memory accesses of a small pack; None if there is no compute-sanitizer.

    It turns off torch's caching allocator, which would hide most overruns: many tensors would share an allocation.
    """
    program = find("compute-sanitizer") or find("compute-sanitizer", path=os.pathsep.join(SANITIZER_FOLDERS))
    if program is None:
        return None
    watched = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", program, "--error-exitcode", "9"]
    return [*watched, *pytest_words((ON_GPU,), None, 1, "-k", "small_pack")]


def run_correctness(run: Run, files: Sequence[str], limit_s: float, sanitizes: bool) -> None:
    """Run the tests on the device, with the sanitizer in parallel; if kernel tests fail, try other block sizes."""
    log = run.options.out / "sanitizer.log"
    words = sanitizer_words() if sanitizes else None
    watched = run.start(words, log) if words else None
    start_s = time.monotonic()
    files = SMOKE_TESTS if run.options.smoke else files
    results = run_tests(run, "tests", files, limit_s)
    red = [name for name, outcome in results.items() if outcome in ("FAILED", "ERROR") and "kernel" in name]
    if red:
        choose_blocks(run, red)
    if watched is not None:
        left_s = run.deadline.limit(max(1.0, SANITIZER_S - (time.monotonic() - start_s)))
        status = wait_for(watched, left_s)
        text = tail_of(log, 0)
        clean = status == 0 and "ERROR SUMMARY: 0 errors" in text
        outcome = "ok" if clean else "timed out" if status is None else "failed"
        run.rows.add("a", "sanitizer", outcome=outcome, seconds=time.monotonic() - start_s, red=text.splitlines()[-6:])
        run.say(f"sanitizer: {outcome}")
    elif sanitizes:
        run.rows.add("a", "sanitizer", outcome="not here", seconds=0.0)


def choose_blocks(run: Run, red: Sequence[str]) -> None:
    """Repeat the kernel's failed tests without pipelining, then with eight warps too; if they still fail, use torch."""
    for changes in ({"num_stages": 1}, {"num_stages": 1, "num_warps": 8}):
        limit_s = run.deadline.limit(40)
        if not limit_s:
            break
        run.variables[BLOCKS] = json.dumps(changes)
        results = run_tests(run, f"red-cases-{'-'.join(changes)}", red, limit_s)
        if results and all(outcome == "PASSED" for outcome in results.values()):
            run.say(f"the kernel is correct with {changes}: later phases use them")
            return
    run.variables.pop(BLOCKS, None)
    run.attention = "torch"
