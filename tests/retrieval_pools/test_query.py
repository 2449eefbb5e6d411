"""The compiled query against its slow reference, and its further promises."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
from drafts import draft, draft_batch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow_drafts import ReferenceText, draft_reference, node_kind, token_kind

from laserbatch.retrieval_pools.draft import SHARE
from laserbatch.retrieval_pools.drafting.estimate import (
    CURVES_SHAPE,
    IN_OUTPUT,
    IN_PROMPT,
    NUM_OWN_TOKENS,
    NUM_PLACES,
)
from laserbatch.retrieval_pools.drafting.tree import draft_trees
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.pool import EMPTY_POOL, Pool
from laserbatch.retrieval_pools.settings import DraftSettings
from laserbatch.retrieval_pools.sources import SOURCE_OUTPUT, SOURCE_POOL, SOURCE_PREVIOUS, SOURCE_PROMPT

VOCAB_SIZE = 6
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12)
GROUPS = st.sampled_from(["a", "b", "c"])


def pool_of(folder, texts, settings=None, groups=None, entities=None):
    """A pool of lists of token ids."""
    groups = [""] * len(texts) if groups is None else groups
    entities = [None] * len(texts) if entities is None else entities
    rows = [
        PoolText(np.array(text, np.int32), group, entity)
        for text, group, entity in zip(texts, groups, entities, strict=True)
    ]
    return build_pool(rows, folder, side="item", tokenizer_hash="t", model_id="m", settings=settings)


def ids(tokens):
    return np.array(tokens, np.int32)


def paths(nodes):
    """{path of token ids: (probability, source)}, from rows of (token, parent, probability, source)."""
    by_path, of_node = {}, []
    for token, parent, probability, source in nodes:
        path = (*(of_node[parent] if parent >= 0 else ()), int(token))
        of_node.append(path)
        assert path not in by_path
        by_path[path] = (probability, int(source))
    return by_path


def rows_of(tree):
    return list(
        zip(tree.token_ids, tree.parents, np.exp(tree.log_acceptance, dtype=np.float64), tree.source, strict=True)
    )


@st.composite
def cases(draw):
    texts = draw(st.lists(st.tuples(TOKENS, GROUPS, st.integers(0, 4)), max_size=12))
    options = DraftSettings(
        scope=draw(st.sampled_from(["side", "group"])),
        group_weight=draw(st.sampled_from([1.0, 3.0, 2.5])),
        index_depth=draw(st.sampled_from([16, 32])),
        min_support=draw(st.sampled_from([1, 2, 3])),
        max_match_tokens=draw(st.integers(1, 14)),
        num_context_lengths=draw(st.integers(1, 5)),
        num_samples=10_000,
        pool_escape_per_token=draw(st.sampled_from([None, 0.5, 2.0, 20.0])),
    )
    call = {
        "max_nodes": draw(st.integers(0, 64)),
        "min_acceptance": draw(st.sampled_from([0.0, 0.01, 0.1])),
        "use_prompt": draw(st.booleans()),
        "use_output": draw(st.booleans()),
        "use_previous": draw(st.booleans()),
        "max_depth": draw(st.sampled_from([0, 1, 3, 64])),
    }
    previous = draw(st.none() | TOKENS)
    group = draw(st.sampled_from([None, "a", "b", "unknown"]))
    seed = draw(st.sampled_from([None, 0, 1, 2]))  # None: identity curves
    curves = None if seed is None else np.sort(np.random.default_rng(seed).random(CURVES_SHAPE, np.float32))
    return texts, options, draw(TOKENS), draw(TOKENS), previous, group, call, curves


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_query_drafts_what_the_reference_drafts(tmp_path_factory, case):
    *case, curves = case
    texts, options, prompt, output, previous, group, call = case
    rows, groups, entities = zip(*texts, strict=True) if texts else ((), (), ())
    pool = pool_of(tmp_path_factory.mktemp("pool") / "p", rows, options, groups, entities)
    if curves is not None:
        pool = replace(pool, curves=curves)
    tree = draft(pool, ids(prompt + output), len(prompt), None if previous is None else ids(previous), group, **call)
    reference = draft_reference(
        [ReferenceText(*text) for text in texts], options, prompt, output, previous, group, curves=pool.curves, **call
    )
    drafted = paths(rows_of(tree))
    expected = paths((n.token_id, n.parent, n.probability, n.source) for n in reference)
    assert len(drafted) == len(expected)
    least = min((probability for probability, _ in expected.values()), default=0.0)
    for path, (probability, source) in expected.items():
        if path not in drafted:  # cut off among equally likely ones
            assert math.isclose(probability, least, rel_tol=1e-6)
            continue
        assert math.isclose(drafted[path][0], probability, rel_tol=1e-5)
        assert drafted[path][1] == source or _is_tie(case, source, drafted[path][1])
    probabilities = [row[2] for row in rows_of(tree)]
    assert (np.diff(probabilities) <= 1e-6).all()


def _is_tie(case, first, second):
    """Whether the shares of two sources may differ only by rounding."""
    return {first, second} <= {SOURCE_PREVIOUS, SOURCE_PROMPT, SOURCE_OUTPUT, SOURCE_POOL} and (
        case[1].pool_escape_per_token or 1.0
    ) <= 2.0


def test_a_draft_says_where_its_tokens_stand_and_how_frequent_they_are(tmp_path):
    pool = pool_of(tmp_path / "p", [[1, 2, 3], [1, 4], [1, 5]])
    tree = draft(pool, ids([4, 9, 5, 1]), 2, min_acceptance=0)  # prompt 4 9, output 5 1
    kinds = dict(zip(tree.token_ids.tolist(), (tree.kind // NUM_PLACES).tolist(), strict=True))
    assert kinds == {
        2: token_kind(0, 1, 10), 3: token_kind(0, 1, 10), 4: token_kind(IN_PROMPT, 1, 10),
        5: token_kind(IN_OUTPUT, 1, 10),
    }  # fmt: skip
    without = draft(pool, ids([4, 9, 5, 1]), 2, min_acceptance=0, use_prompt=False, use_output=False)
    assert set((without.kind // NUM_PLACES).tolist()) == {token_kind(0, 1, 10)}
    own = draft(None, ids([7, 8, 8, 7]), 3)
    assert own.token_ids.tolist() == [8, 8]
    assert own.kind.tolist() == [node_kind(token_kind(IN_PROMPT, 0, 0), 1, depth) for depth in (0, 1)]


def test_a_draft_says_how_often_contexts_were_seen_and_how_deep_it_is(tmp_path):
    pool = pool_of(tmp_path / "p", [[1, 2, 3, 4]] * 40 + [[1, 5, 6]] * 3)
    tree = draft(pool, ids([9, 1]), 1, min_acceptance=0)
    of_places = dict(zip(tree.token_ids.tolist(), (tree.kind % NUM_PLACES).tolist(), strict=True))
    expected = {2: (43, 0), 5: (43, 0), 3: (40, 1), 4: (40, 2), 6: (3, 1)}
    assert of_places == {token: node_kind(0, *seen_and_depth) for token, seen_and_depth in expected.items()}


def test_a_kind_of_token_that_is_worth_more_comes_first(tmp_path):
    pool = pool_of(tmp_path / "p", [[1, 2], [1, 2], [1, 4]])
    context, num_prompt = ids([4, 1]), 1
    assert draft(pool, context, num_prompt, min_acceptance=0).token_ids.tolist() == [2, 4]
    curves = np.full(CURVES_SHAPE, 0.1, np.float32)
    of_token = token_kind(IN_PROMPT, 1, 9) * NUM_PLACES
    curves[:, of_token : of_token + NUM_PLACES] = 0.9
    tree = draft(replace(pool, curves=curves), context, num_prompt, min_acceptance=0)
    assert tree.token_ids.tolist() == [4, 2]
    assert np.allclose(np.exp(tree.log_acceptance), [0.9, 0.1])


@pytest.mark.parametrize("num_later", [NUM_OWN_TOKENS - 2, NUM_OWN_TOKENS - 1, 2 * NUM_OWN_TOKENS])
def test_tokens_are_looked_for_in_the_latest_of_prompt_and_output(tmp_path, num_later):
    texts = [[1, 2], [1, 3]]
    pool = pool_of(tmp_path / "p", texts)
    prompt = [2, *range(1000, 1000 + num_later)]
    output = [3, *range(5000, 5000 + num_later), 1]
    tree = draft(pool, ids(prompt + output), len(prompt), min_acceptance=0)
    kinds = dict(zip(tree.token_ids.tolist(), tree.kind.tolist(), strict=True))
    assert kinds[2] // NUM_PLACES == token_kind(IN_PROMPT if num_later < NUM_OWN_TOKENS else 0, 1, 6)
    assert kinds[3] // NUM_PLACES == token_kind(IN_OUTPUT if num_later + 1 < NUM_OWN_TOKENS else 0, 1, 6)
    reference = draft_reference(
        [ReferenceText(text, "") for text in texts], DraftSettings(), prompt, output, None, None, max_nodes=16,
        min_acceptance=0.0,
    )  # fmt: skip
    assert {node.token_id: node.kind for node in reference} == kinds


def test_no_pool_drafts_from_own_texts_with_their_sources(tmp_path):
    tree = draft(None, ids([7, 8, 9, 5, 7]), 3)  # prompt 7 8 9, output 5 7
    assert tree.token_ids.tolist() == [8, 9]
    assert tree.source.tolist() == [SOURCE_PROMPT, SOURCE_PROMPT]
    assert draft(None, ids([0, 4, 5, 4]), 1).source.tolist() == [SOURCE_OUTPUT, SOURCE_OUTPUT]


def test_previous_text_is_drafted_from_its_beginning():
    previous = [3, 1, 4, 1, 5, 9, 2, 6]
    tree = draft(None, ids([7, 7]), 2, ids(previous))
    assert tree.token_ids.tolist() == previous[: len(tree)]
    assert len(tree) >= 4
    assert set(tree.source.tolist()) == {SOURCE_PREVIOUS}


def test_text_never_runs_into_the_next_one(tmp_path):
    pool = pool_of(tmp_path / "p", [[1, 2], [3, 4], [1, 2], [3, 4]])
    assert draft(pool, ids([1]), 0, min_acceptance=0).token_ids.tolist() == [2]
    assert len(draft(pool, ids([1, 2]), 0, min_acceptance=0)) == 0  # the text always ends here
    assert len(draft(pool, ids([2, 3]), 0, min_acceptance=0).token_ids) == 1  # 4 follows 3; "2 3" is in no text


def test_group_is_preferred_and_wall_excludes_the_others(tmp_path):
    texts, groups = [[1, 2]] * 2 + [[1, 3]], ["a", "a", "b"]
    pool = pool_of(tmp_path / "p", texts, groups=groups)
    assert draft(pool, ids([1]), 0, None, "a").token_ids.tolist() == [2, 3]
    assert draft(pool, ids([1]), 0, None, "b").token_ids.tolist() == [3, 2]
    assert draft(pool, ids([1]), 0, None, "unknown").token_ids.tolist() == [2, 3]
    walled = pool.with_settings(scope="group")
    assert draft(walled, ids([1]), 0, None, "b").token_ids.tolist() == [3]
    assert len(draft(walled, ids([1]), 0, None, "unknown")) == 0
    assert draft(walled, ids([1]), 0, None, None).token_ids.tolist() == [2, 3]


def test_equally_likely_tokens_come_in_the_order_of_their_ids(tmp_path):
    pool = pool_of(tmp_path / "p", [[9, 5], [9, 2], [9, 7], [9, 3]])
    assert draft(pool, ids([9]), 0, min_acceptance=0).token_ids.tolist() == [2, 3, 5, 7]
    assert draft(pool, ids([9]), 0, max_nodes=2, min_acceptance=0).token_ids.tolist() == [2, 3]


def test_limits_hold(tmp_path):
    rng = np.random.default_rng(0)
    pool = pool_of(tmp_path / "p", [rng.integers(0, 40, 30).tolist() for _ in range(300)])
    for max_nodes in (0, 1, 16, 64):
        tree = draft(pool, ids([1, 2]), 1, max_nodes=max_nodes, min_acceptance=0)
        assert len(tree) == max_nodes
        assert (tree.parents < np.arange(max_nodes)).all()
    tree = draft(pool, ids([1, 2]), 1, max_nodes=64, min_acceptance=0, max_depth=1)
    assert len(tree) > 16 and (tree.parents == -1).all()
    tree = draft(pool, ids([1, 2]), 1, max_nodes=64, min_acceptance=0.02)
    assert 0 < len(tree) < 64
    assert (np.exp(tree.log_acceptance) >= 0.0199).all()
    assert (tree.log_acceptance.dtype, tree.source.dtype) == (np.float32, np.int32)
    with pytest.raises(ValueError, match="max_nodes is 65"):
        draft(pool, ids([1]), 0, max_nodes=65)
    with pytest.raises(ValueError, match="num_prompt is 3"):
        draft(pool, ids([1]), 3)


def test_sampling_keeps_the_probabilities_of_a_large_interval(tmp_path):
    rng = np.random.default_rng(0)
    texts = [[1, int(token)] for token in rng.choice([2, 3, 4], 3000, p=[0.6, 0.3, 0.1])]
    pool = pool_of(tmp_path / "p", texts, groups=[f"g{k % 5}" for k in range(3000)])
    for group, scope in ((None, "side"), ("g1", "side"), ("g1", "group")):
        sampled = pool.with_settings(num_samples=64 if scope == "side" else 256, scope=scope)
        exact = pool.with_settings(num_samples=10_000, scope=scope)
        approximate, other = draft(sampled, ids([1]), 0, None, group), draft(exact, ids([1]), 0, None, group)
        assert approximate.token_ids.tolist() == other.token_ids.tolist() == [2, 3, 4]
        np.testing.assert_allclose(np.exp(approximate.log_acceptance), np.exp(other.log_acceptance), atol=0.03)


def test_fewer_samples_behind_unlikely_paths_keep_the_probability_of_every_path(tmp_path):
    rng = np.random.default_rng(0)
    first, second = rng.choice([2, 3, 4], 3000, p=[0.7, 0.25, 0.05]), rng.choice([5, 6], 3000, p=[0.7, 0.3])
    pool = pool_of(tmp_path / "p", [[1, int(a), int(b), int(b) + 2] for a, b in zip(first, second, strict=True)])
    sampled, exact = (
        draft(pool.with_settings(num_samples=number), ids([1]), 0, max_nodes=15, min_acceptance=0)
        for number in (256, 200_000)
    )
    actual, expected = paths(rows_of(sampled)), paths(rows_of(exact))
    assert actual.keys() == expected.keys() == {(a, *b) for a in (2, 3, 4) for b in ((), (5,), (6,), (5, 7), (6, 8))}
    assert actual != expected
    for path, (probability, _) in actual.items():
        assert abs(probability - expected[path][0]) < 0.03


@pytest.mark.parametrize("wrong", [[], [-1], [-1, -1], [1, -1], [-7, 1], [1_000_000], [2**31 - 1, 1]])
def test_ids_that_the_pool_does_not_know_are_no_match(tmp_path, wrong):
    pool = pool_of(tmp_path / "p", [[1, 2, 3]] * 4)
    tree = draft(pool, ids(wrong), 0, ids(wrong))
    assert set(tree.token_ids.tolist()) <= {1, 2, 3, *wrong}


def test_arrays_of_any_kind_use_one_compilation(tmp_path):
    pool = pool_of(tmp_path / "p", [[1, 2, 3]] * 4)
    expected = draft(pool, ids([1, 2]), 0, ids([1, 2, 3])).token_ids.tolist()
    read_only = ids([1, 2])
    read_only.flags.writeable = False
    for context in (read_only, ids([1, 5, 2])[::2], np.array([1, 2], np.int64), [1, 2], ids([1, 2, 9])[:2]):
        assert draft(pool, context, 0, ids([1, 2, 3])).token_ids.tolist() == expected
    assert len(draft_trees.signatures) == 1
    with pytest.raises(ValueError, match="one row of integers"):
        draft(pool, np.array([[1]]), 0)


def test_a_draft_leaves_nothing_behind_for_the_next(tmp_path):
    rng = np.random.default_rng(0)
    pool = pool_of(tmp_path / "large", [rng.integers(0, 900, 40).tolist() for _ in range(400)])
    other = pool_of(tmp_path / "other", [[1, 2, 3, 4]] * 5).with_settings(max_match_tokens=2)
    expected = draft(other, ids([1, 2]), 0)._rows.tolist()
    for max_nodes in (64, 3, 0, 17):
        draft(pool, ids(rng.integers(0, 900, 600)), 300, max_nodes=max_nodes, min_acceptance=1e-4)
        assert draft(other, ids([1, 2]), 0)._rows.tolist() == expected


def test_a_copy_of_a_pool_drafts_when_the_pool_is_gone(tmp_path):
    pool = replace(pool_of(tmp_path / "p", [[1, 2, 3]] * 4), curves=np.full(CURVES_SHAPE, 0.5, np.float32))
    expected = draft(pool, ids([1, 2]), 0)._rows.tolist()
    places = pool.handle.places
    other = copy.deepcopy(pool)
    del pool
    assert draft(other, ids([1, 2]), 0)._rows.tolist() == expected
    assert other.handle.places.tolist() != places.tolist()


def test_groups_may_be_more_than_a_byte_counts(tmp_path):
    num_groups = 300
    texts = [[1, 2 + group] for group in range(num_groups)]
    settings = DraftSettings(scope="group", num_samples=num_groups)  # all occurrences are sampled
    pool = pool_of(tmp_path / "p", texts, settings, [f"g{group}" for group in range(num_groups)])
    assert pool.index.group_codes.dtype == np.uint16
    for group in (0, 255, 256, 299):
        assert draft(pool, ids([1]), 0, None, f"g{group}").token_ids.tolist() == [2 + group]


def test_arrays_of_other_kinds_are_no_pool_to_draft_from(tmp_path):
    pool = pool_of(tmp_path / "p", [[1, 2, 3]] * 4)
    index = pool.index._replace(order=pool.index.order.astype(np.int64))
    with pytest.raises(AssertionError, match="int64"):
        draft(Pool.of_arrays(None, pool.manifest, index), ids([1, 2]), 0)


SEQUENCES = st.tuples(
    TOKENS, TOKENS, st.none() | TOKENS, st.sampled_from([None, "a", "b", "unknown"]), st.integers(0, 9)
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), sequences=st.lists(SEQUENCES, max_size=3 * SHARE), num_threads=st.integers(1, 3))
def test_a_batch_drafts_what_each_sequence_is_drafted_alone(tmp_path_factory, case, sequences, num_threads):
    (texts, options, _, _, _, _, call, _) = case
    rows, groups, entities = zip(*texts, strict=True) if texts else ((), (), ())
    pool = pool_of(tmp_path_factory.mktemp("pool") / "p", rows, options, groups, entities)
    call = {name: value for name, value in call.items() if name != "max_depth"}
    sequences = [
        (ids(prompt + output), len(prompt), None if previous is None else ids(previous), group, max_depth)
        for prompt, output, previous, group, max_depth in sequences
    ]
    columns = zip(*sequences, strict=True) if sequences else [()] * 5
    together = draft_batch(pool, *columns, **call, num_threads=num_threads)
    alone = [draft(pool, *sequence, max_depth=max_depth, **call) for *sequence, max_depth in sequences]
    assert len(together) == len(alone)
    for tree, other in zip(together, alone, strict=True):
        for name in ("token_ids", "parents", "log_acceptance", "source", "relative_count", "kind"):
            np.testing.assert_array_equal(getattr(tree, name), getattr(other, name))


def test_a_batch_takes_arrays_of_any_kind_and_says_what_does_not_fit(tmp_path):
    pool = pool_of(tmp_path / "p", [[1, 2, 3]] * 4)
    expected = [tree.token_ids.tolist() for tree in draft_batch(pool, [ids([1, 2]), ids([1])], [0, 0])]
    assert expected == [[3], [2, 3]]
    mixed = draft_batch(pool, [np.array([1, 2], np.int64), [1]], [0, 0])
    assert [tree.token_ids.tolist() for tree in mixed] == expected
    assert list(draft_batch(None, [], [])) == []
    with pytest.raises(ValueError, match=r"max_depths are \[2, 1, 2, 2, 2\]"):
        draft_batch(pool, [ids([1]), ids([1])], [0])
    with pytest.raises(ValueError, match=r"num_prompts are \[1, 2\]"):
        draft_batch(pool, [ids([1]), ids([1])], [1, 2])
    with pytest.raises(ValueError, match="one row of integers"):
        draft_batch(pool, [np.array([0.5])], [0])
    with pytest.raises(ValueError, match="max_nodes is 65"):
        draft_batch(pool, [ids([1])], [0], max_nodes=65)


def test_certain_continuations_are_drafted_once(tmp_path):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 9, 20).tolist() for _ in range(50)]
    certain = np.ones(CURVES_SHAPE, np.float32)  # every path is as probable as its parent
    pool = replace(pool_of(tmp_path / "p", texts), curves=certain)
    tree = draft(pool, ids([]), 0, max_nodes=64, min_acceptance=0)
    assert len(paths(rows_of(tree))) == 64  # asserts that no path comes twice
    assert (tree.parents < np.arange(64)).all()
    reference = draft_reference(
        [ReferenceText(text, "") for text in texts], pool.settings, [], [], None, None,
        max_nodes=64, min_acceptance=0, curves=certain,
    )  # fmt: skip
    assert [node.token_id for node in reference] == tree.token_ids.tolist()


def test_a_prompt_says_nothing_of_how_a_text_begins_but_group_and_earlier_text_do(tmp_path):
    pool = pool_of(tmp_path / "p", [[1, 2], [1, 2], [3, 4]], groups=["a", "a", "b"])
    options = {"max_nodes": 8, "min_acceptance": 0.0}
    first = draft(pool, ids([7, 7]), 2, None, "a", **options).token_ids.tolist()
    assert draft(pool, ids([8]), 1, None, "a", **options).token_ids.tolist() == first
    assert first[0] == 1
    assert draft(pool, ids([8]), 1, None, "b", **options).token_ids.tolist()[0] == 3
    assert draft(pool, ids([8]), 1, None, "a", max_nodes=2, min_acceptance=0).token_ids.tolist() == [1, 2]
    assert draft(pool, ids([8]), 1, ids([9, 9]), "a", **options).token_ids.tolist()[0] == 9
    walled = pool.with_settings(scope="group")
    assert draft(walled, ids([8]), 1, None, "a", **options).token_ids.tolist() == [1, 2]


def test_own_texts_are_searched_up_to_a_limit():
    prompt = [5, 6] + [0] * 50
    tree = draft(None, ids([*prompt, 5]), len(prompt))
    assert tree.token_ids.tolist()[:1] == [6]
    assert len(draft(EMPTY_POOL.with_settings(max_local_tokens=20), ids([*prompt, 5]), len(prompt))) == 0
