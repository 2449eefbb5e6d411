"""Host arrays on their way to a device, without waiting for what the device is doing."""

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of the array on a device.

    On CUDA it comes from pinned memory and is not waited for: a copy from ordinary memory would first let the device
    finish the forward that it is computing. That branch has not been run on a GPU yet.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
