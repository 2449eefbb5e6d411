"""The engine benchmark: the groups and pools that it compares, its counts and figures, and the command."""

from dataclasses import replace
from pathlib import Path

import engine as engine_command
import engine_systems
import numpy as np
import pytest
import torch
from common import SAMPLE_MODEL, Interval, Spread
from engine import ASKED, Scale, contestants_at
from engine_passes import Amount, Counted, counted, measure, over_best, ratios
from engine_pools import KINDS, like_groups, pools_of, random_groups, unseen_prompts
from engine_rows import figures_of, repeats_of_plain, row_of
from engine_systems import (
    ADAPTIVE,
    ASSISTED,
    LOOKUP,
    PEER,
    PLAIN,
    Contestant,
    Engines,
    Peers,
    relaxed_pools,
    twins_of,
)
from roofline import DeviceRates, Roofline, WatchedPlain
from systems import MIN_ACCEPTANCE, EngineSystem, Pass, TransformersGenerate
from tasks import Task, TaskSize, sample_tasks, tasks_of
from transformers import AutoModelForCausalLM

from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.retrieval_pools.calibration.replay import ReplayText, replay
from laserbatch.retrieval_pools.draft import DraftOptions
from laserbatch.retrieval_pools.step_cost import DraftCost, StepCost, StepPoint

RATES = DeviceRates(1e10, 1e14)  # multiplying never takes longer
COST = StepCost(
    steps=tuple(
        StepPoint(batch_size=size, num_tokens=number, seconds=1.0 + number * 0.001)
        for size in (1, 4)
        for number in (4, 400)
    ),
    draft=DraftCost(seconds_per_step=0.5),
)


@pytest.fixture(autouse=True)
def known_costs(monkeypatch):
    """Time nothing on this machine: steps of all sizes cost nearly the same."""
    monkeypatch.setattr(engine_systems, "measure_step_cost", lambda *_: COST)
    monkeypatch.setattr(engine_command, "measure_device", lambda *_: RATES)


@pytest.fixture(scope="module")
def engines() -> Engines:
    return Engines(SAMPLE_MODEL, "float32", "cpu")


@pytest.fixture(scope="module")
def task(engines) -> Task:
    items = sample_tasks(engines.tokenizer, TaskSize(4, 16, num_earlier=3))[1]
    return replace(items, max_new_tokens=16)


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
    of_first = {groups[prompt.tobytes()] for prompt in task.pool_prompts[:20]}
    of_second = {groups[prompt.tobytes()] for prompt in task.pool_prompts[20:]}
    assert not of_first & of_second
    assert groups[task.held_out[0].tobytes()] in of_first and groups[task.held_out[1].tobytes()] in of_second
    assert like_groups(task) == groups and random_groups(task) == random_groups(task)


@pytest.mark.parametrize("kind", ["held_out", "earlier_prompts"])
def test_no_measured_text_and_none_of_an_earlier_night_is_in_the_pool(engines, task, cache, kind):
    engine = engines.of_batch(4)
    prompts = getattr(task, kind)
    twice = replace(task, pool_prompts=(*task.pool_prompts, prompts[1]))
    unseen = getattr(unseen_prompts(engine, twice, cache), kind)
    assert not any(np.array_equal(prompt, prompts[1]) for prompt in unseen)
    assert {prompt.tobytes() for prompt in unseen} <= {prompt.tobytes() for prompt in prompts}


def test_more_measured_prompts_come_after_those_of_the_pool_and_then_an_earlier_nights(engines):
    without, more = (sample_tasks(engines.tokenizer, size)[1] for size in (TaskSize(2, 8), TaskSize(2, 5, 2, 1)))
    prompts = [prompt.tobytes() for prompt in (*without.held_out, *without.pool_prompts)]
    assert [prompt.tobytes() for prompt in more.pool_prompts] == prompts[2:7]
    assert [prompt.tobytes() for prompt in more.held_out] == prompts[:2] + prompts[7:9]
    assert [prompt.tobytes() for prompt in more.earlier_prompts] == prompts[9:]


