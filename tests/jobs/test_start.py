"""What a command must not load before it needs it: seconds of each night, and of each look at one."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "sklearn", "lightgbm", "matplotlib")


@pytest.mark.parametrize(
    ("module", "late"),
    [
        ("jobs.commands.nightly", HEAVY),  # the encoder is loaded with the first text, the tokenizer by workers
        ("pipeline.distributed.actors", HEAVY),  # a worker loads them when it is asked to load its model
        ("jobs.commands.try_one", (*HEAVY, "ray")),  # tables and the id are looked at first
        ("jobs.commands.status", (*HEAVY, "ray", "numba")),
        ("jobs.events", (*HEAVY, "ray", "numba", "pyarrow")),
    ],
)
def test_what_takes_seconds_to_load_is_loaded_late(module, late):
    code = f"import sys, laserbatch.{module}; print([name for name in {late} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
