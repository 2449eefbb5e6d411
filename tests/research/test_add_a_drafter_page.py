"""docs/add-a-drafter.md, followed to the letter: a package is built, installed and tested outside the project."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "add-a-drafter.md"


def test_the_page_can_be_typed_as_it_stands(tmp_path):
    package, installed = tmp_path / "package", tmp_path / "installed"
    package.mkdir()
    environment = {
        "PYTHONPATH": f"{installed}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PIP_TARGET": str(installed),
    }
    messages = []
    for language, block in re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        if language == "sh":
            for line in block.splitlines():
                _, *command = shlex.split(line)
                here = {"cwd": package, "env": os.environ | environment, "capture_output": True, "text": True}
                messages.append(subprocess.run([sys.executable, *command], **here))
        elif name := re.match(r"# (\S+\.\w+)\n", block):
            (package / name[1]).write_text(block, encoding="utf-8")
    built, tested = messages
    assert built.returncode == 0, built.stderr
    assert "1 passed" in tested.stdout, tested.stdout + tested.stderr
