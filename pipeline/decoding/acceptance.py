"""Acceptance selects the path of each draft that is committed, and the token that follows it.

`judge_rows` applies the rule on the device, for all sequences at once, and brings a few numbers per row to the host.
There `select_paths` handles the trees of all sequences at once. Whatever the rule, nothing is accepted after a node
where the target's choice is an end token, and an end token is committed only as the target's choice, the bonus token.
So relaxed verification does not shift the lengths of texts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from laserbatch.pipeline.decoding.device_memory import to_device
from laserbatch.pipeline.decoding.grammar import Guide
from laserbatch.pipeline.decoding.model.output_head import StepLogits
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.pipeline.decoding.verifiers import DraftedNodes, Verifier

# Number of rows whose logits are in memory at once: many, so that the output layer's weights are read few times, but on
# a CPU so few that their logits stay in its cache.
CHUNK_ROWS = {"cpu": 256, "cuda": 1024}
ROUND_LOGITS = 1 << 18  # a CPU computes and reads this many logits in the time that one more round costs


@dataclass(frozen=True)
class Acceptance:
    """The outcome of one verify step for one sequence.

    `nodes` int64[num_accepted], the accepted path from the root; `next_token`, the target's choice after it.
    """

    nodes: np.ndarray
    next_token: int


def verify(
    verifier: Verifier, rows: StepLogits, trees: TreeBatch, starts: np.ndarray, is_end: np.ndarray,
    guides: Sequence[Guide | None] = (), guided_rows: StepLogits | None = None,
) -> list[Acceptance | None]:  # fmt: skip
    """Accept the best path of each sequence's draft.

    On a CPU, nodes are judged in rounds, in the order in which they were drafted, and each round takes twice as many
    nodes as the one before: hardly any logits are computed for nodes below a rejected one. On other devices all nodes
    are judged at once, which waits for the device once.

    `rows` : row `starts[i]` follows the last committed token of sequence i, row `starts[i] + 1 + j` node j of tree i.
    `is_end` : bool[vocab_size], the end tokens.
    `guides`, `guided_rows` : the guide of each sequence, None if it has no grammar, and the rows with forbidden tokens
        masked; None if no sequence has a grammar.

    Returns None for a sequence where the target's logits after its last committed token are not finite. A node followed
    by logits that are not finite is not accepted.
    """
    if len(trees) == 0:  # plain decoding
        nothing = np.empty(0, np.int64)
        verdicts = judge_rows(verifier, rows, starts, nothing, nothing, nothing)
        choices, is_finite = verdicts.choices, verdicts.is_finite
        if guided_rows is not None:
            judged = zip(guides, choices.tolist(), is_finite.tolist(), strict=True)
            is_left = [guide is not None and sound and not guide.num_allowed([token]) for guide, token, sound in judged]
            if len(left := np.flatnonzero(is_left)):
                again = judge_rows(verifier, guided_rows, starts[left], nothing, nothing, nothing)
                choices[left], is_finite[left] = again.choices, again.is_finite
        outcomes = zip(choices.tolist(), is_finite.tolist(), strict=True)
        return [Acceptance(nothing, choice) if finite else None for choice, finite in outcomes]
    at_once = rows.num_rows
    if rows.device.type == "cpu":
        at_once = max(trees.num_trees, ROUND_LOGITS // len(is_end))
    step = _Judged(rows.num_rows, trees, np.asarray(starts))
    while len(pending := step.next_rows(at_once)):
        step.judge(verifier, rows, pending, is_end)
        at_once *= 2
    may_end = getattr(verifier, "may_end", None)
    if guided_rows is None:
        return step.acceptances(may_end)
    unsure = [tree for tree, guide in enumerate(guides) if guide is not None]
    while True:
        accepted = step.acceptances(may_end)
        unsure, masked = step.leaving(guides, accepted, unsure)
        if not unsure:
            return accepted
        if masked:
            step.judge(verifier, guided_rows, np.sort(masked), is_end)
        while len(pending := step.unjudged()):
            step.judge(verifier, rows, pending, is_end)


class _Judged:
    """Verdicts so far on a step's rows and on the nodes of all its trees."""

    def __init__(self, num_rows: int, trees: TreeBatch, starts: np.ndarray) -> None:
        self._trees, self._starts = trees, starts
        self.choices = np.zeros(num_rows, np.int64)
        self.is_finite = np.ones(num_rows, bool)  # True for rows that were not judged
        self.allowed = np.zeros(len(trees), bool)  # by the rule, and by the rule on end tokens
        self.log_probability = np.zeros(len(trees))
        self._token_ids = trees.token_ids.astype(np.int64)
        first_of = starts[trees.tree_of] + 1
        self._parent_row_of, self._row_of = first_of + trees.parents, first_of + trees.places
        self._tree_of_row = np.full(num_rows, -1)
        self._tree_of_row[starts], self._tree_of_row[self._row_of] = np.arange(len(starts)), trees.tree_of
        self._is_pending = self._tree_of_row >= 0  # neither judged nor below a node that was not accepted
        self._is_judged = np.zeros(num_rows, bool)
        self._masked: set[int] = set()  # rows that were judged with a grammar's mask

    def next_rows(self, at_once: int) -> np.ndarray:
        """Rows to judge next, int64[n]: the first pending rows of each tree, about `at_once` in all."""
        pending = np.flatnonzero(self._is_pending)
        if len(pending) <= at_once:
            return pending
        is_first = np.diff(self._tree_of_row[pending], prepend=-1) != 0  # pending row of its tree
        every = np.arange(len(pending))
        number = every - np.maximum.accumulate(np.where(is_first, every, 0))
        return pending[number < max(1, at_once // is_first.sum())]

    def judge(self, verifier: Verifier, rows: StepLogits, pending: np.ndarray, is_end: np.ndarray) -> None:
        """Judge rows int64[n]: choose the token after each, and apply the rule to the nodes that follow it."""
        place = np.full(len(self.choices), -1)
        place[pending] = np.arange(len(pending))
        nodes = np.flatnonzero(place[self._parent_row_of] >= 0)
        parent_rows, token_ids = self._parent_row_of[nodes], self._token_ids[nodes]
        verdicts = judge_rows(verifier, rows, pending, place[parent_rows], token_ids, self._trees.source[nodes])
        self.choices[pending], self.is_finite[pending] = verdicts.choices, verdicts.is_finite
        self.allowed[nodes] = verdicts.accepted & ~is_end[self.choices[parent_rows]] & ~is_end[token_ids]
        self.log_probability[nodes] = verdicts.log_probability
        self._is_pending[pending], self._is_judged[pending] = False, True
        if self._is_pending.any():  # otherwise all were judged at once, as on a GPU
            is_rejected = np.zeros(len(self._trees), bool)
            is_rejected[nodes] = ~self.allowed[nodes]
            is_dropped = self._trees.scan_from_root(np.logical_or, is_rejected)  # nodes below are not judged
            self._is_pending[self._row_of[is_dropped]] = False

    def leaving(
        self, guides: Sequence[Guide | None], accepted: list[Acceptance | None], unsure: list[int]
    ) -> tuple[list[int], list[int]]:
        """The trees of `unsure` whose accepted tokens leave their grammars, and the rows to judge again with a mask.

        A row is judged again if its choice is not allowed. A drafted node that is not allowed is no longer accepted.
        """
        leaving, masked = [], []
        for tree in unsure:
            guide, acceptance = guides[tree], accepted[tree]
            if guide is None or acceptance is None:
                continue
            nodes = acceptance.nodes.tolist()
            first_row, first_node = int(self._starts[tree]), int(self._trees.starts[tree])
            token_ids = [*self._token_ids[first_node + acceptance.nodes].tolist(), acceptance.next_token]
            place = guide.num_allowed(token_ids)
            if place == len(token_ids):
                continue
            row = first_row + (1 + nodes[place - 1] if place else 0)
            if token_ids[place] != self.choices[row]:
                self.allowed[first_node + nodes[place]] = False
            elif row not in self._masked:
                self._masked.add(row)
                masked.append(row)
            else:  # not allowed even with the mask: this text alone fails, when it is extended
                continue
            leaving.append(tree)
        return leaving, masked

    def unjudged(self) -> np.ndarray:
        """Rows after accepted nodes that were not judged yet, int64[n], as the nodes were accepted later."""
        is_accepted = self._trees.scan_from_root(np.logical_and, self.allowed)
        return self._row_of[is_accepted & ~self._is_judged[self._row_of]]

    def acceptances(self, may_end: Callable[[np.ndarray, TreeBatch], np.ndarray] | None) -> list[Acceptance | None]:
        """The outcome for each tree; `may_end` is the rule's method, if it has one."""
        is_accepted = self.allowed & self.is_finite[self._row_of]
        is_end = True
        if may_end is not None:
            is_end = may_end(self._token_ids != self.choices[self._parent_row_of], self._trees)
        paths, last_nodes = select_paths(is_accepted, self.log_probability, self._trees, is_end)
        next_tokens = self.choices[self._starts + 1 + last_nodes].tolist()
        outcomes = zip(paths, next_tokens, self.is_finite[self._starts].tolist(), strict=True)
        return [Acceptance(path, next_token) if is_sound else None for path, next_token, is_sound in outcomes]


def select_paths(
    accepted: np.ndarray, log_probability: np.ndarray, trees: TreeBatch, may_end: np.ndarray | bool = True
) -> tuple[list[np.ndarray], np.ndarray]:
    """The longest accepted path of each tree; of equally long paths the most probable, of equals the first.

    Arguments have a value for each of the n nodes of all trees; paths end at nodes where `may_end` bool[n].

    Returns each tree's path as int64[num_accepted], node indices from the root, and the last node of each path as
    int64[num_trees], -1 for an empty path.
    """
    num_trees, tree_of = len(trees.sizes), trees.tree_of
    length = np.where(trees.scan_from_root(np.logical_and, accepted) & may_end, trees.depths, 0)
    longest = np.zeros(num_trees, np.int64)
    np.maximum.at(longest, tree_of, length)
    candidates = np.flatnonzero((length > 0) & (length == longest[tree_of]))
    score = trees.scan_from_root(np.add, log_probability)[candidates]
    best = np.full(num_trees, -np.inf)
    np.maximum.at(best, tree_of[candidates], score)
    ends = candidates[score == best[tree_of[candidates]]][::-1]  # a tree's first is written last, and stays
    last_nodes = np.full(num_trees, -1)
    last_nodes[tree_of[ends]] = trees.places[ends]

    accepted_trees = np.flatnonzero(last_nodes >= 0)
    ancestors = np.zeros(num_trees, np.int64)
    ancestors[accepted_trees] = trees.ancestors[trees.starts[accepted_trees] + last_nodes[accepted_trees]]
    bits = np.arange(trees.sizes.max(initial=0))
    _, nodes = np.nonzero((ancestors[:, None] >> bits) & 1)  # parents precede their children
    stops = np.cumsum(longest * (last_nodes >= 0)).tolist()
    return [nodes[start:stop] for start, stop in pairwise([0, *stops])], last_nodes


@dataclass(frozen=True)
class RowVerdicts:
    """Verdicts on the host: each row's argmax int64[n] and whether its logit is finite bool[n]; each node's verdict."""

    choices: np.ndarray
    is_finite: np.ndarray
    accepted: np.ndarray
    log_probability: np.ndarray


@torch.inference_mode()
def judge_rows(
    verifier: Verifier, rows: StepLogits, row_indices: np.ndarray, parents: np.ndarray, token_ids: np.ndarray,
    sources: np.ndarray,
) -> RowVerdicts:  # fmt: skip
    """Judge drafted tokens by a rule and choose the target's tokens, from the logits of CHUNK_ROWS rows at a time.

    `row_indices` : int64[n], the rows to judge.
    `parents`, `token_ids`, `sources` : [m], for each node its parent's index in `row_indices`, its token and source.
    """
    size = CHUNK_ROWS["cpu" if rows.device.type == "cpu" else "cuda"]
    if len(row_indices) <= size:
        by_chunk = [np.arange(len(parents))]
    else:
        order = np.argsort(parents, kind="stable")
        by_chunk = np.split(order, np.searchsorted(parents[order], np.arange(size, len(row_indices), size)))
    choices, best, accepted, log_probability = [], [], [], []
    for number, nodes in enumerate(by_chunk):
        first = number * size
        logits = rows.of(row_indices[first : first + size])
        if logits.device.type == "cpu":
            logits = logits.float()  # a CPU's argmax is twenty times slower in bfloat16
        choices.append(row_argmax(logits))
        best.append(logits.gather(1, choices[-1][:, None])[:, 0])
        if len(nodes):
            used, at = np.unique(parents[nodes] - first, return_inverse=True)
            sent = to_device(np.concatenate((used, at, token_ids[nodes], sources[nodes])), logits.device)
            used_rows, *judged = sent.split((len(used), len(nodes), len(nodes), len(nodes)))
            followed, chosen = logits, choices[-1]
            if len(used) < len(logits):
                followed, chosen = logits.index_select(0, used_rows), chosen.index_select(0, used_rows)
            verdicts = verifier(followed, chosen, DraftedNodes(*judged))
            accepted.append(verdicts.accepted)
            log_probability.append(verdicts.log_probability)
    # One copy, and so one synchronisation, brings all results to the host. float64 represents every token id.
    parts = [part.double() for part in (*choices, *best, *accepted, *log_probability)]
    values = torch.cat(parts).cpu().numpy()
    num_rows, num_nodes = len(row_indices), len(parents)
    node_verdicts = np.empty((2, num_nodes))
    node_verdicts[:, np.concatenate(by_chunk)] = values[2 * num_rows :].reshape(2, num_nodes)
    chosen, is_finite = values[:num_rows].astype(np.int64), np.isfinite(values[num_rows : 2 * num_rows])
    return RowVerdicts(chosen, is_finite, node_verdicts[0] > 0, node_verdicts[1])


def row_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of each row's first largest logit: int64[num_rows]."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))  # vectorised, unlike torch's: a tenth of its time
    return logits.argmax(-1)
