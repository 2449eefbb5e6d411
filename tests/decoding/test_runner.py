import numpy as np
import pytest
import torch
from packs import keep
from tiny_models import VOCAB, tiny_model

from laserbatch.pipeline.decoding.attention import interface, torch_attention
from laserbatch.pipeline.decoding.batch import Feed
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.model.load import prepare_model
from laserbatch.pipeline.decoding.model.runner import ModelRunner
from laserbatch.pipeline.decoding.token_tree import TokenTree, TreeBatch


def random_tree(rng, num_nodes: int) -> TokenTree:
    parents = np.array([rng.integers(-1, i) if i else -1 for i in range(num_nodes)], np.int32)
    tokens = rng.integers(0, VOCAB, num_nodes).astype(np.int32)
    return TokenTree(tokens, parents, np.zeros(num_nodes, np.float32), np.zeros(num_nodes, np.uint8))


def path_to(tree: TokenTree, node: int) -> list[int]:
    return [] if node < 0 else [*path_to(tree, int(tree.parents[node])), node]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt_neox", "gpt_oss", "olmo2"])
@pytest.mark.parametrize(
    ("call_cost", "block_tokens", "has_loops"),
    [(0, 128, False), (1000, 128, False), (10**9, 128, False), (0, 3, False), (8, 3, False), (1000, 128, True)],
)
def test_every_node_gets_the_logits_of_its_own_path(architecture, call_cost, block_tokens, has_loops, monkeypatch):
    """Ragged trees of several sequences, by loops or in any grouping, against plain causal runs."""
    monkeypatch.setattr(torch_attention, "BLOCK_TOKENS", block_tokens)
    if not has_loops:
        monkeypatch.setattr(interface, "_has_loops", lambda query: False)
    monkeypatch.setitem(interface.CALL_COST, "cpu", call_cost)
    sizes = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": None}
    model = tiny_model(architecture, **(sizes if architecture == "gpt_oss" else {}))
    reference = tiny_model(architecture, **(sizes if architecture == "gpt_oss" else {}))
    prepare_model(model)
    rng = np.random.default_rng(1)
    cache = KVCache(5)
    runner = ModelRunner(model, cache, torch.device("cpu"))
    texts: dict[int, list[int]] = {}
    pending: dict[int, list[int]] = {}
    for length in (3, 14, 8, 5):
        prompt = rng.integers(0, VOCAB, length).astype(np.int32)
        row = cache.acquire(prompt, 20).row
        texts[row], pending[row] = [], prompt.tolist()
    cache.release(1)  # a hole between live rows
    del texts[1], pending[1]
    for _ in range(4):
        trees = {row: random_tree(rng, int(rng.integers(0, 9))) for row in texts}
        rows = list(rng.permutation(list(texts)))
        feeds = [Feed(int(row), np.array(pending[row], np.int32)) for row in rows]
        out = runner.forward(feeds, TreeBatch.of([trees[row] for row in rows]))
        kept_nodes = []
        for i, row in enumerate(rows):
            chain, tree = pending[row], trees[row]
            for node in range(-1, len(tree)):
                full = texts[row] + chain + tree.token_ids[path_to(tree, node)].tolist()
                with torch.no_grad():
                    expected = reference(input_ids=torch.tensor([full]), use_cache=False).logits[0, -1]
                actual = out.logits[out.batch.logit_starts[i] + 1 + node]
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
            accepted = path_to(tree, int(rng.integers(-1, len(tree))))
            kept_nodes.append(np.array(accepted, np.int64))
            texts[row] = texts[row] + chain + tree.token_ids[accepted].tolist()
            pending[row] = [int(rng.integers(0, VOCAB))]
        keep(cache, out.batch, kept_nodes)
