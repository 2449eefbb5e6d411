"""What a command must not load before it needs it: seconds of each night, and of each look at one."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "sklearn", "lightgbm", "matplotlib")


LATE = {  # each may load what those before it may
    "jobs.events": (*HEAVY, "ray", "numba", "pyarrow"),
    "jobs.commands.status": (*HEAVY, "ray", "numba"),
    "jobs.commands.try_one": (*HEAVY, "ray"),  # tables and the id are looked at first
    "pipeline.distributed.actors": HEAVY,  # a worker loads them when it is asked to load its model
    "jobs.commands.nightly": HEAVY,  # the encoder is loaded with the first text, the tokenizer by workers
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
