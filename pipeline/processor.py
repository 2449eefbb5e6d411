"""What this machine's processor computes by itself. Nothing is measured: tomorrow's answer must be today's."""

from functools import cache
from pathlib import Path


@cache
def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Names of the processor's extensions, as Linux has them; none where it does not say them."""
    return frozenset(cpuinfo.read_text(encoding="utf-8").split() if cpuinfo.exists() else ())


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16 matrices: AVX512-BF16 of Intel and AMD."""
    return "avx512_bf16" in processor_flags()
