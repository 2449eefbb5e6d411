"""Run the CUDA path on a GPU lent for minutes: correctness, step times, profile, attention blocks, gains.

    python benchmarks/gpu_first.py --call 1 --deadline 300 --out DIR --texts DIR
    python benchmarks/gpu_first.py --call 2 --deadline 350 --out DIR --texts DIR

Phases run until the deadline, the most valuable first; `docs/gpu.md` says which question each answers. Every phase is a
process with a time limit, and its failure does not stop the next one. If a process with the large model ends early, it
is started again at the next item; after a CUDA error, it is started with safer options. Rows go to `rows.jsonl` as they
come, the output of processes to `processes.log`. The table is printed last.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from common import DEFAULT_DATA, DEFAULT_MODEL
from gpu_measure import ITEM_S, LADDER, compile_attention, measure, phases_words
from gpu_report import report
from gpu_run import Deadline, Run, tail_of, wait_for
from gpu_tests import BESIDE, BESIDE_TESTS, DEVICE_TESTS, SHORT_TESTS, run_correctness, run_tests

STEPS = ("64/0", "1/0", "256/0", "64/8", "1/16", "256/4", "32/0", "32/16", "64/16", "64/0/unfused", "1/0/unfused")
SMOKE_ITEMS = ("rates", "gemms", "steps/2/0", "steps/2/4", "gains/reki/2", "chosen/reki/2", "peers/2")
NUM_SMOKE_STEPS = 4  # the first smoke items, which need no drafts
PHASE_ITEMS = {
    "load": ("rates", "gemms"),
    "c": tuple(f"steps/{step}" for step in STEPS),
    "c-short": tuple(f"steps/{step}" for step in ("64/0", "1/0", "256/0", "64/8", "256/4")),
    "e": ("attention/600", "attention/4000"),
    "f": (
        "gains/reki/64", "gains/reki/1", "gains/reki/256", "gains/reki/32", "gains/goodreads-items/64",
        "chosen/reki/64", "chosen/reki/256",
    ),
    "p": ("peers/64", "peers/1"),
    "f-more": tuple(f"gains/goodreads-items/{batch}" for batch in (1, 32, 256)),
}  # fmt: skip
PHASES = {
    1: ("probe", "drafts", "a", "load", "c", "d", "e", "beside"),
    2: ("probe", "drafts", "a-short", "load", "c-short", "f", "p", "f-more"),
}
DEADLINE_S = {1: 300.0, 2: 350.0}


def probe(run: Run) -> bool:
    """Record versions and the card; return whether there is a device and all later imports work."""
    code = (
        "import json, os, sys, torch, triton, numpy, transformers\n"
        "from importlib.metadata import version\n"
        "names = ('torch', 'triton', 'numpy', 'numba', 'pyarrow', 'transformers', 'accelerate', 'pydantic')\n"
        "facts = {n: version(n) for n in names} | {'python': sys.version.split()[0], 'cores': os.cpu_count()}\n"
        "facts['cuda'] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None\n"
        "print('PROBE ' + json.dumps(facts), flush=True)\n"
        "import laserbatch.pipeline.decoding.engine, laserbatch.retrieval_pools.draft, gpu_gains\n"
        "print('IMPORTED', flush=True)\n"
    )
    start, start_s = run.log_size(), time.monotonic()
    status = wait_for(run.start([sys.executable, "-c", code], run.log_path), run.deadline.limit(90))
    output = tail_of(run.log_path, start, 4000)
    line = next((line for line in output.splitlines() if line.startswith("PROBE ")), None)
    facts = json.loads(line.removeprefix("PROBE ")) if line else {}
    facts["seconds"] = time.monotonic() - start_s
    with suppress(OSError, subprocess.TimeoutExpired):
        command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"]
        facts["nvidia_smi"] = subprocess.run(command, capture_output=True, text=True, timeout=15).stdout.strip()
    run.rows.add("probe", "probe", **facts)
    run.say(json.dumps(facts))
    has_device = run.options.smoke or facts.get("cuda")
    if status != 0 or "IMPORTED" not in output or not has_device:
        run.fail("probe", "probe", f"status {status}: {output[-1200:]}" if has_device else "torch sees no CUDA device")
        return False
    return True


def run_phases(run: Run) -> int:
    """Run all phases in order. Return the exit status: 3 if the probe fails, 1 if anything else failed, otherwise 0."""
    options, phases = run.options, run.options.phases
    if "probe" in phases and not probe(run):
        return 3
    drafts = None
    if "drafts" in phases:  # in parallel with the tests: it compiles on one core
        drafts = run.start(phases_words(run, ["drafts"], LADDER[0]), options.out / "drafts.log")
    if "a" in phases:
        run_correctness(run, DEVICE_TESTS, run.deadline.limit(110), sanitizes=True)
    if "a-short" in phases:
        run_correctness(run, SHORT_TESTS, run.deadline.limit(70), sanitizes=False)
    items: list[str] = [item for phase in phases if phase in ("load", "c", "c-short") for item in PHASE_ITEMS[phase]]
    later: list[str] = [item for phase in phases if phase in ("f", "p", "f-more") for item in PHASE_ITEMS[phase]]
    if options.items:
        items = [item for item in options.items if item.split("/")[0] in ("rates", "gemms", "steps")]
        later = [item for item in options.items if item not in items]
    elif options.smoke:
        items, later = list(SMOKE_ITEMS[:NUM_SMOKE_STEPS]), list(SMOKE_ITEMS[NUM_SMOKE_STEPS:])
    if drafts is not None and later:
        if not options.smoke and not finished_drafts(run):
            measure(run, items)
            items = []
        later = without_drafts(run, later, drafts)
    if items or later:
        measure(run, [*items, *later])
    if "e" in phases and not options.items and not options.smoke:
        compile_attention(run, PHASE_ITEMS["e"])
        measure(run, PHASE_ITEMS["e"])
    if "beside" in phases and run.deadline.limit(90) and not options.smoke:
        run_tests(run, "beside", BESIDE, run.deadline.limit(90), "-k", BESIDE_TESTS, phase="beside")
    if drafts is not None and not later:
        without_drafts(run, [], drafts)
    wrong = [row for row in run.rows.read() if "failed" in row or row.get("outcome") in ("failed", "timed out")]
    return 1 if wrong else 0


def finished_drafts(run: Run) -> bool:
    """Whether the pools have been built and drafted from by now."""
    return any(row.get("phase") == "drafts" and "seconds" in row for row in run.rows.read())


def without_drafts(run: Run, items: list[str], process: subprocess.Popen) -> list[str]:
    """Wait for the process that tries drafting; return the items that can be measured: gains only if it succeeded."""
    wait_for(process, run.deadline.limit(ITEM_S["drafts"]))
    if finished_drafts(run):
        return items
    run.fail("drafts", "drafts", tail_of(run.options.out / "drafts.log", 0, 800))
    dropped = [item for item in items if item.split("/")[0] in ("gains", "chosen")]
    for item in dropped:
        run.fail("f", item, "not measured: drafting does not work here")
    return [item for item in items if item not in dropped]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises SystemExit if a folder that a phase needs is missing.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call", type=int, choices=PHASES, default=1, help="which list of phases to run; default: 1")
    parser.add_argument("--deadline", type=float, help="seconds for the whole run; default: that of the call")
    parser.add_argument("--out", type=Path, required=True, help="folder of rows, logs and test reports")
    parser.add_argument("--phases", help=f"instead of the call's phases: {','.join(PHASES[1] + PHASES[2])}")
    parser.add_argument("--items", nargs="+", help="measure these items instead of those of the phases (gpu_phases.py)")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of the small model")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder of the public texts")
    parser.add_argument("--texts", type=Path, help="folder that pool_texts.py wrote")
    parser.add_argument("--geometry", default="8b-gqa", help="geometry of widen.py")
    parser.add_argument("--smoke", action="store_true", help="everything once, on a CPU, with a tiny model")
    parser.add_argument("--crash-at", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    options.phases = tuple(options.phases.split(",")) if options.phases else PHASES[options.call]
    options.deadline = options.deadline or DEADLINE_S[options.call]
    if options.smoke:
        options.geometry = "tiny"
    unknown = set(options.phases) - {*PHASES[1], *PHASES[2]}
    if unknown:
        parser.error(f"no phase {', '.join(sorted(unknown))}")
    if not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model} is not a model folder; set LASERBATCH_TEST_MODELS")
    if {"a", "a-short"} & set(options.phases) and not options.smoke:
        if not (options.data / "reki" / "knowledge.parquet").is_file():
            parser.error(f"--data {options.data} has no reki/knowledge.parquet; set LASERBATCH_TEST_DATA")
        for name, folder in (("MODELS", options.model.parent), ("DATA", options.data)):
            variable = os.environ.get(f"LASERBATCH_TEST_{name}")
            if variable is None or Path(variable).resolve() != folder.resolve():
                parser.error(f"LASERBATCH_TEST_{name} must be {folder}: the tests read that folder")
    if {"drafts", "f", "p", "f-more"} & set(options.phases):
        if options.texts is None or not (options.texts / "reki.parquet").is_file():
            parser.error("--texts needs the folder that pool_texts.py wrote (reki.parquet)")
        options.texts = options.texts.resolve()
    options.model, options.out = options.model.resolve(), options.out.resolve()
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Run the phases and print the table."""
    options = parse_arguments(words)
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options, Deadline(options.deadline))
    if options.smoke:
        run.variables["TRITON_INTERPRET"] = "1"
    status = 1
    try:
        status = run_phases(run)
    finally:
        print("\n" + report(run.rows.read()), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
