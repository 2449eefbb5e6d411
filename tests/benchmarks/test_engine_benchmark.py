"""The benchmark of the engine: groups and pools it compares, what it counts, its figures, and that the command runs."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from common import Figure, Spread  # noqa: E402
from engine import Scale as EngineScale  # noqa: E402
from engine import contestants_at, measure  # noqa: E402
from engine_figures import figures_of  # noqa: E402
from engine_plot import page_of  # noqa: E402
from engine_pools import KINDS, like_groups, pools_of, random_groups, unseen_prompts  # noqa: E402
from engine_roofline import DeviceRates, Roofline, measure_device  # noqa: E402
from engine_rows import row_of  # noqa: E402
from engine_systems import ADAPTIVE, ASSISTED, LOOKUP, PEER, PLAIN, Contestant, Engines, Peers, plain  # noqa: E402
from night_systems import EngineSystem, TransformersGenerate, forget_prompts  # noqa: E402
from night_tasks import Task, TaskSize, sample_tasks  # noqa: E402

from jobs.report.page import render_page  # noqa: E402

SAMPLE = ROOT / "models" / "sample"
RATES = DeviceRates(1e10, 1e14)  # multiplying never takes longer


@pytest.fixture(scope="module")
def engines() -> Engines:
    return Engines(SAMPLE, "float32", "cpu")


@pytest.fixture(scope="module")
def task(engines) -> Task:
    items = sample_tasks(engines.tokenizer, TaskSize(4, 56))[1]
    return replace(items, max_new_tokens=40)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def task_of(pool_prompts: list[list[int]], held_out: list[list[int]]) -> Task:
    arrays = [tuple(np.array(prompt, np.int32) for prompt in prompts) for prompts in (held_out, pool_prompts)]
    return Task("invented", "item", *arrays, max_new_tokens=8, is_long=False)


def test_like_prompts_share_a_group_and_measured_ones_join_the_nearest():
    pool = [[1, 2, 3, 10 + k] for k in range(20)] + [[4, 5, 6, 40 + k] for k in range(20)]
    task = task_of(pool, [[1, 2, 3, 99], [4, 5, 6, 98]])
    groups = like_groups(task)
    of_first = {groups(prompt) for prompt in task.pool_prompts[:20]}
    of_second = {groups(prompt) for prompt in task.pool_prompts[20:]}
    assert not of_first & of_second
    assert groups(task.held_out[0]) in of_first and groups(task.held_out[1]) in of_second
    assert like_groups(task) == groups and random_groups(task) == random_groups(task)


def test_no_measured_text_is_in_the_pool(engines, task, cache):
    engine = engines.of_batch(4)
    twice = replace(task, pool_prompts=(*task.pool_prompts, task.held_out[1]))
    kept = unseen_prompts(engine, twice, cache).held_out
    assert not any(np.array_equal(prompt, task.held_out[1]) for prompt in kept)
    assert {prompt.tobytes() for prompt in kept} <= {prompt.tobytes() for prompt in task.held_out}


def test_every_greedy_system_writes_the_plain_texts(engines, task, cache, tmp_path):
    pools = pools_of(engines.of_batch(4), task, cache, tmp_path, list(KINDS))
    assert {name for name, one in pools.items() if one.group_of is None} == {"global"}
    assert all(one.pool.manifest.num_texts == 56 for one in pools.values())
    for one in pools.values():  # a pilot writes prompts whose texts the smaller pool lacks
        assert one.without.manifest.num_texts + len(one.prompts_of_pilot) == 56 and len(one.prompts_of_pilot) == 11
    scale = EngineScale({}, {}, TaskSize(0, 0), TaskSize(0, 0), 1, 1, fixed_budgets=(2, 8))
    contestants = contestants_at(task, 4, engines, Peers(SAMPLE, "float32", "cpu", None), pools, scale, RATES)
    passes = measure(contestants, task, 4, 4, num_repetitions=1, num_warm_up=1)
    rows = {(row["system"], row["budget"]): row for row in (row_of(one, passes) for one in contestants)}
    for name in (PEER, PLAIN, "own-text", "resd", "crp", "rrp"):
        found = [row for (system, _), row in rows.items() if system == name]
        assert found and all(row["num_texts_as_plain"] == 4 for row in found)
    assert rows["resd", 2]["drafted_per_step"] <= 2 and rows["resd", 2]["accepted_per_step"] > 0
    assert rows["resd", 8]["tokens_per_step"] > rows["resd", 2]["tokens_per_step"] > 1
    assert 0 < rows["resd", 8]["retrieval_share"] < 1
    for row in rows.values():
        assert row["tokens_per_step"] == pytest.approx(1 + row["accepted_per_step"], abs=0.2)
    best = rows["laser", ADAPTIVE]["best_fixed"]
    assert best in (2, 8) and rows["laser", best]["best_fixed"] is None


def test_prompt_lookup_counts_its_own_forwards(task):
    model = AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32).eval()
    alone = TransformersGenerate(model).run(task.held_out, 1, 40)
    drafted = TransformersGenerate(model, prompt_lookup_num_tokens=10).run(task.held_out, 1, 40)
    assert drafted.texts == alone.texts and alone.num_steps == alone.num_tokens
    assert len(task.held_out) <= drafted.num_steps < drafted.num_tokens
    assert 0 < drafted.num_accepted <= drafted.num_drafted


def test_a_peer_without_memory_is_left_out_and_the_rest_is_measured(engines, task):
    class Full:
        def run(self, prompts, batch, max_new_tokens):
            if max_new_tokens == task.max_new_tokens:
                raise torch.OutOfMemoryError("full")

    contestants = [Contestant(PEER, None, Full()), plain(engines.of_batch(1), RATES, engines.bytes_per_token)]
    passes = measure(contestants, task, 1, 1, num_repetitions=2, num_warm_up=1)
    assert list(passes) == [(PLAIN, None)] and len(passes[PLAIN, None]) == 2
    assert row_of(contestants[1], passes)["ratio_to_transformers"] is None
    with pytest.raises(torch.OutOfMemoryError):
        measure([Contestant("laser", 8, Full())], task, 1, 1, num_repetitions=1, num_warm_up=1)


def test_assisted_decoding_needs_the_same_tokenizer():
    peers = Peers(SAMPLE, "float32", "cpu", None)
    assert "--assistant" in peers.left_out[ASSISTED]
    assert [one.system for one in peers.at_batch(1)] == [PEER, LOOKUP]
    assert [one.system for one in peers.at_batch(4)] == [PEER]
    assert [one.system for one in Peers(SAMPLE, "float32", "cpu", SAMPLE).at_batch(1)] == [PEER, LOOKUP, ASSISTED]


def test_the_roofline_is_the_slower_of_reading_and_multiplying(engines, task):
    roofline = Roofline(DeviceRates(100.0, 1000.0), 50, 10, weight_bytes=200, bytes_per_token=2)
    roofline.add(num_tokens=1, num_logits=1, num_cached=50)  # reads 300 bytes, multiplies 120 times
    assert roofline.seconds == pytest.approx(3.0)
    roofline.add(num_tokens=100, num_logits=0, num_cached=0)  # reads 200 bytes, multiplies 10,000 times
    assert roofline.seconds == pytest.approx(13.0)
    engine = engines.of_batch(1)
    real = Roofline.of_engine(engine, RATES, engines.bytes_per_token)
    assert real.num_head_weights == 2371 * 192
    assert real.weight_bytes == 4 * (real.num_body_weights + real.num_head_weights)
    watched = plain(engine, RATES, engines.bytes_per_token).runner
    runs = [watched.run(task.held_out[:2], 1, 40) for _ in range(2)]
    assert runs[0].texts == runs[1].texts
    least_s = runs[0].num_tokens * real.weight_bytes / RATES.bytes_per_s  # a forward a token, and the cache beside it
    counted_s = [share * run.wall_s for share, run in zip(watched.shares, runs, strict=True)]
    assert counted_s[0] == pytest.approx(counted_s[1]) and least_s < counted_s[0] < 2 * least_s


def test_no_pass_finds_its_prompts_computed(engines, task):
    engine = engines.of_batch(4)
    system = EngineSystem.of_pool(engine, None, "greedy")
    fed = []
    forward = engine.runner.forward
    engine.runner.forward = lambda feeds: (fed.append(sum(len(feed.chain_ids) for feed in feeds)), forward(feeds))[1]
    try:
        for forgets in (True, True, False):
            if forgets:
                forget_prompts(engine)
            fed.append(None)
            system.timed(task.held_out, 2)
    finally:
        del engine.runner.forward
    passes = [fed[place + 1] for place, count in enumerate(fed) if count is None]
    assert passes[0] == passes[1] >= len(task.held_out[0]) > passes[2]


def test_a_device_has_rates():
    rates = measure_device(torch.device("cpu"), torch.float32)
    assert rates.bytes_per_s > 1e8 and rates.flops_per_s > 1e8


def row(system: str, budget, ratio: float, **changes) -> dict:
    spread = Spread.of([ratio])
    own = {"ratio_to_best_fixed": None, "best_fixed": None, "ratio_to_transformers": spread, "roofline_share": 0.7}
    return {"task": "reki", "batch": 16, "system": system, "budget": budget, "ratio_to_plain": spread} | own | changes


def test_figures_take_the_rows_that_were_asked_for():
    rows = [
        row(PEER, None, 0.8),
        row(PLAIN, None, 1.0, ratio_to_transformers=Spread.of([1.25])),
        row("laser", ADAPTIVE, 1.6, best_fixed=8, ratio_to_best_fixed=Spread.of([0.97])),
        row("laser", 8, 1.7),
        row("rrp", ADAPTIVE, 0.99),
    ]
    found = {figure.name.split(": ")[1]: (figure.measured, figure.met) for figure in figures_of(rows, "cpu")}
    assert found == {
        "laser, adaptive, over plain, tokens per second": (1.6, True),
        "laser, adaptive over K=8, the best fixed, tokens per second": (0.97, False),
        "the slowest adaptive system (rrp) over plain, tokens per second": (0.99, True),
        "plain over transformers-generate, tokens per second": (1.25, False),
    }
    at_64 = [one | {"batch": 64} for one in rows]
    on_gpu = {figure.name: figure.met for figure in figures_of(at_64, "cuda")}
    assert on_gpu["reki, batch 64: laser, adaptive, over plain, tokens per second"] is False
    assert on_gpu["reki, batch 64: plain, share of the roofline"] is False


def test_the_page_draws_every_task():
    rows = [row(PLAIN, None, 1.0), row("laser", ADAPTIVE, 4.25), row("laser", 8, 3.5), row("resd", ADAPTIVE, 2.0)]
    content = {"model": "m", "dtype": "float32", "rows": rows, "figures": [Figure.at_least("a", 1.0, 2.0)]}
    page = render_page(page_of(content))
    assert "Task reki" in page and "4.25" in page and "K=8" in page and "not met" in page


@pytest.mark.slow
def test_the_command_measures_the_sample_model_where_no_other_is(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "engine.py", "--smoke", "--threads", "1", "--device", "cpu"]
    command += ["--json", tmp_path / "out.json", "--plot", tmp_path / "out.html"]
    command += ["--model", tmp_path / "none", "--cache", tmp_path / "cache", "--task", "sample-items"]
    command += ["--geometry", "tiny"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert content["model"] == "sample-tiny-float32" and ASSISTED in content["left_out"]
    assert {one["system"] for one in content["rows"]} == {PEER, PLAIN, "resd", "laser"}
    assert {one["budget"] for one in content["rows"]} == {None, ADAPTIVE, 8}
    assert next(one for one in content["rows"] if one["system"] == PLAIN)["roofline_share"] > 0
    assert "</svg>" in (tmp_path / "out.html").read_text(encoding="utf-8")