def test_every_greedy_system_writes_the_plain_texts(engines, task, cache, tmp_path):
    pools = pools_of(engines.of_batch(4), task, cache, tmp_path, list(KINDS))
    assert {name for name, group_pools in pools.items() if group_pools.groups is None} == {"global"}
    assert all(group_pools.pool.manifest.num_texts == 16 for group_pools in pools.values())
    relaxed = relaxed_pools(engines.of_batch(4), pools, task, ["resd", "laser"])
    assert relaxed.keys() == {"preference, relaxed"}
    (after,), before = relaxed.values(), pools["preference"]
    assert after.groups is before.groups and after.pool.budgets.new.num_texts == 3
    pools |= relaxed
    scale = Scale({}, {}, TaskSize(0, 0), TaskSize(0, 0), 1, 1, ASKED, fixed_budgets=(2, 8))
    contestants = contestants_at(task, 4, engines, Peers(SAMPLE_MODEL, "float32", "cpu"), pools, scale, RATES)
    passes = measure(contestants, task.held_out, 4, task.max_new_tokens, Amount(4, 1, 4, 1), num_warm_up=1)
    counts = {
        contestant.key: counted(COST, 4, passes[contestant.key][0], task.held_out, contestant.settled)
        for contestant in contestants
        if not contestant.is_peer
    }
    all_rows = [row_of(contestant, passes, counts) for contestant in contestants]
    rows = {(row["system"], row["budget"]): row for row in all_rows}
    for name in (PEER, PLAIN, "own-text", "resd", "crp", "rrp"):
        system_rows = [row for (system, _), row in rows.items() if system == name]
        assert system_rows and all(row["num_texts_as_plain"] == 4 for row in system_rows)
    assert rows["resd", 2]["drafted_per_step"] <= 2 and rows["resd", 2]["accepted_per_step"] > 0
    assert rows["resd", 8]["tokens_per_step"] > rows["resd", 2]["tokens_per_step"] > 1
    assert 0 < rows["resd", 8]["retrieval_share"] < 1
    (of_resd,) = passes["resd", 8][0]
    texts = [ReplayText(*pair) for pair in zip(task.held_out, map(np.int32, of_resd.texts), strict=True)]
    replayed = replay(pools["global"].pool, texts, DraftOptions(8, MIN_ACCEPTANCE, use_previous=False))
    assert of_resd.num_accepted == replayed.num_accepted.sum()  # the replay counts what the engine accepts
    for row in rows.values():
        assert row["tokens_per_step"] == pytest.approx(1 + row["accepted_per_step"], abs=0.2)
    again = repeats_of_plain([{"task": task.name, "batch": 4} | row for row in rows.values()])
    assert {row["system"] for row in again} == {name for (name, _), row in rows.items() if row["max_draft_tokens"] == 0}
    assert all(row["ratio_to_plain"] == rows[row["system"], ADAPTIVE]["ratio_to_plain"] for row in again)
    fewer = replace(scale, systems=("resd", "crp"), only_at={4: ("crp",)})
    at_4 = contestants_at(task, 4, engines, Peers(SAMPLE_MODEL, "float32", "cpu"), pools, fewer, RATES)
    assert [contestant.system for contestant in at_4] == [PLAIN, "crp"]
    best = rows["laser", ADAPTIVE]["best_fixed"]
    assert best in (2, 8) and rows["laser", best]["best_fixed"] is None
    assert rows["laser", ADAPTIVE]["counted_best_fixed"] == 8  # since steps of all sizes cost nearly the same
    assert 0.5 < rows["resd", 8]["counted_to_plain"].value < rows["resd", 8]["tokens_per_step"]  # drafting costs, too


def test_prompt_lookup_counts_its_own_forwards(task):
    model = AutoModelForCausalLM.from_pretrained(SAMPLE_MODEL, dtype=torch.float32).eval()
    alone = TransformersGenerate(model).run(task.held_out, 1, 24)
    drafted = TransformersGenerate(model, prompt_lookup_num_tokens=10).run(task.held_out, 1, 24)
    assert drafted.texts == alone.texts and alone.num_steps == alone.num_tokens
    assert len(task.held_out) <= drafted.num_steps < drafted.num_tokens
    assert 0 < drafted.num_accepted <= drafted.num_drafted


