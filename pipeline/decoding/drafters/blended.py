"""Merges the trees of several drafters into one tree, ranked by estimated acceptance."""

from collections.abc import Sequence

import numpy as np

from laserbatch.pipeline.decoding.drafters.drafter import Drafter, Observation, Observes
from laserbatch.pipeline.decoding.sequence import DecodingSequence
from laserbatch.pipeline.decoding.token_tree import MAX_NODES, ROOT, Proposals, TreeBatch

ORDER: tuple[Observes, ...] = ("nothing", "decode", "prefill")


class BlendedDrafter(Drafter):
    """The proposals of several drafters: equal paths are merged, with the larger estimate; the likeliest nodes stay.

    At most one drafter samples its nodes; they come first and stay whole, as their estimated acceptance is 1.
    """

    def __init__(self, drafters: Sequence[Drafter], max_nodes: int = MAX_NODES) -> None:
        self._drafters, self._max_nodes = drafters, max_nodes
        self.observes = ORDER[max(ORDER.index(drafter.observes) for drafter in drafters)]

    def draft_all(self, sequences: list[DecodingSequence], max_depths: list[int]) -> TreeBatch:
        return blend([drafter.draft_all(sequences, max_depths) for drafter in self._drafters], self._max_nodes)

    def observe(self, observation: Observation) -> None:
        for drafter in self._drafters:
            if drafter.observes != "nothing":
                drafter.observe(observation)

    def forget(self, sequence: DecodingSequence) -> None:
        for drafter in self._drafters:
            drafter.forget(sequence)


def blend(drafts: Sequence[TreeBatch], max_nodes: int) -> TreeBatch:
    """The union of several drafters' trees for the same sequences, cut to the `max_nodes` likeliest nodes of each."""
    drafts = sorted(drafts, key=lambda trees: trees.proposals is None)
    sizes, parts, placed = [], [], []
    for number in range(drafts[0].num_trees):
        columns, places = union([draft[number] for draft in drafts])
        token_ids, parents, log_acceptance, source = columns
        # Parents are at least as likely as their children and come before them.
        order = np.argsort(-log_acceptance, kind="stable")[:max_nodes]
        rank = np.full(len(token_ids) + 1, ROOT)
        rank[order] = np.arange(len(order))
        parts.append((token_ids[order], rank[parents[order]], log_acceptance[order], source[order]))
        sizes.append(len(order))
        placed.append(rank[places])
    token_ids, parents, log_acceptance, source = map(np.concatenate, zip(*parts, strict=True))
    trees = TreeBatch(np.array(sizes), token_ids, parents.astype(np.int32), log_acceptance, source)
    drawn = drafts[0].proposals
    if drawn is not None:
        trees.proposals = Proposals(
            trees.starts[drafts[0].tree_of[drawn.nodes]] + np.concatenate(placed)[drawn.nodes], drawn.rows, drawn.log_q
        )
    return trees


def union(trees) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Merge trees: the union's tokens, parents, log acceptance and sources, and the places of the first tree's nodes.

    The parent of a node that follows the root is ROOT, -1.
    """
    places: dict[tuple[int, int], int] = {}
    tokens, parents, acceptance, sources = [], [], [], []
    first_places: list[int] = []
    for tree in trees:
        at = [ROOT] * (len(tree) + 1)
        rows = zip(
            tree.token_ids.tolist(), tree.parents.tolist(), tree.log_acceptance.tolist(), tree.source.tolist(),
            strict=True,
        )  # fmt: skip
        for node, (token, parent, log_acceptance, source) in enumerate(rows):
            place = at[node] = places.setdefault((at[parent], token), len(tokens))
            if place == len(tokens):
                tokens.append(token)
                parents.append(at[parent])
                acceptance.append(log_acceptance)
                sources.append(source)
            elif log_acceptance > acceptance[place]:
                acceptance[place], sources[place] = log_acceptance, source
        if tree is trees[0]:
            first_places = at[:-1]
    columns = np.array(tokens, np.int32), np.array(parents, np.int64), np.array(acceptance, np.float32)
    return (*columns, np.array(sources, np.uint8)), np.array(first_places, np.int64)
