"""Fixtures that several packages' tests share."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


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
