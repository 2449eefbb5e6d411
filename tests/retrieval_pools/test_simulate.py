"""Simulations on planted texts, whose acceptance is known beforehand."""

from dataclasses import replace

import numpy as np
import pytest

from laserbatch.retrieval_pools.calibration.budget_replay import budget_curve
from laserbatch.retrieval_pools.calibration.calibrate import calibrate
from laserbatch.retrieval_pools.calibration.estimates import Bootstrap
from laserbatch.retrieval_pools.calibration.reliability import reliability
from laserbatch.retrieval_pools.calibration.replay import DraftOptions, ReplayText, replay
from laserbatch.retrieval_pools.drafting.calibration_table import IDENTITY_TABLE
from laserbatch.retrieval_pools.index.pool import DEFAULT_POOL_ESCAPE
from laserbatch.retrieval_pools.settings import PoolSettings
from laserbatch.retrieval_pools.simulating.recommendation import BUDGET, recommend
from laserbatch.retrieval_pools.simulating.simulate import (
    CalibrationTexts,
    DraftSetting,
    Grouping,
    PoolCorpus,
    Simulator,
)
from laserbatch.retrieval_pools.simulating.studies import Findings, Trial, group_counts, plan_trials
from laserbatch.retrieval_pools.sources import SOURCE_NAMES

FULL_TREES = 0.001  # low enough that the number of draft tokens alone bounds a tree
TEXT = np.arange(20, dtype=np.int32)
PROMPT = np.array([90, 91], np.int32)
FULL = DraftSetting("whole", max_draft_tokens=4, min_acceptance=FULL_TREES)


def simulator(folder, pool, held_back, groupings=None) -> Simulator:
    whole = Grouping(["all"] * len(pool), ["all"] * len(held_back))
    corpus = PoolCorpus("item", pool, [f"e{number}" for number in range(len(pool))])
    return Simulator(corpus, held_back, {"whole": whole} | (groupings or {}), folder)


@pytest.fixture
def identical(tmp_path) -> Simulator:
    """Forty equal texts in the pool, eight more of the same held back, one of them with its previous text."""
    held_back = [ReplayText(PROMPT, TEXT, TEXT if number == 0 else None) for number in range(8)]
    return simulator(tmp_path, [TEXT] * 40, held_back)


def test_of_identical_texts_every_draft_is_accepted(identical):
    tally = identical.replay(FULL)
    # 4 accepted and a bonus: at 0, 5, 10 and 15 of 20 tokens; then the step in which only the end is left
    assert tally.num_steps.tolist() == [5.0] * 8
    assert tally.num_accepted.tolist() == [16.0] * 8
    assert Bootstrap(8, 0).tokens_per_step(tally).value == pytest.approx(1 + 16 / 5)


def test_without_a_source_that_knows_the_text_nothing_is_accepted(identical):
    tally = identical.replay(replace(FULL, sources=("prompt", "output")))
    assert tally.num_steps.tolist() == [21.0] * 8
    assert tally.num_accepted.sum() == 0


def test_previous_texts_are_given_to_those_that_have_one_and_to_no_other(identical):
    assert identical.num_with_previous == 1
    own = replace(FULL, sources=("previous",))
    assert identical.replay(own).num_accepted.sum() == 0
    tally = identical.replay(own, "changed")
    assert len(tally) == 1
    assert tally.num_accepted.tolist() == [16.0]  # its previous text is the same


