"""Groups of entities by the leaves of one tree, fitted to predict a text's cluster from attributes (LASER).

Where prefixes (attributes.py) split by one column after the other, the tree splits by whatever tells texts apart. Every
entity falls into a leaf, those without a text too; a leaf's group is named by its number: "leaf/3". A node names some
values of a column, or of a level of a category path ("Mystery/Harbour"): who has one of them goes inside, everybody
else, what is unknown or missing too, goes outside.
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
from scipy.sparse import csr_array
from threadpoolctl import threadpool_limits

from laserbatch.retrieval_pools.routing.collaborative import cluster_embeddings
from laserbatch.retrieval_pools.routing.columns import AttributeColumn, choose_columns, iter_attributes
from laserbatch.retrieval_pools.routing.embeddings import check_same_kind, normalised_ids

LEAF_FILE = "attribute_leaves.json"
MAX_FIT_TEXTS = 50_000  # on larger sides the tree comes from a seeded sample of this many texts
MAX_NAMED = 4  # values that a leaf's rule writes out
NUM_COMPONENTS = 32  # that texts are reduced to before they are clustered

Node = dict | int  # "column", "level", "values", "inside", "outside"; or the number of a leaf


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
        entities : one row an entity; columns that are not attributes are ignored.
        ids : pa.Array (num_entities,), normalised ids of the rows.
        texts : of these entities; ids that `entities` lacks are passed over. Without texts there is one leaf.
        names : columns to split by; None guesses them.
        num_leaves : leaves at most, and text clusters that the tree is to tell apart.
        min_size : texts a leaf has at least, and a value that a node names.
        num_bins : quantile bins of a numeric column.

        Raises
        ------
        PoolError
            A named column is missing or of a type that cannot be grouped by; ids of another kind.
        """
        columns = choose_columns(entities, names, num_bins)
        tree: Node = 0
        if texts is not None and columns and num_leaves > 1:
            known = _known_texts(texts, ids, seed)
            if len(known.ids) >= 2 * min_size:
                with_text = entities.take(pc.index_in(known.ids, value_set=ids))
                tokens = [_tokens(columns, attributes) for attributes in iter_attributes(with_text, columns)]
                positions = cluster_positions(known.token_ids, num_leaves, seed)
                tree = _grow(columns, tokens, positions, num_leaves, min_size, seed)
        held = Counter(_leaf(tree, _tokens(columns, attributes)) for attributes in iter_attributes(entities, columns))
        return cls(columns, tree, tuple(held[leaf] for leaf, _ in sorted(_rules(tree, {}))))

    @property
    def groups(self) -> list[str]:
        """Names of all groups, in the order of the leaves."""
        return [f"leaf/{leaf}" for leaf in range(len(self.num_entities))]

    @property
    def rules(self) -> list[str]:
        """What each leaf holds, in words: "(Mystery or Romance) and not era=1950s"."""
        return [rule for _, rule in sorted(_rules(self.tree, {}))]

    def group_of(self, attributes: Mapping[str, object]) -> str:
        """Group of one entity."""
        return f"leaf/{_leaf(self.tree, _tokens(self.columns, attributes))}"

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


def cluster_positions(token_ids: pa.Array, num_clusters: int, seed: int) -> np.ndarray:
    """Cluster texts that use the same words, and number the clusters so that near numbers have like texts.

    Bags of token ids, weighted by tf-idf, are reduced by a truncated SVD and clustered by k-means. The number of a
    cluster is the rank of its centre on the centres' first principal axis: a target that one regression tree can split.

    Parameters
    ----------
    token_ids : Arrow lists of int32 (n,)
    num_clusters : wanted number; fewer come out when there are fewer distinct texts.

    Returns
    -------
    float64 array (n,)
        0 to the number of clusters less 1.
    """
    from sklearn.decomposition import TruncatedSVD  # here: who asks for a group does not cluster
    from sklearn.feature_extraction.text import TfidfTransformer

    tokens = pc.list_flatten(token_ids).to_numpy(zero_copy_only=False)
    texts = pc.list_parent_indices(token_ids).to_numpy(zero_copy_only=False)
    shape = (len(token_ids), int(tokens.max(initial=0)) + 1)
    num_components = min(NUM_COMPONENTS, *(size - 1 for size in shape))
    if num_components < 1 or not len(tokens):
        return np.zeros(len(token_ids))
    bags = csr_array((np.ones(len(tokens)), (texts, tokens.astype(np.int64))), shape)  # equal tokens are summed
    # Equal texts must give equal clusters, and several threads sum in no fixed order. All texts may be equal (0 / 0).
    with threadpool_limits(1), np.errstate(invalid="ignore"):
        weighted = TfidfTransformer(sublinear_tf=True).fit_transform(bags)
        vectors = TruncatedSVD(num_components, random_state=seed % 2**32).fit_transform(weighted)
    clusters = cluster_embeddings(vectors, num_clusters, seed)
    centres = np.stack([vectors[clusters == cluster].mean(axis=0) for cluster in range(int(clusters.max()) + 1)])
    axis = np.linalg.svd(centres - centres.mean(axis=0), full_matrices=False)[2][0]
    axis *= np.sign(axis[np.abs(axis).argmax()]) or 1
    ranks = np.argsort(np.argsort(centres @ axis, kind="stable"))
    return ranks[clusters].astype(np.float64)


