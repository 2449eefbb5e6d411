"""Compiling the loops of the pools by numba: machine code is cached on disk until any of their sources changes.

Compiled code can also take arrays by their addresses: numba takes longer to unpack one array argument than to draft a
node, and longest if the array is read-only, as all arrays of a pool are. The caller keeps the array alive. These arrays
take no index below 0. For other arrays numba checks at every access whether the index counts from the end, which took a
tenth of a draft's time.
"""

import hashlib
import logging
import operator
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import from_dtype, njit, types
from numba.core import cgutils, config
from numba.core.base import BaseContext
from numba.core.datamodel import models
from numba.core.datamodel.registry import register_default
from numba.core.typing.templates import Signature, signature
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import lower_builtin
from numba.np.arrayobj import getitem_array_tuple, getitem_arraynd_intp, populate_array, setitem_array

logger = logging.getLogger(__name__)
intrinsic = cast(Callable[[Callable], Callable], numba_intrinsic)  # callers of an intrinsic give no typing context

_HERE = Path(__file__).parent
_SOURCES = sorted(path for pattern in ("*.py", "index/*.py", "drafting/*.py") for path in _HERE.glob(pattern))


def source_stamp(paths: Iterable[Path]) -> str:
    """A digest of the contents of source files and of this file, whose functions all compiled loops may call."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in (Path(__file__), *paths))).hexdigest()


_STAMP = source_stamp(_SOURCES)


def cached(stamp: str = _STAMP, **options) -> Callable[[Callable], Any]:
    """`numba.njit` with these options, machine code cached on disk, and the GIL released while a function runs.

    Machine code includes that of called functions, so it is stale once any of their files changes; numba checks only
    the function's own file. `stamp` is the `source_stamp` of all these files; the default is that of the pools.
    """

    def compile_when_called(function: Callable) -> Any:
        compiled = _kept_on_disk(function, nogil=True, **options)
        compiled._cache._cache_file._source_stamp = stamp
        return compiled

    return compile_when_called


def _kept_on_disk(function: Callable, **options) -> Any:
    """`numba.njit` with these options and `cache=True`, also where numba finds no folder that it may write to.

    In a container with a read-only root and no HOME, neither the folder of the package nor the user's cache is
    writable, and numba raises. The machine code then goes to a temporary folder, for this process and its children.
    """

    try:
        return njit(cache=True, **options)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
    folder = str(_temporary_cache())
    os.environ["NUMBA_CACHE_DIR"] = cast(Any, config).CACHE_DIR = folder
    logger.warning(
        "neither the package's folder nor the user's cache is writable, so numba's machine code goes to %s; set "
        "NUMBA_CACHE_DIR to a lasting folder, so that it is not compiled again",
        folder,
    )
    return njit(cache=True, **options)(function)


def _temporary_cache() -> Path:
    """A temporary folder that only this user may write to, the same one in every process where that is possible.

    Its files are executed, so a folder of that name that another user made, or may write to, is not used.
    """
    folder = Path(tempfile.gettempdir(), f"laserbatch-numba-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="laserbatch-numba-"))


# Decorators for the parts of a cached function. A `part` is inlined into its callers, since passing the arrays costs
# more than the work of most parts. Neither may allocate (_nrt): in functions that may, numba counts the references to
# every array that they touch, which took a third of a draft's time.
_options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy", "_nrt": False}
part = njit(**_options, forceinline=True)
called = njit(**_options)  # for parts that are long or rarely called


def _fetching(level: int) -> Callable:
    @intrinsic
    def fetch(typing_context, values, place):
        """Prefetch the value at a place of an array, without waiting for it; in compiled code only."""

        def emit(context, builder, signature, arguments):
            values = context.make_array(signature.args[0])(context, builder, arguments[0])
            emit_fetch(builder, builder.gep(values.data, [arguments[1]]), level)
            return context.get_dummy_value()

        return types.void(values, types.intp), emit

    return fetch


def emit_fetch(builder: ir.IRBuilder, pointer: ir.Value, level: int = 1) -> None:
    """Prefetch the cache line at a pointer into the cache of that level, 1 or 2."""
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *[ir.IntType(32)] * 3])
    instruction = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    to_read, locality, of_data = (cgutils.int32_t(number) for number in (0, 4 - level, 1))
    builder.call(instruction, [builder.bitcast(pointer, cgutils.voidptr_t), to_read, locality, of_data])


fetch = _fetching(1)
fetch_second_level = _fetching(2)  # for values needed so late that other data would evict them from the first level


class _FromStart(types.Array):
    """Type of an array in C order that is only indexed from 0 up, as are the rows taken from it."""

    def __init__(self, dtype: types.Type, ndim: int) -> None:
        super().__init__(dtype, ndim, "C", name=f"from_start({dtype}, {ndim}d)")

    def copy(self, dtype=None, ndim=None, layout=None, readonly=None) -> types.Array:
        if (layout or "C") != "C":
            return super().copy(dtype, ndim, layout, readonly)
        return _FromStart(self.dtype if dtype is None else dtype, self.ndim if ndim is None else ndim)


register_default(_FromStart)(models.ArrayModel)


@lower_builtin(operator.getitem, _FromStart, types.Integer)
def _get_one(context, builder, called_as, arguments):
    return getitem_arraynd_intp(context, builder, *_unsigned(context, builder, called_as, arguments))


@lower_builtin(operator.getitem, _FromStart, types.BaseTuple)
def _get_by_tuple(context, builder, called_as, arguments):
    return getitem_array_tuple(context, builder, *_unsigned(context, builder, called_as, arguments))


@lower_builtin(operator.setitem, _FromStart, types.Integer, types.Any)
@lower_builtin(operator.setitem, _FromStart, types.BaseTuple, types.Any)
def _set(context, builder, called_as, arguments):
    return setitem_array(context, builder, *_unsigned(context, builder, called_as, arguments))


def _unsigned(
    context: BaseContext, builder: ir.IRBuilder, called_as: Signature, arguments: tuple[ir.Value, ...]
) -> tuple[Signature, tuple[ir.Value, ...]]:
    """The signature and the arguments of a call, with its index cast to an unsigned type."""
    kind, index = called_as.args[1], arguments[1]
    if isinstance(kind, types.BaseTuple):
        kinds, values = cast(types.Tuple, kind).types, cgutils.unpack_tuple(builder, index, count=len(kind))
        values = [_widened(context, builder, kind, value) for kind, value in zip(kinds, values, strict=True)]
        kind = types.Tuple([types.uintp if isinstance(item, types.Integer) else item for item in kinds])
        index = context.make_tuple(builder, kind, values)
    else:
        kind, index = types.uintp, _widened(context, builder, kind, index)
    return (
        signature(called_as.return_type, called_as.args[0], kind, *called_as.args[2:]),
        (arguments[0], index, *arguments[2:]),
    )


def _widened(context: BaseContext, builder: ir.IRBuilder, kind: types.Type, value: ir.Value) -> ir.Value:
    return context.cast(builder, value, kind, types.intp) if isinstance(kind, types.Integer) else value


def _array_at(dtype: types.Type) -> Callable:
    @intrinsic
    def array_at(typing_context, address, shape):
        """The array at `address` in C order; `shape` is an integer or a tuple of integers."""
        is_row = isinstance(shape, types.Integer)
        kinds = (shape,) if is_row else tuple(shape)

        def emit(context, builder, signature, arguments):
            sizes = (arguments[1],) if is_row else cgutils.unpack_tuple(builder, arguments[1])
            sizes = [context.cast(builder, size, kind, types.intp) for size, kind in zip(sizes, kinds, strict=True)]
            return _emit_array(context, builder, signature.return_type, arguments[0], sizes)

        return _FromStart(dtype, len(kinds))(types.int64, shape), emit

    return array_at


uint8s_at, uint16s_at = _array_at(types.uint8), _array_at(types.uint16)
int32s_at, float32s_at = _array_at(types.int32), _array_at(types.float32)


def arrays_at(layout: np.dtype, whole: type[tuple], parts: Sequence[type[tuple]]) -> Callable:
    """A compiled function that takes an address and returns the arrays there, as `whole`, a named tuple of `parts`.

    Each field of `layout` is a structured dtype, whose fields are the arrays of one of `parts`, a named tuple.
    """
    inner = _fields(layout)
    kinds = [
        types.NamedTuple([_FromStart(from_dtype(array.base), array.ndim) for array, _ in _fields(fields)], part)
        for part, (fields, _) in zip(parts, inner, strict=True)
    ]

    @intrinsic
    def views(typing_context, address):
        def emit(context, builder, signature, arguments):
            members = []
            for kind, (fields, begin) in zip(kinds, inner, strict=True):
                arrays = []
                for array, (dtype, offset) in zip(kind.types, _fields(fields), strict=True):
                    place = builder.add(arguments[0], context.get_constant(types.int64, begin + offset))
                    sizes = [context.get_constant(types.intp, size) for size in dtype.shape]
                    arrays.append(_emit_array(context, builder, array, place, sizes))
                members.append(context.make_tuple(builder, kind, arrays))
            return context.make_tuple(builder, signature.return_type, members)

        return types.NamedTuple(kinds, whole)(types.int64), emit

    return views


def _fields(layout: np.dtype) -> list[tuple[np.dtype, int]]:
    assert layout.fields is not None
    return [(field[0], field[1]) for field in layout.fields.values()]


def _emit_array(
    context: BaseContext, builder: ir.IRBuilder, kind: types.Array, address: ir.Value, sizes: list[ir.Value]
) -> ir.Value:
    item = context.get_data_type(kind.dtype)
    num_bytes = context.get_constant(types.intp, context.get_abi_sizeof(item))
    strides = [num_bytes]
    for size in reversed(sizes[1:]):
        strides.insert(0, builder.mul(strides[0], size))
    array = context.make_array(kind)(context, builder)
    data = builder.inttoptr(address, item.as_pointer())
    populate_array(array, data=data, shape=sizes, strides=strides, itemsize=num_bytes, meminfo=None)
    return array._getvalue()
