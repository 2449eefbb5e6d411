import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packs import chain_tree, random_tree

from laserbatch.pipeline.decoding.token_tree import EMPTY_TREE, TokenTree, TreeBatch, prune

LOOSE = {"max_nodes": 64, "min_log_acceptance": -np.inf, "vocab_size": 100}


@st.composite
def trees(draw, max_nodes=12, vocab_size=100):
    n = draw(st.integers(0, max_nodes))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    tokens = draw(st.lists(st.integers(-1, vocab_size), min_size=n, max_size=n))
    scores = draw(st.lists(st.floats(-5, 0, width=32), min_size=n, max_size=n))
    return TokenTree(
        np.array(tokens, np.int32), np.array(parents, np.int32), np.array(scores, np.float32), np.zeros(n, np.uint8)
    )


def path(tree, node):
    return [] if node < 0 else [*path(tree, int(tree.parents[node])), node]


@given(st.lists(trees(), max_size=5), st.integers(0, 2**32 - 1))
def test_a_batch_of_trees_says_of_each_what_it_says_alone(forest, seed):
    batch = TreeBatch.of(forest)
    values = np.random.default_rng(seed).integers(0, 9, len(batch))
    sums = batch.scan_from_root(np.add, values)
    every = batch.scan_from_root(np.logical_and, values > 2)
    assert len(batch) == sum(map(len, forest)) and batch.sizes.tolist() == list(map(len, forest))
    for number, (start, tree) in enumerate(zip(batch.starts.tolist(), forest, strict=True)):
        own = slice(start, start + len(tree))
        assert batch.token_ids[own].tolist() == tree.token_ids.tolist()
        assert batch.parents[own].tolist() == tree.parents.tolist()
        assert batch.depths[own].tolist() == [len(path(tree, node)) for node in range(len(tree))]
        assert (batch.tree_of[own] == number).all() and batch.places[own].tolist() == list(range(len(tree)))
        for node in range(len(tree)):
            above = path(tree, node)
            assert int(batch.ancestors[start + node]) == sum(1 << place for place in above)
            assert sums[start + node] == sum(values[start + place] for place in above)
            assert every[start + node] == all(values[start + place] > 2 for place in above)


def test_the_largest_and_the_deepest_tree_fit():
    rng = np.random.default_rng(0)
    batch = TreeBatch.of([chain_tree(range(64)), random_tree(rng, 64, 9)])
    assert batch.depths[:64].tolist() == list(range(1, 65))
    assert batch.ancestors[63] == -1  # all 64 bits


def test_no_trees_have_no_nodes():
    for batch in (TreeBatch.of([]), TreeBatch.of([chain_tree([]), chain_tree([])])):
        assert len(batch) == len(batch.depths) == len(batch.ancestors) == 0


@given(
    st.lists(st.tuples(trees(), st.integers(0, 12)), max_size=5),
    st.sampled_from([0, 3, 64]),
    st.sampled_from([-1.0, -np.inf]),
    st.sampled_from([90, 101]),
)
def test_pruned_trees_hold_whole_paths_within_the_limits(drafts, max_nodes, floor, vocab_size):
    limits = {"max_nodes": max_nodes, "min_log_acceptance": floor, "vocab_size": vocab_size}
    all_pruned = prune(TreeBatch.of([tree for tree, _ in drafts]), max_depths=[depth for _, depth in drafts], **limits)
    assert all_pruned.num_trees == len(drafts)
    for pruned, (tree, depth) in zip(all_pruned, drafts, strict=True):

        def is_allowed(node, tree=tree, depth=depth):
            above = path(tree, node)
            fits = all(0 <= tree.token_ids[n] < vocab_size and tree.log_acceptance[n] >= floor for n in above)
            return fits and len(above) <= depth

        nodes = [node for node in range(len(tree)) if is_allowed(node)][:max_nodes]
        assert [path_ids(pruned, i) for i in range(len(pruned))] == [path_ids(tree, node) for node in nodes]
        np.testing.assert_array_equal(pruned.log_acceptance, tree.log_acceptance[nodes])
        np.testing.assert_array_equal(pruned.source, tree.source[nodes])


def path_ids(tree, node) -> list[int]:
    return tree.token_ids[path(tree, node)].tolist()


def test_many_trees_within_their_limits_are_left_alone():
    given_trees = TreeBatch.of([chain_tree([1, 2, 3]), EMPTY_TREE, chain_tree([4])])
    assert prune(given_trees, max_depths=[3, 0, 1], **LOOSE) is given_trees
    deep = prune(given_trees, max_depths=[2, 0, 0], **LOOSE)
    assert [tree.token_ids.tolist() for tree in deep] == [[1, 2], [], []]


def test_a_drafters_mistakes_are_named():
    bad = TokenTree(np.array([1, 2], np.int32), np.array([1, -1], np.int32), np.zeros(2), np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match="precede"):
        prune(TreeBatch.of([chain_tree([1]), bad]), max_depths=[64, 64], **LOOSE)
    short = TokenTree(np.array([1, 2], np.int32), np.array([-1], np.int32), np.zeros(2), np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match="differ in length: 2 tokens, 1 parents"):
        TreeBatch.of([chain_tree([1]), short])
    with pytest.raises(ValueError, match="1 drafts for 2 texts"):
        prune(TreeBatch.of([chain_tree([1])]), max_depths=[64, 64], **LOOSE)
    with pytest.raises(ValueError, match="found 200"):
        prune(TreeBatch.of([chain_tree([1], 200)]), max_depths=[64], **LOOSE)


def test_an_empty_draft_may_have_arrays_of_another_type():
    batch = TreeBatch.of([chain_tree([1]), TokenTree(*[np.array([])] * 4)])
    assert [column.dtype for column in vars(batch[0]).values()] == [np.int32, np.int32, np.float32, np.uint8]


def test_trees_among_others_without_nodes():
    trees = TreeBatch.of([chain_tree([1, 2]), chain_tree([3])])
    spread = trees.scatter([1, 3], 4)
    assert [tree.token_ids.tolist() for tree in spread] == [[], [1, 2], [], [3]] and spread.num_trees == 4
    assert spread.depths.tolist() == [1, 2, 1]
    assert trees.scatter([0, 1], 2) is trees
