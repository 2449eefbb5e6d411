"""What a draft must know of a pool, in two rows of numbers: where its arrays lie, and how much is believed of them.

A call then hands over two short arrays in place of eleven read-only ones, which numba takes microseconds to unpack.
"""

from collections import namedtuple
from typing import NamedTuple

import numpy as np

from laserbatch.retrieval_pools.compiled import part
from laserbatch.retrieval_pools.drafting.addresses import float32s_at, int32s_at, uint8s_at, uint16s_at
from laserbatch.retrieval_pools.drafting.estimate import CURVES_SHAPE, NUM_KNOTS
from laserbatch.retrieval_pools.drafting.state import CompiledIndex, Estimates, Index

_Places = namedtuple(
    "_Places",
    "tokens num_tokens order num_positions group_codes num_codes num_wide_codes starts num_starts support num_support "
    "frequencies bounds curves depth num_samples max_match max_local_tokens num_context_lengths",
)
_Weights = namedtuple("_Weights", "inside outside of_unknown pool_escape previous_escape local_escape")
PLACE, WEIGHT = _Places(*range(len(_Places._fields))), _Weights(*range(len(_Weights._fields)))


_DTYPES = {  # int32 are all others
    "group_codes": (np.uint8, np.uint16),
    "support": (np.uint8,),
    "frequencies": (np.uint8,),
    "bounds": (np.float32,),
    "curves": (np.float32,),
}


class PoolHandle(NamedTuple):
    """A pool as the compiled query takes it.

    Attributes
    ----------
    places : int64, by PLACE: the addresses of its arrays, and the whole numbers of its settings.
    weights : float64, by WEIGHT.
    kept : the arrays that lie at these addresses.
    """

    places: np.ndarray
    weights: np.ndarray
    kept: tuple[Index, Estimates]

    @classmethod
    def of(cls, index: Index, estimates: Estimates, limits: dict[str, int], weights: dict[str, float]) -> "PoolHandle":
        """Of arrays that nobody changes, the numbers of `_Places` that are no array's, and those of `_Weights`."""
        arrays = {**index._asdict(), **estimates._asdict()}
        depth = arrays.pop("depth")
        is_wide = index.group_codes.dtype == np.uint16
        sizes = {
            "num_tokens": len(index.tokens),
            "num_positions": len(index.order),
            "num_codes": 0 if is_wide else len(index.order),
            "num_wide_codes": len(index.order) if is_wide else 0,
            "num_starts": len(index.starts),
            "num_support": 0 if index.support is None else len(index.order),
        }
        for name, array in arrays.items():
            assert array is None or (array.flags.c_contiguous and array.dtype in _DTYPES.get(name, (np.int32,))), name
        shapes = [array.shape for array in estimates]
        assert shapes == [(len(index.starts) - 1,), (NUM_KNOTS,), CURVES_SHAPE], shapes
        addresses = {name: 0 if array is None else array.ctypes.data for name, array in arrays.items()}
        places = np.array(_Places(**addresses, **sizes, depth=depth, **limits), np.int64)
        return cls(places, np.array(_Weights(**weights), np.float64), (index, estimates))


@part
def index_at(places):
    """The index of a pool."""
    return CompiledIndex(
        int32s_at(places[PLACE.tokens], places[PLACE.num_tokens]),
        int32s_at(places[PLACE.order], places[PLACE.num_positions]),
        uint8s_at(places[PLACE.group_codes], places[PLACE.num_codes]),
        uint16s_at(places[PLACE.group_codes], places[PLACE.num_wide_codes]),
        int32s_at(places[PLACE.starts], places[PLACE.num_starts]),
        uint8s_at(places[PLACE.support], places[PLACE.num_support]),
        places[PLACE.depth],
    )


@part
def estimates_at(places):
    """What makes probabilities of its counts."""
    return Estimates(
        uint8s_at(places[PLACE.frequencies], places[PLACE.num_starts] - 1),
        float32s_at(places[PLACE.bounds], NUM_KNOTS),
        float32s_at(places[PLACE.curves], CURVES_SHAPE),
    )
