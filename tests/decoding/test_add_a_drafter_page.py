"""docs/add-a-drafter.md, followed to the letter in a copy of the project."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "add-a-drafter.md"


def test_the_page_can_be_typed_as_it_stands(tmp_path):
    copied = tmp_path / "laserbatch"
    for name in ("pipeline", "retrieval_pools", "tests/decoding"):
        shutil.copytree(ROOT / name, copied / name)  # with what is compiled
    said = []
    for language, block in re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        path = copied / (re.match(r"# (\S+)\n", block) or [""] * 2)[1]
        if language == "sh":
            _, *command = shlex.split(block)
            here = {"cwd": copied, "env": os.environ | {"PYTHONPATH": str(tmp_path)}}
            said.append(subprocess.run([sys.executable, *command], **here, capture_output=True, text=True).stdout)
        elif language == "diff":
            before, after = (changed(block, sign) for sign in "-+")
            text = path.read_text(encoding="utf-8")
            assert text.count(before) == 1, before
            path.write_text(text.replace(before, after), encoding="utf-8")
        else:
            path.write_text(block, encoding="utf-8")
    assert len(said) == 1 and "1 passed" in said[0], said[0]


def changed(block: str, sign: str) -> str:
    return "\n".join(line[1:] for line in block.splitlines() if line.startswith(sign))
