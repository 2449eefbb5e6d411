"""The benchmark of the simulation: the command runs, and a greedy run does what a replay of its texts says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_a_replay_counts_what_a_greedy_run_accepts(tmp_path):
    options = ["--smoke", "--threads", "1", "--cache", str(tmp_path / "cache"), "--json", str(tmp_path / "out.json")]
    command = [sys.executable, str(ROOT / "benchmarks" / "simulation.py"), *options]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["command"].startswith("python benchmarks/simulation.py --smoke")
    rows = {(row["task"], row["verifier"], row["predicted_from"]): row for row in found["rows"]}
    assert len(rows) == 8
    for (_, verifier, source), row in rows.items():
        assert row["realised"]["value"] > 1
        if (verifier, source) == ("greedy", "same texts"):
            assert row["num_texts_as_plain"] == row["num_texts"]
            assert abs(row["error"]) < 0.02
