"""YAML that people write: a repeated key is refused, not one that only looks so. Messages of other libraries."""

import json

import pytest
from pydantic import ValidationError, model_validator
from pydantic.dataclasses import dataclass

from laserbatch.jobs.settings import load_settings
from laserbatch.pipeline.errors import ConfigError, first_line
from laserbatch.pipeline.validation import read_yaml


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "the key a twice, in lines 1 and 3; keep one of them"),
        ("a:\n  b: 1\n  c: {d: 1, d: 2}\n", "the key d twice, in lines 3 and 3"),
        ("a: {yes: 1, true: 2}\n", "the key true twice, in lines 1 and 1"),
        ("a:\n  0x10: 1\n  16: 2\n", "the key 16 twice, in lines 2 and 3"),
        ("a: [{b: 1}, {b: 2, b: 3}]\n", "the key b twice, in lines 1 and 1"),
    ],
)
def test_a_key_twice_is_refused_by_name_and_line(tmp_path, text, message):
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(tmp_path / "file.yaml", "mapping", "write one")
    assert f"the mapping {tmp_path / 'file.yaml'} has {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("", None),
        ("base: &base {x: 1, y: 2}\nother:\n  <<: *base\n  x: 3\n", {"x": 3, "y": 2}),
        ("other: {1: a, '1': b}\n", {1: "a", "1": "b"}),
        (json.dumps({"other": "😀"}), "😀"),  # as two escaped surrogates
    ],
)
def test_merged_keys_and_keys_of_other_types_are_not_the_same(tmp_path, text, read):
    (tmp_path / "file.yaml").write_text(text)
    data = read_yaml(tmp_path / "file.yaml", "mapping", "write one")
    assert (data and data["other"]) == read


@pytest.mark.parametrize("value", ["2025-02-30", "!!int b", "!!bool b", "!!timestamp b", r'"\ud83d"'])
def test_a_value_that_yaml_cannot_read_is_refused_by_its_line(tmp_path, value):
    (tmp_path / "file.yaml").write_text(f"x: 1\na: {value}\n")
    with pytest.raises(ConfigError, match=r"YAML: '.*' is not a valid .*; put a text in quotes in line 2, column 4"):
        read_yaml(tmp_path / "file.yaml", "mapping", "write one")


@pytest.mark.parametrize("opened", ["[", "{a: "])
def test_yaml_that_is_nested_too_deeply_is_refused(tmp_path, opened):
    (tmp_path / "file.yaml").write_text(f"x: 1\na: {opened * 5000}")
    with pytest.raises(ConfigError, match=r"file.yaml is not YAML: maximum recursion depth exceeded"):
        read_yaml(tmp_path / "file.yaml", "mapping", "write one")


@pytest.mark.parametrize("loop", ["[1, *x]", "{words: *x}", "{user_factors: [{b: *x}]}"])
def test_a_node_within_itself_is_refused_by_its_key(tmp_path, loop):
    (tmp_path / "file.yaml").write_text(f"knowledge: &x {loop}\n")
    with pytest.raises(ConfigError, match=r"file.yaml: knowledge"):
        load_settings(tmp_path / "file.yaml")


def test_the_first_line_of_pydantics_error_is_its_message_and_not_a_count():
    """For example an error that vLLM raises for an unknown quantisation."""

    @dataclass
    class Config:
        bits: int

        @model_validator(mode="after")
        def _is_known(self):
            raise ValueError(f"Unsupported quantization config: bits={self.bits}, sym=True.")

    with pytest.raises(ValidationError, match=r"^1 validation error for Config") as raised:
        Config(3)
    assert first_line(raised.value) == "Unsupported quantization config: bits=3, sym=True"
    assert first_line(ValueError("one.\ntwo")) == "one" and first_line(ValueError()) == "ValueError"
