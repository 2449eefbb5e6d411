"""The GPUs that torch can use. torch takes seconds to import, so it is not imported where there is no GPU driver."""

import re
import subprocess
from pathlib import Path

GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA, Linux on Windows (WSL), AMD


def num_gpus() -> int:
    """The number of GPUs that torch can use on this machine."""
    if not any(Path(driver).exists() for driver in GPU_DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()


def try_gpu(number: int) -> tuple[str, int, int]:
    """Compute a sum on a GPU and return its name, free and total bytes. Raises torch's RuntimeError if that fails."""
    import torch

    torch.ones(1, device=f"cuda:{number}").add(1).tolist()  # raises without a kernel for this GPU, or in exclusive mode
    return torch.cuda.get_device_name(number), *torch.cuda.mem_get_info(number)


def min_free_bytes() -> int | None:
    """Free bytes of the fullest GPU, from NVIDIA's driver; None if it reports none or a GPU is split (MIG)."""
    query = ["nvidia-smi", "--query-gpu=memory.free,mig.mode.current", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.split(",") for line in lines if line.strip()]
    if not rows or any(not size.strip().isdigit() or "Enabled" in mode for size, mode in rows):
        return None
    return min(int(size) for size, _ in rows) << 20


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of NVIDIA's driver; None if there is no driver."""
    if not path.is_file():
        return None
    match = re.search(r"\s(\d+\.[\d.]+)\s", path.read_text(encoding="ascii"))
    return match and match[1]


def gpu_name() -> str | None:
    """The first GPU's name in torch; None if there is no GPU."""
    if not num_gpus():
        return None
    import torch

    return torch.cuda.get_device_name()
