"""Products with a bfloat16 matrix on a CPU, by the processor's own instructions: AMX, or AVX512-BF16.

A few tokens are multiplied in the time in which the weights come from memory. So weights lie in the order in which they
are read, in huge pages (with pages of 4 KiB an Intel Xeon reads a third slower), and while one strip of them is
multiplied the next one is fetched. Sums are float32. A token's results are added up in an order of their own, so that
they have the same bits whatever else is in the product.

Weights are divided into strips of 32 outputs and steps of 32 inputs. A step of a strip is two tiles of 1 KiB, which is
how AMX wants them: row p of a tile has the inputs 2 p and 2 p + 1 of 16 outputs. Inputs are copied into tiles of 16
tokens and 32 inputs.
"""

import ctypes
import platform
from functools import cache
from pathlib import Path

import numba
import numpy as np
import torch
from numba import njit, prange

from laserbatch.pipeline.decoding.attention.bfloat16 import as_array, narrowed, widened
from laserbatch.pipeline.decoding.attention.numba_attention import ATTENTION_STAMP, num_threads
from laserbatch.pipeline.decoding.attention.tile_product import LANES
from laserbatch.pipeline.decoding.model.bfloat16_instructions import (
    FEW_ROWS,
    ROWS,
    STEP,
    STRIP,
    TILE,
    VECTOR_ROWS,
    add_tiles,
    configure_tiles,
    copy_step,
    fetch_line,
    load_tile,
    multiply_vectors,
    release_tiles,
    store_rounded,
    store_sum,
    store_tile,
    stream_tile,
    zero_tile,
)
from laserbatch.pipeline.decoding.model.huge_pages import HugePages
from laserbatch.pipeline.processor import processor_flags
from laserbatch.retrieval_pools.compiled import cached, source_stamp

MAX_TOKENS = 256  # of which the inputs stay in a core's second-level cache
_STAMP = ATTENTION_STAMP + source_stamp(sorted(Path(__file__).parent.glob("bfloat16_*.py")))

# What AMX is told before its first instruction: palette 1, and eight tiles of 16 rows of 64 bytes.
_TILE_CONFIGURATION = np.zeros(64, np.uint8)
_TILE_CONFIGURATION[0] = 1
_TILE_CONFIGURATION[16:32:2], _TILE_CONFIGURATION[48:56] = 64, ROWS
_NOTHING = np.empty((0, 0), np.uint16)


@cache
def has_amx() -> bool:
    """Whether this process may use AMX for bfloat16: Linux wants to be asked, since it enlarges a thread's state."""
    if "amx_bf16" not in processor_flags() or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


