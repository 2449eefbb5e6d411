"""Small matrix operations in compiled loops, for attention on a CPU: a product, and columns gathered from rows.

numba vectorises a loop, but neither keeps a block of results in registers, which a product needs, nor transposes a
block: both are written here in LLVM's vectors. Operands consist of words, a float32 or a pair of bfloat16; results are
float32. Each result is summed in the order of the words, whatever else is computed, so that it has the same bits in a
product of any size and in one that is computed in parts.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from laserbatch.pipeline.decoding.attention.bfloat16 import widened
from laserbatch.retrieval_pools.compiled import fetch, intrinsic

LANES = 16  # float32 values of one vector: one register of AVX-512, or several smaller ones
TILE_ROWS, TILE_VECTORS = 4, 2  # size of the block of results that is kept in registers
TILE_COLUMNS = TILE_VECTORS * LANES
TURNED_BYTES = 4 * LANES  # bytes of each row that are transposed at once
NUM_FETCHED_AHEAD = 2 * TILE_COLUMNS  # number of rows that are prefetched

INT, _SHORT, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
VECTOR, WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_SHORT, LANES)


class _Bfloat16(ir.Type):
    """LLVM's bfloat, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


PAIRS = ir.VectorType(_Bfloat16(), 2 * LANES)


@njit
def padded(size, step):
    """`size`, rounded up to a multiple of `step`."""
    return -(-size // step) * step


@njit
def add_product(left, step, right, num_steps, result, column):
    """result[i, column + j] += sum of left[i, step + k] * right[k, j] over `num_steps` words k, in their order.

    If `step` is 0 the result is set instead. All arrays are contiguous; `result`, float32, has a multiple of TILE_ROWS
    rows, and `right` a multiple of TILE_COLUMNS columns.
    """
    for right_column in range(0, right.shape[1] * right.itemsize // 4, TILE_COLUMNS):
        for row in range(0, len(result), TILE_ROWS):
            _add_tile(left, row, step, right, right_column, num_steps, result, column + right_column)


@njit
def gather_columns(memory, places, begin, columns, others):
    """Set `columns` (words of a row, TILE_COLUMNS) to rows `places[begin:]` of `memory` (any, dim), of the same type.

    Meanwhile the processor prefetches the same rows of `others` and later rows of `memory`.
    """
    dim, num_turned = memory.shape[1], TURNED_BYTES // memory.itemsize
    pair = 4 // memory.itemsize
    for column in range(0, TILE_COLUMNS, LANES):
        first = begin + column
        for d in range(0, dim - num_turned + 1, num_turned):
            for i in range(first, first + LANES):
                fetch(others, places[i] * others.shape[1] + d)
                fetch(memory, places[min(i + NUM_FETCHED_AHEAD, len(places) - 1)] * dim + d)
            turn_block(memory, places, first, d, columns, d // pair, column)
        if dim >= num_turned and dim % num_turned:  # the last block overlaps the one before
            turn_block(memory, places, first, dim - num_turned, columns, (dim - num_turned) // pair, column)
        elif dim < num_turned:
            for d in range(dim):
                for i in range(LANES):
                    columns[d // pair, (column + i) * pair + d % pair] = memory[places[first + i], d]


@njit
def gather_rows(memory, places, begin, rows):
    """Set `rows`, float32 (any, padded dim), to rows `places[begin:]` of `memory`, float32 or bfloat16 (any, dim)."""
    dim = memory.shape[1]
    for i in range(len(rows)):
        place = places[begin + i]
        for d in range(0, dim - TILE_COLUMNS + 1, TILE_COLUMNS):
            _widen_vectors(memory, place, d, rows, i)
        if dim >= TILE_COLUMNS and dim % TILE_COLUMNS:  # the last block overlaps the one before
            _widen_vectors(memory, place, dim - TILE_COLUMNS, rows, i)
        elif dim < TILE_COLUMNS:
            for d in range(dim):
                rows[i, d] = widened(memory[place, d])


class Emitter:
    """Emits instructions on the arguments of a compiled call; arrays are contiguous, of one or two dimensions."""

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

    def load_words(self, argument: int, row: ir.Value, word: ir.Value, of_type: ir.Type) -> ir.Value:
        """Load from a row of an array, from its `word`-th word on."""
        start = self.builder.bitcast(self.pointer(argument, row, ir.Constant(INT, 0)), _SHORT.as_pointer())
        return self.load(self.builder.gep(start, [word]), of_type)

    def call(self, name: str, *arguments: Any, result: ir.Type = ir.VoidType()) -> Any:
        """Call an intrinsic of LLVM by its name."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def add_products(self, word: Any, rights: list[Any], totals: list[Any]) -> list[Any]:
        """Add the products of a word with each word of the vectors `rights` to the float32 vectors `totals`."""
        first = self.builder.insert_element(ir.Constant(WORDS, ir.Undefined), word, ir.Constant(_SHORT, 0))
        left = self.builder.bitcast(self.shuffled(first, first, [0] * LANES), rights[0].type)
        pairs = zip(rights, totals, strict=True)
        if rights[0].type == PAIRS:
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            return [self.call(name, total, left, right, result=VECTOR) for right, total in pairs]
        name = f"llvm.fmuladd.v{LANES}f32"
        return [self.call(name, left, right, total, result=VECTOR) for right, total in pairs]

    def loop(self, num_steps: ir.Value, before: list[list[Any]], body: Callable[..., list[list[Any]]]) -> list[Any]:
        """Emit a loop of num_steps >= 1 that replaces vectors, first `before`, by body(step, vectors); return them."""
        builder = self.builder
        begin, loop, after = builder.block, builder.append_basic_block("step"), builder.append_basic_block("after")
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(INT)
        totals = [[builder.phi(VECTOR) for _ in row] for row in before]
        new = body(step, totals)
        following = self.plus(step, 1)
        step.add_incoming(ir.Constant(INT, 0), begin)
        step.add_incoming(following, loop)
        for total, value_before, value in zip(chain(*totals), chain(*before), chain(*new), strict=True):
            total.add_incoming(value_before, begin)
            total.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, num_steps), loop, after)
        builder.position_at_end(after)
        return new

    def operand(self, argument: int) -> ir.Type:
        """The type of vectors of an array's words."""
        return VECTOR if self.is_float(argument) else PAIRS

    def is_float(self, argument: int) -> bool:
        """Whether an array is of float32 rather than bfloat16."""
        return isinstance(self._types[argument].dtype, types.Float)

    def load_widened(self, argument: int, pointer: ir.Value) -> ir.Value:
        """Load a vector of float32 from an array of float32 or bfloat16."""
        if self.is_float(argument):
            return self.load(pointer, VECTOR)
        narrow = self.load(pointer, ir.VectorType(ir.IntType(16), LANES))
        wide = self.builder.zext(narrow, WORDS)
        shift = ir.Constant(WORDS, [16] * LANES)
        return self.builder.bitcast(self.builder.shl(wide, shift), VECTOR)

    def rounded(self, values: ir.Value) -> Any:
        """Round a vector of float32 to the nearest bfloat16, ties to even, as integers of 16 bits."""
        builder, words = self.builder, ir.VectorType(_SHORT, LANES)

        def each(number):
            return ir.Constant(words, [number] * LANES)

        bits = builder.bitcast(values, words)
        is_odd = builder.and_(builder.lshr(bits, each(16)), each(1))
        rounded = builder.lshr(builder.add(builder.add(bits, each(0x7FFF)), is_odd), each(16))
        rounded = builder.select(builder.fcmp_unordered("uno", values, values), each(0x7FC0), rounded)
        return builder.trunc(rounded, ir.VectorType(ir.IntType(16), LANES))

    def store(self, vector: ir.Value, pointer: ir.Value) -> None:
        self.builder.store(vector, self.builder.bitcast(pointer, VECTOR.as_pointer()), align=4)

    def plus(self, value: ir.Value, number: int) -> ir.Value:
        return self.builder.add(value, ir.Constant(INT, number))

    def shuffled(self, first: ir.Value, second: ir.Value, lanes: list[int]) -> ir.Value:
        return self.builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_SHORT, len(lanes)), lanes))


@intrinsic
def _add_tile(typing, left, row, step, right, right_column, num_steps, result, column):
    """Set TILE_ROWS x TILE_COLUMNS results of `add_product` from `row` and `column` on, num_steps >= 1."""
    return types.void(left, row, step, right, right_column, num_steps, result, column), _emit_tile


def _emit_tile(context, builder, signature, arguments):
    emit = Emitter(context, builder, signature, arguments)
    _, row, first_step, _, right_column, num_steps, _, column = emit.values
    results = [
        [emit.pointer(6, emit.plus(row, i), emit.plus(column, LANES * j)) for j in range(TILE_VECTORS)]
        for i in range(TILE_ROWS)
    ]
    is_first = builder.icmp_signed("==", first_step, ir.Constant(INT, 0))
    zeros = ir.Constant(VECTOR, [0.0] * LANES)
    before = [[builder.select(is_first, zeros, emit.load(pointer, VECTOR)) for pointer in row] for row in results]

    def add_step(step, totals):
        columns = [emit.plus(right_column, LANES * j) for j in range(TILE_VECTORS)]
        rights = [emit.load_words(3, step, right_place, emit.operand(3)) for right_place in columns]
        new = []
        for number, row_totals in enumerate(totals):
            word = emit.load_words(0, emit.plus(row, number), builder.add(first_step, step), _SHORT)
            new.append(emit.add_products(word, rights, row_totals))
        return new

    totals = emit.loop(num_steps, before, add_step)
    for pointer, value in zip(chain(*results), chain(*totals), strict=True):
        emit.store(value, pointer)
    return context.get_dummy_value()


@intrinsic
def _widen_vectors(typing, memory, place, d, rows, i):
    """rows[i, d + j] = memory[place, d + j] for TILE_COLUMNS values of j."""
    return types.void(memory, place, d, rows, i), _emit_widened


def _emit_widened(context, builder, signature, arguments):
    emit = Emitter(context, builder, signature, arguments)
    _, place, d, _, i = emit.values
    for offset in range(0, TILE_COLUMNS, LANES):
        column = emit.plus(d, offset)
        emit.store(emit.load_widened(0, emit.pointer(0, place, column)), emit.pointer(3, i, column))
    return context.get_dummy_value()


@intrinsic
def turn_block(typing, memory, places, begin, d, columns, word, column):
    """columns[word + j, column + i] = word j of memory[places[begin + i], d:], for LANES values of i and of j.

    `columns` is two-dimensional, and `column` counts words.
    """
    return types.void(memory, places, begin, d, columns, word, column), _emit_turned


def _emit_turned(context, builder, signature, arguments):
    emit = Emitter(context, builder, signature, arguments)
    _, _, first_place, d, _, word, column = emit.values
    for j, vector in enumerate(_turned(emit, first_place, d)):
        row = builder.bitcast(emit.pointer(4, emit.plus(word, j), ir.Constant(INT, 0)), _SHORT.as_pointer())
        builder.store(vector, builder.bitcast(builder.gep(row, [column]), WORDS.as_pointer()), align=2)
    return context.get_dummy_value()


@intrinsic
def narrow_vector(typing, source, row, column, target, place):
    """target[place + i] = source[row, column + i] for LANES values of i, rounded from float32 to bfloat16."""
    return types.void(source, row, column, target, place), _emit_narrowed


def _emit_narrowed(context, builder, signature, arguments):
    emit = Emitter(context, builder, signature, arguments)
    _, row, column, _, place = emit.values
    rounded = emit.rounded(emit.load(emit.pointer(0, row, column), VECTOR))
    builder.store(rounded, builder.bitcast(emit.pointer(3, place), rounded.type.as_pointer()), align=2)
    return context.get_dummy_value()


@intrinsic
def interleave_rows(typing, memory, first, second, d, pairs, place, other_place):
    """pairs[place + 2 * i :][:2] = memory[first, d + i], memory[second, d + i] for LANES values of i.

    The same from `other_place` on for d + LANES + i. All are bfloat16.
    """
    return types.void(memory, first, second, d, pairs, place, other_place), _emit_interleaved


def _emit_interleaved(context, builder, signature, arguments):
    emit = Emitter(context, builder, signature, arguments)
    _, first, second, d, _, *places = emit.values
    of_type = ir.VectorType(ir.IntType(16), 2 * LANES)
    upper, lower = (emit.load(emit.pointer(0, row, d), of_type) for row in (first, second))
    for half, place in enumerate(places):
        begin = half * LANES
        lanes = [lane for i in range(begin, begin + LANES) for lane in (i, 2 * LANES + i)]
        builder.store(
            emit.shuffled(upper, lower, lanes), builder.bitcast(emit.pointer(4, place), of_type.as_pointer()), align=2
        )
    return context.get_dummy_value()


def _turned(emit: Emitter, first_place: ir.Value, d: ir.Value) -> list[Any]:
    """LANES vectors: vector j has word j, counted from `d`, of each of LANES rows."""
    builder = emit.builder
    half = LANES // 2
    halves: tuple[list[ir.Value], list[ir.Value]] = ([], [])  # of the words of each row
    for i in range(LANES):
        place = emit.load(emit.pointer(1, emit.plus(first_place, i)))
        start = builder.bitcast(emit.pointer(0, place, d), _SHORT.as_pointer())
        for offset, loaded in zip((0, half), halves, strict=True):
            loaded.append(emit.load(builder.gep(start, [ir.Constant(INT, offset)]), ir.VectorType(_SHORT, half)))
    # Two halves of different rows are joined as they are loaded, which is the first of four swaps.
    block = [emit.shuffled(loaded[i], loaded[i + half], list(range(LANES))) for loaded in halves for i in range(half)]
    distance = half // 2
    while distance:  # swap the off-diagonal quarters of all blocks of 2 * distance
        low = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
        high = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
        for i in (i for i in range(LANES) if not i & distance):
            first, second = block[i], block[i + distance]
            block[i], block[i + distance] = emit.shuffled(first, second, low), emit.shuffled(first, second, high)
        distance //= 2
    return block
