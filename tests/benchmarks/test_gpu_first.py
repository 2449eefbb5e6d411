"""The first run on a GPU ends in time, loses no row, and does not call anything right that was not tried."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import block_override
import gpu_bench
import gpu_first
import gpu_measure
import gpu_phases
import gpu_report
import gpu_run
import gpu_tests
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from common import REPOSITORY, SAMPLE_MODEL
from gpu_report import figures_of, gains_of, report
from gpu_rows import FATAL_STATUS, Rows
from gpu_run import MIN_PHASE_S, RESERVE_S, Deadline, Run
from pool_texts import SCHEMA, read_task, write_task
from roofline import DeviceRates
from tasks import TaskSize, sample_tasks

from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.load import load_model
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.retrieval_pools.index.calibration_record import MIN_ACCEPTANCES, SIZE_KNOTS

WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def run_in(folder: Path, seconds: float = 120, **options) -> Run:
    options_of_run = {"out": folder, "smoke": True, "model": SAMPLE_MODEL, "texts": None, "geometry": "tiny"}
    options_of_run |= {"phases": (), "crash_at": None} | options
    return Run(argparse.Namespace(**options_of_run), Deadline(seconds))


def test_a_phase_takes_what_is_left_of_the_one_deadline():
    now = [100.0]
    deadline = Deadline(60, clock=lambda: now[0])
    assert deadline.left() == 60 - RESERVE_S and deadline.limit(20) == 20
    now[0] += 40
    assert deadline.limit(200) == 20 - RESERVE_S
    now[0] += 20 - RESERVE_S - MIN_PHASE_S + 1
    assert deadline.limit(200) == 0
    assert deadline.left() == MIN_PHASE_S - 1


def test_results_are_read_from_a_log_whether_its_run_ended_or_not():
    log = """
tests/decoding/test_on_gpu.py::test_a_small_pack SKIPPED (no CUDA device)  [ 33%]
tests/decoding/test_step.py::test_kernel[(64, (8, 8), torch.bfloat16)] PASSED [ 66%]
[gw3] [ 70%] FAILED tests/decoding/test_on_gpu.py::test_kernel[(64, (8, 2), torch.float16)]
[gw1] [ 71%] PASSED tests/decoding/test_on_gpu.py::test_a_small_pack[x]
"""
    assert gpu_tests.results_of(log) == {
        "tests/decoding/test_on_gpu.py::test_a_small_pack": "SKIPPED",
        "tests/decoding/test_step.py::test_kernel[(64, (8, 8), torch.bfloat16)]": "PASSED",
        "tests/decoding/test_on_gpu.py::test_kernel[(64, (8, 2), torch.float16)]": "FAILED",
        "tests/decoding/test_on_gpu.py::test_a_small_pack[x]": "PASSED",
    }


def test_one_skipped_test_of_the_device_is_not_ok():
    names = [f"{gpu_tests.ON_GPU}::{name}" for name in ("kernel", "trained")]
    assert gpu_tests.judge_tests(dict.fromkeys(names, "PASSED"), [gpu_tests.ON_GPU], 0) == ("ok", [])
    outcome, red = gpu_tests.judge_tests({names[0]: "PASSED", names[1]: "SKIPPED"}, [gpu_tests.ON_GPU], 0)
    assert outcome == "failed" and red == [f"SKIPPED {names[1]}"]
    assert gpu_tests.judge_tests({names[0]: "PASSED"}, [gpu_tests.ON_GPU], None)[0] == "timed out"


def test_tests_that_are_all_skipped_fail(tmp_path, monkeypatch):
    file = tmp_path / gpu_tests.ON_GPU
    file.parent.mkdir(parents=True)
    file.write_text("import pytest\n\n@pytest.mark.skip\ndef test_small_pack(): pass\n\ndef test_another(): pass\n")
    paths = (str(REPOSITORY / "benchmarks"), os.environ.get("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setattr(gpu_run, "REPOSITORY", tmp_path)  # the folder in which the tests run
    run = run_in(tmp_path)
    gpu_tests.run_tests(run, "tests", [gpu_tests.ON_GPU], 100, "-k", "small_pack")
    (row,) = run.rows.read()
    assert row["outcome"] == "failed" and row["skipped"] == 1 and row["passed"] == 0
    assert any("nothing passed" in line for line in row["red"])
    assert "nothing passed" in report([row])


def test_the_sanitizer_sees_every_tensor_as_an_allocation():
    words = gpu_tests.sanitizer_words(find=lambda name, path=None: f"/cuda/{name}")
    assert words[:3] == ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "/cuda/compute-sanitizer"]
    assert words[words.index("-k") + 1] == "small_pack" and words[words.index("--error-exitcode") + 1] == "9"
    assert gpu_tests.sanitizer_words(find=lambda name, path=None: None) is None


def test_files_that_are_named_are_there():
    files = (*gpu_tests.DEVICE_TESTS, *gpu_tests.SHORT_TESTS, *gpu_tests.BESIDE, *gpu_tests.SMOKE_TESTS)
    assert all((REPOSITORY / file).is_file() for file in files)


WITHOUT_RAY = 'import sys; sys.modules |= dict.fromkeys(("ray", "lightgbm"))\n'


def test_the_driver_wants_no_ray_and_no_lightgbm():
    """Its processes do not either: `test_what_is_measured_with_the_model_runs_once_on_a_cpu`."""
    words = [sys.executable, "-c", WITHOUT_RAY + "import gpu_first"]
    done = subprocess.run(words, cwd=REPOSITORY / "benchmarks", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_block_sizes_are_overridden_for_a_process(monkeypatch):
    pytest.importorskip("triton")
    from laserbatch.pipeline.decoding.attention import triton_attention as launcher

    functions = (launcher.triton_attention, launcher.block_rows, launcher.block_keys)
    for function in functions:
        monkeypatch.setattr(function, "__defaults__", function.__defaults__)  # restored after the test
    monkeypatch.setenv(block_override.VARIABLE, '{"num_stages": 1}')
    block_override.override_blocks()
    stages = [default.num_stages for function in functions for default in blocks_of(function)]
    assert stages == [1, 1, 1]


def blocks_of(function) -> list:
    return [default for default in function.__defaults__ if hasattr(default, "num_stages")]


WORKER = """
import os, sys, time
from pathlib import Path
from gpu_rows import Rows
rows, careful = Rows(Path(sys.argv[1]) / "rows.jsonl"), "--no-graphs" in sys.argv
for item in sys.argv[2].split(","):
    rows.mark("begin", item)
    helps = (careful and "graph" in item) or ("fused" in item and "--no-fused" in sys.argv)
    if item.startswith("crash") or (item.startswith("fatal") and not helps):
        os._exit(70 if item.startswith("fatal") else 139)
    if item.startswith("hang"):
        time.sleep(600)
    rows.add("c", item, mode=" ".join(sys.argv[3:]))
    rows.mark("end", item)
