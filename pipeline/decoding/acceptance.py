"""Which path through each draft is committed, and the token that follows it.

The rule's verdicts are made on the device, for all sequences at once (`judge_rows`), and come to the host as a few
numbers a row; there `select_paths` takes the trees of all sequences at once. Whatever the rule, nothing is accepted
past a node where the target's own choice is an end token, and an end token is only ever the target's choice, as the
bonus token: so relaxed lengths do not drift.
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

# Rows whose logits are in memory at once: enough that an output layer's weights are read few times, and on a CPU few
# enough that they stay in its cache.
CHUNK_ROWS = {"cpu": 256, "cuda": 1024}
ROUND_LOGITS = 1 << 18  # on a CPU this many numbers are computed and read in the time that a further round takes


@dataclass(frozen=True)
class Acceptance:
    """The outcome of one verify step for one sequence.

    `nodes` int64[num_accepted], the accepted path from the root; `next_token`, the target's choice after it.
    """

    nodes: np.ndarray
    next_token: int


def verify(
    verifier: Verifier,
    rows: StepLogits,
    trees: TreeBatch,
    starts: np.ndarray,
    is_end: np.ndarray,
    guides: Sequence[Guide | None] = (),
    guided_rows: StepLogits | None = None,
) -> list[Acceptance | None]:
    """Accept the best path of each sequence's draft.

    On a CPU drafts are judged in rounds, in the order in which they were drafted, twice as many of each tree in every
    round: of what is below a node that was not accepted hardly any logits are computed. Elsewhere all are judged at
    once, which waits for the device once.

    Parameters
    ----------
    rows : of sequence i, row `starts[i]` follows its last committed token and row `starts[i] + 1 + j` follows node j of
        tree i.
    is_end : bool[vocab_size], the end tokens.
    guides, guided_rows : the grammar of each sequence, None for none, and the rows among allowed tokens alone; without
        rows there are no grammars.

    Returns None for a sequence where the target's logits after its last committed token are not finite. Nodes after
    which they are not are not accepted.
    """
    if len(trees) == 0:  # plain decoding
        nothing = np.empty(0, np.int64)
        verdicts = judge_rows(verifier, rows, starts, nothing, nothing, nothing)
        choices, is_finite = verdicts.choices, verdicts.is_finite
        if guided_rows is not None:
            guided_choices = zip(guides, choices.tolist(), is_finite.tolist(), strict=True)
            is_left = [
                guide is not None and finite and not guide.num_allowed([choice])
                for guide, choice, finite in guided_choices
            ]
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
        self.is_finite = np.ones(num_rows, bool)  # true of rows that were not looked at
        self.allowed = np.zeros(len(trees), bool)  # by the rule, and by that of the end of a text
        self.log_probability = np.zeros(len(trees))
        self._token_ids = trees.token_ids.astype(np.int64)
        first_of = starts[trees.tree_of] + 1
        self._parent_row_of, self._row_of = first_of + trees.parents, first_of + trees.places
        self._tree_of_row = np.full(num_rows, -1)
        self._tree_of_row[starts], self._tree_of_row[self._row_of] = np.arange(len(starts)), trees.tree_of
        self._is_pending = self._tree_of_row >= 0  # neither judged nor below a node that was not accepted
        self._is_judged = np.zeros(num_rows, bool)
        self._masked: set[int] = set()  # rows that were judged among the tokens that a grammar allows

    def next_rows(self, at_once: int) -> np.ndarray:
        """Rows to judge next, int64[n]: the first pending rows of each tree, about `at_once` in all."""
        pending = np.flatnonzero(self._is_pending)
        if len(pending) <= at_once:
            return pending
        is_first = np.diff(self._tree_of_row[pending], prepend=-1) != 0  # in its tree, whose rows are adjacent
        every = np.arange(len(pending))
        number = every - np.maximum.accumulate(np.where(is_first, every, 0))
        return pending[number < max(1, at_once // is_first.sum())]

    def judge(self, verifier: Verifier, rows: StepLogits, pending: np.ndarray, is_end: np.ndarray) -> None:
        """Look at the logits of rows int64[n]: of the nodes behind them all is known then."""
        place = np.full(len(self.choices), -1)
        place[pending] = np.arange(len(pending))
        nodes = np.flatnonzero(place[self._parent_row_of] >= 0)
        parent_rows, token_ids = self._parent_row_of[nodes], self._token_ids[nodes]
        verdicts = judge_rows(verifier, rows, pending, place[parent_rows], token_ids, self._trees.source[nodes])
        self.choices[pending], self.is_finite[pending] = verdicts.choices, verdicts.is_finite
        self.allowed[nodes] = verdicts.accepted & ~is_end[self.choices[parent_rows]] & ~is_end[token_ids]
        self.log_probability[nodes] = verdicts.log_probability
        self._is_pending[pending], self._is_judged[pending] = False, True
        if self._is_pending.any():  # else all were judged at once, as a GPU does
            is_rejected = np.zeros(len(self._trees), bool)
            is_rejected[nodes] = ~self.allowed[nodes]
            is_dropped = self._trees.scan_from_root(np.logical_or, is_rejected)  # nodes below are not judged
            self._is_pending[self._row_of[is_dropped]] = False

    def leaving(
        self, guides: Sequence[Guide | None], accepted: list[Acceptance | None], unsure: list[int]
    ) -> tuple[list[int], list[int]]:
        """Trees of `unsure` whose accepted tokens leave their grammars, and rows to judge among allowed tokens.

        Such a row is one whose choice is not allowed; another node that is not allowed is no longer accepted.
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
            else:  # what is not allowed here either fails alone, when the text is extended
                continue
            leaving.append(tree)
        return leaving, masked

    def unjudged(self) -> np.ndarray:
        """Rows behind accepted nodes that were not looked at, int64[n]: of nodes accepted since."""
        is_accepted = self._trees.scan_from_root(np.logical_and, self.allowed)
        return self._row_of[is_accepted & ~self._is_judged[self._row_of]]

    def acceptances(self, may_end: Callable[[np.ndarray, TreeBatch], np.ndarray] | None) -> list[Acceptance | None]:
        """The outcome for each tree; `may_end`: the rule's, if it has one."""
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
    """The longest accepted path of each tree, the more probable of equally long ones, the first of equals.

    Paths end at nodes where `may_end` bool[n].

    From [n] of the trees' nodes int64[num_accepted] for each tree: node indices from the root; and int64[num_trees],
    the last of them, -1 for none.
    """
    num_trees, tree_of = len(trees.sizes), trees.tree_of
    length = np.where(trees.scan_from_root(np.logical_and, accepted) & may_end, trees.depths, 0)
    longest = np.zeros(num_trees, np.int64)
    np.maximum.at(longest, tree_of, length)
    candidates = np.flatnonzero((length > 0) & (length == longest[tree_of]))
    score = trees.scan_from_root(np.add, log_probability)[candidates]
    best = np.full(num_trees, -np.inf)
    np.maximum.at(best, tree_of[candidates], score)
    ends = candidates[score == best[tree_of[candidates]]][::-1]  # the first of a tree is written last
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
    """On the host: of rows their argmax int64[n] and whether it is finite bool[n], of nodes a rule's verdicts."""

    choices: np.ndarray
    is_finite: np.ndarray
    accepted: np.ndarray
    log_probability: np.ndarray


@torch.inference_mode()
def judge_rows(
    verifier: Verifier,
    rows: StepLogits,
    row_indices: np.ndarray,
    parents: np.ndarray,
    token_ids: np.ndarray,
    sources: np.ndarray,
) -> RowVerdicts:
    """Judge drafted tokens by a rule and choose the target's tokens, from the logits of CHUNK_ROWS rows at a time.

    Parameters
    ----------
    row_indices : int64[n], the rows to judge.
    parents, token_ids, sources : [m], per node the place of its parent's row in `row_indices`, its token and source.
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
            logits = logits.float()  # of bfloat16 a CPU finds the largest twenty times as slowly
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
    # One copy, and so one synchronisation, brings the host what it needs. float64 holds every token id.
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
        return torch.from_numpy(logits.numpy().argmax(-1))  # vectorised, which torch's is not: a tenth of its time
    return logits.argmax(-1)
