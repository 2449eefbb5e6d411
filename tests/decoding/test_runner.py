import numpy as np
import pytest
import torch
from packs import keep, random_tree
from tiny_models import VOCAB, tiny_model

from laserbatch.pipeline.decoding.attention import interface, torch_attention
from laserbatch.pipeline.decoding.batch import Feed
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.model.load import prepare_model
from laserbatch.pipeline.decoding.model.runner import ModelRunner
from laserbatch.pipeline.decoding.token_tree import TokenTree, TreeBatch


def path_to(tree: TokenTree, node: int) -> list[int]:
    return [] if node < 0 else [*path_to(tree, int(tree.parents[node])), node]


@torch.no_grad()
def last_logits(model, texts: list[list[int]]) -> torch.Tensor:
    """Logits after each text, (num_texts, vocab_size), by one causal forward; no text attends to its padding."""
    longest = max(map(len, texts))
    padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    logits = model(input_ids=padded, use_cache=False).logits
    return logits[torch.arange(len(texts)), torch.tensor([len(text) - 1 for text in texts])]


LOOPS, ALONE, LIKE, TOGETHER = None, (0, 128), (1000, 128), (10**9, 128)  # (cost of a call, tokens of a block)
BLOCKS, BLOCKS_LIKE = (0, 3), (8, 3)


@pytest.mark.parametrize(
    ("architecture", "grouping"),
    [
        *[(name, by) for name in ("mistral", "gpt_oss") for by in (ALONE, LIKE, TOGETHER, BLOCKS, BLOCKS_LIKE)],
        *[("llama", by) for by in (LOOPS, LIKE, BLOCKS)],  # no window
        *[("gemma2", by) for by in (LIKE, TOGETHER)],  # a softcap
        *[("gpt_neox", by) for by in (LOOPS, ALONE, BLOCKS_LIKE)],
        ("mistral", LOOPS),
    ],
)
def test_every_node_gets_the_logits_of_its_own_path(architecture, grouping, monkeypatch):
    """Ragged trees of several sequences, by compiled loops or in any grouping, against plain causal forwards."""
    if grouping is not LOOPS:
        monkeypatch.setattr(interface, "_has_loops", lambda query: False)
        call_cost, block_tokens = grouping
        monkeypatch.setattr(torch_attention, "BLOCK_TOKENS", block_tokens)
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
        trees = {row: random_tree(rng, int(rng.integers(0, 9)), VOCAB) for row in texts}
        rows = list(rng.permutation(list(texts)))
        feeds = [Feed(int(row), np.array(pending[row], np.int32)) for row in rows]
        out = runner.forward(feeds, TreeBatch.of([trees[row] for row in rows]))
        kept_nodes = []
        for i, row in enumerate(rows):
            chain, tree = pending[row], trees[row]
            ends = [tree.token_ids[path_to(tree, node)].tolist() for node in range(-1, len(tree))]
            expected = last_logits(reference, [texts[row] + chain + end for end in ends])
            actual = out.logits[out.batch.logit_starts[i] :][: len(ends)]
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
            accepted = path_to(tree, int(rng.integers(-1, len(tree))))
            kept_nodes.append(np.array(accepted, np.int64))
            texts[row] = texts[row] + chain + tree.token_ids[accepted].tolist()
            pending[row] = [int(rng.integers(0, VOCAB))]
        keep(cache, out.batch, kept_nodes)
