"""What `gpu_night.py` makes of samples and events."""

import json

import gpu_night
import pytest
from gpu_night import GpuWatch, stage_spans


def test_the_share_of_a_stage_is_of_the_samples_within_it(tmp_path):
    watch = GpuWatch(tmp_path / "gpu.csv")
    watch._process, watch._start_s, watch._end_s = object(), 100.0, 110.0  # pyright: ignore
    (tmp_path / "gpu.csv").write_text("".join(f"{100 if 2 <= at < 6 else 0}, 900\n" for at in range(10)) + "50, 9")
    assert watch.busy([(0.0, float("inf"))]) == pytest.approx(0.4)
    assert watch.busy([(102.0, 106.0)]) == 1.0
    assert watch.busy([(100.0, 104.0)]) == pytest.approx(0.5)
    assert watch.busy([(200.0, 201.0)]) is None


def test_stages_are_read_from_events_whole_and_by_name(tmp_path):
    ends = [("generate", "2025-03-01T00:00:10.000+00:00", 4.0), ("encode", "2025-03-01T00:00:12.000+00:00", 2.0)]
    lines = [{"time": when, "event": "stage_end", "stage": name, "seconds": s} for name, when, s in ends]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, [{"time": "", "event": "said"}, *lines])) + "\n")
    (span,) = stage_spans(tmp_path / "events.jsonl", "generate")
    assert span[1] - span[0] == 4.0 and stage_spans(tmp_path / "events.jsonl", "pools") == []


def test_a_first_night_that_fails_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_night, "MAKE_MODEL", "")
    monkeypatch.setattr(gpu_night, "CLI", (gpu_night.sys.executable, "-c", "raise SystemExit(3)"))
    monkeypatch.setattr(gpu_night, "write_sample_world", lambda *words, **named: None)
    words = ["--out", str(tmp_path / "out"), "--folder", str(tmp_path), "--entities", "4", "--deadline", "60"]
    assert gpu_night.main(words) == 1
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert [row["item"] for row in rows] == ["model", "first"] and "status 3" in rows[1]["failed"]
