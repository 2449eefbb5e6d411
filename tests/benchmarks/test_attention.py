"""The benchmark of attention: its systems agree, and it says so where nothing can be timed."""

import importlib.util
import json

import attention
import pytest
import torch


def test_all_systems_compute_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "SMOKE", attention.Scale((2,), (0, 5), 1, context=20))
    monkeypatch.setattr(attention, "NUM_HEADS", 4)
    monkeypatch.setattr(attention, "NUM_KV_HEADS", 2)
    out = tmp_path / "out.json"
    assert attention.main(["--smoke", "--json", str(out)]) == 0
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
