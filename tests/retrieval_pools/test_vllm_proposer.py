"""Drafts of vLLM's proposer for a batch, called as vLLM does; `test_in_vllm` runs the engine itself."""

import json
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from test_query import ids

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.manifest import tokenizer_hash
from laserbatch.retrieval_pools.index.store import PoolStore
from laserbatch.retrieval_pools.integrations.vllm import (
    SETTINGS_VARIABLE,
    PoolProposer,
    ProposerSettings,
    read_step_cost,
    worth_drafting,
)
from laserbatch.retrieval_pools.integrations.vllm_steps import speculative_config
from laserbatch.retrieval_pools.routing.route_table import RouteTable, write_routes

TEXT = [1, 2, 3, 4, 5, 6, 7, 8]
FREE = {1: 1.0, 4: 1.0, 9: 1.0}  # number of tokens of a step -> its seconds
DEAR = {1: 1.0, 2: 1.95, 9: 9.0}


def cost_file(path, seconds):
    steps = [{"batch_size": 1, "num_tokens": tokens, "seconds": time} for tokens, time in seconds.items()]
    path.write_text(json.dumps({"steps": steps}))
    return path


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A pool, a model folder with its tokenizer, and a settings file."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with PoolStore(tmp_path / "pools").publish("v1") as folder:
        rows = [PoolText(ids(TEXT), "a")] * 4 + [PoolText(ids([1, 9, 9, 9]), "b")] * 4
        names = {"tokenizer_hash": tokenizer_hash(tmp_path / "model"), "model_id": "m"}
        build_pool(rows, folder / "user", side="user", **names)
    monkeypatch.setenv(SETTINGS_VARIABLE, str(tmp_path / "drafts.json"))
    return tmp_path


def write_settings(world, **settings):
    (world / "drafts.json").write_text(json.dumps({"pools": "pools", "side": "user"} | settings))


def proposer(world, k=4, **settings):
    write_settings(world, **settings)
    return PoolProposer(vllm_config(world, k))


def vllm_config(world, k):
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(world / "model"), tokenizer=None, max_model_len=32),
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )


def step(proposing, rows, num_sampled):
    """Call `propose` for rows with these tokens."""
    tokens = np.zeros((len(rows), 32), np.int32)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
    sampled = [row[len(row) - number :] for row, number in zip(rows, num_sampled, strict=True)]
    return proposing.propose(sampled, np.array([len(row) for row in rows]), tokens, slot_mappings=None)


def test_rows_are_drafted_for_and_their_texts_known_again_wherever_they_move(world):
    proposing = proposer(world)
    # the prompt of the second row is not read completely
    assert step(proposing, [[30, 31, 1], [40]], [1, 0]) == [[2, 3, 4, 5], []]
    first = step(proposing, [[30, 31, 1, 2], [40, 41, 1]], [1, 1])
    assert first[0] == [3, 4, 5, 6]
    assert proposing.num_started == 2
    moved = step(proposing, [[40, 41, 1, 2], [30, 31, 1, 2, 3, 4]], [1, 2])
    assert moved == [[3, 4, 5, 6], [5, 6, 7, 8]]
    assert proposing.num_started == 2 and proposing.num_failed == 0
    assert (proposing.num_drafted, proposing.num_accepted) == (4 + 4 + 4, 0 + 1 + 0)
    step(proposing, [[50, 1]], [1])
    again = step(proposing, [[30, 31, 1, 2, 3, 4, 5]], [1])  # the row was absent for a step
    assert again == [[6, 7, 8]] and proposing.num_started == 3


def test_groups_and_previous_texts_are_found_by_the_prompt(world):
    routes = [(ids([30, 31]), "a", None), (ids([30, 32]), "b", None), (ids([30, 33]), None, ids([1, 7, 7, 7]))]
    write_routes(world / "routes.parquet", routes)
    assert len(RouteTable(world / "routes.parquet")) == 3
    proposing = proposer(world, routes="routes.parquet")
    drafts = step(proposing, [[30, 31, 1], [30, 32, 1], [30, 33, 1]], [1, 1, 1])
    assert [draft[0] for draft in drafts] == [2, 9, 7]


