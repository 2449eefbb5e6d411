"""`laserbatch config` shows every option and its changes by a file."""

import json

import pytest
import yaml
from default_yaml import default_yaml
from night_world import run_here

CONFIG = """\
tables: {path: in}
knowledge: {words: {item: "[b]song"}}
gates: {audit: warn}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "laserbatch.yaml"
    path.write_text(CONFIG)
    return str(path)


def leaves(section: dict, within: str = "") -> dict:
    """Values of `configs/default.yaml` by dotted option name; options that are mappings are empty there."""
    options = {}
    for name, value in section.items():
        is_section = value and isinstance(value, dict)
        options |= leaves(value, f"{within}{name}.") if is_section else {f"{within}{name}": value}
    return options


def test_every_option_is_shown_with_its_default_and_what_a_file_changed(config, capfd, tmp_path):
    printed = json.loads(run_here(capfd, "config", "--config", config, "--json").stdout)
    options = {option["option"]: option for option in printed["options"]}
    assert {name: option["default"] for name, option in options.items()} == leaves(yaml.safe_load(default_yaml()))
    changed = {name: option["value"] for name, option in options.items() if option["is_changed"]}
    assert changed == {
        "tables.path": str(tmp_path / "in"), "knowledge.words.item": "[b]song", "gates.audit": "warn",
    }  # fmt: skip
    assert all(option["description"] for option in options.values())


def test_people_read_a_line_for_each_option_with_a_mark_where_it_was_changed(config, capfd):
    lines = run_here(capfd, "config", "--config", config).stdout.splitlines()
    place = lines.index('* gates.audit: "warn" (default: "stop")')
    assert lines[place + 1].startswith("    This decides what follows if audited texts differ")
    assert '* knowledge.words.item: "[b]song" (default: "title")' in lines and "  deliver_to: null" in lines
