"""`min_support`: n-grams of too few entities are never drafted from the pool, in any context."""

import numpy as np
import pytest
from drafts import draft
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.order import count_first_tokens, sort_texts
from laserbatch.retrieval_pools.index.support import supported_lengths
from laserbatch.retrieval_pools.index.texts import SEPARATOR
from laserbatch.retrieval_pools.settings import DraftSettings
from laserbatch.retrieval_pools.sources import SOURCE_POOL

SECRET = [50, 51, 52, 53]  # in no other text
TOKENS = st.lists(st.integers(0, 3), max_size=12)
OWNED = st.lists(st.tuples(TOKENS, st.integers(0, 4)), max_size=12)  # (text, entity)


def ids(tokens):
    return np.array(tokens, np.int32)


def pool_of(folder, owned, **options):
    """A pool of (text, entity) pairs."""
    rows = [PoolText(ids(text), entity=entity) for text, entity in owned]
    settings = DraftSettings(**options)
    return build_pool(rows, folder, side="user", tokenizer_hash="t", model_id="m", settings=settings)


def draft_all(pool, context, **options):
    """All paths that the pool alone drafts after a context."""
    own = dict.fromkeys(("use_prompt", "use_output", "use_previous"), False)
    tree = draft(pool, ids(context), 0, max_nodes=64, min_acceptance=0, **own | options)
    paths = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def num_entities_with(owned, ngram):
    """The number of entities with an n-gram in their texts; SEPARATOR is the start or end of a text."""
    return len({e for text, e in owned if _holds([SEPARATOR, *text, SEPARATOR], ngram)})


def _holds(text, ngram):
    return any(text[k : k + len(ngram)] == ngram for k in range(len(text) - len(ngram) + 1))


def lay_out(owned):
    tokens, entities = [SEPARATOR], []
    for text, entity in owned:
        tokens += [*text, SEPARATOR]
        entities.append(entity)
    return ids(tokens), ids(entities)


def supported_slowly(tokens, order, entities, min_support, depth):
    """The number of supported n-grams from each position on, by collecting the entities of every n-gram."""
    ngrams = []
    for position in order.tolist():
        end = position + 1
        while tokens[end] != SEPARATOR:
            end += 1
        ngrams.append(tokens[position : min(end + 1, position + depth)].tolist())
    holders = {}
    for ngram, position in zip(ngrams, order.tolist(), strict=True):
        for length in range(1, len(ngram) + 1):
            holders.setdefault(tuple(ngram[:length]), set()).add(int(entities[position]))
    return [
        sum(len(holders[tuple(ngram[:length])]) >= min_support for length in range(1, len(ngram) + 1))
        for ngram in ngrams
    ]


@given(owned=OWNED, min_support=st.integers(2, 5), depth=st.sampled_from([1, 2, 4, 16]))
def test_supported_lengths_equal_counting_the_entities_of_every_ngram(owned, min_support, depth):
    tokens, entities = lay_out(owned)
    tokens.flags.writeable = False  # as a night maps it: for other arrays numba would compile everything again
    starts, texts = np.flatnonzero(tokens == SEPARATOR).astype(np.int32), np.arange(len(owned))
    first_tokens = count_first_tokens(tokens, starts, texts, 4)
    chunks = sort_texts(tokens, starts, texts, first_tokens, depth, 1 << 30)
    order = np.concatenate([np.empty(0, np.int32), *chunks])
    by_position = np.repeat(entities, np.diff(starts))
    of_places = by_position[order]
    order.flags.writeable = of_places.flags.writeable = False
    lengths = supported_lengths(tokens, order, of_places, min_support, depth)
    assert lengths.dtype == np.uint8
    assert lengths.tolist() == supported_slowly(tokens, order, by_position, min_support, depth)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    common=OWNED,
    before=TOKENS,
    after=TOKENS,
    secret=st.sampled_from([SECRET, [0, 1, 2, 3], [3, 3, 0, 2]]),
    min_support=st.integers(2, 4),
    num_knowing=st.integers(1, 3),
    context=TOKENS,
    num_known=st.integers(0, 4),
    depth=st.sampled_from([16, 32]),
    max_match=st.integers(1, 20),
    num_lengths=st.integers(1, 8),
    num_samples=st.sampled_from([1, 4, 64]),
    scope=st.sampled_from(["side", "group"]),
)
def test_no_draft_holds_what_too_few_entities_wrote(
    tmp_path_factory, common, before, after, secret, min_support, num_knowing, context, num_known, depth, max_match,
    num_lengths, num_samples, scope,
):  # fmt: skip
    knowing = [10 + k for k in range(min(num_knowing, min_support - 1))]
    owned = common + [([*before, *secret, *after], entity) for entity in knowing for _ in range(3)]
    pool = pool_of(
        tmp_path_factory.mktemp("pool") / "p", owned, min_support=min_support, index_depth=depth, scope=scope,
        max_match_tokens=max_match, num_context_lengths=num_lengths, num_samples=num_samples,
    )  # fmt: skip
    for start in (context, before, [*context, *before]):
        whole = [*start, *secret[:num_known]]
        for path in draft_all(pool, whole, group=""):
            claimed = [whole[-1] if whole else SEPARATOR, *path]
            assert num_entities_with(owned, claimed) >= min_support  # holds for the shortest context, or for none
            assert not set(path) & set(SECRET)


