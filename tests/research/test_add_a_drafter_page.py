"""docs/add-a-drafter.md, followed literally: the package is built, installed and tested outside the project."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

from laserbatch.pipeline import plugins

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "add-a-drafter.md"


def test_the_page_can_be_typed_as_it_stands(tmp_path, monkeypatch):
    """The page's test runs in this process, where torch is imported already, and finds the package like any other."""
    package, installed = tmp_path / "package", tmp_path / "installed"
    package.mkdir()
    commands = []
    for language, block in re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        if language == "sh":
            commands += map(shlex.split, block.splitlines())
        elif name := re.match(r"# (\S+\.\w+)\n", block):
            (package / name[1]).write_text(block, encoding="utf-8")
    (_, *build), (*pytest_words, test) = commands
    here = {"cwd": package, "env": os.environ | {"PIP_TARGET": str(installed)}, "capture_output": True, "text": True}
    built = subprocess.run([sys.executable, *build], **here)
    assert built.returncode == 0, built.stderr
    assert pytest_words == ["python", "-m", "pytest"]
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setattr(plugins, "installed", plugins.installed.__wrapped__)  # searches for packages again
    (run,) = (value for name, value in runpy.run_path(str(package / test)).items() if name.startswith("test_"))
    run()
    assert sys.modules["bigram_drafter"].__file__ == str(installed / "bigram_drafter.py")