@pytest.mark.parametrize("fails_warming_up", [False, True])
def test_a_peer_without_memory_is_left_out_and_the_rest_is_measured(engines, task, fails_warming_up):
    class Full:
        def run(self, prompts, batch, max_new_tokens):
            if fails_warming_up or max_new_tokens == task.max_new_tokens:
                raise torch.OutOfMemoryError("full")

    contestants = [Contestant(PEER, None, Full()), Contestant(PLAIN, None, WatchedPlain(engines.of_batch(1), RATES))]
    arguments = (task.held_out, 1, task.max_new_tokens)
    passes = measure(contestants, *arguments, Amount(1, 2, 1, 2), num_warm_up=1)
    assert list(passes) == [(PLAIN, None)] and len(passes[PLAIN, None]) == 2
    counts = {(PLAIN, None): counted(COST, 1, passes[PLAIN, None][0], task.held_out, None)}
    assert row_of(contestants[1], passes, counts)["ratio_to_transformers"] is None
    with pytest.raises(torch.OutOfMemoryError):
        measure([Contestant("laser", 8, Full())], *arguments, Amount(1, 1, 1, 1), num_warm_up=1)


class Written:
    """Writes one token for each prompt, and records the prompts."""

    def __init__(self):
        self.prompts = []

    def run(self, prompts, batch, max_new_tokens):
        self.prompts += [prompt.tolist() for prompt in prompts]
        return a_pass(1.0, [1] * len(prompts))


def a_pass(wall_s: float, text_tokens: list[int], tree_sizes=((),)) -> Pass:
    texts = tuple((0,) * count for count in text_tokens)
    return Pass(wall_s, sum(text_tokens), 1, texts, text_tokens=tuple(text_tokens), tree_sizes=tree_sizes)


def test_systems_without_a_pool_write_the_first_prompts_in_the_first_repetitions_alone():
    prompts = [np.array([number]) for number in range(4)]
    slow, fast = Contestant("own-text", ADAPTIVE, Written()), Contestant("laser", 8, Written())
    assert Contestant("rrp", ADAPTIVE, Written()).is_slow and not Contestant("resd", ADAPTIVE, Written()).is_slow
    passes = measure([slow, fast], prompts, 1, 8, Amount(3, 4, 2, 1), num_warm_up=0)
    assert slow.runner.prompts == [[0], [1]] and fast.runner.prompts == [[0], [1], [2]] * 4
    assert [len(parts) for parts in passes["laser", 8]] == [3] * 4 and len(passes["own-text", ADAPTIVE]) == 1
    together = measure([fast], prompts, 4, 8, Amount(4, 1, 4, 1), num_warm_up=0)
    assert [len(each.texts) for each in together["laser", 8][0]] == [4]


def test_an_adaptive_budget_that_is_a_fixed_one_is_measured_as_that():
    def contestant(system, budget, size, least):
        return Contestant(system, budget, None, Budget(size, least))

    fixed = [contestant("laser", 8, 8, 0.07), contestant("laser", 16, 16, 0.07), contestant("resd", 16, 16, 0.07)]
    plain = Contestant(PLAIN, None, None)
    others = [contestant("resd", ADAPTIVE, 16, 0.15), contestant("crp", ADAPTIVE, 16, 0.07), plain]
    assert twins_of([contestant("laser", ADAPTIVE, 16, 0.07), *others, *fixed]) == {("laser", ADAPTIVE): ("laser", 16)}


def test_a_ratio_is_of_the_prompts_that_both_wrote():
    many = [(a_pass(1.0, [10]), a_pass(100.0, [10])), (a_pass(1.0, [30]),)]
    few = [(a_pass(5.0, [10]),)]
    assert ratios(many, few) == [5.0] and ratios(few, many) == [0.2]


