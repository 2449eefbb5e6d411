"""The benchmark of compiled layers: that the command runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.decoding.forward.compiled_layers import wants_compiling
from pipeline.errors import ModelError

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_command_writes_every_row(tmp_path):
    try:
        wants_compiling("on", torch.device("cpu"))
    except ModelError as error:
        pytest.skip(str(error))
    out = tmp_path / "compiled.json"
    command = [sys.executable, "benchmarks/compiled.py", "--smoke", "--model", "models/sample", "--json", str(out)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["kind"], row["batch"]) for row in rows] == [("plain", 2), ("chains of 16", 2)]
    for row in rows:
        fast, slow = row["step_ms"]["compiled"]["median"], row["step_ms"]["as they are"]["median"]
        assert row["speed_of_compiled"]["median"] == pytest.approx(slow / fast, rel=1e-3)
