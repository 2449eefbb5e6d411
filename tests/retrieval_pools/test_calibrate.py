"""Calibration: curves find what was planted, lean on coarser cells without data, and hold on texts never fitted to."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laserbatch.models.sample_exercises import make_example
from laserbatch.models.train_sample import world_entities
from laserbatch.pipeline.decoding.model.identity import load_tokenizer
from laserbatch.pipeline.decoding.model.load import SAMPLE_MODEL
from laserbatch.retrieval_pools.calibration.calibrate import (
    MIN_TEXTS,
    calibrate,
    fit_path,
    num_held_back,
    spread_positions,
)
from laserbatch.retrieval_pools.calibration.cell_fit import fit_cells, fit_table
from laserbatch.retrieval_pools.calibration.kind_fit import fit_kinds
from laserbatch.retrieval_pools.calibration.reliability import NUM_BINS, reliability, reliability_bins
from laserbatch.retrieval_pools.calibration.replay import DraftOptions, Nodes, ReplayText, pool_steps, replay
from laserbatch.retrieval_pools.drafting.calibration_table import (
    COUNT_KNOTS,
    IDENTITY_KINDS,
    IDENTITY_PATHS,
    IDENTITY_TABLE,
    LENGTH_EDGES,
    NUM_BEFORE,
    TABLE_SHAPE,
    conditional_acceptance,
    kind_acceptance,
    path_acceptance,
)
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.calibration_record import Calibration, kinds_of, paths_of, table_of
from laserbatch.retrieval_pools.sources import SOURCE_OUTPUT, SOURCE_POOL, SOURCE_PREVIOUS, SOURCE_PROMPT

SHARES = np.linspace(0.05, 0.95, 19)


def invented_nodes(num_nodes: int, acceptance, seed: int = 0, sources=(SOURCE_POOL, SOURCE_OUTPUT)) -> Nodes:
    """Nodes that are accepted as often as `acceptance(source, match_length, depth, relative_count)` says."""
    rng = np.random.default_rng(seed)
    source = rng.choice(np.array(sources, np.uint8), num_nodes)
    num_seen = rng.integers(1, 4, num_nodes).astype(np.int32)
    match_length = rng.integers(1, 30, num_nodes).astype(np.int32)
    depth = rng.integers(1, 12, num_nodes).astype(np.int32)
    relative_count = rng.random(num_nodes, np.float32)
    is_accepted = rng.random(num_nodes) < acceptance(source, match_length, depth, relative_count)
    return Nodes(
        source=source,
        num_seen=num_seen,
        match_length=match_length,
        depth=depth,
        relative_count=relative_count,
        token_kind=np.zeros(num_nodes, np.int32),
        log_acceptance=np.log(relative_count + 1e-9),
        is_parent_accepted=np.ones(num_nodes, bool),
        is_verified=np.ones(num_nodes, bool),
        is_accepted=is_accepted,
    )


def curve(table: np.ndarray, source: int, match_length: int, depth: int) -> np.ndarray:
    return np.array([conditional_acceptance(table, source, 2, match_length, depth, share) for share in SHARES])


def test_a_planted_acceptance_is_found_in_every_cell():
    def planted(source, match_length, depth, count):
        of_pool = np.where(match_length >= LENGTH_EDGES[-1], 0.2 + 0.7 * count, count / 2)
        return np.where(source == SOURCE_OUTPUT, count**2, of_pool)

    table = table_of(fit_cells(invented_nodes(1_500_000, planted)))
    for source in (SOURCE_POOL, SOURCE_OUTPUT):
        for match_length in range(1, 30):
            difference = curve(table, source, match_length, 3) - planted(source, match_length, 3, SHARES)
            assert np.abs(difference).max() < 0.06
            assert np.abs(difference).mean() < 0.02


def test_a_table_is_that_of_the_cells():
    for sources in ((SOURCE_POOL, SOURCE_OUTPUT), (SOURCE_PROMPT,)):
        nodes = invented_nodes(3_000, lambda source, length, depth, count: count / 2, sources=sources)
        assert np.array_equal(fit_table(nodes), table_of(fit_cells(nodes)))


def test_curves_never_fall_even_where_acceptance_does():
    nodes = invented_nodes(20_000, lambda source, length, depth, count: 0.9 - 0.8 * count)
    table = table_of(fit_cells(nodes))
    assert (np.diff(table, axis=-1) >= 0).all()
    assert table.min() > 0
    assert table[[SOURCE_POOL, SOURCE_OUTPUT]].max() < 1  # nothing is certain
    assert np.allclose(curve(table, SOURCE_POOL, 5, 3)[4:], 0.5, atol=0.15)  # the best that does not fall


def test_what_was_never_seen_leans_on_what_covers_it():
    nodes = invented_nodes(60_000, lambda source, length, depth, count: count / 2, sources=(SOURCE_POOL,))
    seen = replace(nodes, match_length=np.full(60_000, 1, np.int32), depth=np.full(60_000, 1, np.int32))
    table = table_of(fit_cells(seen))
    assert np.abs(curve(table, SOURCE_POOL, 1, 1) - SHARES / 2).max() < 0.05
    assert np.abs(curve(table, SOURCE_POOL, 1, 9) - SHARES / 2).max() < 0.05  # that of the length
    assert np.abs(curve(table, SOURCE_POOL, 20, 9) - SHARES / 2).max() < 0.05  # that of the source
    for source in (SOURCE_PREVIOUS, SOURCE_PROMPT, SOURCE_OUTPUT):
        assert np.array_equal(table[source], IDENTITY_TABLE[source])  # a first night has no previous text


def test_few_nodes_hardly_move_a_curve_and_many_do():
    usual = invented_nodes(200_000, lambda source, length, depth, count: count, sources=(SOURCE_POOL,))
    usual = usual.where(usual.match_length >= LENGTH_EDGES[-1])

    def acceptance(num_nodes):
        rare = invented_nodes(num_nodes, lambda source, length, depth, count: 1.0 + 0 * count, 1, (SOURCE_POOL,))
        rare = replace(rare, match_length=np.full(num_nodes, 1, np.int32), depth=np.full(num_nodes, 1, np.int32))
        return conditional_acceptance(table_of(fit_cells(Nodes.joined([usual, rare]))), SOURCE_POOL, 2, 1, 1, 0.5)

    found = {num_nodes: acceptance(num_nodes) for num_nodes in (1, 200, 20_000)}
    assert found[1] < 0.55 < found[200] < found[20_000]
    assert found[20_000] > 0.95


def test_only_nodes_behind_accepted_parents_count():
    nodes = invented_nodes(5_000, lambda source, length, depth, count: count)
    lost = replace(nodes, is_parent_accepted=np.zeros(5_000, bool), is_accepted=np.zeros(5_000, bool))
    assert fit_cells(Nodes.joined([nodes, lost])) == fit_cells(nodes)
    assert fit_cells(lost) == ()
    assert np.array_equal(table_of(()), IDENTITY_TABLE)


def test_cells_count_what_they_are_made_of_and_are_surer_with_more():
    nodes = invented_nodes(30_000, lambda source, length, depth, count: count)
    cells = fit_cells(nodes)
    for num_bins in range(4):
        level = [cell for cell in cells if num_known_bins(cell) == num_bins]
        assert sum(cell.num_tried for cell in level) == 30_000
        assert sum(cell.num_accepted for cell in level) == int(nodes.is_accepted.sum())
    middle = np.searchsorted(COUNT_KNOTS, 0.5)
    error_of = {
        (cell.seen_bin, cell.length_bin, cell.depth_bin): cell.standard_errors[middle]
        for cell in cells
        if cell.source == SOURCE_POOL
    }
    assert error_of[None, None, None] < error_of[1, None, None] < error_of[1, 1, None] < error_of[1, 1, 1]


def num_known_bins(cell) -> int:
    return sum(number is not None for number in (cell.seen_bin, cell.length_bin, cell.depth_bin))


def test_kinds_of_tokens_have_curves_over_what_the_cells_say():
    nodes = invented_nodes(200_000, lambda source, length, depth, count: count / 2)
    rng = np.random.default_rng(3)
    kind = rng.integers(0, 3, len(nodes)).astype(np.int32)
    acceptance = nodes.relative_count / 2 * np.array([0.5, 1.0, 1.5])[kind]  # the cells see their mean
    nodes = replace(nodes, token_kind=kind, is_accepted=rng.random(len(nodes)) < acceptance)
    estimates = nodes.relative_count.astype(np.float64) / 2
    kinds = fit_kinds(estimates, nodes.is_accepted, np.ones(len(nodes)), nodes.source, kind)
    assert [(one.source, one.kind) for one in kinds] == [
        (source, kind) for source in (SOURCE_OUTPUT, SOURCE_POOL) for kind in range(3)
    ]
    assert sum(one.num_tried for one in kinds) == len(nodes)
    curves = kinds_of(kinds)[SOURCE_POOL]
    for of_kind, factor in enumerate([0.5, 1.0, 1.5]):
        found = [kind_acceptance(curves[of_kind], share / 2) for share in SHARES]
        assert np.abs(np.array(found) - SHARES / 2 * factor).max() < 0.05
    assert (np.diff(curves, axis=-1) >= 0).all()
    assert np.array_equal(curves[3], COUNT_KNOTS)  # never seen: the cells are believed
    assert np.array_equal(kinds_of(()), IDENTITY_KINDS)


def test_a_rare_kind_leans_on_those_that_only_the_token_before_tells_from_it():
    rng = np.random.default_rng(5)
    kind = np.concatenate([rng.integers(0, NUM_BEFORE - 1, 40_000), np.repeat([NUM_BEFORE - 1, NUM_BEFORE], 2)])
    is_accepted = rng.random(len(kind)) < 0.8  # where the cells say 0.5
    is_accepted[-4:] = [True, False] * 2
    source = np.full(len(kind), SOURCE_POOL)
    curves = kinds_of(fit_kinds(np.full(len(kind), 0.5), is_accepted, np.ones(len(kind)), source, kind))[SOURCE_POOL]
    usual, alike, other = (kind_acceptance(curves[one], 0.5) for one in (0, NUM_BEFORE - 1, NUM_BEFORE))
    assert usual == pytest.approx(0.8, abs=0.02)
    assert 0.6 < alike < 0.75
    assert other == pytest.approx(0.5, abs=0.02)


def test_the_few_of_a_kind_that_a_run_drafts_count_more_than_the_others():
    nodes = invented_nodes(20_000, lambda source, length, depth, count: count)
    is_verified = np.arange(20_000) < 5_000
    kinds = (
        fit_kinds(np.full(20_000, 0.5), is_verified, np.where(is_verified, 1, weight), nodes.source, nodes.token_kind)
        for weight in (1.0, 0.1)
    )
    low, high = (kind_acceptance(kinds_of(one)[SOURCE_POOL, 0], 0.5) for one in kinds)
    assert low < 0.3 < 0.6 < high


def products(num_nodes: int, acceptance, seed: int = 0) -> Nodes:
    """Nodes whose paths are accepted as often as `acceptance(product)` says."""
    nodes = invented_nodes(num_nodes, lambda source, length, depth, count: count, seed)
    is_accepted = np.random.default_rng(seed + 1).random(num_nodes) < acceptance(nodes.relative_count)
    return replace(nodes, log_acceptance=np.log(nodes.relative_count + 1e-9), is_accepted=is_accepted)


def test_a_path_is_worth_what_the_share_of_such_paths_was():
    found = fit_path(products(200_000, np.sqrt), True)
    curve = paths_of((found,))[1]
    for product in SHARES:
        assert path_acceptance(curve, product) == pytest.approx(np.sqrt(product), abs=0.03)
    assert (np.diff(found.values) >= 0).all() and found.values[0] > 0 and found.values[-1] < 1


def test_some_thousand_paths_say_what_products_are_worth_on_the_whole():
    few = [paths_of((fit_path(products(5_000, np.sqrt, seed), False),))[0] for seed in range(5)]
    for product in SHARES:
        assert np.mean([path_acceptance(one, product) for one in few]) == pytest.approx(np.sqrt(product), abs=0.05)


def test_few_paths_leave_products_as_they_are():
    assert np.allclose(fit_path(products(5, lambda product: 1.0 + 0 * product), False).values, COUNT_KNOTS, atol=0.1)
    nothing = fit_path(products(5, np.sqrt).where(np.zeros(5, bool)), False)
    assert np.allclose(nothing.values, COUNT_KNOTS, atol=2e-4)
    assert np.array_equal(paths_of(()), IDENTITY_PATHS)


def test_bins_are_those_of_a_plain_loop():
    rng = np.random.default_rng(3)
    estimates, is_accepted = rng.random(500), rng.random(500) < 0.3
    estimates[:2] = 0.0, 1.0
    plain = {}
    for estimate, accepted in zip(estimates.tolist(), is_accepted.tolist(), strict=True):
        plain.setdefault(min(int(estimate * NUM_BINS), NUM_BINS - 1), []).append((estimate, accepted))
    found = reliability_bins(estimates, is_accepted)
    assert [one.num_nodes for one in found] == [len(plain[k]) for k in sorted(plain)]
    for one, k in zip(found, sorted(plain), strict=True):
        assert one.mean_estimate == pytest.approx(np.mean([estimate for estimate, _ in plain[k]]), abs=1e-5)
        assert one.share_accepted == pytest.approx(np.mean([accepted for _, accepted in plain[k]]), abs=1e-5)


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
    """Prompts and texts about the items of a sample world, as the bundled model was trained to write them."""
    tokenizer = load_tokenizer(SAMPLE_MODEL)
    _, items = world_entities(11, 2, 1_000)
    rng = np.random.default_rng(0)
    examples = [make_example(item, tokenizer, rng) for item in items]
    return [ReplayText(one.prompt_ids, one.answer_ids[:-1]) for one in examples]


def pool_of(documents: list[ReplayText], folder):
    texts = (PoolText(document.text_ids) for document in documents)
    return build_pool(texts, folder, side="item", tokenizer_hash="t", model_id="m")


@pytest.fixture(scope="module")
def pool(documents, tmp_path_factory):
    return pool_of(documents[400:], tmp_path_factory.mktemp("pool") / "item")


@pytest.fixture(scope="module")
def calibration(pool, documents) -> Calibration:
    return calibrate(pool, documents[:200])


def test_estimates_hold_on_texts_that_nothing_was_fitted_to(pool, documents, calibration):
    other = documents[200:400]
    for options in (DraftOptions(), DraftOptions(32, 0.01), DraftOptions(64, 0.0)):
        plain = reliability([(pool, other)], options)
        calibrated = reliability([(pool.with_calibration(calibration), other)], options)
        assert calibrated.expected_calibration_error < 0.03
        if options.min_probability > 0:  # most paths of a tree without a threshold are never accepted, as anyone says
            assert calibrated.expected_calibration_error < plain.expected_calibration_error
    assert calibration.reliability.expected_calibration_error < 0.03
    assert calibration.uncalibrated.expected_calibration_error > calibration.reliability.expected_calibration_error


def test_few_texts_are_all_checked_by_what_is_fitted_to_the_others(pool, documents):
    few = documents[:180]
    halves = [calibrate(pool, part) for part in (few[0::2], few[1::2])]
    calibration = calibrate(pool, few)
    checked = calibration.reliability
    assert checked.num_texts == calibration.uncalibrated.num_texts == len(few)
    assert checked.num_nodes > 1.5 * halves[0].reliability.num_nodes
    assert checked.expected_calibration_error < calibration.uncalibrated.expected_calibration_error
    assert checked.error_by_chance < halves[0].reliability.error_by_chance


def test_trees_in_calibrated_order_are_accepted_further(pool, documents, calibration):
    options, other = DraftOptions(16, 1e-3), documents[200:400]
    calibrated = replay(pool.with_calibration(calibration), other, options)
    assert calibrated.mean_accepted > replay(pool, other, options).mean_accepted


def test_no_token_is_drafted_twice_behind_the_same(pool, documents, calibration):
    calibrated = pool.with_calibration(calibration)
    for document in documents[200:300]:
        for step in pool_steps(calibrated, document, DraftOptions(64, 0.0)):
            drafted = list(zip(step.tree.parents.tolist(), step.tree.token_ids.tolist(), strict=True))
            assert len(set(drafted)) == len(drafted)
            assert (np.diff(step.tree.log_acceptance) <= 0).all()


def test_a_calibration_says_what_it_was_made_of(documents, calibration):
    assert calibration.num_texts == 200
    assert calibration.num_tokens == sum(len(document.text_ids) for document in documents[:200])
    assert calibration.reliability.num_texts == calibration.uncalibrated.num_texts == 100
    assert sum(one.num_nodes for one in calibration.reliability.bins) == calibration.reliability.num_nodes
    assert 0 < calibration.reliability.error_by_chance < 0.03
    assert calibration.table.shape == TABLE_SHAPE and calibration.table.dtype == np.float32


def test_the_same_texts_give_the_same_calibration_also_from_json(pool, documents, calibration):
    assert calibrate(pool, documents[:200]) == calibration
    assert calibrate(pool.with_calibration(calibration), documents[:200]) == calibration  # starts anew
    again = Calibration.model_validate_json(calibration.model_dump_json())
    assert again == calibration and np.array_equal(again.table, calibration.table)


def test_paths_of_texts_with_an_earlier_one_have_a_curve_of_their_own(pool, documents, calibration):
    without, with_previous = calibration.paths
    assert without.num_nodes > without.num_accepted > 0 == with_previous.num_nodes
    assert np.allclose(calibration.path_curves[1], COUNT_KNOTS, atol=2e-4)
    half = [replace(one, previous_ids=one.text_ids) if k % 3 else one for k, one in enumerate(documents[:120])]
    without, with_previous = calibrate(pool, half).paths
    assert without.num_nodes > 0 and with_previous.num_accepted > 0.9 * with_previous.num_nodes  # they did not change
    assert with_previous.values[-2] > COUNT_KNOTS[-2] and min(np.diff(with_previous.values)) >= 0
    unused = calibrate(pool, half, DraftOptions(use_previous=False)).paths[1]
    assert unused.num_nodes == 0


def test_one_text_is_refused(pool, documents):
    with pytest.raises(ValueError, match="1 texts to calibrate with"):
        calibrate(pool, documents[:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["goodreads", "reki"])
def test_estimates_hold_on_texts_of_large_models(name, shared_data, tmp_path):
    """Descriptions of books and long answers about groups of readers; pool, fit and check have no text in common."""
    file, size = {"goodreads": ("item_knowledge", 1_000), "reki": ("knowledge", 300)}[name]
    texts = pq.read_table(shared_data / name / f"{file}.parquet", columns=["text"])["text"].to_pylist()
    texts = sorted(set(texts))
    np.random.default_rng(0).shuffle(texts)
    tokenizer = load_tokenizer(SAMPLE_MODEL)
    ids = tokenizer(texts[: 2 * size], add_special_tokens=False)["input_ids"]
    documents = [ReplayText(np.empty(0, np.int32), np.array(one, np.int32)) for one in ids]
    pool = pool_of(documents[size // 3 :], tmp_path / "pool")
    fitted, other = documents[: size // 6], documents[size // 6 : size // 3]
    calibrated = pool.with_calibration(calibrate(pool, fitted))
    for options in (DraftOptions(), DraftOptions(64, 0.0)):
        assert reliability([(calibrated, other)], options).expected_calibration_error < 0.03
