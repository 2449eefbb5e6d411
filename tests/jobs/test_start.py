"""Modules that commands must not import early: they would cost seconds in each night and each `status`."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "sklearn", "lightgbm", "matplotlib")


LATE = {  # each may also import what earlier ones may
    "jobs.events": (*HEAVY, "ray", "numba", "pyarrow"),
    "jobs.commands.status": (*HEAVY, "ray", "numba"),
    "jobs.commands.try_one": (*HEAVY, "ray"),  # it checks the tables and the id first
    "pipeline.distributed.actors": HEAVY,  # a worker imports them when it loads its model
    "jobs.commands.nightly": HEAVY,  # loaded later: the encoder with the first text, the tokenizer by workers
}
CODE = """
import importlib, sys
for module, late in {}.items():
    importlib.import_module("laserbatch." + module)
    print(module, *(name for name in late if name in sys.modules))
"""


def test_what_takes_seconds_to_load_is_loaded_late():
    done = subprocess.run([sys.executable, "-c", CODE.format(LATE)], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n") == [*LATE, ""], done.stderr
