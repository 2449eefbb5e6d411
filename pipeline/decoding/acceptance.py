"""Which path through each draft is committed, and the token that follows it.

The rule's verdicts are made on the device, for all sequences at once (`row_verdicts`), and come to the host; there
`select_paths` takes the trees of all sequences at once. Beside it stands `reference_accept`, the same for one sequence
in plain Python.

The end-of-text rule holds whatever the verifier: nothing is accepted past a node where the target's own choice is an
end token, and an end token is only ever the target's choice: it arrives as the bonus token. So relaxed lengths do not
drift.

Knows no sequences, pools or caches.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from laserbatch.pipeline.decoding.model.output_head import HeldLogits, StepLogits
from laserbatch.pipeline.decoding.packed_trees import PackedTrees
from laserbatch.pipeline.decoding.row_verdicts import judge_rows
from laserbatch.pipeline.decoding.token_tree import TokenTree
from laserbatch.pipeline.decoding.verifiers.greedy import Greedy
from laserbatch.pipeline.decoding.verifiers.probability import ProbabilityThreshold
from laserbatch.pipeline.decoding.verifiers.top_k import TopK
from laserbatch.pipeline.decoding.verifiers.verifier import Verifier

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
    trees: PackedTrees,
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
        last committed token and row `starts[i] + 1 + j` follows node j of tree i.
    is_end : bool[vocab_size], the end tokens.

    Returns
    -------
    One `Acceptance` a sequence, None where the target's logits after its last committed token are not finite. Nodes
    after which they are not are not accepted.
    """
    rows = HeldLogits(logits) if isinstance(logits, torch.Tensor) else logits
    if len(trees) == 0:  # plain decoding
        nothing = np.empty(0, np.int64)
        found = judge_rows(verifier, rows, starts, nothing, nothing)
        return [
            Acceptance(nothing, choice) if is_finite else None
            for choice, is_finite in zip(found.choices.tolist(), found.is_finite.tolist(), strict=True)
        ]
    at_once = rows.num_rows
    if rows.device.type == "cpu":
        at_once = max(trees.num_trees, ROUND_LOGITS // len(is_end))
    step = _Judged(rows.num_rows, trees, np.asarray(starts))
    while len(pending := step.next_rows(at_once)):
        step.judge(verifier, rows, pending, is_end)
        at_once *= 2
    return step.acceptances()


class _Judged:
    """What is known so far of a step's rows and nodes, all trees' nodes one after another.

    `choices` int64[num_rows]; `is_finite` bool[num_rows], true of rows that were not looked at; of nodes `allowed`
    bool, the rule's verdict and that of the end-of-text rule, and `log_probability`.
    """

    def __init__(self, num_rows: int, trees: PackedTrees, starts: np.ndarray) -> None:
        self._trees, self._starts = trees, starts
        self.choices = np.zeros(num_rows, np.int64)
        self.is_finite = np.ones(num_rows, bool)
        self.allowed = np.zeros(len(trees), bool)
        self.log_probability = np.zeros(len(trees))
        self._token_ids = trees.token_ids.astype(np.int64)
        first_of = starts[trees.tree_of] + 1
        self._parent_row_of, self._row_of = first_of + trees.parents, first_of + trees.places
        self._tree_of_row = np.full(num_rows, -1)
        self._tree_of_row[starts], self._tree_of_row[self._row_of] = np.arange(len(starts)), trees.tree_of
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
            is_rejected = np.zeros(len(self._trees), bool)
            is_rejected[nodes] = ~self.allowed[nodes]
            is_dropped = self._trees.along_paths(np.logical_or, is_rejected)  # nothing is asked about what is below
            self._is_wanted[self._row_of[is_dropped]] = False

    def acceptances(self) -> list[Acceptance | None]:
        """The outcome for each tree."""
        is_accepted = self.allowed & self.is_finite[self._row_of]
        paths, last_nodes = select_paths(is_accepted, self.log_probability, self._trees)
        next_tokens = self.choices[self._starts + 1 + last_nodes].tolist()
        return [
            Acceptance(path, next_token) if is_sound else None
            for path, next_token, is_sound in zip(
                paths, next_tokens, self.is_finite[self._starts].tolist(), strict=True
            )
        ]


def select_paths(
    accepted: np.ndarray, log_probability: np.ndarray, trees: PackedTrees
) -> tuple[list[np.ndarray], np.ndarray]:
    """The longest accepted path of each tree, the more probable of equally long ones, the first of equals.

    Parameters
    ----------
    accepted, log_probability : [n], of the trees' nodes.

    Returns
    -------
    int64[num_accepted] for each tree: node indices from the root; and int64[num_trees], the last of them, -1 for none.
    """
    num_trees, tree_of = len(trees.sizes), trees.tree_of
    length = np.where(trees.along_paths(np.logical_and, accepted), trees.depths, 0)
    longest = np.zeros(num_trees, np.int64)
    np.maximum.at(longest, tree_of, length)
    candidates = np.flatnonzero((length > 0) & (length == longest[tree_of]))
    score = trees.along_paths(np.add, log_probability)[candidates]
    best = np.full(num_trees, -np.inf)
    np.maximum.at(best, tree_of[candidates], score)
    ends = candidates[score == best[tree_of[candidates]]][::-1]  # the first of a tree is written last
    last_nodes = np.full(num_trees, -1)
    last_nodes[tree_of[ends]] = trees.places[ends]

    found = np.flatnonzero(last_nodes >= 0)
    ancestors = np.zeros(num_trees, np.int64)
    ancestors[found] = trees.ancestors[trees.starts[found] + last_nodes[found]]
    bits = np.arange(trees.sizes.max(initial=0))
    _, nodes = np.nonzero((ancestors[:, None] >> bits) & 1)  # parents precede their children
    stops = np.cumsum(longest * (last_nodes >= 0)).tolist()
    return [nodes[start:stop] for start, stop in pairwise([0, *stops])], last_nodes


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
