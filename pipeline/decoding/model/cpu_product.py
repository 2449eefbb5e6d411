"""Products with a matrix on a CPU, in float32 or bfloat16, by vector instructions or by AMX.

A product of few tokens takes as long as reading the weights from memory. So weights lie in the order in which they are
read, and while one strip of them is multiplied the next one is prefetched. Sums are float32. A token's results are
summed in a fixed order, so that they have the same bits whatever else is in the product.

Weights are divided into strips of 32 outputs. For vectors, a strip has its outputs' weights word by word of the inputs;
a word is a float32 or a pair of bfloat16. For AMX, a strip is divided into steps of 32 inputs, of two tiles of 1 KiB
each: row p of a tile has input pair p of 16 outputs. Inputs are copied into tiles of 16 tokens and 32 inputs.
"""

from pathlib import Path

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types

from laserbatch.pipeline.decoding.attention.amx import (
    CONFIGURATION,
    ROWS,
    STEP,
    TILE,
    add_tiles,
    configure_tiles,
    has_amx,
    literal_intrinsic,
    load_tile,
    release_tiles,
    store_tile,
    stream_tile,
    zero_tile,
)
from laserbatch.pipeline.decoding.attention.bfloat16 import as_array, narrowed, widened
from laserbatch.pipeline.decoding.attention.numba_attention import ATTENTION_STAMP, num_threads
from laserbatch.pipeline.decoding.attention.tile_product import INT, LANES, VECTOR, Emitter
from laserbatch.pipeline.processor import processor_flags
from laserbatch.retrieval_pools.compiled import cached, emit_fetch, fetch_second_level, intrinsic, source_stamp

STRIP = 2 * LANES  # outputs of one strip of weights
MAX_TOKENS = 256  # tokens whose inputs stay in a core's second-level cache
# Tokens that vectors multiply at once: their sums fill the registers of AVX-512, or of AVX2.
MANY, SOME, FEW = (12, 8, 2) if "avx512f" in processor_flags() else (3, 2, 1)
_STAMP = ATTENTION_STAMP + source_stamp(sorted(Path(__file__).parent.glob("cpu_*.py")))


