"""docs/own-prompts.md, followed to the letter."""

import re
import shlex
from pathlib import Path

from night_world import run_here

from laserbatch.pipeline.budget import measuring

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-prompts.md"


def test_the_page_can_be_typed_as_it_stands(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name, value in {"WARM_UP_ROUNDS": {"cpu": 0}, "MIN_ROUNDS": 1, "MAX_ROUNDS": 1}.items():
        monkeypatch.setattr(measuring, name, value)  # what a draft costs is measured, and nothing here depends on it
    messages = []
    for language, block in re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        if language == "sh":
            program, *arguments = shlex.split(block)
            assert program == "laserbatch"
            messages.append(run_here(capfd, *arguments).stdout)
        else:
            path = tmp_path / re.match(r"# (\S+)\n", block)[1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(block, encoding="utf-8")
    record = messages[-1][messages[-1].index("Record") :]
    assert "about: " in record and "listeners: " in record and "a night would keep it" in record