def test_several_pools_serve_one_engine_and_routes_are_replaced_under_it(world):
    with PoolStore(world / "items").publish("v1") as folder:
        names = {"tokenizer_hash": tokenizer_hash(world / "model"), "model_id": "m"}
        build_pool([PoolText(ids([1, 4, 4, 4, 4]))] * 4, folder / "item", side="item", **names)
    write_routes(world / "users.parquet", [(ids([30, 31]), "a", None)])
    write_routes(world / "items.parquet", [])
    both = [
        {"pools": "pools", "side": "user", "routes": "users.parquet"},
        {"pools": "items", "side": "item", "routes": "items.parquet"},
    ]
    (world / "drafts.json").write_text(json.dumps(both))
    proposing = PoolProposer(vllm_config(world, 4))
    assert step(proposing, [[30, 31, 1], [40, 1]], [1, 1])[0] == [2, 3, 4, 5]
    write_routes(world / "new.parquet", [(ids([50]), None, None)])
    (world / "new.parquet").replace(world / "items.parquet")
    drafts = step(proposing, [[50, 1], [30, 31, 1, 2], [51, 1]], [1, 1, 1])
    assert drafts[:2] == [[4, 4, 4, 4], [3, 4, 5, 6]] and drafts[2][0] != 4, "whom no routes know is of the first pool"
    assert proposing.num_failed == 0


def test_nothing_is_drafted_where_it_costs_more_than_it_gains(world):
    cost_file(world / "free.json", FREE)
    cost_file(world / "dear.json", DEAR)
    rows = [[30, 31, 1, 2]]
    assert step(proposer(world, step_cost="free.json"), rows, [1]) == [[3, 4, 5, 6]]
    assert step(proposer(world, step_cost="dear.json"), rows, [1]) == [[]]


def test_estimates_that_do_not_hold_are_believed_less(world):
    cost_file(world / "cost.json", {1: 1.0, 9: 2.0})  # a draft token must be right once in eight times
    proposing = proposer(world, step_cost="cost.json")
    text, num_drafts = [30, 31, 1, 2], 0
    for number in range(200):  # no draft is ever right
        rows = [[60 + number, *text[1:]]]
        num_drafts += bool(step(proposing, rows, [1])[0])
        step(proposing, [[*rows[0], 20]], [1])
    assert 0 < num_drafts < 200
    assert proposing.num_accepted == 0


def test_chains_are_cut_so_that_most_tokens_are_written_a_second(world):
    rng = np.random.default_rng(0)
    cost = read_step_cost(cost_file(world / "cost.json", {1: 1.0, 2: 1.3, 5: 1.5, 9: 4.0}))
    for _ in range(50):
        lengths = rng.integers(0, 4, 3)
        chains = [np.sort(rng.random(length))[::-1] for length in lengths]
        lengths_worth = worth_drafting(np.concatenate(chains), np.repeat(np.arange(3), lengths), 3, cost)

        def speed(cuts, chains=chains):
            written = 3 + sum(chain[:cut].sum() for chain, cut in zip(chains, cuts, strict=True))
            return written / float(cost.seconds_between(3, np.array(sum(cuts))))

        every = np.ndindex(*(lengths + 1))
        assert speed(lengths_worth.tolist()) == pytest.approx(max(speed(cuts) for cuts in every))