def test_a_secret_is_drafted_only_where_it_is_enough_entities_or_the_sequences_own(tmp_path):
    owned = [([1, 2, *SECRET, 3], entity) for entity in ("ann", "bob", "bob")] + [([1, 2, 3], k) for k in range(5)]
    anyone = pool_of(tmp_path / "p1", owned)
    two = pool_of(tmp_path / "p2", owned, min_support=2)
    three = pool_of(tmp_path / "p3", owned, min_support=3)
    for pool in (anyone, two):
        assert [*SECRET, 3] in draft_all(pool, [1, 2])
    for known in range(len(SECRET) + 1):
        assert draft_all(three, [1, 2, *SECRET[:known]]) == ([[3]] if known == 0 else [])
    tree = draft(three, ids([1, 2]), 0, ids([1, 2, *SECRET]))
    assert tree.token_ids.tolist()[:4] == SECRET and SOURCE_POOL not in tree.source.tolist()[:4]


def test_texts_of_one_entity_count_once_and_texts_of_none_each(tmp_path):
    of_one_entity = pool_of(tmp_path / "mine", [([1, 2], "ann")] * 5, min_support=2)
    assert draft_all(of_one_entity, [1]) == []
    separate = pool_of(tmp_path / "separate", [([1, 2], None)] * 2, min_support=2)
    assert draft_all(separate, [1]) == [[2]]


def test_start_and_end_are_tokens_of_an_ngram(tmp_path):
    owned = [([1, 2], "ann"), ([4, 1, 2], "bob"), ([1, 2, 5], "eve")]
    pool = pool_of(tmp_path / "p", owned, min_support=2)
    assert draft_all(pool, []) == [[1], [1, 2]]  # two texts begin so; only ann's ends there
    assert draft_all(pool, [1]) == [[2]]
    three = pool_of(tmp_path / "three", owned, min_support=3)
    assert draft_all(three, []) == []
    assert draft_all(three, [1]) == [[2]]


def test_a_long_context_of_too_few_leaves_its_share_to_a_short_one_of_many(tmp_path):
    owned = [([7, 8, 1, 2], "ann")] * 4 + [([k, 1, 2], k) for k in range(10, 15)] + [([k, 1, 3], k) for k in (20, 21)]
    pool = pool_of(tmp_path / "p", owned, min_support=2)
    assert draft_all(pool, [7, 8, 1])[:1] == draft_all(pool, [1])[:1] == [[2]]
    assert [3] in draft_all(pool, [7, 8, 1])


@pytest.mark.parametrize("min_support", [1, 2, 10])
def test_empty_pools_draft_nothing(tmp_path, min_support):
    pool = pool_of(tmp_path / "none", [], min_support=min_support)
    assert draft_all(pool, []) == draft_all(pool, [1]) == []


def test_distinct_texts_of_nobody_else_leave_nothing_to_draft(tmp_path):
    rng = np.random.default_rng(0)
    owned = [(rng.permutation(50)[:20].tolist(), entity) for entity in range(40)]
    pool = pool_of(tmp_path / "p", owned, min_support=41)
    assert pool.index.support.tolist() == [0] * len(pool.index.order)
    assert all(draft_all(pool, text[:k]) == [] for text, _ in owned for k in (0, 1, 5))
