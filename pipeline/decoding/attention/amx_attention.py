"""The two matrix products of attention by AMX, for a task of `numba_attention` in bfloat16.

Products are summed in float32, and weights are rounded to bfloat16 first, as transformers does. The processor sums the
32 values of a step apart from earlier steps, and even and odd values apart as well. A token must have the same bits
whatever is in its batch, so a value's place in a step follows from its position in the text: a task begins at a
multiple of 32. Nodes of a tree do not lie at their positions, so vector code sums them in the order that AMX would use.
"""

import numpy as np
from numba import njit, types
from numba.extending import overload

from laserbatch.pipeline.decoding.attention.amx import (
    CONFIGURATION,
    ROW_BYTES,
    ROWS,
    STEP,
    TILE,
    add_tiles,
    configure_tiles,
    has_amx,
    load_rows,
    load_tile,
    release_tiles,
    store_rows,
    zero_tile,
)
from laserbatch.pipeline.decoding.attention.bfloat16 import narrowed, widened
from laserbatch.pipeline.decoding.attention.tile_product import (
    LANES,
    NUM_FETCHED_AHEAD,
    TILE_COLUMNS,
    add_product,
    gather_rows,
    interleave_rows,
    narrow_vector,
    padded,
    turn_block,
)
from laserbatch.retrieval_pools.compiled import fetch


def fits_tiles(keys, head_dim, value_dim):
    """Whether the functions below may be called; like them, it exists in compiled loops only."""
    raise NotImplementedError


def set_scores_by_tiles(query, head, keys, values, places, scores):
    """Set scores (padded rows, padded keys) to the products of a head's queries with the keys at some places.

    `query` (tokens, num_kv_heads, num_folded, head_dim), `keys` and `values` (any, dim) are bfloat16. Rows are padded
    to ROWS, and keys to STEP.
    """
    raise NotImplementedError


def set_sums_by_tiles(scores, num_weighted, num_keys, values, places, sums):
    """Set sums (padded rows, value_dim) to the sums of the first `num_keys` values, weighted by the scores.

    Only the first `num_weighted` rows have weights; the sums of other rows are undefined.
    """
    raise NotImplementedError


def _has_tiles(memory) -> bool:
    return not isinstance(memory.dtype, types.Float) and has_amx()


@overload(fits_tiles)
def _fits_tiles(keys, head_dim, value_dim):
    if _has_tiles(keys):
        return lambda keys, head_dim, value_dim: head_dim % STEP == 0 and value_dim % STEP == 0
    return lambda keys, head_dim, value_dim: False


@overload(set_scores_by_tiles)
def _set_scores(query, head, keys, values, places, scores):
    if _has_tiles(keys):
        return lambda query, head, keys, values, places, scores: _scores_by_tiles(
            query, head, keys, values, places, scores
        )
    return lambda query, head, keys, values, places, scores: None


@overload(set_sums_by_tiles)
def _set_sums(scores, num_weighted, num_keys, values, places, sums):
    if _has_tiles(values):
        return lambda scores, num_weighted, num_keys, values, places, sums: _sums_by_tiles(
            scores, num_weighted, num_keys, values, places, sums
        )
    return lambda scores, num_weighted, num_keys, values, places, sums: None


