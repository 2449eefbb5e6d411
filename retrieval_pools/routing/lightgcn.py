"""A short LightGCN: user and item embeddings from interactions (the only module of the pools that needs torch).

After He et al., "LightGCN: Simplifying and Powering Graph Convolution Network for Recommendation", SIGIR 2020.
Training is short because the embeddings only feed k-means. The result depends only on the set of (user, item) pairs,
the seed and (in its last bits) torch's thread count.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch.nn import functional

from laserbatch.retrieval_pools.mapped import MappedFiles, by_code
from laserbatch.retrieval_pools.routing.embeddings import EntityEmbeddings, count_codes, distinct_ids, parts_of

DIM = 64
NUM_LAYERS = 3  # K of He et al.
MAX_STEPS = 40  # each propagates over the whole graph
LEARNING_RATE = 0.03
L2 = 0.02  # weight of the mean squared layer-0 embedding in the loss
MIN_IMPROVEMENT = 0.02  # training stops if the mean loss of five steps falls by less, relative to the five before
MAX_PAIRS_PER_STEP = 1 << 17  # bounds memory on large graphs; smaller ones use every pair in every step
PLATEAU_STEPS = 5
MAX_INTERACTIONS = 4_000_000  # interactions to train on; bounds memory and time
MAX_NODES = 125_000  # nodes of a side to train on
FOLDED_AT_ONCE = 1_000_000  # interactions
_LOWER = 2**32 - 1  # mask of the second number in a key


def train_lightgcn(interactions: pa.Table, seed: int = 0, scratch: Path | None = None) -> dict[str, EntityEmbeddings]:
    """Vectors of every id that occurs, by side ("user", "item"), ids in ascending order: float32 (num_ids, DIM).

    Training is on implicit feedback: each distinct pair of `user_id` and `item_id` (string or int64, no nulls) is one
    edge. `seed` determines the initial embeddings and the negative samples. If there are more than `MAX_INTERACTIONS`
    rows or `MAX_NODES` users, a share of the users, also drawn by `seed`, is trained on; if there are more than
    `MAX_NODES` items, those with the most interactions. The other users and items, and those that have no edge in the
    training graph, are then folded in. Data that grows with interactions and entities is in files without a name in the
    folder `scratch`; None: in memory.
    """
    users, user_index = distinct_ids(interactions, "user_id", scratch)
    items, item_index = distinct_ids(interactions, "item_id", scratch)
    num_users, num_items = len(users), len(items)
    if num_users == 0:
        empty = np.empty((0, DIM), np.float32)
        return {"user": EntityEmbeddings(users, empty), "item": EntityEmbeddings(items, empty)}
    share = min(MAX_INTERACTIONS / len(user_index), MAX_NODES / num_users)
    has_user = np.ones(num_users, bool) if share >= 1 else np.random.default_rng(seed).random(num_users) < share
    has_user[0] |= not has_user.any()
    has_item = np.ones(num_items, bool)
    if num_items > MAX_NODES:
        has_item[np.argsort(-count_codes(item_index, num_items), kind="stable")[MAX_NODES:]] = False
    graph = _Graph.of(user_index, item_index, has_user, has_item)
    layer_0 = _trained(graph, seed)
    if has_user.all() and has_item.all():
        vectors = propagate(graph.adjacency, layer_0, NUM_LAYERS).numpy()
        of_users, of_items = vectors[:num_users], vectors[num_users:]
    else:
        of_users, of_items = _folded_in(graph, layer_0, user_index, item_index, has_user, has_item, scratch)
    return {"user": EntityEmbeddings(users, of_users), "item": EntityEmbeddings(items, of_items)}


@dataclass(frozen=True)
class _Graph:
    """Distinct pairs, sorted by user, then item; users and items are numbered within the graph."""

    users: torch.Tensor  # int32 (num_pairs,)
    items: torch.Tensor
    num_users: int
    num_items: int
    adjacency: torch.Tensor  # see `normalised_adjacency`

    @classmethod
    def of(cls, user_index: np.ndarray, item_index: np.ndarray, has_user: np.ndarray, has_item: np.ndarray) -> "_Graph":
        """The graph of those in `has_user` and `has_item`, bool, from indices of shape (num_interactions,)."""
        pairs = _distinct_pairs(user_index, item_index, has_user, has_item)
        sizes = int(has_user.sum()), int(has_item.sum())
        return cls(*pairs, *sizes, normalised_adjacency(*pairs, *sizes))


def _distinct_pairs(
    rows: np.ndarray, columns: np.ndarray, has_row: np.ndarray, has_column: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct pairs of the rows in `has_row` and columns in `has_column`, renumbered within these, and sorted."""
    number_of_row, number_of_column, parts = np.cumsum(has_row) - 1, np.cumsum(has_column) - 1, [np.zeros(0, np.int64)]
    num_columns = int(has_column.sum())
    for part in parts_of(len(rows)):
        are_in = has_row[rows[part]] & has_column[columns[part]]
        parts.append(number_of_row[rows[part][are_in]] * num_columns + number_of_column[columns[part][are_in]])
    pairs = np.unique(np.concatenate(parts))  # sorted, each once
    of_rows, of_columns = (torch.from_numpy(half.astype(np.int32)) for half in np.divmod(pairs, num_columns))
    return of_rows, of_columns


