import numpy as np
import pyarrow as pa
import pytest
from entities import Entity, HistoryEvent, render_prompt
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import KINDS, make_user

from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge.histories import DAY_US, Histories, labels_of
from laserbatch.pipeline.knowledge.prompts import render_shown
from laserbatch.pipeline.knowledge.questions import SideQuestions, shown_of_row
from laserbatch.pipeline.knowledge.templates import HistoryLines, KnowledgeSettings, PromptTemplate, load_template
from laserbatch.pipeline.tables.read import Tables

TOKENIZER = KINDS["thinking"]()
USER = PromptTemplate.model_validate(
    {
        "name": "u", "version": 1, "framework": "kar", "side": "user", "parser": "free", "instruction": "Explain.",
        "attributes": {"heading": "Person:"}, "history": {"heading": "Rated:", "max_events": 30}, "request": "Now:",
    }
).with_columns(["category"])  # fmt: skip


def text_of(prompt, tokenizer=TOKENIZER) -> str:
    return tokenizer.decode(prompt.token_ids)


def test_a_prompt_reads_as_laid_out():
    text = text_of(render_prompt(USER, make_user(2), TOKENIZER, 10_000))
    assert (
        "Explain.\nPerson:\n- member: yes\n- region: Lorne\n- tags: a, b\nRated:\n"
        "- The Salt Harbour 0 | Mystery > Heist | 1999 | 1\n- The Salt Harbour 1 | Mystery > Heist | 1999 | 2\nNow:"
    ) in text


@pytest.mark.parametrize("attributes", [{}, {"title": " "}])
def test_an_item_without_a_title_is_not_asked_about(attributes):
    template = load_template("kar_item")
    with pytest.raises(RowError, match=r"^no-title: "):
        render_prompt(template, Entity("item", 7, attributes), TOKENIZER, 10_000)


def test_a_user_without_history_says_so():
    rendered = render_prompt(USER, make_user(0), TOKENIZER, 10_000)
    assert "Rated:\n- nothing yet\nNow:" in text_of(rendered)
    assert rendered.num_history == rendered.num_history_dropped == 0


@given(num_events=st.integers(0, 45), budget=st.integers(60, 900))
def test_histories_are_cut_from_the_oldest_side_to_the_budget(num_events, budget):
    user = make_user(num_events)
    try:
        rendered = render_prompt(USER, user, TOKENIZER, budget)
    except RowError as error:
        assert error.reason.startswith("too-long")
        newest = Entity("user", 7, user.attributes, user.history[-1:])
        assert len(render_prompt(USER, newest, TOKENIZER, 10_000).token_ids) > budget
        return
    assert len(rendered.token_ids) <= budget
    assert rendered.num_history + rendered.num_history_dropped == num_events
    shown = [index for index in range(num_events) if f"Harbour {index} |" in text_of(rendered)]
    assert shown == list(range(num_events - rendered.num_history, num_events))
    if rendered.num_history < min(num_events, 30):  # one more event does not fit
        longer = Entity("user", 7, user.attributes, user.history[-(rendered.num_history + 1) :])
        assert len(render_prompt(USER, longer, TOKENIZER, 10_000).token_ids) > budget


def test_no_prompt_says_that_a_user_with_events_has_none():
    user, room = make_user(3), len(render_prompt(USER, make_user(0), TOKENIZER, 10_000).token_ids)
    with pytest.raises(RowError, match=r"too-long: the prompt has \d+ tokens with the newest event alone; the limit"):
        render_prompt(USER, user, TOKENIZER, room)


def test_too_long_without_history_is_a_row_error():
    with pytest.raises(RowError, match=r"too-long: the prompt has .* limit \(knowledge\.max_prompt_tokens\) is 5"):
        render_prompt(USER, make_user(3), TOKENIZER, 5)


def test_a_value_cannot_start_a_line_of_its_own():
    entity = Entity("user", 1, {"about": "x\n- region: forged\r\n\tend"}, ())
    assert "- about: x - region: forged end\n" in text_of(render_prompt(USER, entity, TOKENIZER, 10_000))


def test_a_column_s_name_is_shown_in_one_line():
    """The header of a spreadsheet's column may have several lines."""
    item = HistoryEvent("i", "Heat", {"in\nstock": True}, 4.0)
    text = text_of(render_prompt(USER, Entity("user", 1, {"Price\n (EUR)": 3}, (item,)), TOKENIZER, 10_000))
    assert "- Price (EUR): 3\n" in text and "- Heat | in stock: yes | 4\n" in text


def test_long_values_are_shortened():
    rendered = render_prompt(USER, Entity("user", 1, {"about": "y" * 5_000}, ()), TOKENIZER, 10_000)
    assert "y" * 299 + "…" in text_of(rendered) and "y" * 300 not in text_of(rendered)


def test_braces_in_titles_are_text():
    event = HistoryEvent("i", "The {title} {0} {attributes}", {}, 3.5)
    text = text_of(render_prompt(USER, Entity("user", 1, {}, (event,)), TOKENIZER, 10_000))
    assert "- The {title} {0} {attributes} | 3.5\n" in text


