"""`laserbatch try` on a terminal: everything is printed, and no data can control the terminal."""

import io
from dataclasses import replace
from unittest.mock import patch

import pytest
from rich.console import Console

from laserbatch.jobs.commands import try_one
from laserbatch.jobs.commands.try_one import TriedEntity, print_tried
from laserbatch.pipeline.storage.figures import SampleSpan as Span
from laserbatch.pipeline.storage.stats import DecodingStats

STATS = DecodingStats(
    num_texts=1, num_tokens=120, num_steps=24, num_drafted=300, num_accepted=96, wall_s=0.5,
    finish_reasons={"end_of_text": 1},
)  # fmt: skip
TRIED = TriedEntity(
    side="user",
    entity_id="u12",
    template="kar_user@1",
    prompt="<|user|>\nWhat does [b]this[/b] reader like?",
    num_prompt_tokens=212,
    num_history=30,
    num_history_dropped=4,
    pool_version="2025-02-28",
    group="collaborative/3",
    scheme="collaborative",
    text="1. Genres: slow mysteries",
    spans=[Span("1. Genres: ", "pool"), Span("slow ", "target"), Span("mysteries", "previous")],
    stats=STATS,
    fields={"Genres": "slow mysteries"},
)


def drawn(tried: TriedEntity, **options) -> str:
    console = Console(file=io.StringIO(), width=110, **options)
    with patch.object(try_one, "stdout", console):
        print_tried(tried, "decoding.endpoint.model")
    return console.file.getvalue()


def test_prompt_pool_text_counts_and_record_are_drawn():
    shown = drawn(TRIED)
    for part in (
        "What does [b]this[/b] reader like?",
        "kar_user@1",
        "Prompt of user u12",
        "4 older events cut",
        "collaborative/3",
        "collaborative group",
        "1. Genres: slow mysteries",
        "5.00 tokens per step",
        "32 % of 300 draft tokens",
        "240 tokens/s",
        "ended by itself",
        "Genres: slow mysteries",
        "Record",
    ):
        assert part in shown, part


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "parsed and ended by itself: a night would keep it"),
        (
            {"stats": replace(STATS, finish_reasons={"length": 1})},
            "cut at the token limit: raise decoding.max_new_tokens",
        ),
        (
            {"stats": replace(STATS, finish_reasons={"role_mark": 1}, role_marks={"### Human:": 1}, num_invented=9)},
            "ended at ### Human:, a role mark or end token that the model's configuration does not name, and 9 tokens "
            "after it were cut",
        ),
        ({"fields": None, "problem": "unparsable"}, "A night would put user u12 in quarantine"),
    ],
)
def test_the_last_line_says_whether_a_night_would_keep_the_text(changes, verdict):
    assert verdict in " ".join(drawn(replace(TRIED, **changes)).split())


def test_accepted_spans_are_coloured_by_source_with_a_legend():
    shown = drawn(TRIED, force_terminal=True, color_system="truecolor")
    assert "48;2;242;196;221m1. Genres: " in shown  # pool
    assert "48;2;169;211;242mmysteries" in shown  # previous
    assert "own previous text" in shown and "the model itself" in shown


def test_first_night_says_that_there_is_no_pool():
    assert "No pool yet" in drawn(replace(TRIED, pool_version=None, group=None, scheme="none"))


def test_of_a_servers_text_nothing_is_said_of_drafts():
    shown = drawn(replace(TRIED, pool_version=None, group=None, stats=replace(STATS, num_steps=0, num_drafted=0)))
    assert "No pool yet" not in shown and "draft token" not in shown and "120 tokens; 240 tokens/s" in shown


def test_text_that_cannot_be_parsed_says_why():
    shown = " ".join(drawn(replace(TRIED, fields=None, problem="unparsable: no aspect")).split())
    assert "text was not accepted (unparsable: no aspect). Try another decoding.endpoint.model or knowledge." in shown


def test_no_steps_and_no_text_are_drawn_too():
    shown = drawn(replace(TRIED, spans=[], stats=DecodingStats(), fields={}))
    assert "0 tokens; – tokens/s" in shown


@pytest.mark.parametrize("code", ["\x1b[2J", "\x9b31m"])
def test_control_characters_of_the_data_do_not_reach_the_terminal(code):
    tried = replace(TRIED, prompt=f"a\nb\tc é{code}", spans=[Span(code, "pool")], fields={code: code}, group=code)
    assert code not in drawn(tried) and "c é\ufffd" in drawn(tried)