def test_a_night_gives_previous_texts_to_those_that_have_one_in_their_share(tmp_path):
    """New texts grow by a token a step, changed ones by five: as many steps in all as their shares say."""
    others = [np.arange(100 * number, 100 * number + 20, dtype=np.int32) for number in range(1, 41)]
    held_back = [ReplayText(PROMPT, TEXT, TEXT if number < 10 else None) for number in range(40)]
    whole = Grouping(["all"] * 40, ["all"] * 40)
    corpus, own = PoolCorpus("item", others, range(40)), replace(FULL, sources=("previous",))
    for share in (0.0, 0.25, 0.8, 1.0):
        mixed = Simulator(corpus, held_back, {"whole": whole}, tmp_path / str(share), share_changed=share)
        assert mixed.kinds == ("new", "changed", "mixed")
        tally = mixed.replay(own, "mixed")
        assert tally.num_steps.sum() == pytest.approx(40 * (share * 5 + (1 - share) * 21))
        assert tally.num_accepted.sum() == pytest.approx(40 * share * 16)
        trials = plan_trials(own, mixed)
        assert {trial.kind for trial in trials if trial.study not in ("configured", "sources")} == {"mixed"}
    few = Simulator(corpus, held_back[9:], {"whole": whole}, tmp_path / "few", share_changed=0.5)
    assert few.kinds == ("new",)


def test_a_pool_of_fewer_texts_is_part_of_a_larger_one_and_accepts_no_more(tmp_path):
    rng = np.random.default_rng(0)
    templates = rng.integers(0, 50, (20, 30)).astype(np.int32)
    texts = [templates[number] for number in rng.integers(0, 20, 60)]
    held_back = [ReplayText(PROMPT, text) for text in texts[40:]]
    simulated = simulator(tmp_path, texts[:40], held_back)
    few, many = (simulated.replay(replace(FULL, num_pool_texts=size)).num_accepted.sum() for size in (2, None))
    assert few < many
    bootstrap = Bootstrap(20, 0)
    measured = bootstrap.tokens_per_step(simulated.replay(FULL)).value
    extrapolated = simulated.full_pool_tokens_per_step(FULL, 60, bootstrap)
    halved = bootstrap.tokens_per_step(simulated.replay(replace(FULL, num_pool_texts=20))).value
    assert extrapolated.value == pytest.approx(measured + np.log2(1.5) * (measured - halved))
    assert simulated.full_pool_tokens_per_step(FULL, 81, bootstrap) is None


@pytest.fixture
def dialects(tmp_path) -> Simulator:
    """Two dialects that share every other word: to know the dialect leaves four words to choose from, not eight.

    The groupings "good" and "random" have two groups each.
    """
    rng = np.random.default_rng(0)

    def text(dialect: int) -> np.ndarray:
        words = rng.integers(4 * dialect, 4 * dialect + 4, 16)
        return np.column_stack([50 + np.arange(16), words]).reshape(-1).astype(np.int32)

    dialect_of = [number % 2 for number in range(240)]
    texts = [text(dialect) for dialect in dialect_of]
    good = [f"dialect{dialect}" for dialect in dialect_of]
    chance = [f"random{int(rng.integers(2))}" for _ in texts]
    groupings = {"good": Grouping(good[:160], good[160:]), "random": Grouping(chance[:160], chance[160:])}
    held_back = [ReplayText(PROMPT, text) for text in texts[160:]]
    return simulator(tmp_path, texts[:160], held_back, groupings)


BASE = DraftSetting("whole", PoolSettings(max_match_tokens=1), ("pool",), max_draft_tokens=4, min_acceptance=0.001)


def test_a_grouping_that_helps_is_found_recommended_and_holds(dialects):
    trials = plan_trials(BASE, dialects)
    findings = Findings(dialects, trials)
    gains = {outcome.trial.value: outcome for outcome in findings.of("grouping")}
    assert gains["whole"].verdict == "configured"
    assert gains["good, walls"].verdict == "better" and gains["good, walls"].gain.value > 1.1
    assert gains["random, walls"].verdict != "better"
    found = recommend([dialects], [trials], [BASE])
    assert found.changes[0].value.startswith("good")
    assert found.holds and found.gain.value > 1.1 and len(found.gains) == 1


def test_what_only_drafts_more_is_not_recommended_where_drafts_are_dear(dialects):
    base = replace(BASE.with_pool(pool_escape_per_token=50.0), min_acceptance=0.1)
    trials = [Trial("pool_escape_per_token", "bold", base.with_pool(pool_escape_per_token=0.01))]
    free = recommend([dialects], [trials], [base])
    dear = recommend([dialects], [trials], [base], speed=dear_tokens)
    assert free.changes and free.drafted_ratio > 1
    assert not dear.changes and dear.drafted_ratio == 1


