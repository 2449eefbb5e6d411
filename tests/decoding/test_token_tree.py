import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laserbatch.pipeline.decoding.token_tree import EMPTY_TREE, TokenTree, chain_tree, node_depths, prune

LOOSE = {"max_nodes": 64, "max_depth": 64, "min_log_acceptance": -np.inf, "vocab_size": 100}


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


@given(trees())
def test_depths_follow_the_parents(tree):
    assert node_depths(tree.parents).tolist() == [len(path(tree, i)) for i in range(len(tree))]


@given(trees(), st.integers(0, 12), st.integers(0, 4), st.floats(-4, 0))
def test_pruned_tree_holds_whole_paths_within_the_limits(tree, max_nodes, max_depth, floor):
    pruned = prune(tree, max_nodes=max_nodes, max_depth=max_depth, min_log_acceptance=floor, vocab_size=100)

    def allowed(node):
        return (
            all(0 <= tree.token_ids[n] < 100 and tree.log_acceptance[n] >= floor for n in path(tree, node))
            and len(path(tree, node)) <= max_depth
        )

    kept = [node for node in range(len(tree)) if allowed(node)][:max_nodes]
    texts = [tree.token_ids[path(tree, node)].tolist() for node in kept]
    assert [pruned.token_ids[path(pruned, i)].tolist() for i in range(len(pruned))] == texts


def test_draft_within_its_limits_is_left_alone():
    tree = chain_tree([1, 2, 3])
    assert prune(tree, **LOOSE) is tree
    assert prune(EMPTY_TREE, **LOOSE) is EMPTY_TREE


def test_child_before_its_parent_is_a_drafters_mistake():
    bad = TokenTree(np.array([1, 2], np.int32), np.array([1, -1], np.int32), np.zeros(2), np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match="precede"):
        prune(bad, **LOOSE)
