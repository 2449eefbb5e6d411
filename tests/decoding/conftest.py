"""One thread for tiny models: two threads mostly wait for each other, even more on a busy machine."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from quick_interpreter import quick_interpreter


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="package", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    """Use the quick interpreter if tests of kernels have imported Triton and there is no GPU."""
    if "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    with quick_interpreter():
        yield
