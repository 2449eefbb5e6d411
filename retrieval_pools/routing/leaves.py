"""Groups of entities by the leaves of one LightGBM tree, fitted to predict a text's cluster from attributes.

Where prefixes (grouping/attributes.py) split by one column after the other, the tree splits by whatever tells texts
apart. Every entity falls into a leaf, those without a text too; a leaf's group is named by its number: "leaf/3". A
value that is unknown or missing is never among the values that a split names, and a missing number counts as lower
than all: both sides are fixed, whatever the data. Knows no interactions.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.routing.attributes import ATTRIBUTE_FILE, GroupAssignment
from laserbatch.retrieval_pools.routing.columns import (
    AttributeColumn,
    attributes_of_rows,
    choose_columns,
    distinct_rows,
)
from laserbatch.retrieval_pools.routing.ids import check_same_kind, normalised_ids
from laserbatch.retrieval_pools.routing.leaf_rules import leaf_rules
from laserbatch.retrieval_pools.routing.text_clusters import EntityTexts, cluster_positions

if TYPE_CHECKING:
    from lightgbm import Booster

TREE_FILE, FEATURE_FILE = "attribute_tree.txt", "attribute_features.json"
GROUP_SCHEMA = pa.schema([("group", pa.string()), ("num_entities", pa.int64()), ("rule", pa.string())])
MAX_CATEGORIES = 254  # of a column, or of a level of a path; LightGBM has 255 bins, one of them for the unknown
MAX_FIT_TEXTS = 50_000  # on larger sides the tree comes from a seeded sample of this many texts


@dataclass(frozen=True)
class TreeFeature:
    """One input of the tree: a number's bin, or the place of a value in `categories`.

    Of a category path each level is a feature, whose values are whole prefixes: "Mystery", "Mystery/Harbour".
    """

    column: AttributeColumn
    num_levels: int
    categories: tuple[str, ...]

    @property
    def is_categorical(self) -> bool:
        """Whether the tree splits by sets of values, not at a threshold."""
        return self.column.kind != "number"

    def encode(self, value: object) -> float:
        """The value as the tree sees it; -1, which no split names as a category, for what is unknown or missing."""
        if not self.is_categorical:
            position = self.column.bin_of(value)
            return -1.0 if position is None else float(position)
        tokens = self.column.tokens(value)[: self.num_levels]
        return self._codes.get(_category(tokens), -1.0) if len(tokens) == self.num_levels else -1.0

    @property
    def names(self) -> list[str]:
        """Readable names of the values 0, 1, ..., and of the unknown."""
        values = list(self.categories) if self.is_categorical else self.column.bin_names
        level = f" (level {self.num_levels})" if self.column.kind == "path" else ""
        return [*values, f"{self.column.name}{level} unknown"]

    @cached_property
    def _codes(self) -> dict[str, float]:
        return {category: float(code) for code, category in enumerate(self.categories)}


@dataclass(frozen=True)
class LeafGroups:
    """The fitted tree: its inputs, LightGBM's text of it, and how many entities each leaf held.

    `tree` is empty where there was nothing to split by, and all entities are in the one leaf 0.
    """

    columns: tuple[AttributeColumn, ...]
    features: tuple[TreeFeature, ...]
    tree: str
    num_entities: tuple[int, ...]

    @classmethod
    def fit(
        cls,
        entities: pa.Table,
        ids: pa.Array,
        texts: EntityTexts | None,
        names: Sequence[str] | None,
        *,
        num_leaves: int,
        min_size: int,
        num_bins: int = 4,
        seed: int = 0,
    ) -> "LeafGroups":
        """Grow a tree over the entities that have a text.

        Parameters
        ----------
        entities : pa.Table
            One row an entity; columns that are not attributes are ignored.
        ids : pa.Array (num_entities,)
            Normalised ids of the rows.
        texts : EntityTexts, optional
            Of these entities; ids that `entities` lacks are passed over. Without texts there is one leaf.
        names : sequence of str, or None to guess the columns
        num_leaves : int
            Leaves at most, and text clusters that the tree is to tell apart.
        min_size : int
            Texts a leaf has at least, and a category that a split names.
        num_bins : int
            Quantile bins of a numeric column.
        seed : int

        Raises
        ------
        PoolError
            A named column is missing or of a type that cannot be grouped by; ids of another kind; no LightGBM.
        """
        columns = choose_columns(entities, names, num_bins)
        features = _features(entities, columns)
        tree = ""
        if texts is not None and features:
            known = _known_texts(texts, ids, seed)
            positions = cluster_positions(known.token_ids, num_leaves, seed)
            rows = pc.index_in(known.ids, value_set=ids).to_numpy()
            matrix = _encode(features, attributes_of_rows(entities, columns, rows))
            tree = _grow(matrix, positions, features, num_leaves, min_size, seed)
        leaves = cls(columns, features, tree, ())._leaves_of(entities)
        return cls(columns, features, tree, tuple(np.bincount(leaves, minlength=1).tolist()))

    @property
    def groups(self) -> list[str]:
        """Names of all groups, in the order of the leaves."""
        return [_group_name(leaf) for leaf in range(len(self.num_entities))]

    @property
    def rules(self) -> tuple[str, ...]:
        """What each leaf holds, in words."""
        tree = self._booster.dump_model()["tree_info"][0]["tree_structure"] if self._booster is not None else {}
        return leaf_rules(tree, [feature.names for feature in self.features], len(self.num_entities))

    def group_of(self, attributes: Mapping[str, object]) -> str:
        """Group of one entity."""
        row = tuple(feature.encode(attributes.get(feature.column.name)) for feature in self.features)
        if row not in self._leaf_of_row:  # LightGBM takes 50 us a call, and few rows differ
            self._leaf_of_row[row] = int(self._leaves(np.array([row]))[0])
        return _group_name(self._leaf_of_row[row])

    def groups_of(self, entities: pa.Table) -> GroupAssignment:
        """Groups of all rows of a table, equal to `group_of` of each; missing columns are taken as null."""
        found, indices = np.unique(self._leaves_of(entities), return_inverse=True)
        return GroupAssignment([_group_name(leaf) for leaf in found.tolist()], indices.astype(np.int64))

    def save(self, folder: Path) -> None:
        """Write the tree as LightGBM's text, its inputs as JSON, and the groups with their sizes and rules."""
        (folder / TREE_FILE).write_text(self.tree, encoding="utf-8")
        features = [
            {"column": feature.column.name, "num_levels": feature.num_levels, "categories": feature.categories}
            for feature in self.features
        ]
        described = {"tree_sha256": _sha256(self.tree), "features": features}
        (folder / FEATURE_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        groups = pa.table([self.groups, list(self.num_entities), self.rules], GROUP_SCHEMA)
        pq.write_table(groups, folder / ATTRIBUTE_FILE, compression="zstd")

    @classmethod
    def load(cls, columns: Sequence[AttributeColumn], folder: Path) -> "LeafGroups":
        """Read what `save` wrote; OSError, ValueError or KeyError where it is missing or damaged."""
        described = json.loads((folder / FEATURE_FILE).read_text(encoding="utf-8"))
        tree = (folder / TREE_FILE).read_text(encoding="utf-8")
        if _sha256(tree) != described["tree_sha256"]:  # LightGBM reads past the end of a tree that was cut
            raise ValueError(f"{TREE_FILE} is not what was written")
        column_of = {column.name: column for column in columns}
        features = tuple(
            TreeFeature(column_of[data["column"]], data["num_levels"], tuple(data["categories"]))
            for data in described["features"]
        )
        num_entities = pq.read_table(folder / ATTRIBUTE_FILE)["num_entities"].to_pylist()
        return cls(tuple(columns), features, tree, tuple(num_entities))

    def _leaves_of(self, entities: pa.Table) -> np.ndarray:
        rows = distinct_rows(entities, self.columns)
        matrix = _encode(self.features, attributes_of_rows(entities, self.columns, rows.first_rows))
        return self._leaves(matrix)[rows.inverse]

    def _leaves(self, matrix: np.ndarray) -> np.ndarray:
        if self._booster is None or len(matrix) == 0:
            return np.zeros(len(matrix), np.int64)
        return self._booster.predict(matrix, pred_leaf=True, num_threads=1)[:, 0].astype(np.int64)

    @cached_property
    def _booster(self) -> "Booster | None":
        return _lightgbm().Booster(model_str=self.tree) if self.tree else None

    @cached_property
    def _leaf_of_row(self) -> dict[tuple[float, ...], int]:
        return {}


def read_rules(folder: Path) -> dict[str, str]:
    """What each leaf of a saved router holds, in words, by group; nothing where groups are not leaves."""
    file = folder / ATTRIBUTE_FILE
    if not file.is_file() or "rule" not in pq.read_schema(file).names:
        return {}
    table = pq.read_table(file)
    return dict(zip(table["group"].to_pylist(), table["rule"].to_pylist(), strict=True))


def _features(entities: pa.Table, columns: Sequence[AttributeColumn]) -> tuple[TreeFeature, ...]:
    rows = distinct_rows(entities, columns)
    attributes = attributes_of_rows(entities, columns, rows.first_rows)
    num_entities = np.bincount(rows.inverse, minlength=len(rows.first_rows)).tolist()
    features = []
    for column in columns:
        if column.kind == "number":
            features.append(TreeFeature(column, 1, ()))
            continue
        by_level: defaultdict[int, Counter[str]] = defaultdict(Counter)
        for values, count in zip(attributes, num_entities, strict=True):
            tokens = column.tokens(values.get(column.name))
            for num_levels in range(1, len(tokens) + 1):
                by_level[num_levels][_category(tokens[:num_levels])] += count
        for num_levels, counts in sorted(by_level.items()):
            frequent = sorted(counts, key=lambda category: (-counts[category], category))[:MAX_CATEGORIES]
            features.append(TreeFeature(column, num_levels, tuple(frequent)))
    return tuple(features)


def _encode(features: Sequence[TreeFeature], attributes: Sequence[Mapping[str, object]]) -> np.ndarray:
    rows = [[feature.encode(values.get(feature.column.name)) for feature in features] for values in attributes]
    return np.array(rows, np.float64).reshape(len(rows), len(features))


def _known_texts(texts: EntityTexts, ids: pa.Array, seed: int) -> EntityTexts:
    """Those of the entities `ids`, in the order of their own; a seeded sample where they are many."""
    text_ids = normalised_ids(texts.ids, "entity_id", "texts")
    check_same_kind(text_ids, ids, "texts", "entities")
    order = pc.sort_indices(text_ids).to_numpy()
    rows = order[pc.is_in(text_ids, value_set=ids).to_numpy(zero_copy_only=False)[order]]
    if len(rows) > MAX_FIT_TEXTS:
        rows = rows[np.sort(np.random.default_rng(seed).choice(len(rows), MAX_FIT_TEXTS, replace=False))]
    return EntityTexts(text_ids.take(pa.array(rows)), texts.token_ids.take(pa.array(rows)))


def _grow(
    matrix: np.ndarray,
    positions: np.ndarray,
    features: Sequence[TreeFeature],
    num_leaves: int,
    min_size: int,
    seed: int,
) -> str:
    """LightGBM's text of one regression tree from (num_texts, num_features) to the clusters' positions."""
    if len(matrix) < 2 * min_size or num_leaves < 2:
        return ""
    lightgbm = _lightgbm()
    parameters = {
        "objective": "regression",
        "learning_rate": 1.0,
        "num_leaves": min(num_leaves, len(matrix)),
        "min_data_in_leaf": min_size,
        "min_sum_hessian_in_leaf": 0.0,
        "feature_pre_filter": False,
        "min_data_in_bin": 1,
        # A split names a category that has as many texts as a leaf; rarer ones would be sorted by chance.
        "cat_smooth": float(min_size),
        "min_data_per_group": 1,
        "cat_l2": 0.0,
        "max_cat_threshold": MAX_CATEGORIES,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": 1,
        "seed": seed % 2**31,
        "verbosity": -1,
    }
    categorical = [number for number, feature in enumerate(features) if feature.is_categorical]
    data = lightgbm.Dataset(matrix, positions, categorical_feature=categorical, params=parameters)
    return lightgbm.train(parameters, data, num_boost_round=1).model_to_string()


def _lightgbm() -> ModuleType:
    try:
        import lightgbm  # here: only this grouping needs it, and the system library that it loads
    except (ImportError, OSError) as error:  # OSError: libgomp is missing
        raise PoolError(
            f"LightGBM cannot be loaded ({error}); `pip install lightgbm` and the system library libgomp1 provide it, "
            "or set routing.attribute_grouping to path"
        ) from error
    return lightgbm


def _category(tokens: Sequence[str]) -> str:
    return "/".join(tokens)


def _group_name(leaf: int) -> str:
    return f"leaf/{leaf}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