def dear_tokens(sums):
    return sums.tokens_per_step / (1 + sums.mean_drafted)


def test_the_budget_that_a_night_chooses_is_tried_before_what_is_drafted_with_it(dialects):
    trials, chosen = plan_trials(BASE, dialects), BASE.with_budget(64, 0.2)
    found = recommend([dialects], [trials], [BASE], [chosen], speed=dear_tokens)
    assert found.changes[0].study == BUDGET and found.drafted_ratio < 1
    assert (found.settings[0].max_draft_tokens, found.settings[0].min_acceptance) == (64, 0.2)
    worse = recommend([dialects], [trials], [BASE], [BASE.with_budget(64, 0.001)], speed=dear_tokens)
    same = recommend([dialects], [trials], [BASE], [BASE], speed=dear_tokens)
    assert BUDGET not in {trial.study for trial in (*worse.changes, *same.changes)}


def test_sides_may_draft_with_other_budgets_and_change_the_same_options(dialects):
    bases = [BASE, BASE.with_budget(8, 0.05)]
    plans = [plan_trials(base, dialects) for base in bases]
    found = recommend([dialects, dialects], plans, bases)
    assert found.changes[0].value.startswith("good") and len(found.gains) == 2
    assert [setting.grouping for setting in found.settings] == ["good", "good"]
    assert [setting.max_draft_tokens for setting in found.settings] == [4, 8]


def test_without_a_budget_a_text_is_decoded_plainly(dialects):
    tally = dialects.replay(BASE.with_budget(0, 1.0))
    assert tally.num_drafted.sum() == tally.num_accepted.sum() == 0
    assert tally.num_steps.tolist() == [len(text.text_ids) + 1 for text in dialects.held_back]


def test_nothing_is_recommended_where_nothing_helps(identical):
    trials = plan_trials(FULL, identical)
    found = recommend([identical], [trials], [FULL])
    assert found.changes == () and not found.holds
    assert found.gain.value == 1


def test_every_trial_is_compared_with_the_configured_setting_on_the_same_texts(dialects):
    seen = []
    trials = plan_trials(BASE, dialects)
    findings = Findings(dialects, trials, on_trial=seen.append)
    assert seen == trials
    assert len({(trial.study, trial.value, trial.kind) for trial in trials}) == len(trials)
    configured = findings.of("configured")[0]
    assert configured.gain.value == configured.gain.low == configured.gain.high == 1
    for outcome in findings.outcomes:
        ratio = outcome.tokens_per_step.value / configured.tokens_per_step.value
        assert outcome.gain.value == pytest.approx(ratio)
        assert outcome.precision * outcome.mean_drafted == pytest.approx(outcome.mean_accepted.value)


def test_group_counts_leave_texts_in_every_group():
    assert group_counts(7) == ()
    assert group_counts(100) == (2, 4, 8, 16)
    assert len(group_counts(1_000_000)) == 5


def test_the_same_texts_give_the_same_findings(tmp_path, dialects):
    again = Simulator(dialects.corpus, dialects.held_back, dialects.groupings, tmp_path / "again")
    setting = replace(BASE, num_pool_texts=30)
    for one, other in zip(vars(dialects.replay(setting)).values(), vars(again.replay(setting)).values(), strict=True):
        assert one.tolist() == other.tolist()


@pytest.fixture
def calibrated(dialects, tmp_path) -> Simulator:
    """The dialects, with half of what was held back to calibrate with."""
    texts, other = dialects.held_back[:40], dialects.held_back[40:]
    groupings = {
        name: Grouping(one.pool_groups, one.held_back_groups[:40], one.held_back_groups[40:])
        for name, one in dialects.groupings.items()
    }
    calibration = CalibrationTexts(other, BASE)
    return Simulator(dialects.corpus, texts, groupings, tmp_path / "calibrated", calibration=calibration)


