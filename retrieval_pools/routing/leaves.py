"""Groups of entities by the leaves of one tree, fitted to predict a text's cluster from attributes (LASER).

Where prefixes (attributes.py) split by one column after the other, the tree splits by whatever tells texts apart. A
node names one value: a token of a column (columns.py), or a category path down to a level ("Mystery/Harbour"). Who has
it goes inside, everybody else, what is unknown or missing too, goes outside. So every entity falls into a leaf, those
without a text too; a leaf's group is named by its number: "leaf/3".
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from threadpoolctl import threadpool_limits

from laserbatch.retrieval_pools.routing.attributes import AttributeColumn, iter_attributes
from laserbatch.retrieval_pools.routing.collaborative import cluster_embeddings
from laserbatch.retrieval_pools.routing.distinct import distinct_attributes
from laserbatch.retrieval_pools.routing.embeddings import check_same_kind, normalised_ids

LEAF_FILE = "attribute_leaves.json"
MAX_FIT_TEXTS = 50_000  # on larger sides the tree comes from a seeded sample of this many texts
NUM_COMPONENTS = 32  # that texts are reduced to before they are clustered

Node = dict | int  # "value", "inside", "outside"; or the number of a leaf


@dataclass(frozen=True)
class EntityTexts:
    """The newest text of each entity that has one: `ids` (n, string or int64) and `token_ids` (n, lists of int32)."""

    ids: pa.Array
    token_ids: pa.Array


@dataclass(frozen=True)
class LeafGroups:
    """The fitted tree, and how many entities each leaf held; without anything to split by all are in leaf 0."""

    columns: tuple[AttributeColumn, ...]
    tree: Node
    num_entities: tuple[int, ...]

    @classmethod
    def fit(
        cls,
        entities: pa.Table,
        ids: pa.Array,
        texts: EntityTexts | None,
        columns: tuple[AttributeColumn, ...],
        *,
        num_leaves: int,
        min_size: int,
        seed: int = 0,
    ) -> "LeafGroups":
        """Grow a tree over the entities that have a text.

        Parameters
        ----------
        ids : (num_entities,), normalised ids of the rows of `entities`.
        texts : ids that `entities` lacks are passed over; PoolError where they are of another kind. Without texts there
            is one leaf.
        columns : to split by.
        num_leaves : leaves at most, and text clusters that the tree is to tell apart.
        min_size : texts a leaf has at least.
        """
        tree: Node = 0
        if texts is not None and columns and num_leaves > 1:
            known = _known_texts(texts, ids, seed)
            if len(known.ids) >= 2 * min_size:
                with_text = entities.take(pc.index_in(known.ids, value_set=ids))
                values = [_values(columns, attributes) for attributes in iter_attributes(with_text, columns)]
                clusters = cluster_texts(known.token_ids, num_leaves, seed)
                tree = _grow(values, clusters, num_leaves, min_size, seed)
        codes, distinct = distinct_attributes(entities, columns)
        held: Counter[int] = Counter()
        for attributes, num_alike in zip(distinct, np.bincount(codes).tolist(), strict=True):
            held[_leaf(tree, _values(columns, attributes))] += num_alike
        return cls(columns, tree, tuple(held[leaf] for leaf, _ in _rules(tree)))

    @property
    def groups(self) -> list[str]:
        """Names of all groups, in the order of the leaves."""
        return [f"leaf/{leaf}" for leaf in range(len(self.num_entities))]

    @property
    def rules(self) -> list[str]:
        """What each leaf holds, in words: "Mystery and not era=1950s"."""
        return [rule for _, rule in _rules(self.tree)]

    def group_of(self, attributes: Mapping[str, object]) -> str:
        """Group of one entity."""
        return f"leaf/{_leaf(self.tree, _values(self.columns, attributes))}"

    def save(self, folder: Path) -> None:
        """Write the tree, and the groups with their sizes and rules; the columns are not in it."""
        groups = zip(self.groups, self.num_entities, self.rules, strict=True)
        described = {
            "tree": self.tree,
            "groups": [{"group": group, "num_entities": size, "rule": rule} for group, size, rule in groups],
        }
        (folder / LEAF_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, columns: Sequence[AttributeColumn], folder: Path) -> "LeafGroups":
        """Read what `save` wrote; OSError, ValueError or KeyError where it is missing or damaged."""
        described = json.loads((folder / LEAF_FILE).read_text(encoding="utf-8"))
        num_entities = tuple(group["num_entities"] for group in described["groups"])
        loaded = cls(tuple(columns), described["tree"], num_entities)
        if loaded.rules != [group["rule"] for group in described["groups"]]:
            raise ValueError(f"the tree in {LEAF_FILE} is not what was written")
        return loaded


def read_rules(folder: Path) -> dict[str, str]:
    """What each leaf of a saved router holds, in words, by group; nothing where groups are not leaves."""
    if not (folder / LEAF_FILE).is_file():
        return {}
    groups = json.loads((folder / LEAF_FILE).read_text(encoding="utf-8"))["groups"]
    return {group["group"]: group["rule"] for group in groups}


def cluster_texts(token_ids: pa.Array, num_clusters: int, seed: int) -> np.ndarray:
    """Cluster texts that use the same words: int32 (n,), fewer than `num_clusters` where fewer texts are distinct.

    Bags of token ids, Arrow lists of int32 (n,), are weighted by tf-idf, reduced by a truncated SVD, and clustered by
    k-means.
    """
    from scipy.sparse import csr_array  # here: who asks for a group does not cluster
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfTransformer

    tokens = pc.list_flatten(token_ids).to_numpy(zero_copy_only=False)
    texts = pc.list_parent_indices(token_ids).to_numpy(zero_copy_only=False)
    shape = (len(token_ids), int(tokens.max(initial=0)) + 1)
    num_components = min(NUM_COMPONENTS, *(size - 1 for size in shape))
    if num_components < 1 or not len(tokens):
        return np.zeros(len(token_ids), np.int32)
    bags = csr_array((np.ones(len(tokens)), (texts, tokens.astype(np.int64))), shape)  # equal tokens are summed
    # Equal texts must give equal clusters, and several threads sum in no fixed order. All texts may be equal (0 / 0).
    with threadpool_limits(1), np.errstate(invalid="ignore"):
        weighted = TfidfTransformer(sublinear_tf=True).fit_transform(bags)
        vectors = TruncatedSVD(num_components, random_state=seed % 2**32).fit_transform(weighted)
    return cluster_embeddings(vectors, num_clusters, seed)


def _known_texts(texts: EntityTexts, ids: pa.Array, seed: int) -> EntityTexts:
    """Those of the entities `ids`, in the order of their own; a seeded sample where they are many."""
    text_ids = normalised_ids(texts.ids, "entity_id", "texts")
    check_same_kind(text_ids, ids, "texts", "entities")
    order = pc.sort_indices(text_ids).to_numpy()
    rows = order[pc.is_in(text_ids, value_set=ids).to_numpy(zero_copy_only=False)[order]]
    if len(rows) > MAX_FIT_TEXTS:
        rows = rows[np.sort(np.random.default_rng(seed).choice(len(rows), MAX_FIT_TEXTS, replace=False))]
    return EntityTexts(text_ids.take(pa.array(rows)), texts.token_ids.take(pa.array(rows)))


def _values(columns: Sequence[AttributeColumn], attributes: Mapping[str, object]) -> set[str]:
    """What a node may name of an entity; no two columns share a name."""
    tokens_by_column = [column.tokens(attributes.get(column.name)) for column in columns]
    return {"/".join(tokens[:level]) for tokens in tokens_by_column for level in range(1, len(tokens) + 1)}


def _leaf(node: Node, values: set[str]) -> int:
    while isinstance(node, dict):
        node = node["inside" if node["value"] in values else "outside"]
    return node


def _grow(values: Sequence[set[str]], clusters: np.ndarray, num_leaves: int, min_size: int, seed: int) -> Node:
    """A classification tree from the values of texts' entities to the texts' clusters, both (num_texts,)."""
    from sklearn.preprocessing import MultiLabelBinarizer
    from sklearn.tree import DecisionTreeClassifier

    binarizer = MultiLabelBinarizer(sparse_output=True)
    has_value = binarizer.fit_transform(values)  # (num_texts, num_values)
    if not len(binarizer.classes_):
        return 0
    tree = DecisionTreeClassifier(max_leaf_nodes=num_leaves, min_samples_leaf=min_size, random_state=seed % 2**32)
    grown = tree.fit(has_value, clusters).tree_
    leaves = count()

    def node_of(number: int) -> Node:
        if grown.children_left[number] == grown.children_right[number]:
            return next(leaves)
        inside, outside = node_of(grown.children_right[number]), node_of(grown.children_left[number])
        return {"value": str(binarizer.classes_[grown.feature[number]]), "inside": inside, "outside": outside}

    return node_of(0)


def _rules(node: Node, conditions: tuple[str, ...] = ()) -> Iterator[tuple[int, str]]:
    """Each leaf, in their order, with what leads to it in words."""
    if isinstance(node, int):
        yield node, " and ".join(conditions) or "everything"
        return
    yield from _rules(node["inside"], (*conditions, node["value"]))
    yield from _rules(node["outside"], (*conditions, f"not {node['value']}"))
