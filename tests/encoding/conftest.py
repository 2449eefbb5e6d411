"""One tiny encoder for all tests of encoding."""

from pathlib import Path

import pytest
from tiny_encoders import write_tiny_encoder


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory) -> Path:
    """Folder of a two-layer BERT with random weights."""
    return write_tiny_encoder(tmp_path_factory.mktemp("encoder"))
