"""One small world for all tests of CTR training."""

import pytest
from ctr_world import World, make_world


@pytest.fixture(scope="session")
def world() -> World:
    return make_world()
