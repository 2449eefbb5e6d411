"""Summaries of samples and events by `gpu_night.py`."""

import json

import gpu_night
import pytest
from gpu_night import GpuWatch, writing_span


def test_the_share_of_a_stage_is_of_the_samples_within_it(tmp_path):
    watch = GpuWatch(tmp_path / "gpu.csv")
    watch._process, watch._start_s, watch._end_s = object(), 100.0, 110.0  # pyright: ignore
    (tmp_path / "gpu.csv").write_text("".join(f"{100 if 2 <= at < 6 else 0}, 900\n" for at in range(10)) + "50, 9")
    assert watch.busy([(0.0, float("inf"))]) == pytest.approx(0.4)
    assert watch.busy([(102.0, 106.0)]) == 1.0
    assert watch.busy([(100.0, 104.0)]) == pytest.approx(0.5)
    assert watch.busy([(200.0, 201.0)]) is None


def test_texts_are_written_from_the_begin_of_the_first_shard_to_the_end_of_the_last(tmp_path):
    def line(second: int, event: str, **values) -> dict:
        return {"time": f"2025-03-01T00:00:{second:02}.000+00:00", "event": event, **values}

    done = [line(10, "shard_done", seconds=4.0), line(12, "shard_done", seconds=7.0)]
    lines = [line(1, "said"), *done, line(13, "stage_end", stage="generate"), line(20, "shard_done", seconds=1.0)]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    begun_s, ended_s = writing_span(tmp_path / "events.jsonl")
    assert ended_s - begun_s == 7.0
    (tmp_path / "events.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert writing_span(tmp_path / "events.jsonl") is None


def test_nights_are_named_with_their_workers(capsys, tmp_path):
    assert [gpu_night.night_and_workers(words) for words in ("ctr", "plain/auto", "second/3")] == [
        ("ctr", None), ("plain", None), ("second", 3),
    ]  # fmt: skip
    for nights, message in (("third/1", "expected NIGHT/WORKERS"), ("second/2", "the first is the night `first`")):
        with pytest.raises(SystemExit):
            gpu_night.main(["--out", str(tmp_path), "--nights", nights])
        assert message in capsys.readouterr().err


def test_a_first_night_that_fails_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_night, "MAKE_MODEL", "")
    monkeypatch.setattr(gpu_night, "CLI", (gpu_night.sys.executable, "-c", "raise SystemExit(3)"))
    monkeypatch.setattr(gpu_night, "write_sample_world", lambda *words, **named: None)
    words = ["--out", str(tmp_path / "out"), "--folder", str(tmp_path), "--entities", "4", "--deadline", "60"]
    assert gpu_night.main(words) == 1
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert [row["item"] for row in rows] == ["model", "first-auto"] and "status 3" in rows[1]["failed"]
