"""What `pool_scale.py` measures with: its texts, its eye on another process, its figures."""

import numpy as np
import pytest
from pool_scale import (
    OPENINGS,
    OPENINGS_FROM_DISK,
    figures_of,
    measure_build,
    measure_drafts,
    measure_rounds,
    medians_of,
    memory_mb_of,
    of_median_time,
    require_same_files,
    watched,
)
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
    task = {"measure": "drafts", "pool": str(tmp_path / "p0"), "texts": str(texts.folder)}
    rows[0]["drafts"] = measure_drafts(tmp_path / "p0", texts, (*OPENINGS, *OPENINGS_FROM_DISK), 2)
    assert [drafts["opened"] for drafts in rows[0]["drafts"]] == [
        "resident", "mapped", "resident, from disk", "mapped, from disk"
    ]  # fmt: skip
    for drafts in rows[0]["drafts"]:
        assert drafts["num_drafts"] > 50 and drafts["aal"] > 1 and drafts["open_s"] > 0
        assert 0 < drafts["draft_median_us"] <= drafts["draft_p99_us"] <= drafts["draft_max_us"]
        least, most = drafts["draft_median_us_range"]
        assert least <= drafts["draft_median_us"] <= most
    assert len({(drafts["num_drafts"], drafts["aal"]) for drafts in rows[0]["drafts"]}) == 1
    assert len(figures_of(rows)) == 6
    with pytest.raises(RuntimeError, match="exit code"):
        watched(task | {"pool": str(tmp_path / "none"), "cold": False, "resident": True})
    assert memory_mb_of(2**22 + 1) == (0.0, 0.0)


def test_full_builds_and_merges_are_measured_in_turn(tmp_path):
    texts, today = (
        TextFile.write(tmp_path / str(every), recombined(LINES, 40, seed=1, changed_every=every)) for every in (0, 20)
    )
    measure_build("full", texts, tmp_path / "full")
    full, merged = measure_rounds(today, tmp_path, num_rounds=2)
    assert (full["num_texts_sorted"], merged["num_texts_sorted"]) == (40, 2)
    for row in (full, merged):
        least, most = row["build_s_range"]
        assert least <= row["build_s"] == most
    assert merged["share_of_full_range"][0] <= merged["share_of_full"] <= merged["share_of_full_range"][1]


def test_of_an_odd_number_of_rounds_the_middle_one_is_told():
    row = of_median_time([{"build_s": seconds, "of": seconds} for seconds in (3.0, 1.0, 2.0)])
    assert row == {"build_s": 2.0, "of": 2.0, "build_s_range": [1.0, 3.0]}


def test_of_rounds_of_drafts_medians_are_told_and_the_range_of_times():
    rounds = [{"draft_median_us": us, "draft_p99_us": 2 * us, "open_s": 1.0} for us in (90.0, 60.0, 70.0)]
    assert medians_of(rounds) == {
        "draft_median_us": 70.0, "draft_p99_us": 140.0, "open_s": 1.0,
        "draft_median_us_range": [60.0, 90.0], "draft_p99_us_range": [120.0, 180.0],
    }  # fmt: skip
