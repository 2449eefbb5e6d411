"""What beams are drafted by: a small model's own beams, or lists that are there already."""

from collections.abc import Sequence

from laserbatch.pipeline.recommending.beams import BeamDrafter, Beams, next_beams
from laserbatch.pipeline.recommending.code_trees import CodeTrees
from laserbatch.pipeline.recommending.item_trie import ItemTrie, Path


class ModelBeams(BeamDrafter):
    """A small model's beams of every level (AtSpeed, Eq. 1), `size` wide, over trees of its own for the same users."""

    def __init__(self, trees: CodeTrees, trie: ItemTrie, num_users: int, size: int) -> None:
        self._trees, self._trie, self._num_users, self._size = trees, trie, num_users, size

    def draft(self, users: Sequence[int], beams: Sequence[Beams]) -> list[list[tuple[Path, int]]]:
        own, drafts = dict(zip(users, beams, strict=True)), {user: [] for user in users}
        asked = {user: one.prefixes(self._trie) for user, one in own.items()}
        for level in range(min(one.level for one in beams), self._trie.num_levels - 1):
            live = [user for user in users if own[user].level == level]
            self._trees.add(
                [asked[user] if user in asked and own[user].level == level else [] for user in range(self._num_users)]
            )
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
        if not items:
            return []
        kept = set(beams.paths)
        near = [item for item in items if item[: beams.level] in kept][: self._size]
        paths = dict.fromkeys(item[:level] for level in range(beams.level + 1, len(items[0])) for item in near)
        nodes = ((path, self._trie.node_of(path)) for path in paths)
        return [(path, node) for path, node in nodes if node is not None]