"""


@pytest.fixture
def fake_worker(monkeypatch):
    def words(run, items, mode):
        return [sys.executable, "-c", WORKER, str(run.options.out), ",".join(items), *mode.words]

    monkeypatch.setattr(gpu_measure, "phases_words", words)
    limits = dict.fromkeys(("a", "z", "crash", "fatal", "fatal-graph", "fatal-fused", "hang"), 1.0)
    monkeypatch.setattr(gpu_measure, "ITEM_S", limits)
    monkeypatch.setattr(gpu_measure, "START_S", 20.0)


def measured(run: Run) -> dict[str, str]:
    return {row["item"]: row["mode"] for row in run.rows.read() if "mode" in row and "failed" not in row}


def failures(run: Run) -> list[str]:
    return [row["item"] for row in run.rows.read() if "failed" in row]


def test_a_crash_costs_one_item(tmp_path, fake_worker):
    run = run_in(tmp_path)
    gpu_measure.measure(run, ["a", "crash", "z"])
    assert measured(run) == {"a": "", "z": ""} and failures(run) == ["crash"]
    (row,) = (row for row in run.rows.read() if "failed" in row)
    assert "status 139" in row["failed"]


def test_a_cuda_error_that_graphs_cause_is_avoided_without_them(tmp_path, fake_worker):
    run = run_in(tmp_path)
    gpu_measure.measure(run, ["a", "fatal-graph", "z"])
    assert measured(run) == {"a": "", "fatal-graph": "--no-graphs", "z": "--no-graphs"}


def test_after_a_cuda_error_safer_options_are_tried_one_after_another(tmp_path, fake_worker):
    run = run_in(tmp_path)
    gpu_measure.measure(run, ["fatal", "z"])
    assert failures(run) == ["fatal"] * len(gpu_measure.LADDER)
    assert measured(run) == {"z": ""}  # no mode helps, so the item itself fails


def test_what_follows_goes_on_in_the_mode_that_helped(tmp_path, fake_worker):
    run = run_in(tmp_path)
    gpu_measure.measure(run, ["fatal-fused", "z"])
    assert measured(run) == {"fatal-fused": "--no-fused", "z": "--no-fused"}


def test_an_item_that_hangs_is_ended_and_the_next_ones_go_on(tmp_path, fake_worker):
    run = run_in(tmp_path)
    gpu_measure.measure(run, ["a", "hang", "z"], start_s=20)
    assert set(measured(run)) == {"a", "z"} and failures(run) == ["hang"]


def test_a_process_that_never_begins_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_measure, "phases_words", lambda run, items, mode: [sys.executable, "-c", "import nothing_"])
    run = run_in(tmp_path)
    gpu_measure.measure(run, ["a", "z"])
    assert failures(run) == ["a", "z"] and "nothing_" in run.rows.read()[0]["failed"]


def test_nothing_is_begun_after_the_deadline(tmp_path, fake_worker):
    run = run_in(tmp_path, seconds=1)
    gpu_measure.measure(run, ["a"])
    assert [row["failed"] for row in run.rows.read()] == ["no time left"]


@pytest.fixture(scope="module")
def loaded():
    return load_model("sample", device="cpu")


@pytest.fixture
def bench(tmp_path, loaded):
    values = {"attention": None, "no_fused": False, "no_graphs": False, "profile": True, "smoke": True}
    options = argparse.Namespace(**values, compile_only=None, out=tmp_path, texts=None, geometry="tiny")
    bench = gpu_bench.Bench(options, Rows(tmp_path / "rows.jsonl"), None)
    vars(bench).update(loaded=loaded, rates=DeviceRates(1e10, 1e11), device=torch.device("cpu"), dtype="float32")
    return bench


def test_a_batch_that_does_not_fit_is_a_row(bench):
    bench.max_cache_tokens = 100
    gpu_phases.attempt(bench, "steps/4/0")
    (row,) = bench.rows.read()
    assert row["failed"].startswith("does not fit") and row["batch"] == 4


def test_steps_are_timed_and_profiled(bench):
    fused = gpu_bench.fused_of(bench.loaded.model)
    for item in ("steps/2/0", "steps/2/3", "steps/2/0/unfused"):
        gpu_phases.attempt(bench, item)
    steps = [row for row in bench.rows.read() if row["phase"] == "c"]
    assert [(row["nodes"], row["num_tokens"]) for row in steps] == [(0, 2), (3, 8), (0, 2)]
    assert [row["fused"] for row in steps] == ["FusedModel", "FusedModel", "none"]
    assert all(0 < row["host_share"] < 1 and row["roofline_share"] > 0 for row in steps)
    assert gpu_bench.fused_of(bench.loaded.model) == fused
    assert sum(row["phase"] == "d" and row["launches"] > 0 for row in bench.rows.read()) == 3


def test_memory_that_runs_out_is_tried_again_with_a_smaller_cache(bench, monkeypatch):
    seen = []

    def run_item(bench, item):
        seen.append(bench.max_cache_tokens)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_phases, "run_item", run_item)
    gpu_phases.attempt(bench, "steps/2/0")
    assert seen == [None, gpu_phases.SMALL_CACHE_TOKENS]
    assert [row["failed"] for row in bench.rows.read()] == ["does not fit"]


def test_a_cuda_error_ends_the_process(bench, monkeypatch):
    class Ended(BaseException):
        pass

    def run_item(bench, item):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def end(status):
        assert status == FATAL_STATUS
        raise Ended

    monkeypatch.setattr(gpu_phases, "run_item", run_item)
    monkeypatch.setattr(gpu_phases.os, "_exit", end)
    with pytest.raises(Ended):
        gpu_phases.attempt(bench, "steps/1/0")
    assert "illegal" in bench.rows.read()[0]["failed"]


def test_figures_and_table_say_what_is_met():
    step = {"phase": "c", "item": "steps/64/0", "batch": 64, "nodes": 0, "roofline_share": 0.8, "host_share": 0.2}
    rows = [
        {"phase": "f", "item": "gains/reki/64", "task": "reki", "batch": 64, "round": number, "system": system}
        | {"tokens_per_s": speed}
        for number in range(2)
        for system, speed in (("plain", 100), ("relaxed K4", 300), ("greedy K4", 200), ("chosen relaxed", 97))
    ]
    met = {figure.name: figure.met for figure in figures_of([step, *rows])}
    assert met == {
        "plain, batch 64: share of the roofline": True,
        "plain, batch 64: host's share of a step": False,
        "reki, batch 64: relaxed over plain": True,
        "reki, batch 64: greedy gain over relaxed gain": False,
        "reki, batch 64: chosen relaxed over plain": False,
    }
    first = [row | {"captures": 20, "tokens_per_s": 100} for row in rows if row["round"] == 0]
    assert gains_of([*first, *rows[4:]])["reki", 64]["relaxed K4"] == [3.0]
    assert gains_of(first)["reki", 64]["relaxed K4"] == [1.0]
    assert "FAILED b: why" in report([{"phase": "c", "item": "b", "failed": "why"}])


def test_models_of_different_sizes_are_reported_apart(tmp_path, monkeypatch, capsys):
    ms = {"median": 2.0, "min": 1.0, "max": 3.0}
    words = dict.fromkeys(("fused", "attention"), "x") | {"least_ms": 1.0, "captures": 0, "replays": 1}
    step = {"phase": "c", "item": "steps/1/0", "batch": 1, "nodes": 0, "step_ms": ms, "host_share": 0.1} | words
    for size in (1.5, 8.03):
        rows = [{"phase": "load", "item": "model", "billion_parameters": size}, step | {"roofline_share": 0.5}]
        (tmp_path / f"{size}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert ("predicted" in report(rows)) == (size == 8.03)
    files = [str(path) for path in tmp_path.glob("*.jsonl")]
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", *files, "--json", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit):
        gpu_report.main()
    assert "different sizes" in capsys.readouterr().err


def test_texts_are_read_as_they_were_written(tmp_path, loaded):
    task = replace(sample_tasks(loaded.tokenizer, TaskSize(2, 4, 0, 2))[0], name="reki", max_new_tokens=16)
    engine = Engine(loaded, DecodingSettings(dtype="float32", batch_size=4))
    write_task(engine, task, tmp_path / "reki.parquet")
    saved = read_task(tmp_path, "reki")
    assert len(saved.pool_texts) == 4 and len(saved.earlier_texts) == 2
    assert all(np.array_equal(a, b) for a, b in zip(saved.task.pool_prompts, task.pool_prompts, strict=True))
    pools = saved.pools(tmp_path / "pools")
    assert pools["greedy"].groups is None and set(pools["relaxed"].groups.values()) == set(saved.groups.values())


def test_a_missing_folder_is_an_error_and_not_a_skipped_phase(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("LASERBATCH_TEST_MODELS", raising=False)
    arguments = ["--out", str(tmp_path), "--model", str(SAMPLE_MODEL)]
    for words, reason in (
        (["--out", str(tmp_path), "--model", str(tmp_path)], "is not a model folder"),
        ([*arguments, "--phases", "a", "--data", str(tmp_path)], "no reki/knowledge.parquet"),
        ([*arguments, "--phases", "f"], "pool_texts.py"),
        ([*arguments, "--phases", "x"], "no phase x"),
    ):
        with pytest.raises(SystemExit):
            gpu_first.parse_arguments(words)
        assert reason in capsys.readouterr().err


@pytest.mark.slow
@WITHOUT_CUDA
def test_what_is_measured_with_the_model_runs_once_on_a_cpu(tmp_path, capsys, monkeypatch):
    texts = tmp_path / "texts"
    texts.mkdir()
    rng = np.random.default_rng(0)
    for name in ("reki", "goodreads-items"):
        rows = [
            {
                "role": role,
                "prompt_ids": rng.integers(8, 100, 12).tolist(),
                "token_ids": None if role == "held_out" else rng.integers(8, 100, 20).tolist(),
                "group": f"g{number % 2}",
            }
            for role, count in (("held_out", 3), ("pool", 6), ("earlier", 2))
            for number in range(count)
        ]
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), texts / f"{name}.parquet")
    words = ["--smoke", "--call", "2", "--phases", "load,c,d,f,p", "--deadline", "400"]
    out, blocked = tmp_path / "out", tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(WITHOUT_RAY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(blocked), os.environ.get("PYTHONPATH")))))
    status = gpu_first.main([*words, "--out", str(out), "--texts", str(texts), "--model", str(SAMPLE_MODEL)])
    table = capsys.readouterr().out
    rows = Rows(out / "rows.jsonl").read()
    assert {row["phase"] for row in rows if "phase" in row} >= {"load", "c", "d", "f", "p"}
    unexpected = [row for row in rows if "failed" in row]
    assert not unexpected, unexpected
    rates = next(row for row in rows if row.get("item") == "rates" and "bytes_per_s" in row)
    assert rates["bytes_per_s"] > 1e8 and rates["flops_per_s"] > 1e8
    budgets = next(row["budgets"] for row in rows if row.get("system") == "chosen greedy")
    assert budgets["chosen greedy"] == [SIZE_KNOTS[-1], MIN_ACCEPTANCES[0]], "by step, as a night chooses"
    assert all("min_probability" in row for row in rows if "system" in row), "gains of other rules are not comparable"
    if importlib.util.find_spec("triton") is not None:
        assert status == 0, table
    assert "transformers.generate" in table and "steps/2/0" in table
    assert len(list(out.iterdir())) <= 7
    assert json.loads(json.dumps(rows)) == rows
