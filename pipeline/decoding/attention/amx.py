"""AMX, Intel's instructions on tiles of bfloat16 matrices, for compiled loops.

A tile has 16 rows of 64 bytes: 32 bfloat16 (16 pairs), or 16 float32. There are eight tiles, which instructions name by
number. A place is a flat index into the memory of an array, whatever its shape. A loop with these instructions is
compiled only where `has_amx`, because it cannot be compiled for another processor.
"""

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from typing import cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic

from laserbatch.pipeline.decoding.attention.tile_product import INT, Emitter
from laserbatch.pipeline.processor import processor_flags
from laserbatch.retrieval_pools.compiled import intrinsic

ROWS, ROW_BYTES = 16, 64  # rows of a tile, and bytes of a row
STEP = ROW_BYTES // 2  # bfloat16 values per row, which are multiplied at once
TILE = ROWS * STEP  # bfloat16 values per tile

# The configuration that AMX needs before its first instruction: palette 1, and eight tiles of 16 rows of 64 bytes.
CONFIGURATION = np.zeros(64, np.uint8)
CONFIGURATION[0] = 1
CONFIGURATION[16:32:2], CONFIGURATION[48:56] = ROW_BYTES, ROWS


@cache
def has_amx() -> bool:
    """Whether this process may use AMX for bfloat16; Linux grants it on request, as it enlarges a thread's state."""
    if "amx_bf16" not in processor_flags() or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


# A tile's number is a part of the instruction, so it must be a literal.
literal_intrinsic = cast(Callable[[Callable], Callable], numba_intrinsic(prefer_literal=True))


def _tile_instruction(name: str, num_tiles: int, has_memory: bool):
    """Return the emitter of an instruction on tiles, by number, and on a place of an array and its bytes per row."""

    def emit_instruction(context, builder, signature, arguments):
        emit = Emitter(context, builder, signature, arguments)
        operands = [ir.Constant(ir.IntType(8), kind.literal_value) for kind in signature.args[:num_tiles]]
        if has_memory:
            place = emit.values[num_tiles + 1] if len(arguments) > num_tiles + 1 else ir.Constant(INT, 0)
            operands.append(builder.bitcast(emit.pointer(num_tiles, place), cgutils.voidptr_t))
            if num_tiles:
                has_stride = len(arguments) > num_tiles + 2
                operands.append(emit.values[num_tiles + 2] if has_stride else ir.Constant(INT, ROW_BYTES))
        emit.call(f"llvm.x86.{name}", *operands)
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
    """Like `load_tile`, leaving the first-level cache to other data."""
    return types.void(tile, array, place), _tile_instruction("tileloaddt164", 1, True)


@literal_intrinsic
def store_tile(typing, tile, array, place):
    return types.void(tile, array, place), _tile_instruction("tilestored64", 1, True)


@literal_intrinsic
def load_rows(typing, tile, array, place, row_bytes):
    """Like `load_tile`, for rows `row_bytes` bytes apart."""
    return types.void(tile, array, place, row_bytes), _tile_instruction("tileloadd64", 1, True)


@literal_intrinsic
def store_rows(typing, tile, array, place, row_bytes):
    """Like `store_tile`, to rows `row_bytes` bytes apart."""
    return types.void(tile, array, place, row_bytes), _tile_instruction("tilestored64", 1, True)


@literal_intrinsic
def add_tiles(typing, sums, left, right):
    """sums += left @ right, for tiles given by their numbers."""
    return types.void(sums, left, right), _tile_instruction("tdpbf16ps", 3, False)


@intrinsic
def configure_tiles(typing, configuration):
    return types.void(configuration), _tile_instruction("ldtilecfg", 0, True)


@intrinsic
def release_tiles(typing):
    return types.void(), _tile_instruction("tilerelease", 0, False)