def _trained(graph: _Graph, seed: int) -> torch.Tensor:
    """The trained embeddings of layer 0, users first: float32 (num_users + num_items, DIM)."""
    num_nodes, num_pairs = graph.num_users + graph.num_items, len(graph.users)
    generator = torch.Generator().manual_seed(seed)
    layer_0 = torch.randn(num_nodes, DIM, generator=generator) * 0.1
    optimizer = torch.optim.Adam([layer_0], lr=LEARNING_RATE, fused=True)  # fused: no temporary copies
    losses: list[float] = []  # BPR loss of each step
    while len(losses) < MAX_STEPS and not _on_plateau(losses):
        batch = slice(None)
        if num_pairs > MAX_PAIRS_PER_STEP:
            batch = torch.randint(num_pairs, (MAX_PAIRS_PER_STEP,), generator=generator)
        users, positives = graph.users[batch], graph.items[batch] + graph.num_users
        negatives = torch.randint(graph.num_items, positives.shape, generator=generator) + graph.num_users
        final = propagate(graph.adjacency, layer_0, NUM_LAYERS).requires_grad_()
        loss = bpr_loss(final, users, positives, negatives)
        loss.backward()
        gradient, final = final.grad, None  # frees the memory of `final`
        assert gradient is not None
        # The propagation is linear and symmetric, so its gradient is the propagation of the gradient.
        layer_0.grad = propagate(graph.adjacency, gradient, NUM_LAYERS).add_(layer_0, alpha=L2 / len(layer_0))
        optimizer.step()
        layer_0.grad = gradient = None
        losses.append(loss.item())
    return layer_0


