"""The type in which a model computes: by the requested type, the type of the stored weights, and the device."""

from typing import Literal, NamedTuple

from laserbatch.pipeline.errors import ModelError
from laserbatch.pipeline.processor import multiplies_bfloat16

HALF_TYPES = ("bfloat16", "float16")


class ComputeType(NamedTuple):
    """A type ("auto": the type in which the weights are stored), and the reason for it."""

    name: Literal["float32", "bfloat16", "auto"]
    reason: str


def choose_dtype(
    requested: Literal["auto", "float32", "bfloat16"] | str, device_type: str, stored: str,
    quantization: str | None = None,
) -> ComputeType:  # fmt: skip
    """Choose the type in which a model computes.

    `requested` : as in `decoding.dtype`.
    `device_type` : torch's name, "cpu" or "cuda".
    `stored` : the type of the weights in their files, as torch names it. For quantised weights it is the type of the
        tensors that are not packed, which the packed ones were made for.

    Raises ModelError: bfloat16 on a processor that does not multiply it.
    """
    is_native = device_type != "cpu" or multiplies_bfloat16()
    if requested == "bfloat16" and not is_native:
        raise ModelError(
            "decoding.dtype is bfloat16, but this processor has no instructions for it (AVX512-BF16), and emulation is "
            "slower than float32; set decoding.dtype to auto or float32"
        )
    if requested == "float32":
        return ComputeType("float32", "decoding.dtype")
    if requested == "bfloat16":
        return ComputeType("bfloat16", "decoding.dtype")
    if device_type != "cpu" or quantization is not None:
        return ComputeType("auto", f"the weights are stored in {stored}")
    if stored not in HALF_TYPES:
        return ComputeType("float32", f"the weights are stored in {stored}")
    if not is_native:
        return ComputeType("float32", f"the weights are stored in {stored}, and this processor does not multiply it")
    return ComputeType("bfloat16", f"the weights are stored in {stored}, and this processor multiplies bfloat16")
