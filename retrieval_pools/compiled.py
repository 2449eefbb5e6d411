"""How the loops of the pools are compiled: by numba, kept on disk, and anew when any of their sources has changed."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_HERE = Path(__file__).parent
_SOURCES = sorted(path for pattern in ("*.py", "index/*.py", "drafting/*.py") for path in _HERE.glob(pattern))
_STAMP = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()


def cached(**options) -> Callable[[Callable], Callable]:
    """`numba.njit` with these options, its machine code kept on disk.

    A function's code holds that of those it calls, so what is kept must go when any of their files changes; numba looks
    at the function's own file alone.
    """

    def compile_when_called(function: Callable) -> Callable:
        compiled = njit(cache=True, **options)(function)
        compiled._cache._cache_file._source_stamp = _STAMP
        return compiled

    return compile_when_called


# Parts of a cached function. The first are compiled into their callers, since handing the arrays on costs more than
# most do. They may not allocate (_nrt): where a function may, numba counts the references to every array that it
# touches, which took a third of a draft's time.
_options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy", "_nrt": False}
part = njit(**_options, forceinline=True)
called = njit(**_options)  # long parts, or called rarely


@intrinsic
def fetch(typing_context, values, place):
    """Ask for the value at a place of an array before it is needed, without waiting for it; compiled code only."""

    def emit(context, builder, signature, arguments):
        values = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.bitcast(builder.gep(values.data, [arguments[1]]), cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *[ir.IntType(32)] * 3])
        instruction = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        to_read, keep_near, of_data = (cgutils.int32_t(number) for number in (0, 3, 1))
        builder.call(instruction, [pointer, to_read, keep_near, of_data])
        return context.get_dummy_value()

    return types.void(values, types.intp), emit
