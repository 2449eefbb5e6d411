"""Which drafted tokens the target accepts, and which path through the drafts is committed.

Each rule is a small pure function of the target's logits and the drafted tokens, vectorised over all sequences' nodes
on the device. What they decide comes to the host in one copy; there `select_paths` walks the trees of all sequences at
once. Beside them stands `reference_accept`, the same for one sequence in plain Python.

Every rule accepts the target's own choice (its argmax), so with k = 1, or a threshold no other token reaches, the
relaxed rules are greedy verification. The end-of-text rule holds for all of them: nothing is accepted past a node where
the target's own choice is an end token, and an end token is only ever the target's choice: it arrives as the bonus
token. So relaxed lengths do not drift.

Knows no sequences, pools or caches.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pipeline.decoding.settings import DecodingSettings
from pipeline.decoding.token_tree import TokenTree


@dataclass(frozen=True)
class NodeVerdicts:
    """What a rule says about each drafted node, on the device.

    `accepted` bool[num_nodes]: acceptable after its parent. `log_probability` float32[num_nodes]: of the node's token
    under the target, to choose between paths; zeros where a rule accepts at most one token after each parent.
    """

    accepted: torch.Tensor
    log_probability: torch.Tensor


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


class Verifier(Protocol):
    """A rule with its settings."""

    def __call__(self, logits: torch.Tensor, choices: torch.Tensor, token_ids: torch.Tensor) -> NodeVerdicts:
        """Judge nodes by their parents' logits.

        Parameters
        ----------
        logits : (num_nodes, vocab_size), the target's after each node's parent.
        choices : int64[num_nodes], their argmax.
        token_ids : int64[num_nodes], the drafted tokens.
        """
        ...


def greedy(logits: torch.Tensor, choices: torch.Tensor, token_ids: torch.Tensor) -> NodeVerdicts:
    """Accept the target's own choice only: the text is that of plain greedy decoding (LASER, Eq. 4)."""
    return NodeVerdicts(token_ids == choices, torch.zeros_like(token_ids, dtype=torch.float32))


def top_k(logits: torch.Tensor, choices: torch.Tensor, token_ids: torch.Tensor, k: int) -> NodeVerdicts:
    """Accept the k most probable tokens, and those tied with the k-th (LASER, Eq. 7)."""
    drafted = drafted_logits(logits, token_ids)
    return NodeVerdicts(
        (token_ids == choices) | among_top_k(logits, drafted, k), drafted - torch.logsumexp(logits.float(), -1)
    )


def probability_threshold(
    logits: torch.Tensor, choices: torch.Tensor, token_ids: torch.Tensor, min_probability: float
) -> NodeVerdicts:
    """Accept tokens of more than `min_probability` under the target."""
    log_probability = drafted_logits(logits, token_ids) - torch.logsumexp(logits.float(), -1)
    return NodeVerdicts((token_ids == choices) | above(log_probability, min_probability), log_probability)


def relaxed(
    logits: torch.Tensor, choices: torch.Tensor, token_ids: torch.Tensor, k: int, min_probability: float
) -> NodeVerdicts:
    """LASER's relaxed rule: among the k most probable and of more than `min_probability` (section 3.4, Eq. 8)."""
    drafted = drafted_logits(logits, token_ids)
    log_probability = drafted - torch.logsumexp(logits.float(), -1)
    likely = among_top_k(logits, drafted, k) & above(log_probability, min_probability)
    return NodeVerdicts((token_ids == choices) | likely, log_probability)