class PackedMatrix:
    """A matrix (out_features, in_features), float32 or bfloat16, in the layout of products, with a bias or none.

    `packed` (num_strips, any) has the weights, padded with zeros to whole strips and steps.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._num_outputs, num_inputs = weight.shape
        num_strips, num_steps = -(-self._num_outputs // STRIP), -(-num_inputs // STEP)
        values = as_array(weight.detach())
        self._uses_tiles = values.dtype == np.uint16 and has_amx()
        plain = np.zeros((num_strips * STRIP, num_steps * STEP if self._uses_tiles else num_inputs), values.dtype)
        plain[: self._num_outputs, :num_inputs] = values
        words = plain.view(np.uint32)
        if self._uses_tiles:  # strip, tile, output, step, pair
            in_order = words.reshape(num_strips, 2, ROWS, num_steps, STEP // 2).transpose(0, 3, 1, 4, 2)
        else:  # strip, output, word
            in_order = words.reshape(num_strips, STRIP, -1).transpose(0, 2, 1)
        self.packed = torch.empty(num_strips, plain.size // num_strips, dtype=weight.dtype)
        self._weights = as_array(self.packed)
        self._weights.view(np.uint32).reshape(in_order.shape)[:] = in_order
        self._bias = np.zeros(num_strips * STRIP, np.float32)
        if bias is not None:
            self._bias[: self._num_outputs] = bias.detach().float().numpy()
        self._nothing = np.empty((0, 0), plain.dtype)

    def product(self, inputs: np.ndarray, addend: np.ndarray | None = None) -> np.ndarray:
        """The product (num_tokens, out_features) of inputs (num_tokens, in_features), plus the addend, rounded once.

        All are float32, or bfloat16 as uint16, and contiguous.
        """
        result = np.empty((len(inputs), self._num_outputs), inputs.dtype)
        threads = min(torch.get_num_threads(), num_threads(), len(self._weights))
        numba.set_num_threads(threads)
        added = self._nothing if addend is None else addend
        if self._uses_tiles:
            _multiply_by_tiles(inputs, self._weights, self._bias, added, result, threads, CONFIGURATION)
        else:
            _multiply_by_vectors(inputs, self._weights, self._bias, added, result, threads)
        return result


@intrinsic
def copy_step(typing, inputs, token, begin, tiles, place):
    """tiles[place + i] = inputs[token, begin + i] for STEP values of i."""

    def emit_copy(context, builder, signature, arguments):
        emit = Emitter(context, builder, signature, arguments)
        _, token, begin, _, place = emit.values
        words = ir.VectorType(ir.IntType(16), STEP)
        source, target = emit.pointer(0, token, begin), emit.pointer(3, place)
        builder.store(emit.load(source, words), builder.bitcast(target, words.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(inputs, token, begin, tiles, place), emit_copy


@intrinsic
def store_rounded(typing, sums, place, bias, column, result, token):
    """result[token, column + i] = sum i + bias[column + i] for STRIP values of i, rounded if results are bfloat16."""
    return types.void(sums, place, bias, column, result, token), _emit_stored


@intrinsic
def store_sum(typing, sums, place, bias, column, result, token, addend):
    """Like `store_rounded`, with addend[token, column + i] added."""
    return types.void(sums, place, bias, column, result, token, addend), _emit_stored


def _emit_stored(context, builder, signature, arguments):
    emit = Emitter(context, builder, signature, arguments)
    _, place, _, column, _, token, *addend = emit.values
    halves = []
    for half in range(2):
        half_column = emit.plus(column, half * LANES)
        total = emit.load_widened(0, emit.pointer(0, emit.plus(place, half * ROWS * LANES)))
        total = builder.fadd(total, emit.load_widened(2, emit.pointer(2, half_column)))
        if addend:
            total = builder.fadd(total, emit.load_widened(6, emit.pointer(6, token, half_column)))
        halves.append(total if emit.is_float(4) else emit.rounded(total))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), STRIP), list(range(STRIP)))
    whole = builder.shuffle_vector(*halves, lanes)
    builder.store(whole, builder.bitcast(emit.pointer(4, token, column), whole.type.as_pointer()), align=2)
    return context.get_dummy_value()


@literal_intrinsic
def multiply_rows(typing, num_rows, num_fetched, inputs, row, last_row, weights, weight, fetched, sums):
    """Set `sums` (2, ROWS, LANES) to a strip's results for `num_rows` tokens; rows after the last one repeat it.

    The strip's weights begin at place `weight`: STRIP words, one per output, for each word of the inputs; a word is a
    float32 or two bfloat16. With each input word, `num_fetched` lines are prefetched, from place `fetched` on.
    """
    kinds = num_rows, num_fetched, inputs, row, last_row, weights, weight, fetched, sums
    return types.void(*kinds), _emit_rows


def _emit_rows(context, builder, signature, arguments):
    emit = Emitter(context, builder, signature, arguments)
    _, _, _, row, last_row, _, weight, fetched, _ = emit.values
    num_rows, num_fetched = (kind.literal_value for kind in signature.args[:2])
    is_float, word = emit.is_float(2), ir.IntType(32)
    line = LANES if is_float else 2 * LANES  # values of a cache line
    num_words = builder.extract_value(emit.values[2].shape, 1)
    if not is_float:
        num_words = builder.udiv(num_words, ir.Constant(INT, 2))
    rows = []
    for number in range(num_rows):
        at = emit.plus(row, number)
        at = builder.select(builder.icmp_signed("<", at, last_row), at, last_row)
        rows.append(builder.bitcast(emit.pointer(2, at, ir.Constant(INT, 0)), word.as_pointer()))

    def add_step(step, sums):
        here = builder.add(weight, builder.mul(step, ir.Constant(INT, 2 * line)))
        rights = [emit.load(emit.pointer(5, emit.plus(here, half * line)), emit.operand(5)) for half in range(2)]
        ahead = builder.add(fetched, builder.mul(step, ir.Constant(INT, num_fetched * line)))
        for number in range(num_fetched):
            emit_fetch(builder, emit.pointer(5, emit.plus(ahead, number * line)))
        pairs = zip(rows, sums, strict=True)
        return [emit.add_products(emit.load(builder.gep(row, [step])), rights, row_sums) for row, row_sums in pairs]

    zeros = [[ir.Constant(VECTOR, [0.0] * LANES)] * 2] * num_rows
    for number, values in enumerate(emit.loop(num_words, zeros, add_step)):
        for half, value in enumerate(values):
            emit.store(value, emit.pointer(8, ir.Constant(INT, (half * ROWS + number) * LANES)))
    return context.get_dummy_value()


@cached(_STAMP, parallel=True, error_model="numpy")
def _multiply_by_tiles(inputs, weights, bias, addend, result, num_threads, configuration):
    num_strips, num_steps = len(weights), weights.shape[1] // (2 * TILE)
    for begin in range(0, len(inputs), MAX_TOKENS):
        end = min(begin + MAX_TOKENS, len(inputs))
        tiles = _tiles_of(inputs[begin:end], num_steps, num_threads)
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


@cached(_STAMP, parallel=True, error_model="numpy")
def _multiply_by_vectors(inputs, weights, bias, addend, result, num_threads):
    num_strips, size = weights.shape
    for begin in range(0, len(inputs), MAX_TOKENS):
        end = min(begin + MAX_TOKENS, len(inputs))
        for thread in prange(num_threads):
            sums = np.empty(ROWS * STRIP, np.float32)
            first, last = num_strips * thread // num_threads, num_strips * (thread + 1) // num_threads
            for strip in range(first, last):
                here, ahead = strip * size, min(strip + 1, last - 1) * size
                token = begin
                while token < end:  # the first tokens prefetch the next strip meanwhile
                    left, number = end - token, MANY
                    if left <= FEW:
                        number = FEW
                        multiply_rows(FEW, 2, inputs, token, end - 1, weights, here, ahead, sums)
                    elif left <= SOME:
                        number = SOME
                        multiply_rows(SOME, 2, inputs, token, end - 1, weights, here, ahead, sums)
                    elif token == begin:
                        multiply_rows(MANY, 2, inputs, token, end - 1, weights, here, ahead, sums)
                    else:
                        multiply_rows(MANY, 0, inputs, token, end - 1, weights, here, ahead, sums)
                    _store(sums, token, min(token + number, end), strip, bias, addend, result)
                    token += number


@njit(error_model="numpy", parallel=True)
def _tiles_of(inputs, num_steps, num_threads):
    """Tokens in tiles (num_tiles, num_steps, ROWS, STEP), flattened, with zeros after the last token and input."""
    num_tiles = -(-len(inputs) // ROWS)
    tiles = np.empty(num_tiles * num_steps * TILE + 32, np.uint16)
    tiles = tiles[-tiles.ctypes.data % 64 // 2 :]  # a row of a tile is one line of the cache
    tiles[(num_tiles - 1) * num_steps * TILE :] = 0
    if num_tiles == 1:
        _copy_to_tile(inputs, 0, num_steps, tiles)
    else:
        for thread in prange(num_threads):
            for tile in range(num_tiles * thread // num_threads, num_tiles * (thread + 1) // num_threads):
                _copy_to_tile(inputs, tile, num_steps, tiles)
    return tiles


@njit(error_model="numpy")
def _copy_to_tile(inputs, tile, num_steps, tiles):
    """Copy the tokens of one tile, with zeros after the last input."""
    num_tokens, num_inputs = inputs.shape
    for token in range(tile * ROWS, min((tile + 1) * ROWS, num_tokens)):
        row = token % ROWS
        for step in range(num_inputs // STEP):
            copy_step(inputs, token, step * STEP, tiles, (tile * num_steps + step) * TILE + row * STEP)
        if num_inputs % STEP:
            place = (tile * num_steps + num_steps - 1) * TILE + row * STEP
            for i in range(STEP):
                at = (num_steps - 1) * STEP + i
                tiles[place + i] = inputs[token, at] if at < num_inputs else 0


@njit(error_model="numpy")
def _multiply_tiles(tiles, token, num_tokens, weights, strip, next_strip, sums):
    """Set `sums` (2, 2, ROWS, 16) to the strip's results for 32 tokens; meanwhile prefetch a part of the next strip."""
    num_steps = weights.shape[1] // (2 * TILE)
    weight = strip * num_steps * 2 * TILE
    upper = token * num_steps * STEP
    # Each pass over a strip prefetches its share of the next one, in lines of 64 bytes.
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
                fetch_second_level(weights, fetched)
                fetched += 32
            weight, upper, lower = weight + 2 * TILE, upper + TILE, lower + TILE
        store_tile(2, sums, 2 * ROWS * 16), store_tile(3, sums, 3 * ROWS * 16)
    else:
        for _ in range(num_steps):
            load_tile(4, weights, weight), load_tile(5, weights, weight + TILE)
            stream_tile(6, tiles, upper), add_tiles(0, 6, 4), add_tiles(1, 6, 5)
            for _ in range(num_fetched):
                fetch_second_level(weights, fetched)
                fetched += 32
            weight, upper = weight + 2 * TILE, upper + TILE
    store_tile(0, sums, 0), store_tile(1, sums, ROWS * 16)


@njit(error_model="numpy")
def _store(sums, first, last, strip, bias, addend, result):
    """Set the strip's results for tokens [first, last); in `sums` two adjacent tiles (ROWS, 16) have its outputs."""
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
