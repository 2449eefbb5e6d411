"""Which path through each draft is committed, and the token that follows it.

The rule's verdicts are made on the device, for all sequences at once, and come to the host in one copy; there
`select_paths` walks the trees of all sequences at once. Beside it stands `reference_accept`, the same for one sequence
in plain Python.

The end-of-text rule holds whatever the verifier: nothing is accepted past a node where the target's own choice is an
end token, and an end token is only ever the target's choice: it arrives as the bonus token. So relaxed lengths do not
drift.

Knows no sequences, pools or caches.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.decoding.device_copy import to_device
from pipeline.decoding.token_tree import TokenTree, padded_parents
from pipeline.decoding.verifiers import Greedy, ProbabilityThreshold, TopK, Verifier


@dataclass(frozen=True)
class Acceptance:
    """The outcome of one verify step for one sequence.

    `nodes` int64[num_accepted], the accepted path from the root; `next_token`, the target's choice after it.
    """

    nodes: np.ndarray
    next_token: int

    @property
    def num_accepted(self) -> int:
        return len(self.nodes)


def verify(
    verifier: Verifier, logits: torch.Tensor, trees: list[TokenTree], starts: np.ndarray, is_end: np.ndarray
) -> list[Acceptance | None]:
    """Accept the best path of each sequence's draft.

    Parameters
    ----------
    logits : (num_rows, vocab_size) on any device; of sequence i, row `starts[i]` follows its last committed token and
        row `starts[i] + 1 + j` follows node j of `trees[i]`.
    is_end : bool[vocab_size], the end tokens.

    Returns
    -------
    One `Acceptance` a sequence, None where the target's logits are not finite.
    """
    choices = row_argmax(logits)
    best_logits = logits.gather(1, choices[:, None])[:, 0]
    token_ids = np.concatenate([tree.token_ids for tree in trees]).astype(np.int64)
    # What the host needs comes in one copy, and with it one synchronisation. float64 holds every token id.
    report = [choices.double(), best_logits.double()]
    if len(token_ids):
        parent_rows = np.concatenate([s + 1 + tree.parents for s, tree in zip(starts, trees, strict=True)])
        used_rows, parents = np.unique(parent_rows, return_inverse=True)
        sent = to_device(np.concatenate((used_rows, parents, token_ids)), logits.device)
        used, at, tokens = sent.split((len(used_rows), len(token_ids), len(token_ids)))
        verdicts = verifier(logits.index_select(0, used), choices.index_select(0, used), at, tokens)
        report += [verdicts.accepted.double(), verdicts.log_probability.double()]
    values = torch.cat(report).cpu().numpy()
    num_rows, num_nodes = len(choices), len(token_ids)
    chosen, finite = values[:num_rows].astype(np.int64), np.isfinite(values[num_rows : 2 * num_rows])
    if num_nodes == 0:
        nothing = np.empty(0, np.int64)
        return [Acceptance(nothing, int(chosen[s])) if finite[s] else None for s in starts]
    accepted, log_probability = values[2 * num_rows :].reshape(2, num_nodes)
    allowed = (accepted > 0) & ~is_end[chosen[parent_rows]] & ~is_end[token_ids]
    paths = select_paths(allowed, log_probability, trees)
    results: list[Acceptance | None] = []
    for start, tree, path in zip(starts, trees, paths, strict=True):
        if not finite[start : start + len(tree) + 1].all():
            results.append(None)
        else:
            results.append(Acceptance(path, int(chosen[start + 1 + path[-1]] if len(path) else chosen[start])))
    return results


def row_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of each row's first largest logit: int64[num_rows]."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy().argmax(-1))  # vectorised, which torch's is not: a tenth of its time
    return logits.argmax(-1)


def select_paths(accepted: np.ndarray, log_probability: np.ndarray, trees: list[TokenTree]) -> list[np.ndarray]:
    """The longest accepted path of each tree, the more probable of equally long ones, the first of equals.

    Parameters
    ----------
    accepted, log_probability : [num_nodes], the trees' nodes one tree after another.

    Returns
    -------
    int64[num_accepted] for each tree: node indices from the root.
    """
    sizes = np.array([len(tree) for tree in trees])
    num_trees, longest = len(trees), int(sizes.max())
    inside = np.arange(longest) < sizes[:, None]
    ok = np.zeros((num_trees, longest), bool)
    ok[inside] = accepted
    score = np.zeros((num_trees, longest + 1))  # of the path to each node; the last column is the root
    score[:, :longest][inside] = log_probability
    parents = padded_parents(trees)
    length = np.zeros((num_trees, longest + 1), np.int64)
    alive = np.zeros((num_trees, longest + 1), bool)
    alive[:, -1] = True
    rows = np.arange(num_trees)
    for node in range(longest):
        parent = parents[:, node]  # -1 is the root's column
        alive[:, node] = ok[:, node] & alive[rows, parent]
        length[:, node] = length[rows, parent] + 1
        score[:, node] += score[rows, parent]
    length = np.where(alive, length, 0)[:, :longest]
    best_length = length.max(1)
    candidates = np.where((length == best_length[:, None]) & (length > 0), score[:, :longest], -np.inf)
    last = candidates.argmax(1)
    paths = []
    for tree, end, size in zip(trees, last.tolist(), best_length.tolist(), strict=True):
        path = np.empty(size, np.int64)
        for i in range(size - 1, -1, -1):
            path[i] = end
            end = int(tree.parents[end])
        paths.append(path)
    return paths


def reference_accept(rule: Verifier, logits: np.ndarray, tree: TokenTree, end_ids: set[int]) -> Acceptance:
    """`verify` for one sequence, slow and obvious: every path from the root is tried.

    `logits` float32[n + 1, vocab_size]: after the last committed token, then after each node.
    """
    log_probs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    log_probs -= logits.max(-1, keepdims=True)

    def accepts(node: int) -> bool:
        row = int(tree.parents[node]) + 1
        token, choice = int(tree.token_ids[node]), int(logits[row].argmax())
        if choice in end_ids or token in end_ids:
            return False
        if token == choice:
            return True
        in_top_k = logits[row, token] >= sorted(logits[row])[-min(getattr(rule, "k", 1), logits.shape[1])]
        probable = log_probs[row, token] > np.log(max(getattr(rule, "min_probability", 0.0), 1e-300))
        match rule:
            case Greedy():
                return False
            case TopK():
                return bool(rule.k > 1 and in_top_k)
            case ProbabilityThreshold():
                return bool(probable)
        return bool(rule.k > 1 and in_top_k and probable)

    best: tuple[int, float] = (0, 0.0)
    best_path: list[int] = []
    for node in range(len(tree)):
        path = [node]
        while tree.parents[path[0]] >= 0:
            path.insert(0, int(tree.parents[path[0]]))
        if all(accepts(n) for n in path):
            score = 0.0
            if not isinstance(rule, Greedy):
                score = sum(float(log_probs[int(tree.parents[n]) + 1, tree.token_ids[n]]) for n in path)
            if len(path) > best[0] or (len(path) == best[0] and score > best[1]):
                best, best_path = (len(path), score), path
    last = best_path[-1] + 1 if best_path else 0
    return Acceptance(np.array(best_path, np.int64), int(logits[last].argmax()))
