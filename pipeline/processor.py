"""What this machine's processor computes by itself. Nothing is measured: tomorrow's answer must be today's."""

from pathlib import Path


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Names of the processor's extensions, as Linux has them; none where it does not say them."""
    return set(cpuinfo.read_text(encoding="utf-8").split()) if cpuinfo.exists() else set()


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16 matrices: AVX512-BF16 of Intel and AMD."""
    return "avx512_bf16" in processor_flags()
