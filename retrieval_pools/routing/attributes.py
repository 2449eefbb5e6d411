"""Groups of entities with like attributes: a hierarchy split where it is too big, found again by longest prefix.

The groups are prefixes of the entities' attribute tokens (columns.py), so a group's name reads as a path:
"attribute/Mystery/Harbour", "attribute/gender=F/age=25..35"; the root is "attribute". Every prefix on the way to a
group is a group itself: it holds what its subgroups do not, and catches values never seen.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pygtrie

from laserbatch.retrieval_pools.routing.columns import AttributeColumn, choose_columns, iter_attributes, tokens_of

ATTRIBUTE_FILE = "attribute_groups.parquet"
ROOT_GROUP = "attribute"
Prefix = tuple[str, ...]

GROUP_SCHEMA = pa.schema([("prefix", pa.list_(pa.string())), ("group", pa.string()), ("num_entities", pa.int64())])


@dataclass(frozen=True)
class GroupSizes:
    """A group of more than `max_size` entities is split; a part of fewer than `min_size` stays with its parent."""

    max_size: int
    min_size: int


@dataclass(frozen=True)
class AttributeGroups:
    """The fitted hierarchy: the columns it asks for, and each group's prefix with the entities it held."""

    columns: tuple[AttributeColumn, ...]
    num_entities: Mapping[Prefix, int]

    @classmethod
    def fit(
        cls, entities: pa.Table, names: Sequence[str] | None, sizes: GroupSizes, num_bins: int = 4
    ) -> "AttributeGroups":
        """Split `entities` by the columns `names` in their order (None: guessed).

        Parameters
        ----------
        entities : one row an entity; columns that are not attributes are ignored.
        num_bins : quantile bins of a numeric column.

        Raises
        ------
        PoolError
            A named column is missing or of a type that cannot be grouped by.
        """
        columns = choose_columns(entities, names, num_bins)
        counts = Counter(tokens_of(columns, attributes) for attributes in iter_attributes(entities, columns))
        return cls(columns, split_groups(counts, sizes))

    @property
    def groups(self) -> list[str]:
        """Names of all groups, parents before their subgroups."""
        return [group_name(prefix) for prefix in self.num_entities]

    def group_of(self, attributes: Mapping[str, object]) -> str:
        """Group of one entity by the longest known prefix of its tokens; the root when none is known."""
        return self._trie.longest_prefix(tokens_of(self.columns, attributes)).value

    def save(self, folder: Path) -> None:
        """Write the groups, rows of `GROUP_SCHEMA`, to `ATTRIBUTE_FILE`; the columns are not in it."""
        prefixes = [list(prefix) for prefix in self.num_entities]
        table = pa.table([prefixes, self.groups, list(self.num_entities.values())], GROUP_SCHEMA)
        pq.write_table(table, folder / ATTRIBUTE_FILE, compression="zstd")

    @classmethod
    def load(cls, columns: Sequence[AttributeColumn], folder: Path) -> "AttributeGroups":
        """Read what `save` wrote; OSError, ValueError or KeyError where it is missing or damaged."""
        table = pq.read_table(folder / ATTRIBUTE_FILE)
        prefixes = [tuple(prefix) for prefix in table["prefix"].to_pylist()]
        if () not in prefixes:
            raise ValueError(f"{ATTRIBUTE_FILE} lacks the root")
        return cls(tuple(columns), dict(zip(prefixes, table["num_entities"].to_pylist(), strict=True)))

    @cached_property
    def _trie(self) -> pygtrie.Trie:
        return pygtrie.Trie({prefix: group_name(prefix) for prefix in self.num_entities})


def split_groups(counts: Mapping[Prefix, int], sizes: GroupSizes) -> dict[Prefix, int]:
    """The prefixes that become groups, each with the number of entities for which it is the longest.

    Parameters
    ----------
    counts : number of entities with exactly these tokens.

    Returns
    -------
    dict
        The empty prefix (the root) first, always; parents before children, children in the order of their names.
    """
    totals: Counter[Prefix] = Counter()
    children: defaultdict[Prefix, set[Prefix]] = defaultdict(set)
    for tokens, count in counts.items():
        totals[()] += count
        for depth in range(len(tokens)):
            totals[tokens[: depth + 1]] += count
            children[tokens[:depth]].add(tokens[: depth + 1])
    groups: dict[Prefix, int] = {}
    waiting: list[Prefix] = [()]
    while waiting:
        prefix = waiting.pop()
        parts = []
        if totals[prefix] > sizes.max_size:
            parts = sorted(child for child in children[prefix] if totals[child] >= sizes.min_size)
        groups[prefix] = totals[prefix] - sum(totals[part] for part in parts)
        waiting.extend(reversed(parts))
    return groups


def group_name(prefix: Prefix) -> str:
    """Readable name of a group: tokens have their own `/` quoted, so names are as distinct as prefixes."""
    return "/".join((ROOT_GROUP, *prefix))
