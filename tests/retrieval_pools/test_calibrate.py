"""Calibration: curves find planted rates, use similar nodes where data are missing, and hold for other texts."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from entities import world_entities
from hypothesis import given
from hypothesis import strategies as st
from sample_exercises import make_example

from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL, load_tokenizer
from laserbatch.retrieval_pools.calibration.calibrate import (
    MIN_TEXTS,
    calibrate,
    fit_sources,
    num_held_back,
    spread_positions,
)
from laserbatch.retrieval_pools.calibration.replay import NODE, ReplayText, replay, replay_nodes
from laserbatch.retrieval_pools.draft import DraftOptions
from laserbatch.retrieval_pools.drafting.estimate import COUNT_KNOTS, CURVES_SHAPE, IDENTITY_CURVES, NUM_PLACES
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.calibration_record import Calibration
from laserbatch.retrieval_pools.sources import SOURCE_OUTPUT, SOURCE_POOL, SOURCE_PREVIOUS, SOURCE_PROMPT

SHARES = COUNT_KNOTS[6:-1].astype(float)  # curves are exact at these


def invented_nodes(num_nodes: int, acceptance, seed: int = 0, num_kinds: int = 1) -> np.ndarray:
    """Nodes of pool and output, accepted with probability `acceptance(source, kind of token, relative_count)`."""
    rng = np.random.default_rng(seed)
    source = rng.choice(np.array([SOURCE_POOL, SOURCE_OUTPUT], np.uint8), num_nodes)
    kind = rng.integers(0, num_kinds, num_nodes).astype(np.int32)
    relative_count = rng.random(num_nodes, np.float32)
    nodes = np.ones(num_nodes, NODE)
    nodes["source"], nodes["kind"], nodes["relative_count"] = source, kind * NUM_PLACES, relative_count
    nodes["is_accepted"] = rng.random(num_nodes) < acceptance(source, kind, relative_count)
    return nodes


def raised(acceptance: np.ndarray, factor: np.ndarray | float) -> np.ndarray:
    """The acceptance with odds multiplied by `factor`."""
    return acceptance * factor / (1 - acceptance + acceptance * factor)


def curves_of(sources):
    return Calibration(pool_escape=1.0, num_texts=1, num_tokens=0, sources=sources).curves


def test_a_planted_acceptance_is_found_of_every_source_and_kind():
    factors = np.array([0.3, 1.0, 4.0])

    def planted(source, kind, count):
        return raised(np.where(source == SOURCE_OUTPUT, count**2, count / (2 - count)), factors[kind])

    curves = curves_of(fit_sources(invented_nodes(100_000, planted, num_kinds=3)))
    for source in (SOURCE_POOL, SOURCE_OUTPUT):
        for kind in range(3):
            fitted = curves[source, kind * NUM_PLACES, 6:-1]
            assert np.abs(fitted - planted(source, kind, SHARES)).max() < 0.03
    assert curves.shape == CURVES_SHAPE and curves.dtype == np.float32
    for source in (SOURCE_PREVIOUS, SOURCE_PROMPT):
        assert np.array_equal(curves[source], IDENTITY_CURVES[source])  # there was no previous text


def test_a_place_in_the_draft_is_worth_as_much_for_every_kind_of_token():
    factors = np.linspace(0.2, 5.0, NUM_PLACES)
    nodes = invented_nodes(200_000, lambda source, kind, count: count, num_kinds=2)
    of_place = np.random.default_rng(1).integers(0, NUM_PLACES, len(nodes))
    nodes["kind"] += of_place
    nodes["is_accepted"] = np.random.default_rng(2).random(len(nodes)) < raised(
        nodes["relative_count"].astype(float), factors[of_place]
    )
    curves = curves_of(fit_sources(nodes))
    for kind in (0, 1):
        for place in range(NUM_PLACES):
            fitted = curves[SOURCE_POOL, kind * NUM_PLACES + place, 6:-1]
            assert np.abs(fitted - raised(SHARES, factors[place])).max() < 0.04


def test_curves_never_fall_even_where_acceptance_does():
    curves = curves_of(fit_sources(invented_nodes(20_000, lambda source, kind, count: 0.9 - 0.8 * count)))
    assert (np.diff(curves, axis=-1) >= 0).all()
    assert curves.min() > 0
    assert curves[[SOURCE_POOL, SOURCE_OUTPUT]].max() < 1  # no acceptance is certain


def test_a_kind_leans_on_the_same_kind_of_another_source_and_few_of_it_hardly_move_it():
    usual = invented_nodes(40_000, lambda source, kind, count: count, num_kinds=2)
    usual["kind"][usual["source"] != SOURCE_OUTPUT] = 0
    usual["is_accepted"] |= (usual["source"] == SOURCE_OUTPUT) & (usual["kind"] == NUM_PLACES)
    curves = curves_of(fit_sources(usual))
    before, alike = (np.interp(0.5, COUNT_KNOTS, curves[SOURCE_POOL, kind * NUM_PLACES]) for kind in (0, 1))
    assert before == pytest.approx(0.5, abs=0.03)
    assert alike > 0.8  # the pool had no node of that kind, and the output's were accepted

    def acceptance(num_nodes):
        rare = invented_nodes(num_nodes, lambda source, kind, count: 1.0 + 0 * count, 1)
        rare["kind"], rare["relative_count"] = 7 * NUM_PLACES, 0.5
        curves = curves_of(fit_sources(np.concatenate([usual[usual["kind"] == 0], rare])))
        return float(np.interp(0.5, COUNT_KNOTS, curves[SOURCE_POOL, 7 * NUM_PLACES]))

    of_few, of_many = acceptance(1), acceptance(200)
    assert of_few < 0.93 < 0.95 < of_many


def test_where_all_was_accepted_or_nothing_nothing_can_be_told_apart():
    nodes = invented_nodes(50, lambda source, kind, count: 1.0 + 0 * count)
    assert fit_sources(nodes) == fit_sources(nodes[:0]) == ()
    assert np.array_equal(curves_of(()), IDENTITY_CURVES)


@given(st.integers(0, 2_000), st.integers(0, 500), st.integers(0, 5))
def test_positions_are_spread_evenly(num_texts, num_chosen, seed):
    positions = spread_positions(num_texts, num_chosen, seed)
    assert len(positions) == min(num_texts, num_chosen)
    assert len(set(positions.tolist())) == len(positions)
    if len(positions) > 1:
        steps = np.diff(positions)
        assert steps.min() >= num_texts // num_chosen if num_chosen <= num_texts else steps.min() == 1
        assert steps.max() - steps.min() <= 1
        assert positions[0] >= 0 and positions[-1] < num_texts


def test_small_pools_hold_nothing_back_and_others_a_fifth_at_most():
    assert num_held_back(MIN_TEXTS - 1, 400) == 0
    assert num_held_back(MIN_TEXTS, 400) == MIN_TEXTS // 5
    assert num_held_back(10_000, 400) == 400
    assert num_held_back(10_000, 0) == 0


@pytest.fixture(scope="module")
def documents() -> list[ReplayText]:
    """Prompts and texts about items of a sample world, in the form of the bundled model's training."""
    tokenizer = load_tokenizer(SAMPLE_MODEL)
    _, items = world_entities(11, 2, 700)
    rng = np.random.default_rng(0)
    examples = [make_example(item, tokenizer, rng) for item in items]
    return [ReplayText(example.prompt_ids, example.answer_ids[:-1]) for example in examples]


