"""Arrays by their addresses, in compiled code: numba takes longer to unpack one array argument than to draft a node.

Read-only arrays, as all of a pool's are, take longest. Whoever hands over an address keeps the array alive. These
arrays have no index below 0: of all others numba asks at every access whether it counts from the end, which was a tenth
of a draft's time.
"""

import operator
from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.datamodel import models, register_default
from numba.core.typing import Signature, signature
from numba.extending import intrinsic, lower_builtin
from numba.np.arrayobj import (
    getitem_array_tuple,
    getitem_arraynd_intp,
    populate_array,
    setitem_array,
)


class _FromStart(types.Array):
    """An array in C order, all indices of which are 0 or above; so are those of the rows that are taken from it."""

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
    """A call whose index is one that cannot be below 0: its signature and its arguments."""
    kind, index = called_as.args[1], arguments[1]
    if isinstance(kind, types.BaseTuple):
        kinds, values = kind.types, cgutils.unpack_tuple(builder, index, count=len(kind))
        values = [_widened(context, builder, one, value) for one, value in zip(kinds, values, strict=True)]
        kind = types.Tuple([types.uintp if isinstance(one, types.Integer) else one for one in kinds])
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
        """The array of a shape, a number or a tuple of them, that lies there in C order."""
        is_row = isinstance(shape, types.Integer)
        sizes = (shape,) if is_row else tuple(shape)

        def emit(context, builder, signature, arguments):
            address, shape = arguments
            values = (shape,) if is_row else cgutils.unpack_tuple(builder, shape)
            values = [context.cast(builder, value, size, types.intp) for value, size in zip(values, sizes, strict=True)]
            array = context.make_array(signature.return_type)(context, builder)
            num_bytes = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(dtype)))
            strides = [num_bytes]
            for value in reversed(values[1:]):
                strides.insert(0, builder.mul(strides[0], value))
            data = builder.inttoptr(address, context.get_data_type(dtype).as_pointer())
            populate_array(array, data=data, shape=values, strides=strides, itemsize=num_bytes, meminfo=None)
            return array._getvalue()

        return _FromStart(dtype, len(sizes))(types.int64, shape), emit

    return array_at


uint8s_at, uint16s_at = _array_at(types.uint8), _array_at(types.uint16)
int16s_at, int32s_at, int64s_at = _array_at(types.int16), _array_at(types.int32), _array_at(types.int64)
float32s_at, float64s_at = _array_at(types.float32), _array_at(types.float64)
