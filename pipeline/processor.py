"""Instruction sets of this machine's processor. Nothing is measured, so that the answer is the same every day."""

from functools import cache
from pathlib import Path


@cache
def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """All words of Linux's description of the processor, among them its instruction sets; empty without that file."""
    return frozenset(cpuinfo.read_text(encoding="utf-8").split() if cpuinfo.exists() else ())


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16 matrices: AVX512-BF16 of Intel and AMD."""
    return "avx512_bf16" in processor_flags()