def pool_of(documents: list[ReplayText], folder):
    texts = (PoolText(document.text_ids) for document in documents)
    return build_pool(texts, folder, side="item", tokenizer_hash="t", model_id="m")


@pytest.fixture(scope="module")
def pool(documents, tmp_path_factory):
    return pool_of(documents[400:], tmp_path_factory.mktemp("pool") / "item")


@pytest.fixture(scope="module")
def calibration(pool, documents) -> Calibration:
    return calibrate(pool, documents[:200])


def calibration_error(pool, texts: list[ReplayText], options: DraftOptions) -> float:
    """Mean distance of estimates from the share accepted, in 20 bins of equal width (Guo et al. 2017, Eq. 3)."""
    nodes = replay_nodes(pool, texts, options)
    estimates = np.exp(nodes["log_acceptance"].astype(np.float64))
    bin_of = np.minimum((estimates * 20).astype(np.int64), 19)
    return float(np.abs(np.bincount(bin_of, nodes["is_accepted"] - estimates)).sum() / len(nodes))


def test_estimates_hold_on_texts_that_nothing_was_fitted_to(pool, documents, calibration):
    other = documents[200:400]
    for options in (DraftOptions(), DraftOptions(32, 0.01), DraftOptions(64, 0.0)):
        calibrated = calibration_error(pool.with_calibration(calibration), other, options)
        assert calibrated < 0.03
        if options.min_acceptance > 0:  # else most nodes are surely rejected
            assert calibrated < calibration_error(pool, other, options)


