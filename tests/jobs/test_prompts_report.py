import json

import pytest
import yaml
from night_world import run_here

from laserbatch.jobs.commands import prompts
from laserbatch.pipeline.knowledge.prompts import render_shown
from laserbatch.pipeline.sample.world import LAST_DATE, write_sample_world


def test_the_report_adds_up_and_says_what_half_a_history_saves(tmp_path, capfd):
    write_sample_world(tmp_path / "tables", num_users=30, num_items=20)
    config = tmp_path / "laserbatch.yaml"
    config.write_text(yaml.safe_dump({"tables": {"path": "tables"}}))
    users, items = json.loads(run_here(capfd, "prompts", "report", "--config", str(config), "--json").stdout)["sides"]
    assert (users["template"], items["template"]) == ("kar_user@3", "kar_item@2")
    for side in users, items:
        assert sum(part["tokens"] for part in side["parts"]) == pytest.approx(side["tokens"])
        assert sum(part["share"] for part in side["parts"]) == pytest.approx(1)
    parts = {part["part"]: part for part in users["parts"]}
    assert set(parts) == {"question and chat format", "region", "age_band", "about", "history"}
    assert 0.3 * parts["history"]["tokens"] < users["saved_by_half"] < 0.7 * parts["history"]["tokens"]
    assert items["num_events"] == items["saved_by_half"] == 0
    shown = run_here(capfd, "prompts", "report", "--config", str(config)).stdout
    assert "Half of them would save" in shown and "question and chat format" in shown


def test_lines_without_a_label_are_one_part_and_no_prompt_follows_the_clock(tmp_path, capfd, monkeypatch):
    dates = set()
    monkeypatch.setattr(
        prompts, "render_shown", lambda *of, date, **how: dates.add(date) or render_shown(*of, date=date, **how)
    )
    write_sample_world(tmp_path / "tables", num_users=20, num_items=20)
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nversion: 1\nframework: mine\nside: item\nparser: free\ninstruction: Describe.\n"
        "attributes: {columns: [title, mood], line: '{value}'}\n"
    )
    config = tmp_path / "laserbatch.yaml"
    knowledge = {"template_dir": ".", "item_template": "mine"}
    config.write_text(yaml.safe_dump({"tables": {"path": "tables"}, "knowledge": knowledge}))
    items = json.loads(run_here(capfd, "prompts", "report", "--config", str(config), "--json").stdout)["sides"][1]
    assert {part["part"] for part in items["parts"]} == {"question and chat format", "attributes"}
    assert [date.year for date in dates] == [LAST_DATE.year]
