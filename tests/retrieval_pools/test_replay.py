"""Replays: the accepted part of a draft, the steps along a text, and the record of every drafted token."""

from collections import namedtuple

import numpy as np
import pytest

from laserbatch.retrieval_pools.calibration.replay import (
    ReplayText,
    accepted_path,
    pool_steps,
    replay,
    replay_nodes,
    steps_along,
)
from laserbatch.retrieval_pools.draft import DraftOptions
from laserbatch.retrieval_pools.index.build import PoolText, build_pool

Tree = namedtuple("Tree", "token_ids parents")
NO_TOKENS = np.empty(0, np.int32)
TREE = Tree([5, 7, 8, 6, 9], [-1, -1, 0, 1, 2])  # 5 8 9 and 7 6


def grammar_texts(num_texts: int, length: int, seed: int) -> list[np.ndarray]:
    """Texts in which each word has two possible successors, so that they are partly predictable."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(num_texts):
        text = [int(rng.integers(0, 20))]
        for _ in range(length - 1):
            text.append((3 * text[-1] + int(rng.integers(0, 5) == 0)) % 20)
        texts.append(np.array(text, np.int32))
    return texts


@pytest.fixture(scope="module")
def texts():
    return grammar_texts(60, 40, seed=0)


@pytest.fixture(scope="module")
def pool(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool") / "item"
    return build_pool(map(PoolText, texts[10:]), folder, side="item", tokenizer_hash="t", model_id="m")


def test_the_longest_agreeing_path_is_accepted():
    assert accepted_path(TREE, [5, 8, 9, 1]) == [0, 2, 4]
    assert accepted_path(TREE, [0, 0, 7, 6], position=2) == [1, 3]
    assert accepted_path(TREE, [6]) == []
    assert accepted_path(TREE, [5]) == [0]
    assert accepted_path(Tree([], range(0)), [6]) == []


def test_a_walk_asks_behind_every_bonus_token_and_counts_the_step_that_ends_the_text():
    contexts = []

    def draft_after(position):
        contexts.append(position)
        return TREE

    steps = list(steps_along(np.array([5, 8, 9, 1, 7, 6], np.int32), draft_after))
    assert contexts == [0, 4]
    assert [step.path for step in steps] == [[0, 2, 4], [1, 3]]  # the last bonus token is the end token
    steps = list(steps_along(np.array([1, 2], np.int32), lambda position: Tree([], [])))
    assert [step.position for step in steps] == [0, 1, 2]


def test_a_replay_counts_every_token_once(pool, texts):
    documents = [ReplayText(NO_TOKENS, text) for text in texts[:10]]
    result = replay(pool, documents)
    num_tokens = sum(map(len, texts[:10])) + len(documents)  # the end of every text is a token, too
    assert result.num_steps.sum() + result.num_accepted.sum() == num_tokens
    assert len(result.num_steps) == len(documents)
    assert (result.num_drafted <= DraftOptions().max_nodes * result.num_steps).all()
    assert result.mean_accepted > 0.5
    again = replay(pool, documents)
    assert all(map(np.array_equal, vars(again).values(), vars(result).values()))


def test_a_replay_knows_the_previous_text_and_the_prompt(pool, texts):
    text = np.arange(100, 140, dtype=np.int32)  # tokens that are in no pool
    unknown = replay(None, [ReplayText(NO_TOKENS, text)])
    assert sum(unknown.num_accepted) == 0 and unknown.num_steps == 41
    known = replay(None, [ReplayText(NO_TOKENS, text, previous_ids=text)])
    assert known.num_steps < 10
    without = replay(None, [ReplayText(NO_TOKENS, text, previous_ids=text)], DraftOptions(use_previous=False))
    assert without.num_steps == 41
    assert replay(None, [ReplayText(text, text)]).num_steps < 10


def test_every_drafted_token_is_kept_with_what_became_of_it(pool, texts):
    held_out = [ReplayText(NO_TOKENS, text) for text in texts[:4]]
    options = DraftOptions(max_nodes=24, min_acceptance=0.0), DraftOptions(max_nodes=8, min_acceptance=0.1)
    expected, behind_verified = [], []
    for text in held_out:
        steps = list(pool_steps(pool, text, *options))
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            tree = step.tree
            for node, parent in enumerate(tree.parents.tolist()):
                columns = tree.source[node], tree.relative_count[node], tree.kind[node], tree.log_acceptance[node]
                expected.append((*columns, parent < 0 or parent in step.path, node in step.path))
            if after is not None:  # the next draft starts after the tokens that a run would accept
                likely = [node for node in step.path if node < 8 and np.exp(tree.log_acceptance[node]) >= 0.1]
                assert after.position == step.position + len(likely) + 1
                behind_verified.append(len(step.path) - len(likely))
    nodes = replay_nodes(pool, held_out, *options)
    columns = (nodes[name] for name in ("source", "relative_count", "kind", "log_acceptance"))
    assert list(zip(*columns, nodes["is_parent_accepted"], nodes["is_accepted"], strict=True)) == expected
    assert nodes["is_accepted"].sum() > 0 and max(behind_verified) > 0


def test_replaying_nothing_gives_nothing(pool):
    assert len(replay_nodes(pool, [])) == 0
    assert replay(pool, []).mean_accepted == 0.0
    assert [step.position for step in pool_steps(pool, ReplayText(NO_TOKENS, NO_TOKENS))] == [0]