def test_the_best_of_others_is_not_the_luckiest_of_a_repetition():
    own = [(a_pass(1.0, [10]),) for _ in range(4)]
    sound = [(a_pass(1.1, [10]),) for _ in range(4)]
    lucky = [(a_pass(seconds, [10]),) for seconds in (1.2, 0.1, 1.2, 1.2)]
    best, ratio = over_best(own, {8: sound, 32: lucky})
    assert best == 8 and ratio.median == pytest.approx(1.1) and ratio.min == pytest.approx(1.1)
    assert over_best(own[:1], {8: sound[:1], 32: lucky[:1]})[0] == 8


def test_counted_steps_cost_what_their_live_texts_and_trees_do():
    cost = StepCost(
        steps=tuple(
            StepPoint(batch_size=size, num_tokens=number, seconds=size + number * 0.1)
            for size in (1, 2)
            for number in (1, 1000)
        ),
        draft=DraftCost(seconds_per_step=0.5),
    )
    prompts = [np.array([0]), np.array([1]), np.array([2])]
    counted_pass = a_pass(0.0, [2, 3, 2], tree_sizes=((4, 0), (2,), (6,)))
    first, second = 2 + 0.1 * (2 + 6), 2 + 0.1 * (2 + 6)  # a step drafts 4 + 2, and later 6 for the third text
    drafted = counted(cost, 2, [counted_pass], prompts, Budget(8, 0.1))
    expected = np.array([first + second + 1.0, first + 0.5, second + 0.5]) / 2 + 0.1  # 0.1 for the token of the prompt
    assert drafted.seconds == pytest.approx(expected) and drafted.num_tokens.tolist() == [2, 3, 2]
    undrafted = counted(cost, 2, [counted_pass], prompts, None)
    assert undrafted.seconds.sum() == pytest.approx(drafted.seconds.sum() - 1.0)  # two steps draft nothing
    alone = [a_pass(0.0, [2], ((4, 0),)), a_pass(0.0, [3], ((2,),))]
    assert counted(cost, 1, alone, prompts, None).seconds == pytest.approx([2 * 1.1 + 0.4 + 0.1, 1.1 + 0.2 + 0.1])
    three_live = counted(cost, 4, [counted_pass], prompts, None)  # costs are known up to batch size 2
    assert three_live.seconds.sum() == pytest.approx((2 + 0.1 * 2 * 5) + (2 - 1 + 0.1 * 1) + 0.3)


def test_counted_ratios_are_of_the_texts_that_both_wrote():
    first = Counted(np.array([10.0, 10.0, 1.0]), np.array([1.0, 1.0, 9.0]))
    other = Counted(np.array([10.0, 10.0]), np.array([2.0, 2.0]))
    assert first.over(other) == Interval(2.0, 2.0, 2.0)


def test_transformers_drafts_for_one_prompt_at_a_time():
    peers = Peers(SAMPLE_MODEL, "float32", "cpu")
    assert [peer.system for peer in peers.at_batch(1)] == [PEER, LOOKUP, ASSISTED]
    assert [peer.system for peer in peers.at_batch(4)] == [PEER]


def test_a_models_own_first_layers_assist_it(task):
    systems = {peer.system: peer.runner for peer in Peers(SAMPLE_MODEL, "float32", "cpu").at_batch(1)}
    plain, assisted = (systems[name].run(task.held_out[:2], 1, 12) for name in (PEER, ASSISTED))
    assert assisted.texts == plain.texts
    assert assisted.num_drafted > 0 and assisted.num_steps <= plain.num_steps == plain.num_tokens


def test_the_roofline_is_the_slower_of_reading_and_multiplying(engines, task):
    roofline = Roofline(DeviceRates(100.0, 1000.0), 50, 10, weight_bytes=200, bytes_per_token=2)
    roofline.add(num_tokens=1, num_logits=1, num_cached=50)  # reads 300 bytes, multiplies 120 times
    assert roofline.seconds == pytest.approx(3.0)
    roofline.add(num_tokens=100, num_logits=0, num_cached=0)  # reads 200 bytes, multiplies 10,000 times
    assert roofline.seconds == pytest.approx(13.0)
    engine = engines.of_batch(1)
    real = Roofline.of_engine(engine, RATES)
    assert real.num_head_weights == 2400 * 192  # 2,371 tokens, padded to whole strips of 32
    assert real.weight_bytes == 4 * (real.num_body_weights + real.num_head_weights)
    watched = WatchedPlain(engine, RATES)
    runs = [watched.run(task.held_out[:2], 1, 24) for _ in range(2)]
    assert runs[0].texts == runs[1].texts
    least_s = runs[0].num_tokens * real.weight_bytes / RATES.bytes_per_s  # one forward a token, no cache
    counted_s = [share * run.wall_s for share, run in zip(watched.shares, runs, strict=True)]
    assert counted_s[0] == pytest.approx(counted_s[1]) and least_s < counted_s[0] < 2 * least_s