@njit(error_model="numpy")
def _aligned(size):
    """An uninitialised array of uint16 that begins at a cache line."""
    array = np.empty(size + ROW_BYTES // 2, np.uint16)
    return array[-array.ctypes.data % ROW_BYTES // 2 :]


@njit(error_model="numpy")
def _add_step(lefts, row, column, width, has_lower):
    """Add to tiles 0 to 3 the products of STEP values of ROWS rows, and of the next ROWS, with tiles 4 and 5."""
    load_rows(6, lefts, row * width + column, 2 * width), add_tiles(0, 6, 4), add_tiles(1, 6, 5)
    if has_lower:
        load_rows(7, lefts, (row + ROWS) * width + column, 2 * width), add_tiles(2, 7, 4), add_tiles(3, 7, 5)


@njit(error_model="numpy")
def _store_sums(sums, row, column, width, has_lower):
    place, row_bytes = row * width + column, 4 * width
    store_rows(0, sums, place, row_bytes), store_rows(1, sums, place + LANES, row_bytes)
    if has_lower:
        place += ROWS * width
        store_rows(2, sums, place, row_bytes), store_rows(3, sums, place + LANES, row_bytes)


@njit(error_model="numpy")
def _scores_by_tiles(query, head, keys, values, places, scores):
    num_tokens, _, num_folded, head_dim = query.shape
    num_rows, width = scores.shape
    rows = _aligned(num_rows * head_dim)
    rows[num_tokens * num_folded * head_dim :] = 0
    for row in range(num_tokens * num_folded):
        vector = query[row // num_folded, head, row % num_folded]
        for d in range(head_dim):
            rows[row * head_dim + d] = vector[d]
    columns, half = _aligned(2 * LANES * head_dim), LANES * head_dim
    # Upper half: the first LANES keys; lower half: the next ones.
    turned = columns[: 2 * LANES * head_dim].reshape(head_dim, 2 * LANES)
    configure_tiles(CONFIGURATION)
    for key in range(0, width, 2 * LANES):
        for first in range(key, key + 2 * LANES, LANES):
            for d in range(0, head_dim, STEP):
                for i in range(first, first + LANES):
                    fetch(values, places[i] * values.shape[1] + d)
                    fetch(keys, places[min(i + NUM_FETCHED_AHEAD, len(places) - 1)] * head_dim + d)
                turn_block(keys, places, first, d, turned, (first - key) // LANES * head_dim // 2 + d // 2, 0)
        for row in range(0, num_rows, 2 * ROWS):
            zero_tile(0), zero_tile(1), zero_tile(2), zero_tile(3)
            has_lower = row + ROWS < num_rows
            for d in range(0, head_dim, STEP):
                load_tile(4, columns, d * LANES), load_tile(5, columns, half + d * LANES)
                _add_step(rows, row, d, head_dim, has_lower)
            _store_sums(scores, row, key, width, has_lower)
    release_tiles()


@njit(error_model="numpy")
def _sums_by_tiles(scores, num_weighted, num_keys, values, places, sums):
    num_rows, width, value_dim = len(scores), scores.shape[1], values.shape[1]
    num_steps, num_columns = -(-num_keys // STEP), value_dim // LANES
    weights = _aligned(num_rows * width)
    for row in range(num_weighted):
        scores[row, num_keys : num_steps * STEP] = 0
        for key in range(0, num_steps * STEP, LANES):
            narrow_vector(scores, row, key, weights, row * width + key)
    pairs = _aligned(num_steps * num_columns * TILE)
    for step in range(num_steps):
        for pair in range(ROWS):
            first, second = places[step * STEP + 2 * pair], places[step * STEP + 2 * pair + 1]
            for d in range(0, value_dim, 2 * LANES):
                place = (step * num_columns + d // LANES) * TILE + pair * STEP
                interleave_rows(values, first, second, d, pairs, place, place + TILE)
    configure_tiles(CONFIGURATION)
    for row in range(0, num_rows, 2 * ROWS):
        has_lower = row + ROWS < num_rows
        for column in range(0, value_dim, 2 * LANES):
            zero_tile(0), zero_tile(1), zero_tile(2), zero_tile(3)
            for step in range(num_steps):
                place = (step * num_columns + column // LANES) * TILE
                load_tile(4, pairs, place), load_tile(5, pairs, place + TILE)
                _add_step(weights, row, step * STEP, width, has_lower)
            _store_sums(sums, row, column, value_dim, has_lower)
    release_tiles()


@njit(error_model="numpy")
def add_in_order_of_steps(scores, num_folded, begin, chain_end, ancestors, values, places, sums):
    """Add the weighted values of keys from `begin` on to the sums (padded rows, value_dim), in AMX's order.

    `scores` : float32 (rows, keys), `num_folded` rows for each token.
    `begin` : a multiple of STEP; the keys before it are already added.
    `chain_end` : keys before it lie at the positions of their tokens; after it come the nodes of the tree.
    `ancestors` : a bit mask for each token of the nodes that it sees; other nodes have no position in its text.
    """
    num_rows, num_keys = scores.shape
    weights = np.zeros((num_rows, num_keys - begin), np.float32)
    at = np.full(weights.shape, -1, np.int64)  # positions of seen keys, from `begin` on
    last = 0
    for row in range(num_rows):
        seen, position = ancestors[row // num_folded], 0
        for key in range(begin, num_keys):
            if key < chain_end or (seen >> (key - chain_end)) & 1 != 0:
                weights[row, key - begin] = widened(narrowed(scores[row, key], values))
                at[row, key - begin] = position
                position += 1
        last = max(last, position)
    value_rows = np.empty((padded(num_keys - begin, TILE_COLUMNS), values.shape[1]), np.float32)
    for key in range(0, num_keys - begin, TILE_COLUMNS):
        gather_rows(values, places, begin + key, value_rows[key : key + TILE_COLUMNS])
    # Each pass takes the even or the odd positions of a step; all other keys add zeros.
    own_weights = np.zeros((len(sums), num_keys - begin), np.float32)
    parts = np.empty((2, *sums.shape), np.float32)
    for step in range(0, last, STEP):
        for parity in range(2):
            for row in range(num_rows):
                for key in range(num_keys - begin):
                    is_own = at[row, key] // STEP * STEP == step and at[row, key] % 2 == parity
                    own_weights[row, key] = weights[row, key] if is_own else np.float32(0)
            add_product(own_weights, 0, value_rows, num_keys - begin, parts[parity], 0)
        for row in range(num_rows):
            for d in range(sums.shape[1]):
                sums[row, d] += parts[0, row, d] + parts[1, row, d]
