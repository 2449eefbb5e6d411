"""Fixtures that several packages' tests share."""

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

# A machine may be busy, and the first call compiles. Examples are drawn anew in every run: few do.
settings.register_profile("laserbatch", deadline=None, max_examples=30)
settings.load_profile("laserbatch")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Processes that share the cores, and what they start, compute on one thread each. Before torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if importlib.util.find_spec("triton") is not None:
    import torch

    if not torch.cuda.is_available():
        # Kernels then run in Triton's interpreter. It must be asked for before anything imports triton.
        os.environ.setdefault("TRITON_INTERPRET", "1")

# Else Ray's workers, for which tests wait, give way to the tests of other processes until those have ended.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ["LASERBATCH_CACHE"] = os.devnull + "/no-cache"  # no test reads what another one measured

ROOT = Path(__file__).resolve().parent.parent


LONGEST = ("nodes", "jobs", "research", "distributed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folders with the longest files come first, so that no process is left with one at the end."""
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)


def pytest_collection_finish() -> None:
    """What torch, transformers and Ray made of objects stays, so that no later collection walks through all of it."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Tests before this one may have let torch compute on all cores, which other processes' tests need."""
    torch = sys.modules.get("torch")
    if torch is not None and "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Tests write thousands of small files, and the machine does not lose its power meanwhile."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


def _folder(variable: str, default: Path) -> Path:
    folder = Path(os.environ.get(variable, default))
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; set {variable} to the folder with the public data sets or models")
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the repacked public data sets (ml-100k, goodreads, reki)."""
    return _folder("LASERBATCH_TEST_DATA", ROOT.parent / "shared" / "data")


@pytest.fixture(scope="session")
def shared_models() -> Path:
    """Folder of the measuring models (bench-target)."""
    return _folder("LASERBATCH_TEST_MODELS", ROOT.parent / "shared" / "models")


@pytest.fixture
def a_device() -> Iterator[None]:
    """A CUDA device for what computes on one where there is one; where there is none, one that is pretended."""
    import torch

    if torch.cuda.is_available():
        yield
        return
    from pretend_cuda import pretend_cuda

    known = {"is_available": lambda: True, "mem_get_info": lambda device=None: (2**34, 2**34)}
    with pretend_cuda(), mock.patch.multiple(torch.cuda, **known):
        yield
