"""docs/own-prompts.md, followed to the letter."""

import re
import shlex
from pathlib import Path

from night_world import run_here

from laserbatch.pipeline.engines import own
from laserbatch.retrieval_pools.step_cost import StepCost, StepPoint

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-prompts.md"


def test_the_page_can_be_typed_as_it_stands(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    steps = [StepPoint(batch_size=1, num_tokens=number, seconds=number) for number in (1, 2)]
    monkeypatch.setattr(own, "measure_step_cost", lambda *_: StepCost(steps=tuple(steps)))  # nothing depends on it
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
