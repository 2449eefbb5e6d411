"""Arrays by their addresses, in compiled code: numba takes longer to unpack one array argument than to draft a node.

Read-only arrays, as all of a pool's are, take longest. Whoever hands over an address keeps the array alive.
"""

from collections.abc import Callable

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array


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

        return types.Array(dtype, len(sizes), "C")(types.int64, shape), emit

    return array_at


uint8s_at, uint16s_at = _array_at(types.uint8), _array_at(types.uint16)
int16s_at, int32s_at, int64s_at = _array_at(types.int16), _array_at(types.int32), _array_at(types.int64)
float32s_at, float64s_at = _array_at(types.float32), _array_at(types.float64)