def test_costs_of_batches_between_those_measured_lie_between_them(world):
    steps = [(1, 1, 1.0), (1, 3, 2.0), (4, 4, 2.0), (4, 12, 6.0)]
    costs = [dict(zip(("batch_size", "num_tokens", "seconds"), step_values, strict=True)) for step_values in steps]
    (world / "cost.json").write_text(json.dumps({"steps": costs}))
    cost = read_step_cost(world / "cost.json")
    assert cost.seconds_between(1, np.array([0, 1, 2, 4])).tolist() == [1.0, 1.5, 2.0, 3.0]
    assert cost.seconds_between(4, np.array([0, 8])).tolist() == [2.0, 6.0]
    assert 1.0 < float(cost.seconds_between(2, np.array(0))) < 2.0
    assert float(cost.seconds_between(16, np.array(32))) == 6.0  # beyond the measured sizes, the cost stays constant


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([], "steps: .*at least 1 item"),
        ([(1, 1, 1.0)], "batch_size 1 has one point"),
        ([(1, 1, 1.0), (1, 1, 2.0)], "batch_size 1 has two points of the same num_tokens"),
        ([(1, 1, 1.0), (1, 2, "slow")], r"steps.1.seconds: .* \(found slow\)"),
        ([(0, 1, 1.0), (0, 2, 1.0)], r"steps.0.batch_size: .* greater than or equal to 1 \(found 0\)"),
        ([(1, 1, 1.0), (1, 2, -1.0)], r"steps.1.seconds: .* greater than 0 \(found -1.0\)"),
    ],
)
def test_a_step_cost_that_is_none_is_refused_by_its_key(world, steps, sentence):
    costs = [dict(zip(("batch_size", "num_tokens", "seconds"), step_values, strict=True)) for step_values in steps]
    (world / "cost.json").write_text(json.dumps({"steps": costs}))
    with pytest.raises(PoolError, match=rf"cost.json is not a step cost \(.*{sentence}.*measures one"):
        read_step_cost(world / "cost.json")


def test_a_draft_that_fails_is_none_and_logged_once(world, caplog):
    proposing = proposer(world)
    proposing._pools = None
    for _ in range(3):
        assert step(proposing, [[30, 31, 1]], [1]) == [[]]
    assert proposing.num_failed == 3
    assert len([record for record in caplog.records if "a draft failed" in record.message]) == 1


def test_no_draft_exceeds_the_longest_text(world):
    proposing = proposer(world)
    assert step(proposing, [[30] * 29 + [1, 2]], [1]) == [[3]]
    assert step(proposing, [[30] * 30 + [1, 2]], [1]) == [[]]


def test_what_is_missing_or_of_another_tokenizer_is_said_before_anything_loads(world, monkeypatch):
    write_settings(world, version="v2")
    for change, sentence in (
        ({"version": "v2"}, "there are no pools 'v2'"),
        ({"side": "item"}, "no pool of the side 'item'"),
        ({"routes": "gone.parquet"}, "route table .* cannot be read"),
        ({"step_cost": "gone.json"}, "not a step cost .* measures one"),
        ({"pool": "pools"}, "does not say what to draft from: 0.pool: Extra inputs"),
        ({"side": "users"}, r"0.side: .*'item' \(found users\)"),
        ({"min_acceptance": 5}, r"0.min_acceptance: .* equal to 1 \(found 5\)"),
    ):
        with pytest.raises(PoolError, match=sentence):
            proposer(world, **change)
    entries = [{"pools": "pools", "side": "user", "min_acceptance": value} for value in (0.1, 0.1, 0.2)]
    (world / "drafts.json").write_text(json.dumps(entries))
    with pytest.raises(PoolError, match=r"min_acceptance is 0\.2 in entry 2 and 0\.1 in entry 0"):
        ProposerSettings.read()
    write_settings(world)
    (world / "model" / "tokenizer.json").write_text("{ }")
    with pytest.raises(PoolError, match=r"was built with the tokenizer \w{12} \(model .*\); expected \w{12}, because"):
        proposer(world)
    (world / "drafts.json").unlink()
    with pytest.raises(PoolError, match="does not say what to draft from"):
        ProposerSettings.read()
    monkeypatch.delenv(SETTINGS_VARIABLE)
    with pytest.raises(PoolError, match=f"{SETTINGS_VARIABLE} is not set"):
        ProposerSettings.read()


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_a_sentence_says_so(world):
    with pytest.raises(PoolError, match="vLLM is not installed"):
        speculative_config(world / "model")
