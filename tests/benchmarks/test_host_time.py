"""The host-time benchmark: a step without a model is a complete step, and a GPU's least time is that of its reads."""

import numpy as np
import pytest
from corpora import Corpus, Document
from host_time import (
    FLOPS_PER_S,
    MIN_TOKENS_LEFT,
    Scale,
    figures_of,
    host_parts,
    least_ms,
    measure,
    measure_streams,
)
from step_spans import HOST_PARTS
from tasks import build
from widen import GEOMETRIES

from laserbatch.pipeline.decoding.model.load import load_model

SMALL = Scale((2,), (0, 4), num_turns=1, num_steps=4, num_pool_texts=4, stream_batches=3, num_stream_turns=1)


@pytest.fixture(scope="module")
def loaded():
    return load_model("sample", device="cpu")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """Held-out texts that are also in the pool, so that every drafted token is accepted."""
    rng = np.random.default_rng(0)
    texts = tuple(rng.integers(20, 500, 2 * MIN_TOKENS_LEFT).astype(np.int32) for _ in range(4))
    documents = tuple(Document(np.arange(20 + i, 40 + i, dtype=np.int32), text) for i, text in enumerate(texts))
    return Corpus("texts", "user", texts, (), documents, np.empty(0, np.int32))


@pytest.fixture(scope="module")
def pool(loaded, corpus, tmp_path_factory):
    return build(corpus.pool, tmp_path_factory.mktemp("pools") / "pool", "user")


def test_a_step_that_computes_nothing_still_drafts_accepts_and_commits(loaded, corpus, pool):
    plain, drafted = (host_parts(loaded, corpus, pool, 2, size, SMALL, num_threads=1) for size in SMALL.draft_sizes)
    assert plain["drafted_tokens_a_text"] == 0 and plain["tokens_a_step"] == 1
    assert drafted["drafted_tokens_a_text"] == 4 and drafted["tokens_a_step"] > 3
    for row in (plain, drafted):
        assert set(row["parts_ms"]) == set(HOST_PARTS) and row["parts_ms"]["packing"] > 0 < row["parts_ms"]["commit"]


def test_rows_have_shares_of_every_geometry(loaded, corpus, pool):
    rows = measure(loaded, corpus, pool, SMALL, num_threads=1)
    assert [(row["batch"], row["draft_size"]) for row in rows] == [(2, 0), (2, 4)]
    for row in rows:
        for name in GEOMETRIES:
            host, least = row["host_ms"].median, row["least_ms"][name]
            assert row["host_share"][name] == pytest.approx(host / (host + least))
    assert figures_of(rows) == []
    (figure,) = figures_of([rows[0] | {"batch": 64}])
    assert figure.name.startswith("full batches, 7b-mha, batch 64, drafts of 0")


def test_least_time_reads_weights_and_cache_once_and_computes_every_token():
    vicuna = GEOMETRIES["7b-mha"]
    num_weights = 32 * (4 * 4096**2 + 3 * 4096 * 11_008) + 4096 * 32_000
    assert least_ms(vicuna, 1, 0) == pytest.approx(1e3 * 2 * num_weights / 4.8e12)
    assert least_ms(vicuna, 1, 10_000) == pytest.approx(1e3 * (2 * num_weights + 10_000 * 524_288) / 4.8e12)
    assert least_ms(vicuna, 5_000, 0) == pytest.approx(1e3 * 2 * 5_000 * num_weights / FLOPS_PER_S)


def test_streams_write_the_texts_that_are_scripted_in_the_steps_that_their_lengths_take(loaded, corpus, pool):
    """`stream_turn` compares each text."""
    plain, drafted = measure_streams(loaded, {"texts": corpus}, {"texts": pool}, SMALL, num_threads=1)
    assert plain["num_texts"] == drafted["num_texts"] == 6
    num_tokens = 2 * MIN_TOKENS_LEFT + 1  # of a text, including its end token
    assert plain["num_steps"] == 3 * num_tokens  # three pairs of texts, one after another
    assert drafted["num_steps"] < plain["num_steps"] / 2
    for row in (plain, drafted):
        assert row["host_ms"].median > 0 and row["results_ms"].median > 0
    (figure,) = figures_of([plain | {"batch": 64}])
    assert figure.name.startswith("texts, a stream, 7b-mha")
