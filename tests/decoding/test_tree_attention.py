import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from packs import keep
from tiny_models import VOCAB, tiny_model

from laserbatch.pipeline.decoding.attention import row_plan
from laserbatch.pipeline.decoding.attention.tree_attention import reference_attention
from laserbatch.pipeline.decoding.feed import Feed
from laserbatch.pipeline.decoding.memory.kv_store import KVStore
from laserbatch.pipeline.decoding.memory.token_store import TokenStore
from laserbatch.pipeline.decoding.model.load import prepare_model
from laserbatch.pipeline.decoding.model.model_runner import ModelRunner
from laserbatch.pipeline.decoding.packed_trees import PackedTrees
from laserbatch.pipeline.decoding.token_tree import TokenTree


def test_written_out_attention_equals_the_fused_one():
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 2, 8, 16), torch.randn(3, 2, 20, 16), torch.randn(3, 2, 20, 16)
    mask = torch.where(torch.rand(3, 1, 8, 20) < 0.7, 0.0, torch.finfo(torch.float32).min)
    fused = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(reference_attention(queries, keys, values, mask, 0.3), fused)


def random_tree(rng, num_nodes: int) -> TokenTree:
    parents = np.array([rng.integers(-1, i) if i else -1 for i in range(num_nodes)], np.int32)
    tokens = rng.integers(0, VOCAB, num_nodes).astype(np.int32)
    return TokenTree(tokens, parents, np.zeros(num_nodes, np.float32), np.zeros(num_nodes, np.uint8))


def path_to(tree: TokenTree, node: int) -> list[int]:
    return [] if node < 0 else [*path_to(tree, int(tree.parents[node])), node]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt_neox", "gpt_oss", "olmo2"])
@pytest.mark.parametrize(
    ("store_type", "call_cost", "block_tokens"),
    [
        *itertools.product([KVStore, TokenStore], [0, 1000, 10**9], [row_plan.BLOCK_TOKENS]),
        (KVStore, 0, 3),
        (KVStore, 8, 3),
    ],
)
def test_every_node_gets_the_logits_of_its_own_path(architecture, store_type, call_cost, block_tokens, monkeypatch):
    """Ragged trees of sequences with holes in their rows, in any grouping, against plain causal runs."""
    monkeypatch.setattr(row_plan, "BLOCK_TOKENS", block_tokens)
    sizes = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": None}
    model = tiny_model(architecture, **(sizes if architecture == "gpt_oss" else {}))
    reference = tiny_model(architecture, **(sizes if architecture == "gpt_oss" else {}))
    prepare_model(model)
    rng = np.random.default_rng(1)
    store = store_type(5)
    runner = ModelRunner(model, store, torch.device("cpu"))
    runner._call_cost = call_cost
    texts: dict[int, list[int]] = {}
    pending: dict[int, list[int]] = {}
    for length in (3, 14, 8, 5):
        prompt = rng.integers(0, VOCAB, length).astype(np.int32)
        row = store.acquire(prompt, 80, 20).row
        texts[row], pending[row] = [], prompt.tolist()
    store.release(1)  # a hole between live rows
    del texts[1], pending[1]
    for _ in range(4):
        trees = {row: random_tree(rng, int(rng.integers(0, 9))) for row in texts}
        rows = list(rng.permutation(list(texts)))
        feeds = [Feed(int(row), np.array(pending[row], np.int32)) for row in rows]
        out = runner.forward(feeds, PackedTrees.of([trees[row] for row in rows]))
        kept_nodes = []
        for i, row in enumerate(rows):
            chain, tree = pending[row], trees[row]
            for node in range(-1, len(tree)):
                full = texts[row] + chain + tree.token_ids[path_to(tree, node)].tolist()
                with torch.no_grad():
                    expected = reference(input_ids=torch.tensor([full]), use_cache=False).logits[0, -1]
                found = out.logits[out.starts[i] + 1 + node]
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            kept = path_to(tree, int(rng.integers(-1, len(tree))))
            kept_nodes.append(np.array(kept, np.int64))
            texts[row] = texts[row] + chain + tree.token_ids[kept].tolist()
            pending[row] = [int(rng.integers(0, VOCAB))]
        keep(store, out.pack, kept_nodes)
