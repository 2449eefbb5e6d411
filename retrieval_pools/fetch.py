"""Asking for memory before it is needed, in compiled code: many places are waited for at once."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def fetch(typing_context, values, place):
    """Ask for the value at a place of an array, without waiting for it; compiled code only."""

    def emit(context, builder, signature, arguments):
        values = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.bitcast(builder.gep(values.data, [arguments[1]]), cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *[ir.IntType(32)] * 3])
        instruction = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        to_read, keep_near, of_data = (cgutils.int32_t(number) for number in (0, 3, 1))
        builder.call(instruction, [pointer, to_read, keep_near, of_data])
        return context.get_dummy_value()

    return types.void(values, types.intp), emit
