"""Alternatives in a pool: kept beside the tokens they were nearly written for, and drafted with a share of theirs."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from slow_drafts import ReferenceText, draft_reference

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.query import draft
from laserbatch.retrieval_pools.settings import PoolBuildSettings, PoolSettings

VOCAB_SIZE = 6
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12)


def ids(tokens):
    return np.array(tokens, np.int32)


def pool_of(folder, rows, previous=None, building=None, **options):
    """A pool of (text, group, alternatives) rows."""
    texts = [
        PoolText(ids(text), group, alternatives=None if alternatives is None else ids(alternatives))
        for text, group, alternatives in rows
    ]
    options = PoolSettings(**({"alternatives": True} | options))
    return build_pool(
        texts, folder, side="item", tokenizer_hash="t", model_id="m", settings=options, previous=previous,
        building=building,
    )  # fmt: skip


def paths(nodes):
    """{path of token ids: probability} of (token, parent, probability) rows."""
    found, of_node = {}, []
    for token, parent, probability in nodes:
        path = (*(of_node[parent] if parent >= 0 else ()), int(token))
        of_node.append(path)
        found[path] = float(probability)
    return found


def drafted(pool, context, group=None, **options):
    tree = draft(pool, ids(context), 0, None, group, **{"max_nodes": 64, "use_output": False} | options)
    return paths(zip(tree.token_ids, tree.parents, np.exp(tree.log_acceptance, dtype=np.float64), strict=True))


@st.composite
def texts_with_alternatives(draw):
    rows = []
    for text in draw(st.lists(TOKENS, max_size=10)):
        alternatives = draw(st.none() | st.lists(st.integers(-1, 7), min_size=len(text), max_size=len(text)))
        rows.append((text, draw(st.sampled_from(["a", "b"])), alternatives))
    return rows


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=texts_with_alternatives(),
    output=TOKENS,
    previous=st.none() | TOKENS,
    group=st.sampled_from([None, "a", "unknown"]),
    scope=st.sampled_from(["side", "group"]),
    weight=st.sampled_from([0.1, 0.5, 0.9]),
    max_match=st.integers(1, 14),
    num_lengths=st.integers(1, 5),
)
def test_query_drafts_alternatives_as_the_reference_does(
    tmp_path_factory, rows, output, previous, group, scope, weight, max_match, num_lengths
):
    folder = tmp_path_factory.mktemp("pool") / "p"
    pool = pool_of(
        folder, rows, alternative_weight=weight, scope=scope, max_match_tokens=max_match,
        num_context_lengths=num_lengths, num_samples=10_000, num_group_samples=10_000,
    )  # fmt: skip
    call = {"max_nodes": 64, "min_probability": 0.01, "end_token_id": 99}
    tree = draft(pool, ids(output), 0, None if previous is None else ids(previous), group, **call)
    found = paths(zip(tree.token_ids, tree.parents, np.exp(tree.log_acceptance, dtype=np.float64), strict=True))
    texts = [ReferenceText(text, group, alternatives=alternatives) for text, group, alternatives in rows]
    reference = draft_reference(texts, pool.settings, [], output, previous, group, **call)
    expected = paths((node.token_id, node.parent, node.probability) for node in reference)
    assert len(found) == len(expected)
    least = min(expected.values(), default=0.0)
    for path, probability in expected.items():
        if path not in found:  # one of several that are equally likely was cut off
            assert math.isclose(probability, least, rel_tol=1e-6)
            continue
        assert math.isclose(found[path], probability, rel_tol=1e-5)


def test_a_runner_up_is_drafted_beside_what_was_written(tmp_path):
    rows = [([1, 2, 3], "", [-1, 5, -1])] * 4
    without = drafted(pool_of(tmp_path / "without", rows, alternatives=False), [1], min_probability=0)
    half = drafted(pool_of(tmp_path / "half", rows, alternative_weight=0.5), [1], min_probability=0)
    quarter = drafted(pool_of(tmp_path / "quarter", rows, alternative_weight=0.25), [1], min_probability=0)
    assert (5,) not in without and set(without) < set(half)
    assert half[2,] == without[2,]  # only what would be left to shorter contexts is given away
    assert half[5,] == pytest.approx(2 * quarter[5,], rel=1e-5)


def test_a_runner_up_leads_on_to_what_others_wrote_behind_it(tmp_path):
    rows = [([1, 2, 3], "", [-1, 5, -1])] * 4 + [([5, 7], "", None)] * 4
    assert (5, 7) not in drafted(pool_of(tmp_path / "p", rows), [1], min_probability=0)  # nobody wrote 1 5
    rows += [([1, 5, 7], "", None)]
    assert (5, 7) in drafted(pool_of(tmp_path / "q", rows), [1], min_probability=0)


def test_texts_without_recorded_alternatives_draft_as_ever(tmp_path):
    rows = [([1, 2, 3, 1, 2], "a", None), ([1, 4], "b", [-1, -1])]
    on, off = pool_of(tmp_path / "on", rows), pool_of(tmp_path / "off", rows, alternatives=False)
    for context in ([], [1], [1, 2]):
        assert drafted(on, context, "a") == drafted(off, context, "a")


def test_the_array_is_there_only_when_asked_for(tmp_path):
    rows = [([1, 2], "", [4, -1]), ([3], "", None)]
    pool_of(tmp_path / "on", rows)
    pool_of(tmp_path / "off", rows, alternatives=False)
    on, off = (Pool.open(tmp_path / name, verify=True) for name in ("on", "off"))
    assert on.index.alternatives.tolist() == [-1, 4, -1, -1, -1, -1]
    assert on.index.alternatives.dtype == np.int32 and not on.index.alternatives.flags.writeable
    assert off.index.alternatives is None and not (tmp_path / "off" / "alternatives.npy").exists()
    with pytest.raises(PoolError, match="alternatives is fixed"):
        off.with_settings(alternatives=True)
    assert on.with_settings(alternative_weight=0.5).settings.alternative_weight == 0.5


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_alternatives_are_tonights_where_the_order_is_an_older_pools(tmp_path):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 9, 12) for _ in range(30)]
    alternatives = [None if k % 3 == 0 else rng.integers(-1, 9, 12) for k in range(30)]
    others = [rng.integers(-1, 9, 12) if k % 2 else alternatives[k] for k in range(30)]
    before = pool_of(tmp_path / "before", [(text, "", other) for text, other in zip(texts, others, strict=True)])
    today = [(text, "", row) for text, row in zip(texts, alternatives, strict=True)]
    pool_of(tmp_path / "merged", today, previous=before)
    pool_of(tmp_path / "full", today)
    assert files(tmp_path / "merged") == files(tmp_path / "full") != files(tmp_path / "before")
    without = pool_of(tmp_path / "without", today, alternatives=False)
    pool_of(tmp_path / "now with", today, previous=without)
    assert files(tmp_path / "now with") == files(tmp_path / "full")


def test_texts_that_a_full_pool_keeps_bring_their_alternatives(tmp_path):
    rng = np.random.default_rng(1)
    rows = [(rng.integers(0, 9, 12), "", rng.integers(-1, 9, 12)) for _ in range(30)]
    full = pool_of(tmp_path / "p", rows, building=PoolBuildSettings(max_tokens=120))
    laid = zip(full.index.tokens[:-1].reshape(-1, 13), full.index.alternatives[:-1].reshape(-1, 13), strict=True)
    kept = {(tuple(text[1:]), tuple(alternatives[1:])) for text, alternatives in laid}
    assert len(kept) == 10 and kept < {(tuple(text), tuple(alternatives)) for text, _, alternatives in rows}
    assert not (tmp_path / "p" / "scratch").exists()


def test_a_runner_up_of_one_entity_is_never_drafted_where_support_is_asked_for():
    with pytest.raises(ValidationError, match=r"min_support is 2.*Turn one of them off"):
        PoolSettings(alternatives=True, min_support=2)


@pytest.mark.parametrize("wrong", [[1], [1, 2, 3], [[1, 2]], [0.5, 0.5], [1, 2**31], [1, -2]])
def test_alternatives_that_do_not_fit_their_text_are_refused(tmp_path, wrong):
    texts = [PoolText(ids([1, 2]), alternatives=np.array(wrong))]
    with pytest.raises(PoolError, match=r"text 0 (has|is not)"):
        build_pool(
            texts, tmp_path / "p", side="item", tokenizer_hash="t", model_id="m",
            settings=PoolSettings(alternatives=True),
        )  # fmt: skip