def test_no_pass_finds_its_prompts_computed(engines, task):
    engine = engines.of_batch(4)
    system = EngineSystem.plain(engine)
    fed = []
    forward = engine.runner.forward
    engine.runner.forward = lambda feeds, trees: (
        fed.append(sum(len(feed.chain_ids) for feed in feeds)) or forward(feeds, trees)
    )
    try:
        for forgets in (True, True, False):
            if forgets:
                engine.reset_prefix_cache()
            fed.append(None)
            system.timed(task.held_out, 2)
    finally:
        del engine.runner.forward
    passes = [fed[place + 1] for place, count in enumerate(fed) if count is None]
    assert passes[0] == passes[1] >= len(task.held_out[0]) > passes[2]


def row(system: str, budget, ratio: float, **changes) -> dict:
    spread = Spread.of([ratio])
    own = {"ratio_to_best_fixed": None, "best_fixed": None, "ratio_to_transformers": spread, "roofline_share": 0.7}
    own |= {"max_draft_tokens": 8}
    return {"task": "reki", "batch": 16, "system": system, "budget": budget, "ratio_to_plain": spread} | own | changes


def test_figures_take_the_rows_that_were_asked_for():
    over_fixed = {"best_fixed": 8, "ratio_to_best_fixed": Spread.of([0.97])}
    over_fixed |= {"counted_best_fixed": 16, "counted_to_best_fixed": Interval(0.99, 0.9, 1.1)}
    rows = [
        row(PEER, None, 0.8),
        row(PLAIN, None, 1.0, ratio_to_transformers=Spread.of([1.25])),
        row("laser", ADAPTIVE, 1.6, **over_fixed),
        row("own-text", ADAPTIVE, 0.9, max_draft_tokens=0),
        row("laser", 8, 1.7),
        row("rrp", ADAPTIVE, 0.99),
    ]
    by_name = {figure.name.split(": ")[1]: (figure.measured, figure.met) for figure in figures_of(rows, "cpu")}
    assert by_name == {
        "laser, adaptive, over plain, tokens per second": (1.6, True),
        "laser, adaptive over K=8, the best fixed, tokens per second": (0.97, False),
        "laser, adaptive over K=16, by counted steps": (0.99, True),
        "the slowest system that drafts (rrp) over plain, tokens per second": (0.99, True),
        "plain over transformers-generate, tokens per second": (1.25, False),
    }
    at_64 = [row | {"batch": 64} for row in rows]
    on_gpu = {figure.name: figure.met for figure in figures_of(at_64, "cuda")}
    assert on_gpu["reki, batch 64: laser, adaptive, over plain, tokens per second"] is False
    assert on_gpu["reki, batch 64: plain, share of the roofline"] is False


def test_the_command_measures_the_sample_model_where_no_other_is(run_benchmark, tmp_path, monkeypatch):
    def short(*arguments) -> list[Task]:
        return [replace(task, max_new_tokens=16) for task in tasks_of(*arguments)]

    monkeypatch.setattr(engine_command, "tasks_of", short)
    words = ["--threads", 1, "--device", "cpu", "--model", tmp_path / "none", "--cache", tmp_path / "cache"]
    words += ["--task", "sample-items"]
    content = run_benchmark("engine", "--smoke", *words)
    assert content["model"] == "sample"
    assert {row["system"] for row in content["rows"]} == {PEER, PLAIN, "resd", "laser"}
    assert {row["budget"] for row in content["rows"]} == {None, ADAPTIVE, 8}
    assert next(row for row in content["rows"] if row["system"] == PLAIN)["roofline_share"] > 0
