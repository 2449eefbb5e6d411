"""Small float32 matrices in compiled loops, for attention on a CPU: a product, and columns gathered from rows.

numba vectorises a loop, but keeps no block of results in registers, which a product needs, and turns no block of a
matrix: both are written here in LLVM's own vectors. Each result of the product is added up in the order of the steps,
whatever else is computed beside it, so that it has the same bits in a product of any size.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from laserbatch.pipeline.decoding.attention.bfloat16 import widened
from laserbatch.retrieval_pools.compiled import intrinsic

LANES = 16  # float32 values of one vector: one of AVX-512, or several of what the processor has
TILE_ROWS, TILE_VECTORS = 4, 2  # results that are in registers at once
TILE_COLUMNS = TILE_VECTORS * LANES

_INT, _SHORT, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)


@njit
def padded(size, step):
    """`size`, rounded up to a multiple of `step`."""
    return -(-size // step) * step


@njit
def set_product(left, right, num_steps, result):
    """result[i, j] = sum of left[i, k] * right[k, j] over `num_steps` k.

    All are contiguous float32; `result` has a multiple of TILE_ROWS rows and, as `right`, of TILE_COLUMNS columns.
    """
    for column in range(0, result.shape[1], TILE_COLUMNS):
        for row in range(0, len(result), TILE_ROWS):
            _set_tile(left, row, right, column, num_steps, result)


@njit
def gathered_columns(memory, slots):
    """Rows `slots` of `memory`, (any, dim) float32 or bfloat16, as columns: float32 (dim, padded number of slots)."""
    num_columns, dim = padded(len(slots), TILE_COLUMNS), memory.shape[1]
    places = np.empty(num_columns, np.int64)
    for column in range(num_columns):
        places[column] = slots[min(column, len(slots) - 1)]
    result = np.empty((dim, num_columns), np.float32)
    for column in range(0, num_columns, LANES):
        for d in range(0, dim - LANES + 1, LANES):
            _turn_block(memory, places, column, d, result)
        for d in range(dim - dim % LANES, dim):
            for i in range(column, column + LANES):
                result[d, i] = widened(memory[places[i], d])
    return result


@njit
def gathered_rows(memory, slots):
    """Rows `slots` of `memory`, (any, dim) float32 or bfloat16: float32 (number of slots, padded dim)."""
    dim = memory.shape[1]
    result = np.empty((len(slots), padded(dim, TILE_COLUMNS)), np.float32)
    for i in range(len(slots)):
        row = memory[slots[i]]
        for d in range(dim):
            result[i, d] = widened(row[d])
        for d in range(dim, result.shape[1]):
            result[i, d] = 0
    return result


class _Emitter:
    """Instructions on the arguments of a compiled call; arrays are two-dimensional and contiguous, or vectors."""

    def __init__(self, context, builder, signature, arguments) -> None:
        self.builder, self._types = builder, signature.args
        self.values = [
            cgutils.create_struct_proxy(of_type)(context, builder, value) if isinstance(of_type, types.Array)
            else context.cast(builder, value, of_type, types.int64)
            for of_type, value in zip(signature.args, arguments, strict=True)
        ]  # fmt: skip

    def pointer(self, argument: int, row: ir.Value, column: ir.Value | None = None) -> ir.Value:
        """Address of an element of an array."""
        array, place = self.values[argument], row
        if column is not None:
            place = self.builder.add(self.builder.mul(row, self.builder.extract_value(array.shape, 1)), column)
        return self.builder.gep(array.data, [place])

    def load(self, pointer: ir.Value, of_type: ir.Type | None = None) -> ir.Value:
        """Load the value at a pointer, which is cast to `of_type` first."""
        pointer = pointer if of_type is None else self.builder.bitcast(pointer, of_type.as_pointer())
        return self.builder.load(pointer, align=2)

    def load_widened(self, argument: int, pointer: ir.Value) -> ir.Value:
        """A vector of float32 from an array of float32 or bfloat16."""
        if isinstance(self._types[argument].dtype, types.Float):
            return self.load(pointer, _VECTOR)
        narrow = self.load(pointer, ir.VectorType(ir.IntType(16), LANES))
        wide = self.builder.zext(narrow, ir.VectorType(_SHORT, LANES))
        shift = ir.Constant(ir.VectorType(_SHORT, LANES), [16] * LANES)
        return self.builder.bitcast(self.builder.shl(wide, shift), _VECTOR)

    def store(self, vector: ir.Value, pointer: ir.Value) -> None:
        self.builder.store(vector, self.builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)

    def plus(self, value: ir.Value, number: int) -> ir.Value:
        return self.builder.add(value, ir.Constant(_INT, number))

    def shuffled(self, first: ir.Value, second: ir.Value, lanes: list[int]) -> ir.Value:
        return self.builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_SHORT, LANES), lanes))


@intrinsic
def _set_tile(typing, left, row, right, column, num_steps, result):
    """TILE_ROWS x TILE_COLUMNS results of `set_product` from `row` and `column` on, num_steps >= 1."""
    return types.void(left, row, right, column, num_steps, result), _emit_tile


def _emit_tile(context, builder, signature, arguments):
    emit = _Emitter(context, builder, signature, arguments)
    _, row, _, column, num_steps, _ = emit.values
    multiply_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fmuladd.v{LANES}f32"
    )
    begin, loop, after = builder.block, builder.append_basic_block("step"), builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(_INT)
    totals = [[builder.phi(_VECTOR) for _ in range(TILE_VECTORS)] for _ in range(TILE_ROWS)]
    rights = [
        emit.load(emit.pointer(2, step, emit.plus(column, LANES * number)), _VECTOR) for number in range(TILE_VECTORS)
    ]
    new = []
    for number, row_totals in enumerate(totals):
        value = emit.load(emit.pointer(0, emit.plus(row, number), step))
        first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_SHORT, 0))
        repeated = emit.shuffled(first, first, [0] * LANES)
        pairs = zip(rights, row_totals, strict=True)
        new.append([builder.call(multiply_add, [repeated, right, total]) for right, total in pairs])
    following = emit.plus(step, 1)
    step.add_incoming(ir.Constant(_INT, 0), begin)
    step.add_incoming(following, loop)
    for row_totals, row_new in zip(totals, new, strict=True):
        for total, value in zip(row_totals, row_new, strict=True):
            total.add_incoming(ir.Constant(_VECTOR, [0.0] * LANES), begin)
            total.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, num_steps), loop, after)
    builder.position_at_end(after)
    for number, row_new in enumerate(new):
        for place, value in enumerate(row_new):
            emit.store(value, emit.pointer(5, emit.plus(row, number), emit.plus(column, LANES * place)))
    return context.get_dummy_value()


@intrinsic
def _turn_block(typing, memory, places, column, d, result):
    """result[d + j, column + i] = memory[places[column + i], d + j] of LANES i and j."""
    return types.void(memory, places, column, d, result), _emit_turned


def _emit_turned(context, builder, signature, arguments):
    emit = _Emitter(context, builder, signature, arguments)
    _, _, column, d, _ = emit.values
    block = []
    for i in range(LANES):
        place = emit.load(emit.pointer(1, emit.plus(column, i)))
        block.append(emit.load_widened(0, emit.pointer(0, place, d)))
    distance = LANES // 2
    while distance:  # swap the off-diagonal quarters of all blocks of 2 * distance
        low = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
        high = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
        for i in (i for i in range(LANES) if not i & distance):
            first, second = block[i], block[i + distance]
            block[i], block[i + distance] = emit.shuffled(first, second, low), emit.shuffled(first, second, high)
        distance //= 2
    for j, vector in enumerate(block):
        emit.store(vector, emit.pointer(4, emit.plus(d, j), column))
    return context.get_dummy_value()
