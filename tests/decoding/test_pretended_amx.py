"""Tests of the code for AMX on a processor without it, with tiles in plain C (`pretend_amx.py`)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from laserbatch.pipeline.decoding.attention.amx import has_amx
from laserbatch.pipeline.processor import multiplies_bfloat16

HERE = Path(__file__).parent
FILES = ("test_cpu_product.py", "test_cpu_attention.py")
OF_AMX = "AMX or ((grouping_and_window or same_bits) and dtype1 and not window)"


@pytest.mark.skipif(has_amx(), reason="the other tests run the real instructions")
@pytest.mark.skipif(not multiplies_bfloat16(), reason="code for AMX multiplies by AVX512-BF16, too")
def test_what_is_compiled_for_amx(tmp_path):
    paths = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    names = os.environ | {"PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(tmp_path)}
    files = [HERE / name for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "pretend_amx", *files, "-k", OF_AMX]
    done = subprocess.run(command, env=names, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout
