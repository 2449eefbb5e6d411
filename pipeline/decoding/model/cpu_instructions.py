"""Instructions of processors on matrices, for compiled loops: a product in vectors, copying into tiles, rounding."""

from llvmlite import ir
from numba import types

from laserbatch.pipeline.decoding.attention.amx import ROWS, STEP, literal_intrinsic
from laserbatch.pipeline.decoding.attention.tile_product import INT, LANES, VECTOR, Emitter
from laserbatch.retrieval_pools.compiled import emit_fetch, intrinsic

STRIP = 2 * LANES  # outputs that weights are divided into


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
    """result[token, column + i] = the sum + bias[column + i] of STRIP i, rounded where results are bfloat16."""
    return types.void(sums, place, bias, column, result, token), _emit_stored


@intrinsic
def store_sum(typing, sums, place, bias, column, result, token, addend):
    """As `store_rounded`, with addend[token, column + i] added."""
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
    """Set `sums` (2, ROWS, LANES) to a strip's results of `num_rows` tokens; behind the last row it is repeated.

    The strip's weights are from place `weight` on, for each word of an input one of STRIP outputs: a word is a float32
    or two bfloat16. With each, `num_fetched` lines are fetched from place `fetched` on.
    """
    kinds = num_rows, num_fetched, inputs, row, last_row, weights, weight, fetched, sums
    return types.void(*kinds), _emit_rows


def _emit_rows(context, builder, signature, arguments):
    emit = Emitter(context, builder, signature, arguments)
    _, _, _, row, last_row, _, weight, fetched, _ = emit.values
    num_rows, num_fetched = (kind.literal_value for kind in signature.args[:2])
    is_float, word = emit.is_float(2), ir.IntType(32)
    line = LANES if is_float else 2 * LANES  # values
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
