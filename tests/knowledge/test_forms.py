"""The form of a template's answers allows what the template's parser reads."""

import json
from pathlib import Path

import llguidance
import pytest
import yaml

from laserbatch.pipeline.decoding.grammar import ThoughtMarks, after_thoughts, require_grammar
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.knowledge.forms import grammar_of, guiding_grammar, require_form
from laserbatch.pipeline.knowledge.parsers import parse_answer
from laserbatch.pipeline.knowledge.templates import SHIPPED_TEMPLATES, PromptTemplate, load_template, template_path

BYTES = llguidance.LLTokenizer("byte")
FREE = {"name": "mine", "version": 1, "framework": "own", "side": "item", "parser": "free", "instruction": "Describe."}


def own(form: dict, folder: Path) -> PromptTemplate:
    (folder / "mine.yaml").write_text(yaml.safe_dump(FREE | form, sort_keys=False))
    return load_template("mine", folder)


def allowed(grammar: str, text: str) -> int:
    """The number of a text's bytes that a grammar allows, plus 1 if the text may end after them."""
    matcher = llguidance.LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    num_allowed = matcher.try_consume_tokens(list(text.encode()))
    return num_allowed + (num_allowed == len(text.encode()) and matcher.is_accepting())


def is_whole(grammar: str, text: str) -> bool:
    return allowed(grammar, text) == len(text.encode()) + 1


def example(template: PromptTemplate) -> str:
    if template.parser == "aspects":
        return "\n".join(
            f"{number}. {name}: Café & “quotes” of 199{number}" for number, name in enumerate(template.factors, 1)
        )
    if template.parser == "attributes":
        return "\n".join(f"{name}: sea stories, {name}" for name in template.factors)
    values = {
        name: [name, "Crime fiction"] if kind == "list" else f"A reader's {name}: it's 5/5."
        for name, kind in template.fields.items()
    }
    return json.dumps(values, ensure_ascii=False)


@pytest.mark.parametrize("name", sorted(path.stem for path in SHIPPED_TEMPLATES.glob("*.yaml")))
def test_the_form_of_a_shipped_template_is_what_its_parser_reads(name):
    template = load_template(name)
    grammar = grammar_of(template, 200)
    require_form(template, template_path(name))
    if template.parser == "free":
        assert grammar is None and guiding_grammar(template, DecodingSettings()) is None
        return
    assert grammar is not None and guiding_grammar(template, DecodingSettings(max_new_tokens=200)) == grammar
    assert guiding_grammar(template, DecodingSettings(guided=False)) is None  # YAML reads a bare `off` as False
    thinks = DecodingSettings(thinking="cut", max_new_tokens=200)
    assert guiding_grammar(template, thinks) == grammar, "the grammar holds after the thoughts"
    assert guiding_grammar(template, thinks.model_copy(update={"engine": "endpoint"})) is None
    text = example(template)
    assert is_whole(grammar, text)
    require_grammar(after_thoughts(grammar, ThoughtMarks(open_id=None, close_id=5)))
    parsed = parse_answer(template, text)
    assert list(parsed.fields) == list(template.fields or template.factors) and not parsed.repairs
    assert allowed(grammar, "Sure! Here") < 4 and allowed(grammar, text + "\n") == len(text.encode())


def test_parts_are_words_and_lists_are_as_long_as_the_template_says():
    grammar = grammar_of(load_template("once_user"), 200) or ""
    assert is_whole(grammar, '{"interests": ["Sea"], "regions": []}')
    assert not is_whole(grammar, '{"interests": [], "regions": []}')
    assert allowed(grammar, '{"interests": ["...') == len('{"interests": ["')
    five = ", ".join(['"Sea"'] * 5)
    assert is_whole(grammar, f'{{"interests": [{five}], "regions": []}}')
    assert allowed(grammar, f'{{"interests": [{five}, ') < len(f'{{"interests": [{five}, ')
    assert not is_whole(grammar, '{"interests": ["' + "a" * 80 + '"], "regions": []}')


@pytest.mark.parametrize(
    ("form", "whole", "broken"),
    [
        ({"regex": "[A-Z]{2}/[0-9]+"}, "AB/12", "AB-"),
        ({"grammar": 'start: "yes" | "no"'}, "no", "maybe"),
        ({"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}, '{"a": 3}', "[1]"),
    ],
)
def test_a_template_of_ones_own_gives_its_form(form, whole, broken, tmp_path):
    template = own(form, tmp_path)
    require_form(template, tmp_path / "mine.yaml")
    grammar = grammar_of(template, 64) or ""
    assert is_whole(grammar, whole) and allowed(grammar, broken) < len(broken)


def test_a_form_that_does_not_compile_is_refused_with_its_place(tmp_path):
    for form, place in (
        ({"regex": "(a"}, "regex: .*invalid regex"),
        ({"parser": "attributes", "factors": ["Era", "-dash"]}, r"factors: .*would not find '-dash' in an answer"),
        ({"parser": "aspects", "factors": ["*Era*"]}, r"factors: .*would not find '\*Era\*' in an answer"),
        ({"grammar": "start: A LINE\nA: /a/"}, r'grammar: .*at 1\(8\): unknown name: "LINE"'),
        ({"json_schema": {"type": "strin"}}, "json_schema: .*Invalid type: strin"),
        ({"regex": "a{0}"}, r"regex allows only the empty answer \(found 'a.0.'\)"),
        ({"grammar": 'start: ""'}, "grammar allows only the empty answer"),
        ({"grammar": "start: ONE\nONE: /a/ & /b/"}, "grammar allows only the empty answer"),
    ):
        with pytest.raises(ConfigError, match=f"prompt template .*mine.yaml, line 7: {place}"):
            require_form(own(form, tmp_path), tmp_path / "mine.yaml")
    for wrong, reason in (
        ({"regex": "a", "grammar": 'start: "a"'}, "one of `json_schema`, `regex` and `grammar`"),
        ({"max_items": {"interests": 3}}, "`max_items` has interests: 3"),
    ):
        with pytest.raises(ValueError, match=reason):
            PromptTemplate.model_validate(FREE | wrong)
