"""Constrained beam search over codes, by drafts: the same items, order and scores with fewer forwards of the target.

A draft is a set of paths. One forward says what follows each; then beams go on for as many levels as all K of them are
among the paths that are known (strict N-to-K verification: AtSpeed, Lin et al., ICLR 2025, Algorithm 1). Where they are
not, the next forward computes those that are missing, beside a new draft: nothing that was computed is thrown away.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from laserbatch.research.recommending.code_trees import BROKEN, ROOT, CodeTrees
from laserbatch.research.recommending.item_trie import ItemTrie, Path


@dataclass(frozen=True)
class Beams:
    """The best paths of a level, the best first: `nodes` int64[k] of the trie, `scores` float64[k], log probabilities.

    On the last level nodes are rows of the catalogue.
    """

    paths: tuple[Path, ...] = (ROOT,)
    nodes: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    scores: np.ndarray = field(default_factory=lambda: np.zeros(1))

    @property
    def level(self) -> int:
        return len(self.paths[0])

    def are_done(self, trie: ItemTrie) -> bool:
        """Whether they are items; or nothing, where nothing is left."""
        return not self.paths or self.level == trie.num_levels

    def prefixes(self, trie: ItemTrie) -> list[tuple[Path, int]]:
        """The paths and all above them with their nodes, those above first."""
        found = dict.fromkeys(path[:length] for length in range(1, self.level + 1) for path in self.paths)
        return [(path, trie.node_of(path)) for path in found]


@dataclass(frozen=True)
class Found:
    """A user's list: `rows` int64[k] of the catalogue, `scores` float64[k]. Of the levels, `num_accepted` needed no
    forward of their own."""

    rows: np.ndarray
    scores: np.ndarray
    num_accepted: int

    @property
    def is_sound(self) -> bool:
        """Whether all that the model said on the way were numbers."""
        return bool((self.scores > BROKEN / 2).all())


class BeamDrafter:
    """Proposes paths that beams may take. This one proposes none: plain beam search."""

    def draft(self, users: Sequence[int], beams: Sequence[Beams]) -> list[list[tuple[Path, int]]]:
        """For each user paths with their nodes, those above first, of every level that is to be asked about."""
        return [[] for _ in users]


class ModelBeams(BeamDrafter):
    """A small model's beams of every level (AtSpeed, Eq. 1), `size` wide, over trees of its own for the same users."""

    def __init__(self, trees: CodeTrees, trie: ItemTrie, num_users: int, size: int) -> None:
        self._trees, self._trie, self._num_users, self._size = trees, trie, num_users, size

    def draft(self, users: Sequence[int], beams: Sequence[Beams]) -> list[list[tuple[Path, int]]]:
        own, drafts = dict(zip(users, beams, strict=True)), {user: [] for user in users}
        asked = {user: one.prefixes(self._trie) for user, one in own.items()}
        for level in range(min(one.level for one in beams), self._trie.num_levels - 1):
            live = {user for user in users if own[user].level == level}
            self._trees.add([asked[user] if user in live else [] for user in range(self._num_users)])
            for user in live:
                own[user] = next_beams(self._trees, self._trie, user, own[user], self._size)
                asked[user] = list(zip(own[user].paths, own[user].nodes.tolist(), strict=True))
                drafts[user] += asked[user]
        return [drafts[user] for user in users]


class ListedItems(BeamDrafter):
    """Paths to items that somebody expects: yesterday's list of the user, those of the group. Needs no model.

    `lists` : of each user codes of items, the likeliest first; `size`, of how many of them at most.
    """

    def __init__(self, lists: Sequence[Sequence[Path]], trie: ItemTrie, size: int) -> None:
        self._lists, self._trie, self._size = lists, trie, size

    def draft(self, users: Sequence[int], beams: Sequence[Beams]) -> list[list[tuple[Path, int]]]:
        return [self._of(self._lists[user], one) for user, one in zip(users, beams, strict=True)]

    def _of(self, items: Sequence[Path], beams: Beams) -> list[tuple[Path, int]]:
        kept = set(beams.paths)
        near = [item for item in items if item[: beams.level] in kept][: self._size]
        levels = range(beams.level + 1, self._trie.num_levels)
        paths = dict.fromkeys(item[:level] for level in levels for item in near)
        nodes = ((path, self._trie.node_of(path)) for path in paths)
        return [(path, node) for path, node in nodes if node is not None]


def next_beams(
    trees: CodeTrees, trie: ItemTrie, user: int, beams: Beams, size: int, left_out: Sequence[np.ndarray] | None = None
) -> Beams | None:
    """The best `size` paths one level on; None where what follows one of the beams is not known.

    `left_out` are nodes of each level that no path leads to, as `ItemTrie.emptied_by` has them.
    """
    followers = [trees.log_p(user, path, node) for path, node in zip(beams.paths, beams.nodes.tolist(), strict=True)]
    if any(one is None for one in followers):
        return None
    scores = (beams.scores[:, None] + np.stack(followers)).ravel()
    if left_out is not None:
        scores[np.isin(trie.nodes[beams.level][beams.nodes].ravel(), left_out[beams.level])] = -np.inf
    known = np.flatnonzero(np.isfinite(scores))
    if len(known) > size:
        least = np.partition(scores[known], -size)[-size]
        known = known[scores[known] >= least]
    chosen = known[np.argsort(-scores[known], kind="stable")][:size]
    rows, places = np.divmod(chosen, followers[0].size)
    codes, nodes = (table[beams.level][beams.nodes[rows], places] for table in (trie.codes, trie.nodes))
    paths = tuple((*beams.paths[row], code) for row, code in zip(rows.tolist(), codes.tolist(), strict=True))
    return Beams(paths, nodes, scores[chosen])


def search(
    trees: CodeTrees,
    trie: ItemTrie,
    num_users: int,
    size: int,
    drafter: BeamDrafter,
    left_out: Sequence[Sequence[np.ndarray] | None] | None = None,
) -> list[Found]:
    """The `size` best items of each user; fewer where fewer are there.

    `left_out` are of each user those of `next_beams`.
    """
    left_out = left_out or [None] * num_users
    beams = [Beams() for _ in range(num_users)]
    num_forwards = np.zeros(num_users, np.int64)
    live = list(range(num_users))
    while live:
        drafts = dict(zip(live, drafter.draft(live, [beams[user] for user in live]), strict=True))
        wanted = [[] for _ in range(num_users)]
        for user in live:
            wanted[user] = [*beams[user].prefixes(trie), *drafts[user]]
        trees.add(wanted)
        num_forwards[live] += 1
        for user in live:
            while not beams[user].are_done(trie):
                found = next_beams(trees, trie, user, beams[user], size, left_out[user])
                if found is None:
                    break
                beams[user] = found
        live = [user for user in live if not beams[user].are_done(trie)]
    accepted = (trie.num_levels - num_forwards).tolist()
    return [Found(one.nodes, one.scores, number) for one, number in zip(beams, accepted, strict=True)]
