import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from packs import random_tree
from test_token_tree import path, trees

from pipeline.decoding.packed_trees import PackedTrees
from pipeline.decoding.token_tree import chain_tree, node_depths


@given(st.lists(trees(), max_size=5), st.integers(0, 2**32 - 1))
def test_packed_trees_say_of_each_tree_what_it_says_alone(forest, seed):
    packed = PackedTrees(forest)
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
    packed = PackedTrees([chain_tree(range(64)), random_tree(rng, 64, 9)])
    assert packed.depths[:64].tolist() == list(range(1, 65))
    assert packed.ancestors[63] == -1  # all 64 bits


def test_no_trees_have_no_nodes():
    for packed in (PackedTrees([]), PackedTrees([chain_tree([]), chain_tree([])])):
        assert len(packed) == len(packed.depths) == len(packed.ancestors) == 0
