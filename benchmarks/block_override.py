"""Override the attention kernel's block sizes in a whole process, as a pytest plugin (`-p block_override`) or a call.

`BENCHMARK_BLOCKS='{"num_stages": 1}'` sets these fields in every default of `triton_attention.py`. If the kernel is
right with one stage and wrong with three, its pipelining has a fault.
"""

import inspect
import json
import os
from dataclasses import replace

VARIABLE = "BENCHMARK_BLOCKS"


def override_blocks() -> None:
    """Apply the environment variable, if it is set.

    Raises
    ------
    RuntimeError : the kernel's module has no default block sizes any more.
    """
    changes = json.loads(os.environ.get(VARIABLE) or "{}")
    if not changes:
        return
    from laserbatch.pipeline.decoding.attention import triton_attention as launcher

    num_changed = 0
    for name, value in list(vars(launcher).items()):
        if isinstance(value, launcher.Blocks):
            setattr(launcher, name, replace(value, **changes))
            num_changed += 1
        elif inspect.isfunction(value) and value.__module__ == launcher.__name__ and value.__defaults__:
            defaults = value.__defaults__
            value.__defaults__ = tuple(
                replace(default, **changes) if isinstance(default, launcher.Blocks) else default for default in defaults
            )
            num_changed += value.__defaults__ != defaults
    if not num_changed:
        raise RuntimeError(f"{launcher.__name__} has no default blocks that {VARIABLE} could change")


def pytest_configure(config) -> None:
    """Override the blocks; pytest calls this in its own process and in every worker of xdist."""
    override_blocks()
