"""Groups of entities with similar attributes: a hierarchy, split where groups are too large, looked up by prefix.

A row's values become words ("tokens"): a category path gives one token per level ("Mystery", "Harbour"), a scalar
`column=value`, a number the name of its quantile bin ("age=25..35"); nulls, empty strings, missing columns and values
of another kind give none. The groups are prefixes of the entities' tokens, so a group's name reads as a path:
"attribute/Mystery/Harbour", "attribute/gender=F/age=25..35"; the root is "attribute". Every prefix of a group is a
group itself: it holds the entities that its subgroups do not, and those with values that were not seen at the fit.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from numbers import Real
from pathlib import Path
from typing import Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pygtrie

from laserbatch.retrieval_pools.errors import PoolError

MAX_PATH_LEVELS = 8  # deeper levels of a category path are ignored
MAX_GUESSED_VALUES = 256  # a text column with more distinct values is not guessed to be an attribute
NEVER_GUESSED = frozenset({"user_id", "item_id", "title", "name", "created_at"})
ATTRIBUTE_FILE = "attribute_groups.parquet"
NUM_BINS = 4  # quantile bins of a numeric attribute; with more, most parts are too small and rejoin their parent
ROOT_GROUP = "attribute"

Kind = Literal["path", "value", "number"]
Prefix = tuple[str, ...]

GROUP_SCHEMA = pa.schema([("prefix", pa.list_(pa.string())), ("group", pa.string()), ("num_entities", pa.int64())])


@dataclass(frozen=True)
class AttributeColumn:
    """A column to split by. `edges` are the inner bin edges of a number; tokens name the column if it is `labelled`."""

    name: str
    kind: Kind
    edges: tuple[float, ...] = ()
    labelled: bool = True

    def tokens(self, value: object) -> tuple[str, ...]:
        """The tokens of one value, from broad to narrow; none for a null, an empty text or a value of another kind."""
        if self.kind == "number":
            if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
                return ()
            return (self.bin_names[bisect_right(self.edges, float(value))],)
        levels = value[:MAX_PATH_LEVELS] if self.kind == "path" and isinstance(value, list | tuple) else (value,)
        kinds = str | bool if self.kind == "path" else str | Real
        texts = (_text(level) if isinstance(level, kinds) else "" for level in levels)
        return tuple(map(self._token, takewhile(bool, texts)))  # a level below an unknown one has no known parent

    @cached_property
    def bin_names(self) -> tuple[str, ...]:
        """The tokens of a number's bins, in ascending order."""
        shown = [f"{edge:g}" for edge in self.edges]
        return tuple(self._token(f"{low}..{high}") for low, high in zip(["", *shown], [*shown, ""], strict=True))

    def _token(self, text: str) -> str:
        return f"{_quote(self.name)}={_quote(text)}" if self.labelled else _quote(text)


def choose_columns(entities: pa.Table, names: Sequence[str] | None) -> tuple[AttributeColumn, ...]:
    """The columns to split by, in order: the columns `names`, or a guess.

    The guess: category paths (lists), sorted by name; then text and boolean columns of 2 to 256 values (and at least 4
    rows per value), fewest values first; then numbers, sorted by name. Ids, titles and dates are never guessed.

    Raises PoolError if a named column is missing, or its type cannot be grouped by.
    """
    chosen: list[tuple[str, Kind]]
    chosen = _guess(entities) if names is None else [(name, _kind_of_named(entities, name)) for name in names]
    columns, has_plain_path = [], False
    for name, kind in chosen:
        edges = _quantile_edges(entities[name]) if kind == "number" else ()
        labelled = kind != "path" or has_plain_path  # the first path's tokens stand alone: "Mystery"
        has_plain_path |= kind == "path"
        columns.append(AttributeColumn(name, kind, edges, labelled))
    return tuple(columns)


def tokens_of(columns: Sequence[AttributeColumn], attributes: Mapping[str, object]) -> tuple[str, ...]:
    """All tokens of one entity, in the order of the columns."""
    return tuple(token for column in columns for token in column.tokens(attributes.get(column.name)))


