"""The runner of the GPU's stages: no part stops another, none outlasts its limit, and what each wrote is kept."""

import subprocess
import sys
import time
from pathlib import Path

import engine
import step_profile
from common import REPOSITORY
from gpu import RESULT, STAGES, Part, describe, run_stage

WRITES = "import sys; open(sys.argv[1], 'w').write('{\"figures\": [%s]}')"
FIGURE = '{"name": "speed", "met": false, "measured": 1, "comparison": ">=", "wanted": 2}'
HANGS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"


def test_every_part_has_its_outcome_and_what_it_wrote():
    parts = [
        Part("fails", ("-c", "print('a reason'); raise SystemExit(3)"), 60),
        Part("hangs", ("-c", HANGS), 2),
        Part("writes", ("-c", WRITES % FIGURE, RESULT), 60),
        Part("lacks a library", ("-c", ""), 60, needs="no_such_library"),
        Part("lacks a program", ("-c", ""), 60, before=("no-such-program",)),
    ]
    start_s = time.monotonic()
    found = {outcome.name: outcome for outcome in run_stage(parts)}
    assert time.monotonic() - start_s < 60
    assert {name: one.outcome for name, one in found.items()} == {
        "fails": "failed",
        "hangs": "timed out",
        "writes": "ok",
        "lacks a library": "not here",
        "lacks a program": "not here",
    }
    table = describe(list(found.values()))
    assert "a reason" in table and "NOT MET  speed: 1 (>= 2)" in table
    assert table.splitlines()[-5].startswith("failed") and table.splitlines()[-1].endswith("lacks a program")


def test_a_stage_ends_in_time_whatever_its_parts_take():
    parts = [Part("long", ("-c", HANGS), 60), Part("never begun", ("-c", ""), 60)]
    assert [outcome.outcome for outcome in run_stage(parts, limit_s=1)] == ["timed out", "timed out"]


def test_parts_name_files_and_options_that_are_there():
    parsers = {
        "benchmarks/engine.py": engine.parse_arguments,
        "benchmarks/step_profile.py": step_profile.parse_arguments,
    }
    for words in {part.words for parts in STAGES.values() for part in parts}:
        files = [word for word in words if word.endswith(".py")]
        assert files and all((REPOSITORY / file).is_file() for file in files)
        if words[0] in parsers:
            parsers[words[0]](words[1:])  # ends the test where it does not know an option


def test_parts_want_neither_ray_nor_lightgbm():
    scripts = {Path(part.words[0]).stem for parts in STAGES.values() for part in parts} - {"-m"}
    absent = "import sys; sys.modules |= dict.fromkeys(('ray', 'lightgbm')); sys.path.insert(0, 'benchmarks')"
    asked = [sys.executable, "-c", f"{absent}; import {', '.join(sorted(scripts))}"]
    done = subprocess.run(asked, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0 and "beams" in scripts, done.stderr