def _known_texts(texts: EntityTexts, ids: pa.Array, seed: int) -> EntityTexts:
    """Those of the entities `ids`, in the order of their own; a seeded sample where they are many."""
    text_ids = normalised_ids(texts.ids, "entity_id", "texts")
    check_same_kind(text_ids, ids, "texts", "entities")
    order = pc.sort_indices(text_ids).to_numpy()
    rows = order[pc.is_in(text_ids, value_set=ids).to_numpy(zero_copy_only=False)[order]]
    if len(rows) > MAX_FIT_TEXTS:
        rows = rows[np.sort(np.random.default_rng(seed).choice(len(rows), MAX_FIT_TEXTS, replace=False))]
    return EntityTexts(text_ids.take(pa.array(rows)), texts.token_ids.take(pa.array(rows)))


def _tokens(columns: Sequence[AttributeColumn], attributes: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    return {column.name: column.tokens(attributes.get(column.name)) for column in columns}


def _value(tokens: Mapping[str, tuple[str, ...]], column: str, level: int) -> str | None:
    """What a node compares: a prefix of the column's tokens; None where they are fewer."""
    return "/".join(tokens[column][:level]) if len(tokens[column]) >= level else None


def _leaf(node: Node, tokens: Mapping[str, tuple[str, ...]]) -> int:
    while isinstance(node, dict):
        is_inside = _value(tokens, node["column"], node["level"]) in node["values"]
        node = node["inside" if is_inside else "outside"]
    return node


def _grow(
    columns: Sequence[AttributeColumn],
    tokens: Sequence[Mapping[str, tuple[str, ...]]],
    positions: np.ndarray,
    num_leaves: int,
    min_size: int,
    seed: int,
) -> Node:
    """A regression tree from the tokens of texts' entities to the positions of the texts' clusters, both (num_texts,).

    Values stand in the order of their texts' mean position (those of a number in their own): cutting that order in two
    is the best split into two sets (Breiman et al. 1984, section 4.2.2). What is unknown or rare stands before them.
    """
    from sklearn.tree import DecisionTreeRegressor

    features, codes = [], []  # column and level; float (num_texts,) the places of the values
    for column in columns:
        for level in range(1, max(len(known[column.name]) for known in tokens) + 1):
            values = np.array([_value(known, column.name, level) or "" for known in tokens])
            distinct, inverse, sizes = np.unique(values, return_inverse=True, return_counts=True)
            means = np.bincount(inverse, positions) / sizes
            if column.kind == "number":
                means = np.array([column.bin_names.index(value) if value else -1 for value in distinct])
            order = [
                place for place in np.argsort(means, kind="stable") if distinct[place] and sizes[place] >= min_size
            ]
            code_of = np.full(len(distinct), -1.0)
            code_of[order] = np.arange(len(order))
            features.append((column.name, level, distinct[order].tolist()))
            codes.append(code_of[inverse])
    tree = DecisionTreeRegressor(max_leaf_nodes=num_leaves, min_samples_leaf=min_size, random_state=seed % 2**32)
    grown = tree.fit(np.stack(codes, axis=1), positions).tree_
    leaves = count()

    def node_of(number: int) -> Node:
        if grown.children_left[number] == grown.children_right[number]:
            return next(leaves)
        column, level, order = features[grown.feature[number]]
        above = int(np.floor(grown.threshold[number])) + 1
        inside, outside = node_of(grown.children_right[number]), node_of(grown.children_left[number])
        return {"column": column, "level": level, "values": order[above:], "inside": inside, "outside": outside}

    return node_of(0)


def _rules(
    node: Node, conditions: dict[tuple[str, int], tuple[list[str] | None, set[str]]]
) -> Iterator[tuple[int, str]]:
    """Each leaf with what leads to it; conditions are, by column and level, the values allowed and those ruled out."""
    if isinstance(node, int):
        yield node, " and ".join(_in_words(*condition) for condition in conditions.values()) or "everything"
        return
    place, named = (node["column"], node["level"]), node["values"]
    allowed, ruled_out = conditions.get(place, (None, set()))
    inside = [value for value in named if allowed is None or value in allowed]
    yield from _rules(node["inside"], conditions | {place: (inside, ruled_out)})
    yield from _rules(node["outside"], conditions | {place: (allowed, ruled_out | set(named))})


def _in_words(allowed: list[str] | None, ruled_out: set[str]) -> str:
    if allowed is None:
        return f"not {_any_of(sorted(ruled_out))}"
    return _any_of([value for value in allowed if value not in ruled_out])


def _any_of(names: Sequence[str]) -> str:
    more = [f"{len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    return names[0] if len(names) == 1 else f"({' or '.join([*names[:MAX_NAMED], *more])})"
