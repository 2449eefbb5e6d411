"""Step budgets: the best prefix of a ranking is admitted, fewer texts get larger trees, and estimates are learned."""

import itertools

import numpy as np
import pytest
from tiny_models import requests_for, tiny_engine, tiny_model, tiny_prompts

from laserbatch.pipeline.decoding.acceptance import Acceptance
from laserbatch.pipeline.decoding.drafters import RetrievalDrafter
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.decoding.step_budget import StepBudget
from laserbatch.pipeline.decoding.token_tree import TokenTree, TreeBatch
from laserbatch.pipeline.decoding.verifiers import Greedy
from laserbatch.retrieval_pools.sources import SOURCE_POOL, SOURCE_PROMPT
from laserbatch.retrieval_pools.step_cost import StepCost

COST = StepCost.model_validate(
    {
        "steps": [
            {"batch_size": size, "num_tokens": size * tokens, "seconds": 0.01 + 0.001 * per * size * tokens}
            for size, per in ((1, 0.2), (8, 1.0))
            for tokens in (1, 9)
        ]
    }
)


def tree(rng, num_nodes: int, source: int = SOURCE_POOL) -> TokenTree:
    parents = np.array([rng.integers(-1, node) for node in range(num_nodes)], np.int32)
    log_acceptance = np.zeros(num_nodes, np.float32)
    for node, parent in enumerate(parents):
        log_acceptance[node] = (log_acceptance[parent] if parent >= 0 else 0) + np.log(rng.uniform(0.2, 1.0))
    token_ids, sources = np.arange(num_nodes, dtype=np.int32), np.full(num_nodes, source, np.uint8)
    return TokenTree(token_ids, parents, log_acceptance, sources)


def is_closed(admitted: TreeBatch) -> bool:
    return bool((admitted.parents < admitted.places).all())


@pytest.mark.parametrize("num_sequences", [1, 2, 8])
def test_no_other_part_of_the_trees_gives_more_tokens_a_second(num_sequences):
    """Against all ancestor-closed subsets of small trees."""
    rng = np.random.default_rng(num_sequences)
    for _ in range(8):
        trees = TreeBatch.of([tree(rng, 4), tree(rng, 4)])
        admitted = StepBudget(COST).admit(trees, num_sequences, 0)
        assert is_closed(admitted)
        probability = np.exp(trees.log_acceptance)

        def speed(nodes, probability=probability):
            seconds = COST.seconds_between(num_sequences, np.array([len(nodes)]))[0]
            return (num_sequences + sum(probability[list(nodes)])) / seconds

        above = trees.parents + np.where(trees.parents >= 0, trees.starts[trees.tree_of], 0)
        parts = (
            nodes
            for size in range(len(trees) + 1)
            for nodes in itertools.combinations(range(len(trees)), size)
            if all(above[node] < 0 or above[node] in nodes for node in nodes)
        )
        own = (num_sequences + np.exp(admitted.log_acceptance).sum()) / COST.seconds_between(
            num_sequences, np.array([len(admitted)])
        )[0]
        assert own == pytest.approx(max(map(speed, parts)), rel=1e-6)


def test_few_texts_get_larger_trees_than_many():
    rng = np.random.default_rng(0)
    lone = [tree(rng, 16)]
    alone = len(StepBudget(COST).admit(TreeBatch.of(lone), 1, 0))
    among = len(StepBudget(COST).admit(TreeBatch.of(lone * 8), 8, 0)) / 8
    assert alone > 2 * among > 0


def test_estimates_that_do_not_hold_are_believed_less_and_tried_again_later():
    rng = np.random.default_rng(1)
    budget, trees = StepBudget(COST), TreeBatch.of([tree(rng, 8, SOURCE_PROMPT)])
    nothing = [Acceptance(np.empty(0, np.int64), 0)]
    first = len(budget.admit(trees, 1, 0))
    for _ in range(200):
        budget.observe(budget.admit(trees, 1, 0), nothing)
    trust = budget.trust
    assert trust[SOURCE_PROMPT] < 0.5 and trust[SOURCE_POOL] == 1.0
    assert len(budget.admit(trees, 1, 0)) < first
    for _ in range(500):
        budget.observe(TreeBatch.empty(1), nothing)
    assert len(budget.admit(trees, 1, 0)) == first
    everything = [Acceptance(np.arange(8), 0)]
    for _ in range(100):
        budget.observe(trees, everything)
    assert budget.trust[SOURCE_PROMPT] > 1.0


@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_texts_are_the_same_under_any_budget(batch_size):
    engine = tiny_engine(tiny_model(), batch_size=batch_size)
    prompts = tiny_prompts(5)
    drafter = RetrievalDrafter(max_nodes=64, min_acceptance=0.0)
    texts = []
    for step_budget in (None, StepBudget(COST)):
        results = list(engine.generate(requests_for(prompts), drafter, Greedy(), Budget(64, 0.0), step_budget))
        texts.append({result.request_id: result.token_ids.tolist() for result in results})
        assert sum(result.num_drafted for result in results) > 0
    assert texts[0] == texts[1]
