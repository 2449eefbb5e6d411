"""The summary and the report name a side that accepts notably less than its budget was chosen for."""

import copy

import pytest
from manifest_fixture import figures_of, manifest_of, night_manifest, night_of

from laserbatch.jobs.commands.nightly import night_counts
from laserbatch.jobs.gates import MAX_SHARE_MISSING, MIN_STEPS
from laserbatch.jobs.report.page import render_page
from laserbatch.jobs.report.sides import side_warnings


@pytest.fixture
def manifest() -> dict:
    return night_manifest()


def with_forecast(side_data: dict, share: float) -> dict:
    """A side that accepted the given share of its forecast."""
    side_data = copy.deepcopy(side_data)
    stats = side_data["stats"]
    side_data["budget"]["forecast"]["tokens_per_step"] = 1 + stats["num_accepted"] / stats["num_steps"] / share
    return side_data


def warnings_of(side_data: dict, **options) -> list[str]:
    return side_warnings(figures_of(side_data), {"decoding": {"drafters": [*options], "drafter_options": options}})


@pytest.mark.parametrize(("share", "is_said"), [(1.3, False), (0.81, False), (0.79, True), (0.1, True)])
def test_only_notably_less_than_forecast_is_said(manifest, share, is_said):
    side = with_forecast(manifest["sides"]["user"], share)
    counts = night_counts(night_of(side))["users"]
    assert ("warning" in counts) is is_said
    manifest["sides"]["user"] = side
    page = render_page(manifest_of(manifest))
    assert ("laserbatch pools rebuild" in page) is is_said
    assert "Draft budgets" in page and "the fastest in replays" in page
    if is_said:
        assert "texts may have changed since" in counts["warning"]
        assert f"{1 - share:.0%} less" in counts["warning"] and f"{MAX_SHARE_MISSING:.0%}" in counts["warning"]


def test_texts_that_role_marks_ended_are_said_with_the_tokens_that_were_written_in_vain(manifest):
    side = with_forecast(manifest["sides"]["user"], 1.0)
    assert not warnings_of(side)
    side["stats"] |= {"role_marks": {"### Human:": 2, "<|end|>": 3}, "num_invented": 71}
    (warning,) = warnings_of(side)
    assert "5 of" in warning and "### Human: (2), <|end|> (3)" in warning and "71 tokens" in warning
    assert "generation_config.json" in warning


def test_thoughts_that_were_cut_are_counted(manifest):
    side = with_forecast(manifest["sides"]["user"], 1.0)
    side["stats"] |= {"num_thinking": 4, "num_thought_tokens": side["stats"]["num_tokens"]}
    (warning,) = warnings_of(side)
    assert warning.startswith("4 of") and "50 % of what was written" in warning and "decoding.thinking" in warning


def test_few_steps_say_nothing(manifest):
    side = with_forecast(manifest["sides"]["user"], 0.1)
    side["stats"] |= {"num_steps": MIN_STEPS - 1, "num_accepted": 1}
    assert not warnings_of(side)


def test_no_forecast_and_no_drafts_say_nothing(manifest):
    side = with_forecast(manifest["sides"]["user"], 0.1)
    assert warnings_of(side)
    budget = side["budget"]
    for without in (None, budget | {"max_draft_tokens": 0}, budget | {"forecast": {"reason": "nothing was replayed"}}):
        assert not warnings_of(side | {"budget": without})
    assert not warnings_of(side | {"stats": side["stats"] | {"num_steps": 0}})
    del manifest["sides"]["user"]["budget"], manifest["sides"]["item"]["budget"]
    assert "Draft budgets" not in render_page(manifest_of(manifest))


def test_draft_models_that_drafted_nothing_are_said(manifest):
    side, trained = with_forecast(manifest["sides"]["user"], 1.0), {"models": ["small"]}
    assert not warnings_of(side, trained=trained)
    side["stats"]["drafted_by_source"]["model"] = 0
    (warning,) = warnings_of(side, trained=trained)
    assert "drafted nothing" in warning and "longer than their context" in warning
    assert not warnings_of(side, trained={"models": []})