def test_the_base_is_calibrated_as_a_pool_of_a_night(calibrated):
    pool = calibrated.night_pool(BASE)
    texts = [replace(text, group="all") for text in calibrated.calibration.texts]
    options = DraftOptions(4, 0.001, use_prompt=False, use_output=False, use_previous=False)
    fitted = calibrate(pool, texts, options)
    assert not np.array_equal(pool.acceptance_table, IDENTITY_TABLE)
    np.testing.assert_array_equal(pool.acceptance_table, fitted.table)
    assert pool.fitted_escape == fitted.pool_escape != DEFAULT_POOL_ESCAPE
    assert calibrated.num_calibration_texts == 40


def test_budgets_and_fewer_sources_share_the_curves_and_what_estimates_otherwise_has_its_own(calibrated):
    base = calibrated.pool(BASE).acceptance_table
    for same in (replace(BASE, max_draft_tokens=16), replace(BASE, min_acceptance=0.2), replace(BASE, sources=())):
        np.testing.assert_array_equal(calibrated.pool(same).acceptance_table, base)
    for other in (
        BASE.with_pool(pool_escape_per_token=50.0),
        replace(BASE, grouping="good"),
        replace(BASE, num_pool_texts=20),
    ):
        assert not np.array_equal(calibrated.pool(other).acceptance_table, base)
    with_output = calibrated.pool(replace(BASE, sources=("pool", "output"))).acceptance_table
    assert not np.array_equal(with_output[SOURCE_NAMES.index("output")], IDENTITY_TABLE[0])


def test_one_more_replay_fits_as_the_whole_calibration_does(calibrated):
    night = calibrated.night_pool(BASE)
    assert not np.array_equal(calibrated.pool(BASE).acceptance_table, night.acceptance_table)
    assert not np.array_equal(calibrated.pool(BASE).path_curves, night.path_curves)
    options = DraftOptions(4, 0.001, use_prompt=False, use_output=False, use_previous=False)
    texts = [replace(text, group="all") for text in calibrated.held_back]
    paces = [1 + replay(pool, texts, options).mean_accepted for pool in (night, calibrated.pool(BASE))]
    assert paces[0] == pytest.approx(paces[1], rel=0.06)  # which of eight equally frequent words are drafted is chance


def test_the_configured_setting_by_another_name_gains_nothing(calibrated):
    other = BASE.with_pool(pool_escape_per_token=calibrated.night_pool(BASE).fitted_escape)
    assert other != BASE
    gain = Bootstrap(40, 0).gain(calibrated.replay(other), calibrated.replay(BASE))
    assert (gain.low, gain.value, gain.high) == (1, 1, 1)


def test_estimates_of_a_calibrated_simulation_hold(calibrated, dialects):
    options = DraftOptions(16, 0.001, use_prompt=False, use_output=False, use_previous=False)
    timid = BASE.with_pool(pool_escape_per_token=50.0)  # believes others too little

    def error(simulated: Simulator) -> float:
        return reliability([(simulated.pool(timid), calibrated.held_back)], options).expected_calibration_error

    assert error(calibrated) < error(dialects)


def test_a_night_finds_with_its_pool_what_every_budget_gains(calibrated):
    curve = calibrated.night_pool(BASE).budgets
    texts = [replace(text, group="all") for text in calibrated.calibration.texts]
    options = DraftOptions(4, 0.001, use_prompt=False, use_output=False, use_previous=False)
    assert curve == budget_curve(calibrated.night_pool(BASE), texts, options)
    assert curve.sources == ("pool",)


def test_one_text_calibrates_nothing(dialects, tmp_path):
    calibration = CalibrationTexts(dialects.held_back[:1], BASE)
    lone = Simulator(dialects.corpus, dialects.held_back, dialects.groupings, tmp_path / "lone", 0, calibration)
    assert lone.num_calibration_texts == 0
    assert lone.pool(BASE).acceptance_table is IDENTITY_TABLE
    assert lone.night_pool(BASE).budgets is None
