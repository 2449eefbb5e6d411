"""Instructions of a processor on bfloat16 matrices, for compiled loops: AMX's tiles, AVX512-BF16's vectors, rounding.

A place is an index of an array as it lies in memory, whatever its shape. AMX has eight tiles, which instructions name
by number.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic

from laserbatch.pipeline.decoding.attention.tile_product import INT, LANES, VECTOR, Emitter
from laserbatch.retrieval_pools.compiled import intrinsic

STRIP, STEP, ROWS = 32, 32, 16  # outputs of a strip, inputs of a step, tokens of a tile
TILE = ROWS * STEP  # values
VECTOR_ROWS, FEW_ROWS = 8, 2  # tokens that vectors multiply at once

# A tile's number is a part of its instruction.
literal_intrinsic = cast(Callable[[Callable], Callable], numba_intrinsic(prefer_literal=True))


def _emit_call(emit: Emitter, name: str, *arguments: Any, result: ir.Type = ir.VoidType()) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return emit.builder.call(cgutils.get_or_insert_function(emit.builder.module, kind, name), arguments)


def _tile_instruction(name: str, num_tiles: int, has_memory: bool):
    """What emits an instruction on tiles, by number, and on a place of an array, where tiles lie one after another."""

    def emit_instruction(context, builder, signature, arguments):
        emit = Emitter(context, builder, signature, arguments)
        operands = [ir.Constant(ir.IntType(8), kind.literal_value) for kind in signature.args[:num_tiles]]
        if has_memory:
            place = emit.values[num_tiles + 1] if len(arguments) > num_tiles + 1 else ir.Constant(INT, 0)
            operands.append(builder.bitcast(emit.pointer(num_tiles, place), cgutils.voidptr_t))
            if num_tiles:
                operands.append(ir.Constant(INT, 64))  # bytes from row to row
        _emit_call(emit, f"llvm.x86.{name}", *operands)
        return context.get_dummy_value()

    return emit_instruction


@literal_intrinsic
def zero_tile(typing, tile):
    return types.void(tile), _tile_instruction("tilezero", 1, False)


@literal_intrinsic
def load_tile(typing, tile, array, place):
    return types.void(tile, array, place), _tile_instruction("tileloadd64", 1, True)


@literal_intrinsic
def stream_tile(typing, tile, array, place):
    """As `load_tile`, leaving the first-level cache to others."""
    return types.void(tile, array, place), _tile_instruction("tileloaddt164", 1, True)


@literal_intrinsic
def store_tile(typing, tile, array, place):
    return types.void(tile, array, place), _tile_instruction("tilestored64", 1, True)


@literal_intrinsic
def add_tiles(typing, sums, left, right):
    """sums += left @ right, of tiles by their numbers."""
    return types.void(sums, left, right), _tile_instruction("tdpbf16ps", 3, False)


@intrinsic
def configure_tiles(typing, configuration):
    return types.void(configuration), _tile_instruction("ldtilecfg", 0, True)


@intrinsic
def release_tiles(typing):
    return types.void(), _tile_instruction("tilerelease", 0, False)


@intrinsic
def fetch_line(typing, array, place):
    """Have 64 bytes brought to the core's second-level cache."""

    def emit_fetch(context, builder, signature, arguments):
        emit = Emitter(context, builder, signature, arguments)
        pointer = builder.bitcast(emit.pointer(0, emit.values[1]), cgutils.voidptr_t)
        to_read, second_level, of_data = (cgutils.int32_t(number) for number in (0, 2, 1))
        _emit_call(emit, "llvm.prefetch.p0", pointer, to_read, second_level, of_data)
        return context.get_dummy_value()

    return types.void(array, place), emit_fetch


@intrinsic
def copy_step(typing, inputs, token, begin, tiles, place):
    """tiles[place + i] = inputs[token, begin + i] of STEP i."""

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
    """result[token, column + i] = the sum + bias[column + i] of STRIP i, rounded to bfloat16."""
    return types.void(sums, place, bias, column, result, token), _emit_rounded


@intrinsic
def store_sum(typing, sums, place, bias, column, result, token, addend):
    """As `store_rounded`, with addend[token, column + i] added."""
    return types.void(sums, place, bias, column, result, token, addend), _emit_rounded


