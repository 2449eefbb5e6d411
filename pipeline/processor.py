"""What this machine's processor computes by itself. Nothing is measured: tomorrow's answer must be today's."""

from pathlib import Path

BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of Intel and AMD, Intel's tiles, ARM


def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has instructions for products of bfloat16 matrices; False where Linux does not say it."""
    return cpuinfo.exists() and not BFLOAT16_FLAGS.isdisjoint(cpuinfo.read_text(encoding="utf-8").split())
