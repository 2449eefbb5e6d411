"""An entity keeps its text for as long as nothing changes that its prompt is made from."""

import shutil
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import KINDS, make_user

from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge import prompts
from laserbatch.pipeline.knowledge.entities import Entity, HistoryEvent
from laserbatch.pipeline.knowledge.prompts import changed_parts, fingerprint, render_prompt
from laserbatch.pipeline.knowledge.templates import SHIPPED_TEMPLATES, KnowledgeSettings, PromptTemplate
from laserbatch.pipeline.planning.planner import prompt_renderer

TOKENIZER = KINDS["thinking"]()
TEMPLATE = PromptTemplate.model_validate(
    {
        "name": "u", "version": 1, "framework": "kar", "side": "user", "parser": "free", "instruction": "Explain.",
        "history": {"line": "{title}{number}{attributes}", "line_unrated": "{title}{number}{attributes}",
                    "separator": "", "max_events": 3},
    }
)  # fmt: skip
SMALL = st.sampled_from(["", "1", "a", "a1", "11"])
EVENTS = st.lists(st.builds(HistoryEvent, st.just("i"), SMALL, SMALL.map(lambda text: {"genre": text}), st.none()),
                  max_size=4)  # fmt: skip
USER = make_user(5)


@settings(max_examples=200)
@given(EVENTS, EVENTS, st.integers(55, 80))
def test_equal_fingerprints_mean_equal_prompts_wherever_the_history_is_cut(first, second, max_prompt_tokens):
    """`a` and `1`, and `a1` and nothing, are one line as the first event, and two as the second."""
    users = [Entity("user", 7, {}, tuple(events)) for events in (first, second)]
    shown = [[(event.title, event.attributes) for event in user.history[-3:]] for user in users]
    is_equal = len({fingerprint(TEMPLATE, user, "shared") for user in users}) == 1
    assert is_equal == (shown[0] == shown[1])
    if is_equal:
        assert len({prompt_or_reason(user, max_prompt_tokens) for user in users}) == 1


def prompt_or_reason(user: Entity, max_prompt_tokens: int) -> object:
    try:
        return tuple(render_prompt(TEMPLATE, user, TOKENIZER, max_prompt_tokens).token_ids.tolist())
    except RowError as error:
        return error.reason


def fingerprint_of(folder=SAMPLE_MODEL, user=USER, decoding=None, **knowledge) -> str:
    ask = prompt_renderer("user", KnowledgeSettings(**knowledge), DecodingSettings(**decoding or {}), folder)
    return ask(user)[0]


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_each_file_that_decides_what_the_model_reads_changes_it(tmp_path, file):
    folder = shutil.copytree(SAMPLE_MODEL, tmp_path / "sample")
    assert fingerprint_of(folder) == fingerprint_of()
    text = (folder / file).read_text()
    changed = text.replace("<|user|>", "<|user|> ").replace("<|{{", " <|{{") if file.endswith("jinja") else text + "\n"
    assert changed != text
    (folder / file).write_text(changed)
    assert fingerprint_of(folder) != fingerprint_of()


def test_no_text_is_tokenised_for_it(monkeypatch):
    monkeypatch.setattr(prompts, "encode_content", None)
    assert fingerprint_of() == fingerprint_of()


def test_each_part_changes_with_what_it_is_of_and_with_nothing_else(tmp_path):
    text = (SHIPPED_TEMPLATES / "kar_user.yaml").read_text()
    (tmp_path / "kar_user.yaml").write_text(text.replace("factors: [", "factors: [Weather, "))
    config = shutil.copytree(SAMPLE_MODEL, tmp_path / "sample") / "config.json"
    config.write_text(config.read_text() + "\n")
    older = replace(USER.history[0], title="Another")
    before = fingerprint_of()
    expected = {
        fingerprint_of(template_dir=tmp_path): ("template",),
        fingerprint_of(max_prompt_tokens=512): ("prompt",),
        fingerprint_of(config.parent): ("model",),
        fingerprint_of(decoding={"top_k": 7}): ("decoding",),
        fingerprint_of(user=replace(USER, attributes={"region": "Velden"})): ("attributes",),
        fingerprint_of(user=replace(USER, history=USER.history[:-1])): ("history",),
        fingerprint_of(user=replace(USER, history=(older, *USER.history[1:]))): ("history",),
        fingerprint_of(decoding={"batch_size": 3, "max_draft_tokens": 5}): (),
        "0" * 32: ("version",),
    }
    assert {after: changed_parts(before, after) for after in expected} == expected
