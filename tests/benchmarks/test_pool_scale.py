"""Tools of `pool_scale.py`: its texts, the measurement of another process, its figures."""

import sys

import numpy as np
import pool_scale
import pytest
from pool_scale import (
    figures_of,
    measure_rounds,
    medians_of,
    memory_mb_of,
    recombined,
    require_same_files,
    watched,
)
from pool_scale_worker import TextFile, measure_build, measure_drafts

LINES = [[np.arange(10 * k, 10 * k + 3 + user % 4, dtype=np.int32) + user for user in range(30)] for k in range(4)]


def test_every_so_many_th_text_changes_and_no_other():
    before, after = (list(recombined(LINES, 100, seed=1, changed_every=every)) for every in (0, 20))
    same = [np.array_equal(text, other) for text, other in zip(before, after, strict=True)]
    assert [number for number, is_same in enumerate(same) if not is_same] == [0, 20, 40, 60, 80]


def test_texts_are_read_as_they_were_written(tmp_path):
    texts = list(recombined(LINES, 10, seed=1))
    read = list(TextFile.write(tmp_path / "texts", iter(texts)))
    assert all(np.array_equal(text, other) for text, other in zip(read, texts, strict=True))


def in_this_process(task: dict) -> dict:
    """The result of `watched`, without another process and without measuring memory."""
    task = dict(task)
    measure = {"build": measure_build, "drafts": measure_drafts}[task.pop("measure")]
    return measure(**task) | {"before_own_mb": 1.0, "peak_own_mb": 2.0, "peak_mb": 3.0}


def test_the_command_builds_merges_and_drafts(run_benchmark, monkeypatch):
    monkeypatch.setattr(pool_scale, "grammar_lines", lambda num_users: LINES)
    monkeypatch.setattr(pool_scale, "watched", in_this_process)
    result = run_benchmark("pool_scale", "--smoke", "--num-texts", 50, "--memory-mb", 16)
    assert [row["kind"] for row in result["rows"]] == ["full", "bounded", "full, 5 % changed", "merged, 5 % changed"]
    assert [row["num_texts_sorted"] for row in result["rows"]] == [50, 50, 50, 3]
    assert all(row["num_texts"] == 50 and row["mtokens_per_s"] > 0 for row in result["rows"])
    (drafts,) = result["rows"][0]["drafts"]
    assert drafts["opened"] == "resident" and drafts["num_drafts"] > 50 and drafts["aal"] > 1 and drafts["open_s"] > 0
    assert 0 < drafts["draft_median_us"] <= drafts["draft_p99_us"] <= drafts["draft_max_us"]
    assert len(result["figures"]) == 7


def test_a_measurement_is_a_process_whose_memory_is_told(tmp_path):
    texts = TextFile.write(tmp_path / "texts", recombined(LINES, 50, seed=1))
    task = {"measure": "build", "texts": str(texts.folder), "out": str(tmp_path / "pool")}
    row = watched(task | {"memory_mb": None, "previous": None})
    assert row["num_texts"] == 50 and row["peak_mb"] > row["peak_own_mb"] > row["before_own_mb"] - 1 > 1
    assert memory_mb_of(2**22 + 1) == (0.0, 0.0)


def test_a_measurement_that_fails_ends_the_command(monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RuntimeError, match="exit code 1"):
        watched({"measure": "builds"})


def test_full_builds_and_merges_are_measured_in_turn(tmp_path, monkeypatch):
    seconds = iter([4.0, 1.0, 10.0, 5.0, 6.0, 3.0])
    built = []

    def build(kind, texts, out, memory_mb=None, previous=None):
        built.append((kind, previous))
        out.mkdir()
        (out / "manifest.json").write_text("{}")
        return {"kind": kind, "build_s": next(seconds)}

    monkeypatch.setattr(pool_scale, "measure_build", build)
    full, merged = measure_rounds(TextFile(tmp_path), tmp_path, num_rounds=3)
    assert built == [("full, 5 % changed", None), ("merged, 5 % changed", tmp_path / "full")] * 3
    assert (full["build_s"], full["build_s_range"]) == (6.0, [4.0, 10.0])
    assert (merged["build_s"], merged["build_s_range"]) == (3.0, [1.0, 5.0])
    assert (merged["share_of_full"], merged["share_of_full_range"]) == (0.5, [0.25, 0.5])


def test_builds_that_differ_end_the_command(tmp_path):
    for name, manifest in (("one", "{}"), ("other", '{"a": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(manifest)
    with pytest.raises(RuntimeError, match="one and other have different files"):
        require_same_files(tmp_path / "one", tmp_path / "other")


def test_figures_are_of_the_largest_size_and_of_merging():
    def rows(num_texts: int, share: float) -> list[dict]:
        row = {"num_texts": num_texts, "mtokens_per_s": 2.0, "peak_mb": 9.0, "peak_own_mb": 50.0, "before_own_mb": 20.0}
        row |= {"memory_mb": 16, "bytes_per_token": 9.0, "drafts": [{"draft_median_us": 90.0}]}
        return [row | {"kind": "full"}, row | {"kind": "bounded"}, row | {"kind": "merged", "share_of_full": share}]

    figures = figures_of([*rows(1_000, 0.9), *rows(100_000, 0.2)])
    by_name = {figure.name: (figure.measured, figure.met) for figure in figures}
    assert len(by_name) == 7
    assert by_name["100,000 texts, bounded to 16 MiB: MiB of its own beyond those before"] == (30.0, False)
    assert by_name["100,000 texts, resident: microseconds a draft, median"] == (90.0, False)
    assert by_name["100,000 texts, 5 % changed: time of a merge over a full build"] == (0.2, True)


def test_of_rounds_of_drafts_medians_are_told_and_the_range_of_times():
    rounds = [{"draft_median_us": us, "draft_p99_us": 2 * us, "open_s": 1.0} for us in (90.0, 60.0, 70.0)]
    assert medians_of(rounds) == {
        "draft_median_us": 70.0, "draft_p99_us": 140.0, "open_s": 1.0,
        "draft_median_us_range": [60.0, 90.0], "draft_p99_us_range": [120.0, 180.0],
    }  # fmt: skip