class Bfloat16Matrix:
    """A matrix (out_features, in_features) in tiles, and a bias or none."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, memory: HugePages) -> None:
        self._num_outputs, num_inputs = weight.shape
        self._multiply = _multiply_by_tiles if has_amx() else _multiply_by_vectors
        num_strips, num_steps = -(-self._num_outputs // STRIP), -(-num_inputs // STEP)
        plain = np.zeros((num_strips * STRIP, num_steps * STEP), np.uint16)
        plain[: self._num_outputs, :num_inputs] = as_array(weight.detach())
        # strip, tile, output, step, pair, input of the pair
        in_order = plain.reshape(num_strips, 2, ROWS, num_steps, STEP // 2, 2).transpose(0, 3, 1, 4, 2, 5)
        self._tiles = memory.empty(plain.size).reshape(num_strips, num_steps, 2 * TILE)
        self._tiles.reshape(in_order.shape)[:] = in_order
        self._bias = np.zeros(num_strips * STRIP, np.float32)
        if bias is not None:
            self._bias[: self._num_outputs] = bias.detach().float().numpy()

    def product(self, inputs: np.ndarray, addend: np.ndarray = _NOTHING) -> np.ndarray:
        """Result (num_tokens, out_features) of inputs (num_tokens, in_features), plus the addend, rounded once.

        All are bfloat16 as uint16.
        """
        result = np.empty((len(inputs), self._num_outputs), np.uint16)
        threads = min(torch.get_num_threads(), num_threads(), len(self._tiles))
        numba.set_num_threads(threads)
        self._multiply(inputs, self._tiles, self._bias, addend, result, _TILE_CONFIGURATION, threads)
        return result


@cached(_STAMP, nogil=True, parallel=True, error_model="numpy")
def _multiply_by_tiles(inputs, weights, bias, addend, result, configuration, num_threads):
    num_strips, num_steps, _ = weights.shape
    for begin in range(0, len(inputs), MAX_TOKENS):
        end = min(begin + MAX_TOKENS, len(inputs))
        tiles = _tiles_of(inputs[begin:end], num_steps)
        for thread in prange(num_threads):
            sums = np.empty(2 * ROWS * STRIP + 16, np.float32)
            sums = sums[-sums.ctypes.data % 64 // 4 :]
            first, last = num_strips * thread // num_threads, num_strips * (thread + 1) // num_threads
            configure_tiles(configuration)
            for strip in range(first, last):
                next_strip = min(strip + 1, last - 1)
                for token in range(begin, end, 2 * ROWS):
                    _multiply_tiles(tiles, token - begin, end - begin, weights, strip, next_strip, sums)
                    _store(sums, token, min(token + 2 * ROWS, end), strip, bias, addend, result)
            release_tiles()


@cached(_STAMP, nogil=True, parallel=True, error_model="numpy")
def _multiply_by_vectors(inputs, weights, bias, addend, result, configuration, num_threads):
    num_strips, num_steps, _ = weights.shape
    for begin in range(0, len(inputs), MAX_TOKENS):
        end = min(begin + MAX_TOKENS, len(inputs))
        tiles = _tiles_of(inputs[begin:end], num_steps)
        for thread in prange(num_threads):
            sums = np.empty(2 * ROWS * STRIP, np.float32)
            for strip in range(num_strips * thread // num_threads, num_strips * (thread + 1) // num_threads):
                for token in range(begin, end, VECTOR_ROWS):
                    row = (token - begin) % ROWS
                    place = (token - begin - row) * num_steps * STEP + row * STEP
                    weight = strip * num_steps * 2 * TILE
                    if end - token > FEW_ROWS:
                        multiply_vectors(VECTOR_ROWS, tiles, place, weights, weight, num_steps, sums)
                    else:
                        multiply_vectors(FEW_ROWS, tiles, place, weights, weight, num_steps, sums)
                    _store(sums, token, min(token + VECTOR_ROWS, end), strip, bias, addend, result)


@njit(error_model="numpy")
def _tiles_of(inputs, num_steps):
    """Tokens in tiles (num_tiles, num_steps, ROWS, STEP), flat; what is behind the last token or input is zero."""
    num_tokens, num_inputs = inputs.shape
    num_tiles = -(-num_tokens // ROWS)
    tiles = np.empty(num_tiles * num_steps * TILE + 32, np.uint16)
    tiles = tiles[-tiles.ctypes.data % 64 // 2 :]  # a row of a tile is one line of the cache
    tiles[(num_tiles - 1) * num_steps * TILE :] = 0
    for token in range(num_tokens):
        tile, row = token // ROWS, token % ROWS
        for step in range(num_inputs // STEP):
            copy_step(inputs, token, step * STEP, tiles, (tile * num_steps + step) * TILE + row * STEP)
        if num_inputs % STEP:
            place = (tile * num_steps + num_steps - 1) * TILE + row * STEP
            for i in range(STEP):
                at = (num_steps - 1) * STEP + i
                tiles[place + i] = inputs[token, at] if at < num_inputs else 0
    return tiles


@njit(error_model="numpy")
def _multiply_tiles(tiles, token, num_tokens, weights, strip, next_strip, sums):
    """Set `sums` (2, 2, ROWS, 16): the strip's results of 32 tokens; meanwhile a part of the next strip is fetched."""
    num_steps = weights.shape[1]
    weight = strip * num_steps * 2 * TILE
    upper = token * num_steps * STEP
    # Each pass over a strip fetches its share of the next one: lines of 64 bytes.
    num_passes = -(-num_tokens // (2 * ROWS))
    num_fetched = -(-2 * TILE // 32 // num_passes)
    fetched = next_strip * num_steps * 2 * TILE + token // (2 * ROWS) * num_fetched * num_steps * 32
    zero_tile(0), zero_tile(1), zero_tile(2), zero_tile(3)
    if token + ROWS < num_tokens:
        lower = upper + num_steps * TILE
        for _ in range(num_steps):
            load_tile(4, weights, weight), load_tile(5, weights, weight + TILE)
            stream_tile(6, tiles, upper), add_tiles(0, 6, 4), add_tiles(1, 6, 5)
            stream_tile(7, tiles, lower), add_tiles(2, 7, 4), add_tiles(3, 7, 5)
            for _ in range(num_fetched):
                fetch_line(weights, fetched)
                fetched += 32
            weight, upper, lower = weight + 2 * TILE, upper + TILE, lower + TILE
        store_tile(2, sums, 2 * ROWS * 16), store_tile(3, sums, 3 * ROWS * 16)
    else:
        for _ in range(num_steps):
            load_tile(4, weights, weight), load_tile(5, weights, weight + TILE)
            stream_tile(6, tiles, upper), add_tiles(0, 6, 4), add_tiles(1, 6, 5)
            for _ in range(num_fetched):
                fetch_line(weights, fetched)
                fetched += 32
            weight, upper = weight + 2 * TILE, upper + TILE
    store_tile(0, sums, 0), store_tile(1, sums, ROWS * 16)


@njit(error_model="numpy")
def _store(sums, first, last, strip, bias, addend, result):
    """Set the strip's results of tokens [first, last), of whose sums two tiles (ROWS, 16) are beside each other."""
    column, num_outputs = strip * STRIP, result.shape[1]
    for token in range(first, last):
        row = token - first
        place = (row // ROWS * 2 * ROWS + row % ROWS) * LANES
        if column + STRIP > num_outputs:
            for i in range(num_outputs - column):
                total = sums[place + i // LANES * ROWS * LANES + i % LANES] + bias[column + i]
                if len(addend):
                    total += widened(addend[token, column + i])
                result[token, column + i] = narrowed(total, result)
        elif len(addend):
            store_sum(sums, place, bias, column, result, token, addend)
        else:
            store_rounded(sums, place, bias, column, result, token)
