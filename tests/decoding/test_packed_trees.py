import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packs import random_tree
from test_token_tree import LOOSE, path, trees

from laserbatch.pipeline.decoding.packed_trees import PackedTrees, prune_all
from laserbatch.pipeline.decoding.token_tree import EMPTY_TREE, TokenTree, chain_tree, node_depths, prune


@given(st.lists(trees(), max_size=5), st.integers(0, 2**32 - 1))
def test_packed_trees_say_of_each_tree_what_it_says_alone(forest, seed):
    packed = PackedTrees.of(forest)
    values = np.random.default_rng(seed).integers(0, 9, len(packed))
    sums = packed.along_paths(np.add, values)
    every = packed.along_paths(np.logical_and, values > 2)
    assert len(packed) == sum(map(len, forest)) and packed.sizes.tolist() == list(map(len, forest))
    for number, (start, tree) in enumerate(zip(packed.starts.tolist(), forest, strict=True)):
        own = slice(start, start + len(tree))
        assert packed.token_ids[own].tolist() == tree.token_ids.tolist()
        assert packed.parents[own].tolist() == tree.parents.tolist()
        assert packed.depths[own].tolist() == node_depths(tree.parents).tolist()
        assert (packed.tree_of[own] == number).all() and packed.places[own].tolist() == list(range(len(tree)))
        for node in range(len(tree)):
            above = path(tree, node)
            assert int(packed.ancestors[start + node]) == sum(1 << place for place in above)
            assert sums[start + node] == sum(values[start + place] for place in above)
            assert every[start + node] == all(values[start + place] > 2 for place in above)


def test_the_largest_and_the_deepest_tree_fit():
    rng = np.random.default_rng(0)
    packed = PackedTrees.of([chain_tree(range(64)), random_tree(rng, 64, 9)])
    assert packed.depths[:64].tolist() == list(range(1, 65))
    assert packed.ancestors[63] == -1  # all 64 bits


def test_no_trees_have_no_nodes():
    for packed in (PackedTrees.of([]), PackedTrees.of([chain_tree([]), chain_tree([])])):
        assert len(packed) == len(packed.depths) == len(packed.ancestors) == 0


BATCH_LOOSE = {name: value for name, value in LOOSE.items() if name != "max_depth"}


@given(
    st.lists(st.tuples(trees(), st.integers(0, 12)), max_size=5),
    st.sampled_from([3, 64]),
    st.sampled_from([-1.0, -np.inf]),
    st.sampled_from([90, 101]),
)
def test_many_trees_are_pruned_as_each_is(drafts, max_nodes, floor, vocab_size):
    limits = {"max_nodes": max_nodes, "min_log_acceptance": floor, "vocab_size": vocab_size}
    found = prune_all(PackedTrees.of([tree for tree, _ in drafts]), max_depths=[depth for _, depth in drafts], **limits)
    for one, (tree, depth) in zip(found, drafts, strict=True):
        other = prune(tree, max_depth=depth, **limits)
        for name in ("token_ids", "parents", "log_acceptance", "source"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_many_trees_within_their_limits_are_left_alone():
    given_trees = PackedTrees.of([chain_tree([1, 2, 3]), EMPTY_TREE, chain_tree([4])])
    assert prune_all(given_trees, max_depths=[3, 0, 1], **BATCH_LOOSE) is given_trees
    deep = prune_all(given_trees, max_depths=[2, 0, 0], **BATCH_LOOSE)
    assert [tree.token_ids.tolist() for tree in deep] == [[1, 2], [], []]


def test_a_drafters_mistakes_are_named():
    bad = TokenTree(np.array([1, 2], np.int32), np.array([1, -1], np.int32), np.zeros(2), np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match="precede"):
        prune_all(PackedTrees.of([chain_tree([1]), bad]), max_depths=[64, 64], **BATCH_LOOSE)
    short = TokenTree(np.array([1, 2], np.int32), np.array([-1], np.int32), np.zeros(2), np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match="differ in length: 2 tokens, 1 parents"):
        PackedTrees.of([chain_tree([1]), short])


def test_trees_among_others_without_nodes():
    trees = PackedTrees.of([chain_tree([1, 2]), chain_tree([3])])
    spread = trees.spread([1, 3], 4)
    assert [tree.token_ids.tolist() for tree in spread] == [[], [1, 2], [], [3]] and spread.num_trees == 4
    assert spread.depths.tolist() == [1, 2, 1]
    again = spread.gathered(np.array([1, 3]))
    assert [tree.token_ids.tolist() for tree in again] == [[1, 2], [3]]
    assert trees.spread([0, 1], 2) is trees and trees.gathered(np.arange(2)) is trees
    with pytest.raises(AssertionError, match="left out"):
        spread.gathered(np.array([0, 1]))
