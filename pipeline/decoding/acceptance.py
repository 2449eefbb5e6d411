"""Which path through each draft is committed, and the token that follows it.

The rule's verdicts are made on the device, for all sequences at once (`row_verdicts`), and come to the host; there
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

from pipeline.decoding.forward.output_head import HeldLogits, StepLogits
from pipeline.decoding.row_verdicts import judge_rows
from pipeline.decoding.token_tree import TokenTree, padded_parents
from pipeline.decoding.verifiers import Greedy, ProbabilityThreshold, TopK, Verifier

ROUND_LOGITS = 1 << 18  # on a CPU this many numbers are computed and read in the time that a further round takes


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
    verifier: Verifier,
    logits: torch.Tensor | StepLogits,
    trees: list[TokenTree],
    starts: np.ndarray,
    is_end: np.ndarray,
) -> list[Acceptance | None]:
    """Accept the best path of each sequence's draft.

    On a CPU drafts are judged in rounds, in the order in which they were drafted, twice as many of each tree in every
    round: of what is below a node that was not accepted hardly any logits are computed. Elsewhere all are judged at
    once, which waits for the device once.

    Parameters
    ----------
    logits : (num_rows, vocab_size) on any device, or what computes them; of sequence i, row `starts[i]` follows its
        last committed token and row `starts[i] + 1 + j` follows node j of `trees[i]`.
    is_end : bool[vocab_size], the end tokens.

    Returns
    -------
    One `Acceptance` a sequence, None where those of the target's logits that were looked at are not finite.
    """
    rows = HeldLogits(logits) if isinstance(logits, torch.Tensor) else logits
    if not any(len(tree) for tree in trees):  # plain decoding
        nothing = np.empty(0, np.int64)
        found = judge_rows(verifier, rows, starts, nothing, nothing)
        return [
            Acceptance(nothing, choice) if is_finite else None
            for choice, is_finite in zip(found.choices.tolist(), found.is_finite.tolist(), strict=True)
        ]
    at_once = ROUND_LOGITS // len(is_end) if rows.device.type == "cpu" else rows.num_rows
    step = _Judged(rows.num_rows, trees, starts)
    while len(pending := step.next_rows(at_once)):
        step.judge(verifier, rows, pending, is_end)
        at_once *= 2
    return step.acceptances(trees, starts)


class _Judged:
    """What is known so far of a step's rows and nodes, all trees' nodes one after another.

    `choices` int64[num_rows]; `is_finite` bool[num_rows], true of rows that were not looked at; of nodes `allowed`
    bool, the rule's verdict and that of the end-of-text rule, and `log_probability`.
    """

    def __init__(self, num_rows: int, trees: list[TokenTree], starts: np.ndarray) -> None:
        starts = np.asarray(starts)
        sizes = np.array([len(tree) for tree in trees])
        num_nodes = int(sizes.sum())
        self.choices = np.zeros(num_rows, np.int64)
        self.is_finite = np.ones(num_rows, bool)
        self.allowed = np.zeros(num_nodes, bool)
        self.log_probability = np.zeros(num_nodes)
        tree_of = np.repeat(np.arange(len(trees)), sizes)
        self._token_ids = np.concatenate([tree.token_ids for tree in trees]).astype(np.int64)
        parents = np.concatenate([tree.parents for tree in trees])
        self._parent_row_of = starts[tree_of] + 1 + parents
        self._row_of = np.arange(num_nodes) + (starts + 1 - (np.cumsum(sizes) - sizes))[tree_of]
        self._tree_of_row = np.full(num_rows, -1)
        self._tree_of_row[starts], self._tree_of_row[self._row_of] = np.arange(len(trees)), tree_of
        self._is_wanted = self._tree_of_row >= 0  # neither judged nor below a node that was not accepted

    def next_rows(self, at_once: int) -> np.ndarray:
        """The rows to look at next, int64[n]: of each tree the first, as many as make `at_once` of all, or all."""
        wanted = np.flatnonzero(self._is_wanted)
        if len(wanted) <= at_once:
            return wanted
        is_first = np.diff(self._tree_of_row[wanted], prepend=-1) != 0  # of a tree's, which are neighbours
        every = np.arange(len(wanted))
        number = every - np.maximum.accumulate(np.where(is_first, every, 0))
        return wanted[number < max(1, at_once // is_first.sum())]

    def judge(self, verifier: Verifier, rows: StepLogits, pending: np.ndarray, is_end: np.ndarray) -> None:
        """Look at the logits of rows int64[n]: of the nodes behind them all is known then."""
        place = np.full(len(self.choices), -1)
        place[pending] = np.arange(len(pending))
        nodes = np.flatnonzero(place[self._parent_row_of] >= 0)
        parent_rows, token_ids = self._parent_row_of[nodes], self._token_ids[nodes]
        verdicts = judge_rows(verifier, rows, pending, place[parent_rows], token_ids)
        self.choices[pending], self.is_finite[pending] = verdicts.choices, verdicts.is_finite
        self.allowed[nodes] = verdicts.accepted & ~is_end[self.choices[parent_rows]] & ~is_end[token_ids]
        self.log_probability[nodes] = verdicts.log_probability
        self._is_wanted[pending] = False
        if self._is_wanted.any():  # else all were judged at once, as a GPU does
            self._drop_below(self._row_of[nodes[~self.allowed[nodes]]])

    def _drop_below(self, rejected: np.ndarray) -> None:
        """Rows of nodes that were not accepted, int64[n]: nothing is asked about them and what comes behind them."""
        is_dropped = np.zeros(len(self.choices), bool)
        is_dropped[rejected] = True
        above = np.arange(len(self.choices))  # an ancestor's row, 1, 2, 4, ... steps up; a root's is its own
        above[self._row_of] = self._parent_row_of
        while True:
            is_dropped |= is_dropped[above]
            if (above == (further := above[above])).all():
                break
            above = further
        self._is_wanted &= ~is_dropped

    def acceptances(self, trees: list[TokenTree], starts: np.ndarray) -> list[Acceptance | None]:
        """The outcome for each tree."""
        paths = select_paths(self.allowed, self.log_probability, trees)
        results: list[Acceptance | None] = []
        for start, tree, path in zip(starts, trees, paths, strict=True):
            last = start + 1 + path[-1] if len(path) else start
            is_sound = self.is_finite[start : start + len(tree) + 1].all()
            results.append(Acceptance(path, int(self.choices[last])) if is_sound else None)
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
