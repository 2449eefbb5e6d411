"""What `pool_scale.py` measures with: its texts, its eye on another process, its figures."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from pool_scale import figures_of, memory_mb_of, require_same_files, watched
from pool_scale_texts import TextFile, recombined

LINES = [[np.arange(10 * k, 10 * k + 3 + user % 4, dtype=np.int32) + user for user in range(30)] for k in range(4)]


def test_every_so_many_th_text_changes_and_no_other():
    before, after = (list(recombined(LINES, 100, seed=1, changed_every=every)) for every in (0, 20))
    same = [np.array_equal(one, other) for one, other in zip(before, after, strict=True)]
    assert [number for number, is_same in enumerate(same) if not is_same] == [0, 20, 40, 60, 80]


def test_a_measurement_is_a_process_whose_files_and_memory_are_told(tmp_path):
    texts = TextFile.write(tmp_path / "texts", recombined(LINES, 50, seed=1))
    rows = []
    for number, (kind, memory_mb) in enumerate((("full", None), ("bounded", 16))):
        task = {"texts": str(texts.folder), "out": str(tmp_path / f"p{number}"), "memory_mb": memory_mb}
        row = {"kind": kind, "memory_mb": memory_mb} | watched({"measure": "build", "previous": None, **task})
        assert row["num_texts"] == row["num_texts_sorted"] == 50 and row["peak_mb"] > row["peak_own_mb"] > 1
        rows.append(row | {"mtokens_per_s": 2.0, "bytes_per_token": row["bytes"] / row["num_tokens"]})
    require_same_files(tmp_path / "p0", tmp_path / "p1")
    assert len(figures_of(rows)) == 5
    drafts = watched({"measure": "drafts", "pool": str(tmp_path / "p0"), "texts": str(texts.folder)})
    assert drafts["num_drafts"] > 50 and drafts["aal"] > 1 and drafts["draft_median_us"] > 0
    with pytest.raises(RuntimeError, match="exit code"):
        watched({"measure": "drafts", "pool": str(tmp_path / "none"), "texts": str(texts.folder)})
    assert memory_mb_of(2**22 + 1) == (0.0, 0.0)
