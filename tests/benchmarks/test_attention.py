"""The benchmark of attention: its systems agree, and it says so where nothing can be timed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import attention
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = [sys.executable, str(ROOT / "benchmarks" / "attention.py")]


def test_all_systems_compute_the_same(tmp_path):
    environment = os.environ if torch.cuda.is_available() else os.environ | {"TRITON_INTERPRET": "1"}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    out = tmp_path / "out.json"
    command = [*SCRIPT, "--smoke", "--json", str(out)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env=environment | {"PYTHONPATH": paths})
    rows = json.loads(out.read_text())["rows"]
    assert {row["system"] for row in rows} == {"kernel", "sdpa-gathered", "sdpa-contiguous"}
    for row in rows:
        if row["system"] == "kernel" and importlib.util.find_spec("triton") is None:
            assert "ModuleNotFoundError" in row["failed"]
        else:
            assert row["right"], row


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_that_nothing_was_timed(capsys):
    assert attention.main(["--quick"]) == 1
    assert "no CUDA device" in capsys.readouterr().out