def test_trees_in_calibrated_order_are_accepted_further(pool, documents, calibration):
    options, other = DraftOptions(16, 1e-3), documents[200:400]
    calibrated = replay(pool.with_calibration(calibration), other, options)
    assert calibrated.mean_accepted > replay(pool, other, options).mean_accepted


def test_a_calibration_says_what_it_was_made_of(documents, calibration):
    assert calibration.num_texts == 200
    assert calibration.num_tokens == sum(len(document.text_ids) for document in documents[:200])
    assert {source.source for source in calibration.sources} == {SOURCE_PROMPT, SOURCE_OUTPUT, SOURCE_POOL}


def test_the_same_texts_give_the_same_calibration_also_from_json(pool, documents, calibration):
    assert calibrate(pool, documents[:200]) == calibration
    assert calibrate(pool.with_calibration(calibration), documents[:200]) == calibration  # starts anew
    again = Calibration.model_validate_json(calibration.model_dump_json())
    assert again == calibration and np.array_equal(again.curves, calibration.curves)


def test_estimates_hold_of_texts_with_an_earlier_one_too(pool, documents):
    rng = np.random.default_rng(2)

    def earlier(text: np.ndarray) -> np.ndarray:
        """A random two thirds of the tokens."""
        return text[np.sort(rng.choice(len(text), 2 * len(text) // 3, replace=False))]

    changed = [replace(entry, previous_ids=earlier(entry.text_ids)) for entry in documents[:240]]
    calibration = calibrate(pool, changed[:120])
    assert SOURCE_PREVIOUS in {entry.source for entry in calibration.sources}
    held, plain = (
        calibration_error(entry, changed[120:], DraftOptions()) for entry in (pool.with_calibration(calibration), pool)
    )
    assert held < 0.05 and held < plain


def test_one_text_is_refused(pool, documents):
    with pytest.raises(ValueError, match="1 texts to calibrate with"):
        calibrate(pool, documents[:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["goodreads", "reki"])
def test_estimates_hold_on_texts_of_large_models(name, shared_data, tmp_path):
    """Book descriptions and long answers about reader groups; pool, fit and check share no text."""
    file, size = {"goodreads": ("item_knowledge", 400), "reki": ("knowledge", 180)}[name]
    texts = pq.read_table(shared_data / name / f"{file}.parquet", columns=["text"])["text"].to_pylist()
    texts = sorted(set(texts))
    np.random.default_rng(0).shuffle(texts)
    tokenizer = load_tokenizer(SAMPLE_MODEL)
    ids = tokenizer(texts[: 2 * size], add_special_tokens=False)["input_ids"]
    documents = [ReplayText(np.empty(0, np.int32), np.array(text_ids, np.int32)) for text_ids in ids]
    pool = pool_of(documents[size // 3 :], tmp_path / "pool")
    fitted, other = documents[: size // 6], documents[size // 6 : size // 3]
    calibrated = pool.with_calibration(calibrate(pool, fitted))
    assert calibration_error(calibrated, other, DraftOptions()) < 0.03
