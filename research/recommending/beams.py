"""Constrained beam search over codes with drafts: the same items, order and scores with fewer forwards of the target.

A draft is a set of paths. One forward computes the log probabilities after each path; then beams advance level by level
while all K beams are among the computed paths (strict N-to-K verification: AtSpeed, Lin et al., ICLR 2025, Algorithm
1). If one is missing, the next forward computes it together with a new draft; computed paths are never discarded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from laserbatch.research.recommending.code_trees import BROKEN, ROOT, CodeTrees
from laserbatch.research.recommending.item_trie import ItemTrie, Path


@dataclass(frozen=True)
class Beams:
    """The best paths of a level, best first: `nodes` int64[k] of the trie, `scores` float64[k] (log probabilities).

    On the last level nodes are rows of the catalogue.
    """

    paths: tuple[Path, ...] = (ROOT,)
    nodes: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    scores: np.ndarray = field(default_factory=lambda: np.zeros(1))

    @property
    def level(self) -> int:
        return len(self.paths[0])

    def are_done(self, trie: ItemTrie) -> bool:
        """Whether the paths are complete items, or no path is left."""
        return not self.paths or self.level == trie.num_levels

    def prefixes(self, trie: ItemTrie) -> list[tuple[Path, int]]:
        """The paths and all their prefixes, with their nodes; prefixes come first."""
        return trie.with_nodes(path[:length] for length in range(1, self.level + 1) for path in self.paths)


@dataclass(frozen=True)
class BeamResult:
    """A user's list: `rows` int64[k] of the catalogue and `scores` float64[k]; `num_accepted` levels needed no separate
    forward."""

    rows: np.ndarray
    scores: np.ndarray
    num_accepted: int

    @property
    def is_sound(self) -> bool:
        """Whether all log probabilities on the paths were numbers."""
        return bool((self.scores > BROKEN / 2).all())


class BeamDrafter:
    """Drafts the paths that beams may take. The base class drafts none, which is plain beam search."""

    def draft(self, users: Sequence[int], beams: Sequence[Beams]) -> list[list[tuple[Path, int]]]:
        """The paths to compute for each user, with their nodes; prefixes come first."""
        return [[] for _ in users]


class ModelBeams(BeamDrafter):
    """Drafts a small model's beams of every level (AtSpeed, Eq. 1), `size` wide; `trees` are the small model's."""

    def __init__(self, trees: CodeTrees, trie: ItemTrie, num_users: int, size: int) -> None:
        self._trees, self._trie, self._num_users, self._size = trees, trie, num_users, size

    def draft(self, users: Sequence[int], beams: Sequence[Beams]) -> list[list[tuple[Path, int]]]:
        beams_of, drafts = dict(zip(users, beams, strict=True)), {user: [] for user in users}
        paths_of = {user: state.prefixes(self._trie) for user, state in beams_of.items()}
        for level in range(min(state.level for state in beams), self._trie.num_levels - 1):
            live = {user for user in users if beams_of[user].level == level}
            self._trees.add([paths_of[user] if user in live else [] for user in range(self._num_users)])
            for user in live:
                if (longer := next_beams(self._trees, self._trie, user, beams_of[user], self._size)) is not None:
                    beams_of[user], paths_of[user] = longer, list(zip(longer.paths, longer.nodes.tolist(), strict=True))
                    drafts[user] += paths_of[user]
        return [drafts[user] for user in users]


class ListedItems(BeamDrafter):
    """Drafts the paths to items of earlier lists, of the user and of similar users. Needs no model.

    `lists` : for each user the codes of items, the most likely first; at most `size` items are drafted.
    """

    def __init__(self, lists: Sequence[Sequence[Path]], trie: ItemTrie, size: int) -> None:
        self._lists, self._trie, self._size = lists, trie, size

    def draft(self, users: Sequence[int], beams: Sequence[Beams]) -> list[list[tuple[Path, int]]]:
        return [self._of(self._lists[user], state) for user, state in zip(users, beams, strict=True)]

    def _of(self, items: Sequence[Path], beams: Beams) -> list[tuple[Path, int]]:
        paths = set(beams.paths)
        near = [item for item in items if item[: beams.level] in paths][: self._size]
        levels = range(beams.level + 1, self._trie.num_levels)
        return self._trie.with_nodes(item[:level] for level in levels for item in near)


def next_beams(
    trees: CodeTrees, trie: ItemTrie, user: int, beams: Beams, size: int, left_out: Sequence[np.ndarray] | None = None
) -> Beams | None:
    """The best `size` paths of the next level; None if the log probabilities after a beam are not computed yet.

    `left_out` are the nodes of each level that no path may lead to, as `ItemTrie.emptied_by` returns them.
    """
    pairs = zip(beams.paths, beams.nodes.tolist(), strict=True)
    followers = [log_p for path, node in pairs if (log_p := trees.log_p(user, path, node)) is not None]
    if len(followers) < len(beams.paths):
        return None
    scores = (beams.scores[:, None] + np.stack(followers)).ravel()
    if left_out is not None:
        scores[np.isin(trie.nodes[beams.level][beams.nodes].ravel(), left_out[beams.level])] = -np.inf
    finite = np.flatnonzero(np.isfinite(scores))
    if len(finite) > size:
        least = np.partition(scores[finite], -size)[-size]
        finite = finite[scores[finite] >= least]
    chosen = finite[np.argsort(-scores[finite], kind="stable")][:size]
    rows, places = np.divmod(chosen, followers[0].size)
    codes, nodes = (table[beams.level][beams.nodes[rows], places] for table in (trie.codes, trie.nodes))
    paths = tuple((*beams.paths[row], code) for row, code in zip(rows.tolist(), codes.tolist(), strict=True))
    return Beams(paths, nodes, scores[chosen])


def search(
    trees: CodeTrees, trie: ItemTrie, num_users: int, size: int, drafter: BeamDrafter,
    left_out: Sequence[Sequence[np.ndarray] | None] | None = None,
) -> list[BeamResult]:  # fmt: skip
    """The `size` best items of each user, or fewer if the catalogue has fewer.

    `left_out` has for each user the argument of `next_beams`.
    """
    left_out = left_out or [None] * num_users
    beams = [Beams() for _ in range(num_users)]
    num_forwards = np.zeros(num_users, np.int64)
    live = list(range(num_users))
    while live:
        drafts = dict(zip(live, drafter.draft(live, [beams[user] for user in live]), strict=True))
        paths = [[] for _ in range(num_users)]
        for user in live:
            paths[user] = [*beams[user].prefixes(trie), *drafts[user]]
        trees.add(paths)
        num_forwards[live] += 1
        for user in live:
            while not beams[user].are_done(trie):
                longer = next_beams(trees, trie, user, beams[user], size, left_out[user])
                if longer is None:
                    break
                beams[user] = longer
        live = [user for user in live if not beams[user].are_done(trie)]
    accepted = (trie.num_levels - num_forwards).tolist()
    return [BeamResult(state.nodes, state.scores, number) for state, number in zip(beams, accepted, strict=True)]
