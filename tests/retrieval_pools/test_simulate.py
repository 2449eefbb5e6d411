"""Simulations on planted texts, whose acceptance is known beforehand."""

from dataclasses import replace

import numpy as np
import pytest

from retrieval_pools.calibrate import calibrate
from retrieval_pools.calibration_table import IDENTITY_TABLE
from retrieval_pools.estimates import Bootstrap
from retrieval_pools.pool import DEFAULT_POOL_ESCAPE
from retrieval_pools.recommendation import recommend
from retrieval_pools.reliability import reliability
from retrieval_pools.replay import DraftOptions, ReplayText
from retrieval_pools.settings import PoolSettings
from retrieval_pools.simulate import CalibrationTexts, DraftSetting, Grouping, PoolCorpus, Simulator
from retrieval_pools.sources import SOURCE_NAMES
from retrieval_pools.step_cost import StepCost
from retrieval_pools.studies import FULL_TREES, Findings, Trial, best_speed, group_counts, plan_trials

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


def test_what_was_nearly_written_is_drafted_where_it_was_recorded(tmp_path):
    nearly = np.where(np.arange(20) == 10, 77, -1).astype(np.int32)
    held_back = [ReplayText(PROMPT, np.where(nearly >= 0, nearly, TEXT).astype(np.int32))]
    entity_ids, whole = list(range(8)), Grouping(["all"] * 8, ["all"])
    off = replace(FULL, sources=("pool",), max_draft_tokens=64)
    on = off.with_pool(alternatives=True, alternative_weight=1.0)
    found = {}
    for name, alternatives in (("recorded", [nearly] * 7 + [None]), ("not", None)):
        corpus = PoolCorpus("item", [TEXT] * 8, entity_ids, alternatives)
        simulated = Simulator(corpus, held_back, {"whole": whole}, tmp_path / name)
        found[name] = [int(simulated.replay(one).num_accepted.sum()) for one in (off, on)]
        assert all(trial.setting.pool.alternatives for trial in plan_trials(on, simulated))
    assert found["not"] == [found["recorded"][0]] * 2
    assert found["recorded"][1] > found["recorded"][0]


def test_without_a_source_that_knows_the_text_nothing_is_accepted(identical):
    tally = identical.replay(replace(FULL, sources=("prompt", "output")))
    assert tally.num_steps.tolist() == [21.0] * 8
    assert tally.num_accepted.sum() == 0


def test_previous_texts_are_given_to_those_that_have_one_and_to_no_other(identical):
    assert identical.num_with_previous == 1
    own = replace(FULL, sources=("previous",))
    assert identical.replay(own).num_accepted.sum() == 0
    tally = identical.replay(own, with_previous=True)
    assert len(tally) == 1
    assert tally.num_accepted.tolist() == [16.0]  # its previous text is the same


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
    found = recommend([dialects], [trials], BASE)
    assert found.changes[0].value.startswith("good")
    assert found.holds and found.gain.value > 1.1 and len(found.gains) == 1


def test_what_only_drafts_more_is_not_recommended_where_drafts_are_dear(dialects):
    base = replace(BASE.with_pool(pool_escape_per_token=50.0), min_acceptance=0.1)
    trials = [Trial("pool_escape_per_token", "bold", base.with_pool(pool_escape_per_token=0.01))]
    free = recommend([dialects], [trials], base)
    dear = recommend([dialects], [trials], base, speed=lambda sums: sums.tokens_per_step / (1 + sums.mean_drafted))
    assert free.changes and free.drafted_ratio > 1
    assert not dear.changes and dear.drafted_ratio == 1


def test_the_budget_is_chosen_before_what_is_drafted_with_it(dialects):
    trials = plan_trials(BASE, dialects)
    found = recommend([dialects], [trials], BASE, speed=lambda sums: sums.tokens_per_step / (1 + sums.mean_drafted))
    assert found.changes[0].study == "min_acceptance" and found.drafted_ratio < 1
    assert found.setting.min_acceptance == found.changes[0].setting.min_acceptance


def test_nothing_is_recommended_where_nothing_helps(identical):
    trials = plan_trials(FULL, identical)
    found = recommend([identical], [trials], FULL)
    assert found.changes == () and not found.holds
    assert found.gain.value == 1


def test_every_trial_is_compared_with_the_configured_setting_on_the_same_texts(dialects):
    seen = []
    trials = plan_trials(BASE, dialects)
    findings = Findings(dialects, trials, on_trial=seen.append)
    assert seen == trials
    assert len({(trial.study, trial.value, trial.with_previous) for trial in trials}) == len(trials)
    configured = findings.of("configured")[0]
    assert configured.gain.value == configured.gain.low == configured.gain.high == 1
    for outcome in findings.outcomes:
        ratio = outcome.tokens_per_step.value / configured.tokens_per_step.value
        assert outcome.gain.value == pytest.approx(ratio)
        assert outcome.precision * outcome.mean_drafted == pytest.approx(outcome.mean_accepted.value)


def test_the_best_budget_depends_on_what_a_token_costs(dialects):
    findings = Findings(dialects, [trial for trial in plan_trials(BASE, dialects) if trial.study != "grouping"])

    def best(seconds_at_100: float) -> str:
        points = [{"batch_size": 1, "num_tokens": n, "seconds": s} for n, s in ((1, 0.01), (100, seconds_at_100))]
        return best_speed(findings.speeds(StepCost.model_validate({"steps": points}), [1]), 1)

    free, dear = best(0.01), best(1.0)
    assert free.budget == "draft tokens 64"
    assert dear.study == "min_acceptance" and float(dear.value) >= 0.2
    assert free.speed_up.value > dear.speed_up.value


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
    pool = calibrated.pool(BASE)
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
    other = BASE.with_pool(
        pool_escape_per_token=calibrated.pool(BASE).fitted_escape
    )  # the same, but with curves of its own
    assert not np.array_equal(calibrated.pool(other).acceptance_table, calibrated.pool(BASE).acceptance_table)
    bootstrap = Bootstrap(40, 0)
    gain = bootstrap.gain(calibrated.replay(other), calibrated.replay(BASE))
    assert gain.value == pytest.approx(1, abs=0.02)


def test_estimates_of_a_calibrated_simulation_hold(calibrated, dialects):
    options = DraftOptions(16, 0.001, use_prompt=False, use_output=False, use_previous=False)
    timid = BASE.with_pool(pool_escape_per_token=50.0)  # believes others too little

    def error(simulated: Simulator) -> float:
        return reliability([(simulated.pool(timid), calibrated.held_back)], options).expected_calibration_error

    assert error(calibrated) < error(dialects)


def test_one_text_calibrates_nothing(dialects, tmp_path):
    calibration = CalibrationTexts(dialects.held_back[:1], BASE)
    lone = Simulator(dialects.corpus, dialects.held_back, dialects.groupings, tmp_path / "lone", 0, calibration)
    assert lone.num_calibration_texts == 0
    assert lone.pool(BASE).acceptance_table is IDENTITY_TABLE
