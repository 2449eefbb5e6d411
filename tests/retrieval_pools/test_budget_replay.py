"""Replays under many budgets at once: the same counts as one budget at a time, whatever the texts and the pool."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_replay import NO_TOKENS, grammar_texts

from laserbatch.retrieval_pools.calibration.calibrate import GRID, budget_curve, calibrate, replay_budgets
from laserbatch.retrieval_pools.calibration.replay import ReplayText, replay
from laserbatch.retrieval_pools.draft import DraftOptions
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.calibration_record import DRAFT_TOKENS, MIN_ACCEPTANCES, SIZE_KNOTS


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    """The same texts without and with a calibration."""
    folder = tmp_path_factory.mktemp("pool") / "item"
    texts = map(PoolText, grammar_texts(60, 40, seed=0))
    pool = build_pool(texts, folder, side="item", tokenizer_hash="t", model_id="m")
    held_back = [ReplayText(NO_TOKENS, text) for text in grammar_texts(20, 40, seed=1)]
    return pool, pool.with_calibration(calibrate(pool, held_back))


def assert_as_one_at_a_time(pool, text: ReplayText, options: DraftOptions, budgets) -> None:
    num_at_knots = replay_budgets(pool, text, options, budgets)
    for number, (size, least) in enumerate(budgets):
        slow = replay(pool, [text], replace(options, max_nodes=size, min_acceptance=least))
        assert num_at_knots[number].sum() == pytest.approx(slow.num_steps[0])
        assert num_at_knots[number] @ SIZE_KNOTS == pytest.approx(slow.num_drafted[0])


@pytest.mark.parametrize("is_calibrated", [False, True])
@pytest.mark.parametrize("has_previous", [False, True])
def test_the_whole_grid_is_as_one_budget_at_a_time(pools, is_calibrated, has_previous):
    prompt, text, previous = grammar_texts(3, 30, seed=2)
    replayed = ReplayText(prompt, text, previous if has_previous else None)
    assert_as_one_at_a_time(pools[is_calibrated], replayed, DraftOptions(), GRID)


@given(data=st.data())
def test_any_budgets_on_any_text_are_as_one_budget_at_a_time(pools, data):
    tokens = st.lists(st.integers(0, 20), max_size=25).map(lambda ids: np.array(ids, np.int32))
    text_ids = data.draw(tokens)
    is_form = st.lists(st.booleans(), min_size=len(text_ids), max_size=len(text_ids)).map(lambda of: np.array(of, bool))
    text = ReplayText(data.draw(tokens), text_ids, data.draw(st.none() | tokens), None, data.draw(st.none() | is_form))
    options = DraftOptions(
        use_prompt=data.draw(st.booleans()),
        use_output=data.draw(st.booleans()),
        use_previous=data.draw(st.booleans()),
    )
    budget = st.tuples(st.integers(1, 64), st.sampled_from(MIN_ACCEPTANCES))
    budgets = data.draw(st.lists(budget, min_size=1, max_size=4))
    assert_as_one_at_a_time(data.draw(st.sampled_from([None, *pools])), text, options, budgets)


def test_a_curve_says_of_both_kinds_of_text_what_replays_say(pools):
    texts = grammar_texts(24, 30, seed=3)
    replayed = [ReplayText(NO_TOKENS, text, texts[0] if number % 2 else None) for number, text in enumerate(texts)]
    curve = budget_curve(pools[1], replayed)
    assert curve.sources == ("previous", "prompt", "output", "pool")
    assert (curve.new.num_texts, curve.changed.num_texts) == (24, 12)
    for kind, of_kind, use_previous in ((curve.new, replayed, False), (curve.changed, replayed[1::2], True)):
        assert len(kind.cells) == len(DRAFT_TOKENS) * len(MIN_ACCEPTANCES)
        for cell in kind.cells[::17]:
            slow = replay(
                pools[1], of_kind, DraftOptions(cell.max_draft_tokens, cell.min_acceptance, use_previous=use_previous)
            )
            assert cell.tokens_per_step == pytest.approx(1 + slow.mean_accepted, abs=1e-4)
            assert cell.mean_drafted == pytest.approx(slow.num_drafted.sum() / slow.num_steps.sum(), abs=2e-3)


def test_what_the_form_appends_takes_no_step_and_counts_as_accepted(pools):
    text_ids = grammar_texts(1, 30, seed=7)[0]
    is_form = np.zeros(len(text_ids), bool)
    is_form[[0, 1, 7, 8, 9]] = True
    text = ReplayText(NO_TOKENS, text_ids, None, None, is_form)
    plain = replay(None, [text], DraftOptions(use_prompt=False, use_output=False))
    assert (plain.num_steps, plain.num_drafted, plain.num_accepted) == (len(text_ids) - 4, 0, 5)
    drafted = replay(pools[0], [text])
    assert drafted.num_steps + drafted.num_accepted == len(text_ids) + 1
    curve = budget_curve(pools[0], [text])
    assert curve.new.plain_tokens_per_step == (len(text_ids) + 1) / (len(text_ids) - 4)
    assert min(cell.tokens_per_step for cell in curve.new.cells) >= curve.new.plain_tokens_per_step - 1e-4


def test_too_few_changed_texts_and_sources_that_are_off_have_no_curve(pools):
    texts = [ReplayText(NO_TOKENS, text, text) for text in grammar_texts(12, 10, seed=4)]
    assert budget_curve(pools[1], texts[:9]).changed is None
    without = budget_curve(pools[1], texts, DraftOptions(use_previous=False, use_prompt=False))
    assert without.changed is None and without.sources == ("output", "pool")


def test_a_curve_survives_the_manifest_of_its_pool(pools):
    calibration = pools[1].manifest.calibration or calibrate(
        pools[0], [ReplayText(NO_TOKENS, text) for text in grammar_texts(6, 10, seed=5)]
    )
    curve = budget_curve(pools[1], [ReplayText(NO_TOKENS, text) for text in grammar_texts(4, 10, seed=6)])
    stored = calibration.model_copy(update={"budgets": curve})
    assert type(stored).model_validate_json(stored.model_dump_json()).budgets == curve
