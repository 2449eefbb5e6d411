"""Chains: the best of all paths that could be drafted, against a search of every path."""

from dataclasses import replace

import numpy as np
import pytest
from drafts import draft_batch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow_drafts import ReferenceText, best_chain, draft_reference
from test_query import cases, ids, paths, pool_of

from laserbatch.retrieval_pools.drafting.estimate import CURVES_SHAPE
from laserbatch.retrieval_pools.drafting.state import MAX_NODES

EVERY_NODE = 1 << 20


def chain_of(pool, context, num_prompt=0, previous=None, group=None, max_tokens=8, **options):
    (chain,) = draft_batch(
        pool, [ids(context)], [num_prompt], [previous], [group], max_nodes=max_tokens, as_chains=True, **options
    )
    assert chain.parents.tolist() == list(range(-1, len(chain) - 1))
    return chain


def worth_of(chain) -> float:
    """The worth of a chain, as in `slow_drafts.best_chain`."""
    return float(np.exp(chain.log_acceptance, dtype=np.float64) @ 0.5 ** np.arange(len(chain)))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), max_tokens=st.integers(1, 9))
def test_a_chain_is_the_best_of_all_paths(tmp_path_factory, case, max_tokens):
    texts, options, prompt, output, previous, group, call, curves = case
    rows, groups, entities = zip(*texts, strict=True) if texts else ((), (), ())
    pool = pool_of(tmp_path_factory.mktemp("pool") / "p", rows, options, groups, entities)
    pool = pool if curves is None else replace(pool, curves=curves)
    call = {name: value for name, value in call.items() if name not in ("max_nodes", "max_depth")}
    own = None if previous is None else ids(previous)
    chain = chain_of(pool, prompt + output, len(prompt), own, group, max_tokens, **call)
    assert len(chain) <= max_tokens
    nodes = {
        most: draft_reference(
            [ReferenceText(*text) for text in texts], options, prompt, output, previous, group,
            max_nodes=most, max_depth=max_tokens, curves=pool.curves, **call,
        )
        for most in (MAX_NODES, EVERY_NODE)
    }  # fmt: skip
    expected, most = best_chain(nodes[EVERY_NODE])
    assert worth_of(chain) <= most * (1 + 1e-5)
    assert worth_of(chain) >= best_chain(nodes[MAX_NODES])[1] * (1 - 1e-5)
    if len(nodes[EVERY_NODE]) <= MAX_NODES and chain.token_ids.tolist() != expected:
        assert worth_of(chain) == pytest.approx(most, rel=1e-5)  # another chain of equal worth
        known = paths((node.token_id, node.parent, node.probability, node.source) for node in nodes[EVERY_NODE])
        assert tuple(chain.token_ids.tolist()) in known


def test_a_chain_need_not_begin_with_the_likeliest_token(tmp_path):
    ways = [[1, 2, 10 + k, 20 + k] for k in range(6)] + [[1, 3, 4, 5, 6]] * 5  # 2 is likelier, but has many successors
    pool = pool_of(tmp_path / "p", ways)
    (tree,) = draft_batch(pool, [ids([1])], [0])
    assert tree.token_ids[0] == 2
    assert chain_of(pool, [1]).token_ids.tolist() == [3, 4, 5, 6]
    assert chain_of(pool, [1], max_tokens=1).token_ids.tolist() == [2]  # the best chain of one token


def test_limits_of_a_chain_hold(tmp_path):
    pool = pool_of(tmp_path / "p", [list(range(1, 40))] * 4)
    assert chain_of(pool, [1], max_tokens=0).token_ids.tolist() == []
    assert chain_of(pool, [1], max_tokens=5).token_ids.tolist() == [2, 3, 4, 5, 6]
    (short,) = draft_batch(pool, [ids([1])], [0], max_depths=[3], max_nodes=8, as_chains=True)
    assert short.token_ids.tolist() == [2, 3, 4]
    half = replace(pool, curves=np.full(CURVES_SHAPE, 0.5, np.float32))
    assert len(chain_of(half, [1], min_acceptance=0.2)) == 2  # 0.5, 0.25
    num_drafted, tokens, parents, _, _ = draft_batch(pool, [ids([1])] * 2, [0, 0], max_nodes=2, as_chains=True).joined()
    assert (num_drafted.tolist(), tokens.tolist(), parents.tolist()) == ([2, 2], [2, 3, 2, 3], [-1, 0, -1, 0])