def _guess(entities: pa.Table) -> list[tuple[str, Kind]]:
    names_of: dict[Kind, list[str]] = {"path": [], "value": [], "number": []}
    num_values: dict[str, int] = {}
    for name in sorted(entities.column_names):
        kind = None if name in NEVER_GUESSED else _kind(entities[name].type)
        if kind == "value":
            num_values[name] = pc.count_distinct(_plain(entities[name])).as_py()
            if not 2 <= num_values[name] <= min(MAX_GUESSED_VALUES, max(2, entities.num_rows // 4)):
                continue
        if kind is not None and entities[name].null_count < entities.num_rows:
            names_of[kind].append(name)
    names_of["value"].sort(key=lambda name: (num_values[name], name))
    return [(name, kind) for kind in ("path", "value", "number") for name in names_of[kind]]


def _kind_of_named(entities: pa.Table, name: str) -> Kind:
    if name not in entities.column_names:
        raise PoolError(
            f"cannot group by attribute {name!r}: the table has the columns {', '.join(entities.column_names)}; "
            "correct routing.user_attributes or routing.item_attributes"
        )
    kind = _kind(entities[name].type)
    if kind is None:
        raise PoolError(
            f"cannot group by attribute {name!r} of type {entities[name].type}: expected text, a boolean, a number or "
            "a list of strings; name another column in routing.user_attributes or routing.item_attributes"
        )
    return kind


def _kind(arrow_type: pa.DataType) -> Kind | None:
    types = pa.types
    if types.is_dictionary(arrow_type):
        return _kind(arrow_type.value_type)
    if types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_fixed_size_list(arrow_type):
        return "path" if _kind(arrow_type.value_type) == "value" else None
    if types.is_integer(arrow_type) or types.is_floating(arrow_type):
        return "number"
    if types.is_string(arrow_type) or types.is_large_string(arrow_type) or types.is_boolean(arrow_type):
        return "value"
    return None


def _plain(values: pa.ChunkedArray) -> pa.ChunkedArray:
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


def _quantile_edges(values: pa.ChunkedArray) -> tuple[float, ...]:
    numbers = pc.drop_null(_plain(values).cast(pa.float64(), safe=False)).to_numpy()
    numbers = numbers[np.isfinite(numbers)]
    if len(numbers) == 0:
        return ()
    # Rounded to what a bin's name shows, so that two bins never share a name.
    quantiles = np.quantile(numbers, np.arange(1, NUM_BINS) / NUM_BINS)
    edges = {float(f"{quantile:g}") for quantile in quantiles.tolist()}
    return tuple(sorted(edge for edge in edges if edge > numbers.min()))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quote(text: str) -> str:
    """Quote `/` and `=`, which have a meaning in a group's name."""
    return text.replace("%", "%25").replace("/", "%2F").replace("=", "%3D")


def distinct_attributes(
    entities: pa.Table, columns: Sequence[AttributeColumn]
) -> tuple[np.ndarray, list[dict[str, object]]]:
    """Number the distinct rows: the number of each row, int64[num_rows], and each number's values by column.

    Columns that the table lacks are left out. Numbers count from 0 in the order of the first rows that have them.
    """
    present = [column for column in columns if column.name in entities.column_names]
    codes = np.zeros(entities.num_rows, np.int64)
    for column in present:
        column_codes = _codes(entities[column.name], column)
        codes = _numbered(pa.array(codes * (column_codes.max(initial=0) + 1) + column_codes))
    first = np.unique(codes, return_index=True)[1]
    if not present:
        return codes, [{} for _ in first]
    return codes, entities.select([column.name for column in present]).take(pa.array(first)).to_pylist()


def _codes(values: pa.ChunkedArray, column: AttributeColumn) -> np.ndarray:
    """A code for each row, int64[n]: equal codes have equal tokens of the column, but not always the reverse."""
    kind = values.type
    if column.kind == "number" and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        numbers = pc.fill_null(values.cast(pa.float64(), safe=False), np.nan).to_numpy()
        bins = np.searchsorted(np.array(column.edges, np.float64), numbers, side="right")
        return np.where(np.isfinite(numbers), bins + 1, 0).astype(np.int64)
    values = values.combine_chunks()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if not pa.types.is_string(kind.value_type) or values.flatten().null_count:
            values = pa.array([None if row is None else repr(row) for row in values.to_pylist()], pa.string())
        else:
            values = pc.binary_join(values, "\x1f")
    return _numbered(values)


def _numbered(values: pa.Array) -> np.ndarray:
    encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    return pc.fill_null(encoded.indices, len(encoded.dictionary)).to_numpy(zero_copy_only=False).astype(np.int64)


@dataclass(frozen=True)
class AttributeGroups:
    """The fitted hierarchy: its columns, and the prefix of each group with its number of entities at the fit."""

    columns: tuple[AttributeColumn, ...]
    num_entities: Mapping[Prefix, int]

    @classmethod
    def fit(
        cls, entities: pa.Table, columns: tuple[AttributeColumn, ...], max_size: int, min_size: int
    ) -> "AttributeGroups":
        """Split `entities`, one row each, by columns in their order; sizes as in `split_groups`."""
        codes, distinct = distinct_attributes(entities, columns)
        counts: Counter[Prefix] = Counter()
        for attributes, count in zip(distinct, np.bincount(codes).tolist(), strict=True):
            counts[tokens_of(columns, attributes)] += count
        return cls(columns, split_groups(counts, max_size, min_size))

    @property
    def groups(self) -> list[str]:
        """The names of all groups, parents before their subgroups."""
        return [group_name(prefix) for prefix in self.num_entities]

    def group_of(self, attributes: Mapping[str, object]) -> str:
        """The group of an entity, by the longest known prefix of its tokens; the root if none is known."""
        return cast(str, self._trie.longest_prefix(tokens_of(self.columns, attributes)).value)

    def save(self, folder: Path) -> None:
        """Write the groups, rows of `GROUP_SCHEMA`, to `ATTRIBUTE_FILE`, without `columns`."""
        prefixes = [list(prefix) for prefix in self.num_entities]
        table = pa.table([prefixes, self.groups, list(self.num_entities.values())], GROUP_SCHEMA)
        pq.write_table(table, folder / ATTRIBUTE_FILE, compression="zstd")

    @classmethod
    def load(cls, columns: Sequence[AttributeColumn], folder: Path) -> "AttributeGroups":
        """Read the file that `save` wrote; OSError, ValueError or KeyError if it is missing or damaged."""
        table = pq.read_table(folder / ATTRIBUTE_FILE)
        prefixes = [tuple(prefix) for prefix in table["prefix"].to_pylist()]
        if () not in prefixes:
            raise ValueError(f"{ATTRIBUTE_FILE} lacks the root of the groups")
        return cls(tuple(columns), dict(zip(prefixes, table["num_entities"].to_pylist(), strict=True)))

    @cached_property
    def _trie(self) -> pygtrie.Trie:
        return pygtrie.Trie({prefix: group_name(prefix) for prefix in self.num_entities})


def split_groups(counts: Mapping[Prefix, int], max_size: int, min_size: int) -> dict[Prefix, int]:
    """The prefixes that become groups, each with the number of entities that have no longer one.

    `counts` has the number of entities with exactly these tokens. A group of more than `max_size` entities is split; a
    part of fewer than `min_size` stays with its parent. The empty prefix (the root) is the first; parents come before
    children, which are sorted by name.
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
        if totals[prefix] > max_size:
            parts = sorted(child for child in children[prefix] if totals[child] >= min_size)
        groups[prefix] = totals[prefix] - sum(totals[part] for part in parts)
        waiting.extend(reversed(parts))
    return groups


def group_name(prefix: Prefix) -> str:
    """The readable name of a group; a `/` within a token is quoted, so different prefixes have different names."""
    return "/".join((ROOT_GROUP, *prefix))
