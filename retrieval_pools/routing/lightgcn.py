"""LightGCN, short: user and item embeddings from who interacted with what (the only module of the pools with torch).

After He et al., "LightGCN: Simplifying and Powering Graph Convolution Network for Recommendation", SIGIR 2020.
It is short because its embeddings only feed k-means. The result depends on the set of (user, item) pairs, the seed and
(in its last bits) torch's thread count, and on nothing else.
"""

import warnings

import numpy as np
import pyarrow as pa
import torch
from torch.nn import functional

from laserbatch.retrieval_pools.routing.embeddings import EntityEmbeddings, distinct_ids

DIM = 64
NUM_LAYERS = 3  # K of He et al.
MAX_STEPS = 40  # each over the whole graph
LEARNING_RATE = 0.03
L2 = 0.02  # weight of the mean squared layer-0 embedding in the loss
MIN_IMPROVEMENT = 0.02  # of the mean loss of five steps over that of the five before, else training stops
MAX_PAIRS_PER_STEP = 1 << 17  # bounds memory on large graphs; smaller ones use every pair in every step
PLATEAU_STEPS = 5


def train_lightgcn(interactions: pa.Table, seed: int = 0, max_steps: int = MAX_STEPS) -> dict[str, EntityEmbeddings]:
    """Vectors of every id that occurs, by side ("user", "item"), ids in ascending order: float32 (num_ids, DIM).

    Training is on implicit feedback: a pair of `user_id` and `item_id` (string or int64, no nulls) that occurs, however
    often and in whatever order, is one edge. `seed` is of the initial embeddings and of the negative samples.
    """
    users, user_index = distinct_ids(interactions, "user_id", "interactions")
    items, item_index = distinct_ids(interactions, "item_id", "interactions")
    num_users, num_items = len(users), len(items)
    if num_users == 0:
        empty = np.empty((0, DIM), np.float32)
        return {"user": EntityEmbeddings(users, empty), "item": EntityEmbeddings(items, empty)}
    pairs = np.unique(user_index * np.int64(num_items) + item_index)  # sorted, each once
    num_pairs = len(pairs)
    users_of_pairs = torch.from_numpy((pairs // num_items).astype(np.int32))  # (num_pairs,)
    items_of_pairs = torch.from_numpy((pairs % num_items).astype(np.int32))
    del user_index, item_index, pairs  # there are many times as many interactions as ids
    adjacency = normalised_adjacency(users_of_pairs, items_of_pairs, num_users, num_items)

    generator = torch.Generator().manual_seed(seed)
    layer_0 = torch.randn(num_users + num_items, DIM, generator=generator) * 0.1
    optimizer = torch.optim.Adam([layer_0], lr=LEARNING_RATE, fused=True)  # without copies of what it reads
    losses: list[float] = []  # BPR, of each step
    while len(losses) < max_steps and not _on_plateau(losses):
        batch = slice(None)
        if num_pairs > MAX_PAIRS_PER_STEP:
            batch = torch.randint(num_pairs, (MAX_PAIRS_PER_STEP,), generator=generator)
        batch_users, positives = users_of_pairs[batch], items_of_pairs[batch] + num_users
        negatives = torch.randint(num_items, positives.shape, generator=generator) + num_users
        final = propagate(adjacency, layer_0, NUM_LAYERS).requires_grad_()
        loss = bpr_loss(final, batch_users, positives, negatives)
        loss.backward()
        gradient, final = final.grad, None  # whose memory is free then
        assert gradient is not None
        # The propagation is linear and symmetric, so its gradient is the propagation of the gradient.
        layer_0.grad = propagate(adjacency, gradient, NUM_LAYERS).add_(layer_0, alpha=L2 / len(layer_0))
        optimizer.step()
        layer_0.grad = gradient = None
        losses.append(loss.item())

    vectors = propagate(adjacency, layer_0, NUM_LAYERS).numpy()
    return {
        "user": EntityEmbeddings(users, vectors[:num_users]),
        "item": EntityEmbeddings(items, vectors[num_users:]),
    }


def propagate(adjacency: torch.Tensor, layer_0: torch.Tensor, num_layers: int) -> torch.Tensor:
    """Mean of layers 0 to K, each the normalised neighbours' sum of the one before (Eqs. 7 and 8, alpha = 1/(K+1)).

    `adjacency` is sparse CSR float32 (num_nodes, num_nodes), D^-1/2 A D^-1/2; `layer_0` float32 (num_nodes, dim), as is
    what is returned, detached.
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
    # Rows through `embedding`: the gradient of plain indexing is summed by several threads in no fixed order.
    of_users, of_positives, of_negatives = (functional.embedding(n, final) for n in (users, positives, negatives))
    margins = (of_users * (of_positives - of_negatives)).sum(dim=1)  # Eq. 5, (batch,)
    return functional.softplus(-margins).mean()


def normalised_adjacency(users: torch.Tensor, items: torch.Tensor, num_users: int, num_items: int) -> torch.Tensor:
    """D^-1/2 A D^-1/2 of the bipartite graph (Eqs. 6 and 7): users are nodes first, items after them.

    Its pairs come by user, then item, so that it is put together row by row.
    """
    num_nodes, by_item = num_users + num_items, torch.argsort(items, stable=True)
    degrees = torch.cat([torch.bincount(users, minlength=num_users), torch.bincount(items, minlength=num_items)])
    starts = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
    degrees = degrees.to(torch.float32)
    weights = (degrees[users] * degrees[items + num_users]).rsqrt()
    columns = torch.cat([(items + num_users).to(torch.int32), users[by_item].to(torch.int32)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse ")  # torch's notes on its CSR support, once a process
        values = torch.cat([weights, weights[by_item]])
        return torch.sparse_csr_tensor(starts.to(torch.int32), columns, values, (num_nodes, num_nodes))


def _on_plateau(losses: list[float]) -> bool:
    if len(losses) < 2 * PLATEAU_STEPS:
        return False
    before, latest = np.mean(losses[-2 * PLATEAU_STEPS : -PLATEAU_STEPS]), np.mean(losses[-PLATEAU_STEPS:])
    return bool(latest > before * (1 - MIN_IMPROVEMENT)) and bool(latest < 0.65)  # 0.69 at the start: not yet learning
