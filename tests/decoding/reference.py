"""Slow reference versions of the attention over slots and of the acceptance of a draft."""

from dataclasses import dataclass
from functools import singledispatch

import numpy as np
import torch

from laserbatch.pipeline.decoding.acceptance import Acceptance
from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata
from laserbatch.pipeline.decoding.token_tree import TokenTree
from laserbatch.pipeline.decoding.verifiers import Greedy, Relaxed, Verifier


@dataclass(frozen=True)
class HeldLogits:
    """Given logits of a step's rows: (num_rows, vocab_size)."""

    logits: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.logits.device

    @property
    def num_rows(self) -> int:
        return len(self.logits)

    def of(self, rows: np.ndarray) -> torch.Tensor:
        if len(rows) == self.num_rows and (rows == np.arange(self.num_rows)).all():
            return self.logits  # not a copy, like a model's logits
        return self.logits[rows]


def visible_keys(metadata: AttentionMetadata, sequence: int, window: int | None = None) -> torch.Tensor:
    """The slots of a sequence that each of its packed tokens attends to: bool[num_new, num_committed + num_new]."""
    committed, chain = int(metadata.num_committed[sequence]), int(metadata.num_chain[sequence])
    first, last = int(metadata.cu_seqlens_q[sequence]), int(metadata.cu_seqlens_q[sequence + 1])
    num_new, device = last - first, metadata.slots.device
    sees = torch.zeros(num_new, committed + num_new, dtype=torch.bool, device=device)
    sees[:, :committed] = True
    sees[:chain, committed : committed + chain] = torch.ones(chain, chain, dtype=torch.bool, device=device).tril()
    sees[chain:, committed : committed + chain] = True
    bits = torch.arange(num_new - chain, device=device)
    sees[chain:, committed + chain :] = (metadata.ancestors[first + chain : last, None] >> bits) & 1 > 0
    if window is not None:
        own = metadata.positions[first:last]
        positions = torch.cat((torch.arange(committed, device=device, dtype=own.dtype), own))
        sees &= own[:, None] - positions < window
    return sees


def reference_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    shape=None,
) -> torch.Tensor:
    """Attention as `metadata` describes it, one sequence at a time, on any device. `shape` is ignored."""
    num_heads, num_kv_heads = query.shape[1], keys.shape[0]
    result = query.new_zeros(query.shape[0], num_heads, values.shape[2])
    for sequence in range(len(metadata.num_committed)):
        first, last = int(metadata.cu_seqlens_q[sequence]), int(metadata.cu_seqlens_q[sequence + 1])
        if first == last:
            continue
        slots = metadata.slots[int(metadata.cu_seqlens_k[sequence]) : int(metadata.cu_seqlens_k[sequence + 1])].long()
        own_keys = keys[:, slots].repeat_interleave(num_heads // num_kv_heads, 0).float()  # (num_heads, num_keys, d)
        own_values = values[:, slots].repeat_interleave(num_heads // num_kv_heads, 0).float()
        scores = torch.einsum("qhd,hkd->hqk", query[first:last].float(), own_keys) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~visible_keys(metadata, sequence, window), -torch.inf)
        if sinks is not None:
            sink_scores = sinks.float()[:, None, None].expand(-1, last - first, 1)
            scores = torch.cat((scores, sink_scores), -1)
        weights = torch.softmax(scores, -1)[..., : len(slots)]
        result[first:last] = torch.einsum("hqk,hkd->qhd", weights, own_values).to(query.dtype)
    return result


def reference_accept(rule: Verifier, logits: np.ndarray, tree: TokenTree, end_ids: set[int]) -> Acceptance:
    """The slow reference of `verify` for one sequence: try every path from the root.

    `logits` float32[n + 1, vocab_size]: after the last committed token, then after each node.
    """
    log_probs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    log_probs -= logits.max(-1, keepdims=True)

    def is_own_choice(node: int) -> bool:
        return int(tree.token_ids[node]) == int(logits[tree.parents[node] + 1].argmax())

    def accepts(node: int) -> bool:
        row = int(tree.parents[node]) + 1
        token, choice = int(tree.token_ids[node]), int(logits[row].argmax())
        if choice in end_ids or token in end_ids:
            return False
        return token == choice or reference_rule(rule, logits[row], log_probs[row], token, int(tree.source[node]))

    best: tuple[int, float] = (0, 0.0)
    best_path: list[int] = []
    for node in range(len(tree)):
        path = [node]
        while tree.parents[path[0]] >= 0:
            path.insert(0, int(tree.parents[path[0]]))
        window = getattr(rule, "window", 0)
        if window and not all(
            is_own_choice(node) or (len(after) == window and all(map(is_own_choice, after)))
            for node, after in ((node, path[at + 1 : at + 1 + window]) for at, node in enumerate(path))
        ):
            continue
        if all(accepts(n) for n in path):
            score = 0.0
            if not isinstance(rule, Greedy):
                score = sum(float(log_probs[int(tree.parents[n]) + 1, tree.token_ids[n]]) for n in path)
            if len(path) > best[0] or (len(path) == best[0] and score > best[1]):
                best, best_path = (len(path), score), path
    last = best_path[-1] + 1 if best_path else 0
    return Acceptance(np.array(best_path, np.int64), int(logits[last].argmax()))


@singledispatch
def reference_rule(rule: Verifier, logits: np.ndarray, log_probs: np.ndarray, token: int, source: int) -> bool:
    """Whether a rule accepts a token other than the target's choice, given one row of the target's logits."""
    raise AssertionError(rule)


@reference_rule.register
def _(rule: Greedy, logits, log_probs, token, source) -> bool:
    return False


@reference_rule.register
def _(rule: Relaxed, logits, log_probs, token, source) -> bool:
    is_probable = bool(log_probs[token] > np.log(max(rule.min_probability, 1e-300)))
    k = rule.k
    return is_probable and (k is None or (k > 1 and logits[token] >= sorted(logits)[-min(k, len(logits))]))