def drafted_logits(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The logit of each node's own token: float32[num_nodes]."""
    return logits.gather(1, token_ids[:, None])[:, 0].float()


def among_top_k(logits: torch.Tensor, drafted: torch.Tensor, k: int) -> torch.Tensor:
    """Whether a drafted logit is at least its row's k-th largest: bool[num_nodes]. For k = 1 only `choices` counts."""
    if k == 1:
        return torch.zeros_like(drafted, dtype=torch.bool)
    smallest = logits.topk(min(k, logits.shape[-1]), -1).values[:, -1]
    return drafted >= smallest.float()


def above(log_probability: torch.Tensor, min_probability: float) -> torch.Tensor:
    """Whether a probability exceeds a threshold: bool, as `log_probability`."""
    return log_probability > (math.log(min_probability) if min_probability > 0 else -math.inf)


@dataclass(frozen=True)
class Greedy:
    """`greedy`, as a verifier."""

    def __call__(self, logits, choices, token_ids) -> NodeVerdicts:
        return greedy(logits, choices, token_ids)


@dataclass(frozen=True)
class TopK:
    """`top_k`, as a verifier."""

    k: int = 2

    def __call__(self, logits, choices, token_ids) -> NodeVerdicts:
        return top_k(logits, choices, token_ids, self.k)


@dataclass(frozen=True)
class ProbabilityThreshold:
    """`probability_threshold`, as a verifier."""

    min_probability: float = 0.1

    def __call__(self, logits, choices, token_ids) -> NodeVerdicts:
        return probability_threshold(logits, choices, token_ids, self.min_probability)


@dataclass(frozen=True)
class Relaxed:
    """`relaxed`, as a verifier; the defaults are LASER's published ones."""

    k: int = 2
    min_probability: float = 0.1

    def __call__(self, logits, choices, token_ids) -> NodeVerdicts:
        return relaxed(logits, choices, token_ids, self.k, self.min_probability)


def verifier_from(settings: DecodingSettings) -> Verifier:
    """The verifier that the settings name."""
    if settings.verifier == "greedy":
        return Greedy()
    if settings.verifier == "top_k":
        return TopK(settings.top_k)
    if settings.verifier == "probability":
        return ProbabilityThreshold(settings.min_probability)
    return Relaxed(settings.top_k, settings.min_probability)


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
    choices = logits.argmax(-1)
    best_logits = logits.gather(1, choices[:, None])[:, 0].float()
    token_ids = np.concatenate([tree.token_ids for tree in trees]).astype(np.int64)
    if len(token_ids) == 0:
        report = torch.cat((choices.double(), best_logits.double())).cpu().numpy()
        chosen, finite = report[: len(choices)].astype(np.int64), np.isfinite(report[len(choices) :])
        empty = np.empty(0, np.int64)
        return [Acceptance(empty, int(chosen[s])) if finite[s] else None for s in starts]

    parent_rows = np.concatenate([s + 1 + tree.parents.astype(np.int64) for s, tree in zip(starts, trees, strict=True)])
    nodes = torch.from_numpy(np.stack((parent_rows, token_ids))).to(logits.device)
    verdicts = verifier(logits.index_select(0, nodes[0]), choices.index_select(0, nodes[0]), nodes[1])
    # One copy to the host, and with it one synchronisation. float64 holds every token id.
    report = (
        torch.cat(
            (choices.double(), best_logits.double(), verdicts.accepted.double(), verdicts.log_probability.double())
        )
        .cpu()
        .numpy()
    )
    num_rows, num_nodes = len(choices), len(token_ids)
    chosen, finite = report[:num_rows].astype(np.int64), np.isfinite(report[num_rows : 2 * num_rows])
    accepted = report[2 * num_rows : 2 * num_rows + num_nodes] > 0
    accepted &= ~is_end[chosen[parent_rows]] & ~is_end[token_ids]
    paths = select_paths(accepted, report[2 * num_rows + num_nodes :], trees)
    results: list[Acceptance | None] = []
    for start, tree, path in zip(starts, trees, paths, strict=True):
        if not finite[start : start + len(tree) + 1].all():
            results.append(None)
        else:
            results.append(Acceptance(path, int(chosen[start + 1 + path[-1]] if len(path) else chosen[start])))
    return results


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
    parents = np.full((num_trees, longest), -1, np.int64)
    parents[inside] = np.concatenate([tree.parents for tree in trees])
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