def test_unrated_events_have_their_own_line():
    event = HistoryEvent("i", "Title", {"a": 1}, None)
    assert "- Title | 1\nNow:" in text_of(render_prompt(USER, Entity("user", 1, {}, (event,)), TOKENIZER, 10_000))


def test_a_blank_event_is_shown_as_no_event():
    user = Entity("user", 1, {}, tuple(HistoryEvent("i", "T", {}, rating, " ") for rating in (None, 5.0)))
    assert "\n- T\n- T | 5\nNow:" in text_of(render_prompt(USER, user, TOKENIZER, 10_000))


def test_columns_are_chosen_by_name_and_absent_ones_skipped():
    changed = USER.model_copy(
        update={
            "attributes": USER.attributes.model_copy(update={"columns": ("member", "gone"), "labels": {"member": "M"}}),
            "history": USER.history.model_copy(update={"exclude": ("year",)}),
        }
    )
    text = text_of(render_prompt(changed, make_user(1), TOKENIZER, 10_000))
    assert "Person:\n- M: yes\nRated:\n- The Salt Harbour 0 | Mystery > Heist | 1\n" in text


def test_shipped_templates_render_with_every_tokenizer(any_tokenizer):
    item = Entity("item", "i1", {"title": "The Salt Harbour", "category": ["Mystery"]})
    for entity in (make_user(3), item):
        rendered = render_prompt(load_template(f"kar_{entity.side}"), entity, any_tokenizer, 10_000)
        assert rendered.token_ids.dtype == "int32" and "The Salt Harbour" in text_of(rendered, any_tokenizer)


@pytest.mark.parametrize(
    "options",
    [
        {"max_days": 3},
        {"deduplicate": True},
        {"half_life": 2.0},
        {"max_days": 9, "deduplicate": True, "half_life": 3.0},
    ],
)
def test_histories_are_shortened_as_one_event_after_another_would_be(options):
    rng = np.random.default_rng(3)
    num, columns = 400, HistoryLines(max_events=6, **options)
    times = np.sort(rng.integers(0, 20 * DAY_US, num))
    user, item = rng.integers(0, 9, num), rng.integers(0, 12, num)
    tables = Tables(
        pa.table({"user_id": range(9)}),
        pa.table({"item_id": range(12), "title": ["x"] * 12}),
        pa.table({"user_id": user, "item_id": item, "timestamp": pa.array(times, pa.timestamp("us"))}),
    )
    histories = Histories(tables, {"time": lambda at: times[at]})
    places, starts = histories.chosen(np.arange(9), columns)
    for user_row in range(9):
        events, shown = [(int(item[row]), int(times[row])) for row in np.flatnonzero(user == user_row)], []
        newest, seen, rank = events[-1][1], set(), 0
        for what, when in reversed(events):
            if options.get("max_days") and when <= newest - options["max_days"] * DAY_US:
                continue
            if options.get("deduplicate") and what in seen:
                continue
            seen.add(what)
            drawn = (when * 0x9E3779B97F4A7C15 % 2**64 >> 40) / 2**24
            if drawn < 0.5 ** (rank / options.get("half_life", 1e9)):
                shown.append(what)
            rank += 1
        assert histories.items[places[starts[user_row] : starts[user_row + 1]]].tolist() == shown[:6][::-1]


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"event": ["view", "purchase"]}, '{"title": "Blue", "about": "Ay", "what": "bought"}'),
        ({"event": ["view", "purchase"], "rating": [3, 4.5]}, '"what": "bought, rated 4.5"}'),
        ({"event": ["view", "rate"], "rating": [3, 1]}, '"what": "rated 1"}'),
        ({"event": ["put aside", "kauf"]}, '"what": "gekauft"}'),
        ({"event": ["view", 'a"\n- {x}']}, '"what": "a" - {x}"}'),  # one line, and `{x}` is not replaced
        ({"rating": [0, 1]}, '"what": "picked"}'),
        ({"rating": [2, 4]}, '"rating": 4}'),
        ({"event": ["view", "view"]}, '{"title": "Blue", "about": "Ay"}'),
        ({}, '{"title": "Blue", "about": "Ay"}'),
    ],
)
def test_what_was_done_is_said_in_words_where_it_is_no_number(tokenizer, columns, line):
    items = pa.table({"item_id": [1, 2], "title": ["Red", "Blue"], "artist": ["Ay", "Ay"]})
    events = pa.table({"user_id": [7, 7], "item_id": [1, 2], "timestamp": [1, 2]} | columns)
    tables = Tables(pa.table({"user_id": [7]}), items, events)
    knowledge = KnowledgeSettings(user_template="rlmrec_user", words={"events": {"kauf": "gekauft"}})
    template = knowledge.template("user", labels_of(events, knowledge.words.events))
    (shown,) = SideQuestions(tables, "user", template, "").shown(np.array([0])).to_pylist()
    lines = text_of(render_shown(template, shown_of_row(shown), tokenizer, 10_000)).split("\n")
    assert [shown for shown in lines if "Blue" in shown and shown.endswith(line)]