def _folded_in(
    graph: _Graph,
    layer_0: torch.Tensor,
    user_index: np.ndarray,
    item_index: np.ndarray,
    has_user: np.ndarray,
    has_item: np.ndarray,
    scratch: Path | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of all users and of all items, float32 (any, DIM), from a graph of those in `has_user` and `has_item`.

    A user without an edge in the graph is added as a node whose layer-0 embedding is zero, and other nodes stay as they
    are: by Eqs. 7 and 8 its vector is the sum of its items' layers 0 to K - 1, each item weighted by 1 / sqrt(product
    of both degrees), divided by K + 1. Items without an edge are then added in the same way, from the final vectors of
    their users.
    """
    own = propagate(graph.adjacency, layer_0, NUM_LAYERS).numpy()
    user_degrees = torch.bincount(graph.users, minlength=graph.num_users).numpy()
    degrees = torch.bincount(graph.items, minlength=graph.num_items)
    sources = propagate(graph.adjacency, layer_0, NUM_LAYERS - 1)[graph.num_users :] * (NUM_LAYERS / (NUM_LAYERS + 1))
    sources *= degrees.clamp(min=1).rsqrt()[:, None]
    sources[degrees == 0] = 0  # their layer 0 is random, not learned
    files = MappedFiles(scratch)
    of_users, of_items = (files.empty((len(has), DIM), np.float32) for has in (has_user, has_item))
    of_users[has_user], of_items[has_item] = own[: graph.num_users], own[graph.num_users :]
    is_learned, is_learned_item = has_user.copy(), has_item.copy()
    is_learned[has_user], is_learned_item[has_item] = user_degrees > 0, degrees.numpy() > 0
    number_of_item = np.where(has_item, np.cumsum(has_item) - 1, -1)
    for places, users, items in _folded_pairs(~is_learned, user_index, item_index, number_of_item, files):
        of_users[places] = _sums(users, items, len(places), sources).numpy()
    everybody = np.arange(len(has_user))
    for places, items, users in _folded_pairs(~is_learned_item, item_index, user_index, everybody, files):
        of_items[places] = _sums(items, users, len(places), torch.from_numpy(of_users)).numpy()
    return of_users, of_items


def _folded_pairs(
    is_folded: np.ndarray, rows: np.ndarray, columns: np.ndarray, number_of: np.ndarray, files: MappedFiles
) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor]]:
    """Yield the rows to fold in, int64 ascending, in parts, with their distinct pairs as of `_distinct_pairs`.

    `number_of` is the number of each column among those used, int64; -1: the column is not used.
    """

    def pairs() -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        for part in parts_of(len(rows)):
            are_in = is_folded[rows[part]] & (number_of[columns[part]] >= 0)
            yield rows[part][are_in], [number_of[columns[part][are_in]].astype(np.uint32)]

    starts, (numbers,) = by_code(pairs(), len(is_folded), len(rows), files.folder)
    inner = np.searchsorted(starts, np.arange(FOLDED_AT_ONCE, starts[-1], FOLDED_AT_ONCE))
    for first, stop in pairwise(np.unique([0, *inner, len(is_folded)]).tolist()):
        places = first + np.flatnonzero(is_folded[first:stop])
        number = np.repeat(np.cumsum(is_folded[first:stop]) - 1, np.diff(starts[first : stop + 1]))
        distinct = np.unique(number << 32 | numbers[starts[first] : starts[stop]])
        of_rows, of_columns = (torch.from_numpy(half.astype(np.int32)) for half in (distinct >> 32, distinct & _LOWER))
        if len(places):
            yield places, of_rows, of_columns


def _sums(rows: torch.Tensor, columns: torch.Tensor, num_rows: int, sources: torch.Tensor) -> torch.Tensor:
    """For each row the sum of `sources` (any, DIM) at its columns, divided by the square root of their number.

    `rows` and `columns` are int32; `rows` ascend.
    """
    counts = torch.bincount(rows, minlength=num_rows)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse ")
        matrix = torch.sparse_csr_tensor(
            starts.to(torch.int32), columns, counts.clamp(min=1).rsqrt()[rows], (num_rows, len(sources))
        )
        return matrix @ sources


def propagate(adjacency: torch.Tensor, layer_0: torch.Tensor, num_layers: int) -> torch.Tensor:
    """Mean of layers 0 to K, each the normalised sum over neighbours of the last (Eqs. 7 and 8, alpha = 1/(K+1)).

    `adjacency` is sparse CSR float32 (num_nodes, num_nodes), D^-1/2 A D^-1/2; `layer_0` and the result, which is
    detached, are float32 (num_nodes, dim).
    """
    with torch.no_grad():
        layer, total = layer_0, layer_0.clone()
        for _ in range(num_layers):
            layer = adjacency @ layer
            total += layer
        return total.div_(num_layers + 1)


def bpr_loss(
    final: torch.Tensor, users: torch.Tensor, positives: torch.Tensor, negatives: torch.Tensor
) -> torch.Tensor:
    """Mean of -ln sigmoid(score of the positive - score of the negative) (Eq. 15), over node indices (batch,)."""
    # Rows are taken by `embedding`: several threads sum the gradient of plain indexing in no fixed order.
    of_users, of_positives, of_negatives = (functional.embedding(n, final) for n in (users, positives, negatives))
    margins = (of_users * (of_positives - of_negatives)).sum(dim=1)  # Eq. 5, (batch,)
    return functional.softplus(-margins).mean()


def normalised_adjacency(users: torch.Tensor, items: torch.Tensor, num_users: int, num_items: int) -> torch.Tensor:
    """D^-1/2 A D^-1/2 of the bipartite graph (Eqs. 6 and 7): users are the first nodes, items follow.

    The pairs must be sorted by user, then item: the matrix is built row by row.
    """
    num_nodes, by_item = num_users + num_items, torch.argsort(items, stable=True)
    degrees = torch.cat([torch.bincount(users, minlength=num_users), torch.bincount(items, minlength=num_items)])
    starts = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
    degrees = degrees.to(torch.float32)
    weights = (degrees[users] * degrees[items + num_users]).rsqrt()
    columns = torch.cat([(items + num_users).to(torch.int32), users[by_item].to(torch.int32)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse ")  # torch's notes on its CSR support, once per process
        values = torch.cat([weights, weights[by_item]])
        return torch.sparse_csr_tensor(starts.to(torch.int32), columns, values, (num_nodes, num_nodes))


def _on_plateau(losses: list[float]) -> bool:
    if len(losses) < 2 * PLATEAU_STEPS:
        return False
    before, latest = np.mean(losses[-2 * PLATEAU_STEPS : -PLATEAU_STEPS]), np.mean(losses[-PLATEAU_STEPS:])
    return bool(latest > before * (1 - MIN_IMPROVEMENT)) and bool(latest < 0.65)  # 0.69 at the start: not yet learning
