"""bfloat16 in compiled loops. numba has no such type: its arrays are passed as uint16 and computed in float32.

A bfloat16 is the upper half of a float32, so that widening is a shift; narrowing rounds to the nearest, ties to even.
"""

import numpy as np
import torch
from numba import types
from numba.extending import overload


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a tensor on a CPU for a compiled loop: float32, or uint16 for bfloat16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """The tensor that shares the memory of such an array."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def widened(value):
    """An element of such an array as float32; exists in compiled loops only."""
    raise NotImplementedError


def narrowed(value, array):
    """A float32 as an element of `array`; exists in compiled loops only."""
    raise NotImplementedError


@overload(widened)
def _widened(value):
    if isinstance(value, types.Float):
        return lambda value: value
    return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


@overload(narrowed)
def _narrowed(value, array):
    if isinstance(array.dtype, types.Float):
        return lambda value, array: value

    def to_bfloat16(value, array):
        bits = np.float32(value).view(np.uint32)
        rounded = np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
        return rounded if value == value else np.uint16(0x7FC0)  # rounding would carry NaN over to zero

    return to_bfloat16
