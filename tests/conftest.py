"""Fixtures that several packages' tests share."""

import gc
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

# No deadline: a machine may be busy, and the first call compiles. Few examples, since each run draws new ones.
settings.register_profile("laserbatch", deadline=None, max_examples=30)
settings.load_profile("laserbatch")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Parallel test processes and their children compute on one thread each. This must be set before torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if importlib.util.find_spec("triton") is not None:
    import torch

    if not torch.cuda.is_available():
        # Then kernels run in Triton's interpreter. The variable must be set before anything imports triton.
        os.environ.setdefault("TRITON_INTERPRET", "1")

# Otherwise Ray's workers, for which tests wait, have a lower priority than other test processes.
os.environ.setdefault("RAY_worker_niceness", "0")
gc.disable()  # until all tests are imported: a sixth of the time of the imports would go into collections
os.environ["LASERBATCH_CACHE"] = os.devnull + "/no-cache"  # no test reads a measurement of another one

ROOT = Path(__file__).resolve().parent.parent


LONGEST = ("nodes", "jobs", "research", "distributed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the folders with the longest files first, so that no process is left with a long file at the end."""
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Exempt the objects of torch, transformers and Ray from later garbage collections."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup() -> None:
    """Earlier tests may have let torch compute on all cores, which other test processes need."""
    torch = sys.modules.get("torch")
    if torch is not None and "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture
def removes_as_nfs(monkeypatch) -> None:
    """Refuse to remove a folder one of whose files is still mapped, as NFS does."""

    def removed(path, *arguments, **options):
        assert f"{path}/" not in Path("/proc/self/maps").read_text()
        remove(path, *arguments, **options)

    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", removed)


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Do not sync files: tests write thousands of small ones, and need not survive a loss of power."""
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
    """Run a test on a CUDA device if there is one, otherwise on a pretended one."""
    import torch

    if torch.cuda.is_available():
        yield
        return
    from pretend_cuda import pretend_cuda

    known = {"is_available": lambda: True, "mem_get_info": lambda device=None: (2**34, 2**34)}
    with pretend_cuda(), mock.patch.multiple(torch.cuda, **known):
        yield
