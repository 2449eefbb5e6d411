"""Which GPUs torch can use here; it takes seconds to load, and is not where there is no driver of any."""

from pathlib import Path

GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's, that of Windows' Linux, AMD's


def num_gpus() -> int:
    """GPUs that torch can use here."""
    if not any(Path(driver).exists() for driver in GPU_DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()


def gpu_name() -> str | None:
    """What torch calls the first GPU; None where there is none."""
    if not num_gpus():
        return None
    import torch

    return torch.cuda.get_device_name()