def _emit_rounded(context, builder, signature, arguments):
    emit = Emitter(context, builder, signature, arguments)
    _, place, _, column, _, token, *addend = emit.values
    halves = []
    for tile in range(2):
        total = emit.load_widened(0, emit.pointer(0, emit.plus(place, tile * ROWS * LANES)))
        tile_column = emit.plus(column, tile * LANES)
        total = builder.fadd(total, emit.load_widened(2, emit.pointer(2, tile_column)))
        if addend:
            total = builder.fadd(total, emit.load_widened(6, emit.pointer(6, token, tile_column)))
        halves.append(_rounded(builder, total))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), STRIP), list(range(STRIP)))
    whole = builder.shuffle_vector(*halves, lanes)
    builder.store(whole, builder.bitcast(emit.pointer(4, token, column), whole.type.as_pointer()), align=2)
    return context.get_dummy_value()


def _rounded(builder: ir.IRBuilder, values: ir.Value) -> Any:
    """A vector of float32, rounded to the nearest bfloat16, ties to even, as integers of 16 bits."""
    words = ir.VectorType(ir.IntType(32), LANES)

    def each(number):
        return ir.Constant(words, [number] * LANES)

    bits = builder.bitcast(values, words)
    is_odd = builder.and_(builder.lshr(bits, each(16)), each(1))
    rounded = builder.lshr(builder.add(builder.add(bits, each(0x7FFF)), is_odd), each(16))
    rounded = builder.select(builder.fcmp_unordered("uno", values, values), each(0x7FC0), rounded)
    return builder.trunc(rounded, ir.VectorType(ir.IntType(16), LANES))


class _Bfloat16(ir.Type):
    """LLVM's bfloat, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


@literal_intrinsic
def multiply_vectors(typing, num_rows, tiles, place, weights, weight, num_steps, sums):
    """Set `sums` (2, ROWS, 16) to a strip's results of `num_rows` tokens of a tile from `place` on."""
    return types.void(num_rows, tiles, place, weights, weight, num_steps, sums), _emit_vectors


def _emit_vectors(context, builder, signature, arguments):
    emit = Emitter(context, builder, signature, arguments)
    _, _, place, _, weight, num_steps, _ = emit.values
    num_rows = signature.args[0].literal_value
    pairs = ir.VectorType(_Bfloat16(), 2 * LANES)
    word = ir.IntType(32)
    begin, loop, after = builder.block, builder.append_basic_block("step"), builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(INT)
    sums = [[builder.phi(VECTOR) for _ in range(2)] for _ in range(num_rows)]
    new = [list(row) for row in sums]
    place = builder.add(place, builder.mul(step, ir.Constant(INT, TILE)))
    weight = builder.add(weight, builder.mul(step, ir.Constant(INT, 2 * TILE)))
    for pair in range(STEP // 2):
        places = [emit.plus(weight, tile * TILE + pair * STEP) for tile in range(2)]
        rights = [emit.load(emit.pointer(3, at), pairs) for at in places]
        for row in range(num_rows):
            value = emit.load(emit.pointer(1, emit.plus(place, row * STEP + 2 * pair)), word)
            undefined = ir.Constant(ir.VectorType(word, LANES), ir.Undefined)
            first = builder.insert_element(undefined, value, ir.Constant(word, 0))
            left = builder.bitcast(emit.shuffled(first, first, [0] * LANES), pairs)
            for tile in range(2):
                operands = new[row][tile], left, rights[tile]
                name = "llvm.x86.avx512bf16.dpbf16ps.512"
                new[row][tile] = _emit_call(emit, name, *operands, result=VECTOR)
    following = emit.plus(step, 1)
    step.add_incoming(ir.Constant(INT, 0), begin)
    step.add_incoming(following, loop)
    for row_sums, row_new in zip(sums, new, strict=True):
        for total, value in zip(row_sums, row_new, strict=True):
            total.add_incoming(ir.Constant(VECTOR, [0.0] * LANES), begin)
            total.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, num_steps), loop, after)
    builder.position_at_end(after)
    for row, values in enumerate(new):
        for tile, value in enumerate(values):
            emit.store(value, emit.pointer(6, ir.Constant(INT, (tile * ROWS + row) * LANES)))
    return context.get_dummy_value()
