"""A few weeks of the simulated year: `python tests/soak/year.py` lives all of it."""

import pytest
from year import run_year

pytestmark = pytest.mark.slow
NUM_NIGHTS = 14  # with most kinds of nights among them


def test_every_ordinary_night_is_as_it_must_be(tmp_path):
    result = run_year(tmp_path, NUM_NIGHTS)
    assert result["failed"] is None
    assert result["as_they_must_be"] == NUM_NIGHTS
