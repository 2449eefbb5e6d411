"""The codes of a catalogue as a trie in flat arrays, which has the codes that may follow a path."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from laserbatch.research.recommending.codes import ItemCodes

Path = tuple[int, ...]  # codes from the first level on


@dataclass(frozen=True)
class ItemTrie:
    """The nodes of level j are the distinct paths of j codes, sorted; level 0 is the root, the last level the items.

    For the nodes of level j, `codes[j]` int64 (num_nodes, width) has the codes that may follow, sorted, padded by -1;
    and `nodes[j]` has their nodes on the next level or, on the last level, the rows of items in the catalogue.
    """

    codes: tuple[np.ndarray, ...]
    nodes: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, items: ItemCodes) -> "ItemTrie":
        order = np.lexsort(items.codes.T[::-1])
        ordered = items.codes[order]
        above = np.zeros(len(ordered), np.int64)  # the node of each item's path so far
        codes, nodes = [], []
        for level in range(ordered.shape[1]):
            begins = np.ones(len(ordered), bool)
            begins[1:] = (above[1:] != above[:-1]) | (ordered[1:, level] != ordered[:-1, level])
            parents, children = above[begins], ordered[begins, level]
            first = np.searchsorted(parents, parents)
            places = np.arange(len(parents)) - first  # among its parent's children
            shape = int(parents[-1]) + 1, int(places.max()) + 1
            table = np.full((2, *shape), -1, np.int64)
            is_last = level == ordered.shape[1] - 1
            table[0, parents, places] = children
            table[1, parents, places] = order if is_last else np.arange(len(parents))
            codes.append(table[0])
            nodes.append(table[1])
            above = np.cumsum(begins) - 1
        return cls(tuple(codes), tuple(nodes))

    @property
    def num_levels(self) -> int:
        return len(self.codes)

    @cached_property
    def num_children(self) -> tuple[np.ndarray, ...]:
        """The number of children of each node, int64[num_nodes] for each level but the last."""
        return tuple((codes >= 0).sum(1) for codes in self.codes)

    @cached_property
    def num_items(self) -> tuple[np.ndarray, ...]:
        """The number of items below each node, int64[num_nodes] for each level but the last."""
        num_below = [self.num_children[-1]]
        for nodes in self.nodes[-2::-1]:
            num_below.append(np.where(nodes >= 0, num_below[-1][nodes], 0).sum(1))
        return tuple(reversed(num_below))

    def emptied_by(self, codes: np.ndarray) -> list[np.ndarray]:
        """The nodes of each level, from the first on, below which all items are among n distinct items, given as codes,
        int (n, num_levels); on the last level the rows of these items."""
        above, places = self.ways_to(codes)
        below = [nodes[above[:, level], places[:, level]] for level, nodes in enumerate(self.nodes)]
        emptied = []
        for nodes, num_items in zip(below[:-1], self.num_items[1:], strict=True):
            nodes, counts = np.unique(nodes, return_counts=True)
            emptied.append(nodes[counts == num_items[nodes]])
        return [*emptied, below[-1]]

    @cached_property
    def _nodes_of_paths(self) -> dict[Path, int | None]:
        return {(): 0}

    def ways_to(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For items in the trie, given as codes, int (n, num_levels): the node above each code, and the code's place
        among the node's children, both int64 (n, num_levels)."""
        above, places = np.zeros(codes.shape, np.int64), np.zeros(codes.shape, np.int64)
        node = np.zeros(len(codes), np.int64)
        for level in range(self.num_levels):
            above[:, level] = node
            places[:, level] = (self.codes[level][node] == codes[:, level, None]).argmax(1)
            node = self.nodes[level][node, places[:, level]]
        return above, places

    def with_nodes(self, paths: Iterable[Path]) -> list[tuple[Path, int]]:
        """The distinct paths that are in the trie, with their nodes."""
        return [(path, node) for path in dict.fromkeys(paths) if (node := self.node_of(path)) is not None]

    def node_of(self, path: Path) -> int | None:
        """The node of a path; None if no item has this path."""
        if path not in self._nodes_of_paths:
            level, node, child = len(path) - 1, self.node_of(path[:-1]), None
            if node is not None:
                children = self.codes[level][node, : self.num_children[level][node]]
                place = int(np.searchsorted(children, path[-1]))
                if place < len(children) and children[place] == path[-1]:
                    child = int(self.nodes[level][node, place])
            self._nodes_of_paths[path] = child
        return self._nodes_of_paths[path]
