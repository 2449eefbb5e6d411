"""How waiting threads spin: libgomp reads it from the environment once, when torch is imported."""

import os
import subprocess
import sys

import pytest

PRINTED = "import laserbatch.pipeline, os; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("own", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_they_soon_sleep_unless_somebody_decides_otherwise(own, expected):
    environment = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", *own)} | own
    shown = subprocess.run([sys.executable, "-c", PRINTED], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == expected
