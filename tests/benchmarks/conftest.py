"""Benchmarks import each other from the folder of their command; here they run in the process of the tests."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

for tests in ("decoding", "research"):  # the slow reference of attention; a small catalogue
    sys.path.append(str(Path(__file__).resolve().parents[1] / tests))


@pytest.fixture
def run_benchmark(tmp_path, monkeypatch):
    """A function that runs a benchmark with the given arguments and returns the JSON that it wrote."""
    num_threads = torch.get_num_threads()

    def run(name: str, *words: object) -> dict:
        out = tmp_path / f"{name}.json"
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *map(str, words), "--json", str(out)])
        assert not importlib.import_module(name).main()
        written = out.read_text(encoding="utf-8")
        assert str(tmp_path) not in written
        result = json.loads(written)
        assert list(result)[:2] == ["command", "machine"]
        assert result["command"].startswith(f"python benchmarks/{name}.py")
        return result

    yield run
    torch.set_num_threads(num_threads)
