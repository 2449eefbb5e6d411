"""An entity keeps its text until any input of its prompt changes."""

import math
import shutil
from dataclasses import replace
from hashlib import blake2b
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from entities import Entity, HistoryEvent, iter_entities, render_prompt, shown_of
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import KINDS, make_user

from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge import questions as questions_of_sides
from laserbatch.pipeline.knowledge.prompts import changed_parts
from laserbatch.pipeline.knowledge.questions import SideQuestions, shown_of_row
from laserbatch.pipeline.knowledge.templates import (
    SHIPPED_TEMPLATES,
    AttributeLines,
    KnowledgeSettings,
    PromptTemplate,
    load_template,
)
from laserbatch.pipeline.planning.planner import shared_fingerprint
from laserbatch.pipeline.tables.read import Tables

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


@given(EVENTS, EVENTS, st.integers(55, 80))
def test_equal_fingerprints_mean_equal_prompts_wherever_the_history_is_cut(first, second, max_prompt_tokens):
    """Title `a` with genre `1` and title `a1` with none give one line as the first event, and two as the second."""
    users = [Entity("user", 7, {}, tuple(events)) for events in (first, second)]
    shown = [[(event.title, event.attributes) for event in user.history[-3:]] for user in users]
    is_equal = len({fingerprint_in_columns(user, TEMPLATE) for user in users}) == 1
    assert is_equal == (shown[0] == shown[1])
    if is_equal:
        assert len({prompt_or_reason(user, max_prompt_tokens) for user in users}) == 1


def tables_of(user: Entity) -> Tables:
    """Tables from which `iter_entities` makes this user, with a separate item for each event."""
    names = {name for event in user.history for name in event.attributes}
    items = {"item_id": range(len(user.history)), "title": [event.title for event in user.history]}
    items |= {name: [event.attributes.get(name) for event in user.history] for name in sorted(names)}
    kinds = {"item_id": pa.int64(), "title": pa.string()}
    columns = {name: pa.array(values, kinds.get(name)) for name, values in items.items()}
    interactions = {"user_id": [user.entity_id] * len(user.history), "item_id": range(len(user.history))}
    interactions = {name: pa.array(values, pa.int64()) for name, values in interactions.items()}
    interactions["rating"] = pa.array([event.rating for event in user.history], pa.float64())
    users = pa.table({"user_id": [user.entity_id]} | {name: [value] for name, value in user.attributes.items()})
    return Tables(users, pa.table(columns), pa.table(interactions))


def fingerprint_in_columns(user: Entity, template: PromptTemplate, shared: str = "shared") -> str:
    return SideQuestions(tables_of(user), "user", template, shared).fingerprints(0, 1)[0].as_py()


def prompt_or_reason(user: Entity, max_prompt_tokens: int) -> object:
    try:
        return tuple(render_prompt(TEMPLATE, user, TOKENIZER, max_prompt_tokens).token_ids.tolist())
    except RowError as error:
        return error.reason


def fingerprint_of(folder=SAMPLE_MODEL, user=USER, decoding=None, **knowledge) -> str:
    knowledge = KnowledgeSettings(**knowledge)
    template = knowledge.template("user")
    shared = shared_fingerprint(template, knowledge.max_prompt_tokens, DecodingSettings(**decoding or {}), folder)
    return fingerprint_in_columns(user, template, shared)


def slowly(template: PromptTemplate, entity: Entity) -> str | None:
    """The last two parts of the fingerprint of one entity."""

    def blake(data: bytes) -> bytes:
        return blake2b(data, digest_size=8).digest()

    try:
        shown = shown_of(template, entity)
    except RowError:
        return None
    attributes = b"\xff" if shown.attributes is None else shown.attributes.encode()
    events = (
        blake((title if rest is None else f"{title}\n{rest}").encode()) + blake((rating or "").encode())
        for title, rest, rating in shown.events
    )
    return f"{blake(attributes).hex()}-{blake(b''.join(events)).hex()}"


VALUES = {
    "city": (st.sampled_from(["a", " a\n", "", "x" * 400]), pa.string()),
    "age": (st.sampled_from([1.0, 1.0000001, math.nan, 0.5]), pa.float64()),
    "member": (st.booleans(), pa.bool_()),
    "path": (st.lists(st.sampled_from(["a", "b", None]), max_size=2), pa.list_(pa.string())),
    "born": (st.dates(), pa.date32()),
}
ALL_TEMPLATES = [TEMPLATE, *map(load_template, ("kar_user", "kar_item"))]


def some_rows(data, num_rows: int) -> dict[str, pa.Array]:
    return {
        name: pa.array([data.draw(st.none() | values) for _ in range(num_rows)], kind)
        for name, (values, kind) in VALUES.items()
    }


@given(st.data(), st.sampled_from(ALL_TEMPLATES))
def test_in_columns_it_is_and_shows_what_it_is_and_shows_of_one_entity(data, template):
    users = pa.table({"user_id": [1, 2, 3]} | some_rows(data, 3))
    titles = pa.array([data.draw(st.none() | st.sampled_from(["A", " ", "A\nB"])) for _ in range(3)], pa.string())
    items = pa.table({"item_id": [1, 2, 3], "title": titles} | some_rows(data, 3))
    done = st.none() | st.sampled_from(["click", "put_back", "rate"])
    some = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.none() | st.just(3.5), done), max_size=12)
    events = list(zip(*data.draw(some), strict=True)) or [(), (), (), ()]
    kinds = {"user_id": pa.int64(), "item_id": pa.int64(), "rating": pa.float64(), "event": pa.string()}
    interactions = {name: pa.array(values, kind) for (name, kind), values in zip(kinds.items(), events, strict=True)}
    tables = Tables(users, items, pa.table(interactions))
    template = template.model_copy(update={"attributes": AttributeLines(exclude=("member",), heading="Known:")})
    with patch.object(questions_of_sides, "ROWS_AT_ONCE", data.draw(st.sampled_from([2, 1000]))):
        questions = SideQuestions(tables, template.side, template, "s")
        fingerprints, shown_rows = questions.fingerprints(0, 3), questions.shown(rows := np.array([2, 0]))
    entities = list(iter_entities(tables, template.side))
    expected = [slowly(template, entity) for entity in entities]
    assert fingerprints.to_pylist() == [digest and f"s-{digest}" for digest in expected]
    for row, shown in zip(rows, map(shown_of_row, shown_rows.to_pylist()), strict=True):
        if expected[row] is not None:
            assert shown == shown_of(template, entities[row])


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_each_file_that_decides_what_the_model_reads_changes_it(tmp_path, file):
    folder = shutil.copytree(SAMPLE_MODEL, tmp_path / "sample")
    assert fingerprint_of(folder) == fingerprint_of()
    text = (folder / file).read_text()
    changed = text.replace("<|user|>", "<|user|> ").replace("<|{{", " <|{{") if file.endswith("jinja") else text + "\n"
    assert changed != text
    (folder / file).write_text(changed)
    assert fingerprint_of(folder) != fingerprint_of()


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
