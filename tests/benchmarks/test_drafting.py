"""The drafting benchmark: counts of a replay, held-out texts that drafters must forget, and the command."""

from pathlib import Path

import drafting
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from common import SAMPLE_MODEL, Interval, Spread
from corpora import Corpus, CorpusSize, Document, goodreads_corpus, reki_corpus
from drafters import (
    Arctic,
    ArcticGrid,
    Ours,
    PromptLookup,
    Replay,
    SuffixDecodingCache,
    Trie,
    replay,
    tuned_arctic,
)
from drafting import aal_ratio, aal_samples, fastest_of

PHRASES = [[1, 2, 3, 4, 5], [1, 2, 6, 7], [3, 9, 9, 8], [10, 11, 12, 13, 14, 15]]
MARK = np.array([30, 31], np.int32)
DRAFTERS = ["ours", "prompt-lookup", "pygtrie", "arctic"]


def invented_text(generator) -> np.ndarray:
    return np.concatenate([PHRASES[generator.integers(4)] for _ in range(8)]).astype(np.int32)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    generator = np.random.default_rng(0)
    prompt = np.array([20, 1, 2, *MARK], np.int32)
    pool = tuple(invented_text(generator) for _ in range(40))
    tuning = tuple(Document(prompt, text) for text in pool[:5])
    held_out = tuple(Document(prompt, invented_text(generator)) for _ in range(6))
    return Corpus("invented", "item", pool, tuning, held_out, MARK)


@pytest.fixture(scope="module")
def drafters(corpus, tmp_path_factory) -> dict:
    made = {
        "ours": Ours(corpus, tmp_path_factory.mktemp("pools") / "pool", [16]),
        "prompt-lookup": PromptLookup(),
        "pygtrie": Trie(corpus, corpus.pool),
    }
    if SuffixDecodingCache is not None:
        grid = ArcticGrid((8,), (8, 100), (0,), (0.01,))
        made["arctic"] = Arctic(corpus, corpus.pool, tuned_arctic(corpus, grid, [16])[16])
    return made


@pytest.fixture(params=DRAFTERS)
def drafter(request, drafters):
    if request.param not in drafters:
        pytest.skip(f"{request.param} is not installed")
    return drafters[request.param]


def test_every_token_and_the_end_come_from_a_step(drafter, corpus):
    for document in corpus.held_out:
        result = replay(drafter, document, 16)
        assert sum(result.num_accepted) + len(result.num_accepted) == len(document.text_ids) + 1
        assert len(result.draft_us) == len(result.num_drafted) == len(result.num_accepted)


def test_drafts_are_trees_within_their_limit(drafter, corpus):
    drafter.begin(corpus.held_out[0])
    drafter.advance(5)
    for max_nodes in (1, 4, 16):
        token_ids, parents = drafter.draft(max_nodes)
        assert len(token_ids) == len(parents) <= max_nodes
        assert all(-1 <= parent < node for node, parent in enumerate(parents))
        assert len(set(zip(map(int, parents), map(int, token_ids), strict=True))) == len(token_ids)
    drafter.end()


def test_a_replayed_text_leaves_nothing_behind(drafter, corpus):
    first = replay(drafter, corpus.held_out[0], 16)
    for document in corpus.held_out:
        replay(drafter, document, 16)
    again = replay(drafter, corpus.held_out[0], 16)
    assert again.num_accepted == first.num_accepted
    assert again.num_drafted == first.num_drafted


def test_drafters_with_a_pool_beat_the_one_without(drafters, corpus):
    aal = {
        name: aal_samples([replay(drafter, document, 16) for document in corpus.held_out])[0]
        for name, drafter in drafters.items()
    }
    assert all(aal[name] > aal["prompt-lookup"] for name in aal if name != "prompt-lookup")


def test_aal_is_of_all_steps_and_a_ratio_is_resampled_in_pairs():
    replays = [Replay([1.0] * 3, [4] * 3, accepted) for accepted in ([1, 2, 3], [0, 0, 4], [5, 5])]
    twice = [Replay(each.draft_us, each.num_drafted, [2 * n for n in each.num_accepted]) for each in replays]
    assert aal_samples(replays)[0] == pytest.approx(20 / 8)
    assert aal_ratio(twice, replays) == Interval(2.0, 2.0, 2.0)
    interval = Interval.of(aal_samples(replays))
    assert interval.low < interval.value < interval.high
    nothing = [Replay([1.0], [0], [0])] * 3
    assert aal_ratio(replays, nothing).value == float("inf")


def test_of_times_taken_again_the_fastest_is_told():
    instalments = [[{"k": 16, "us": Spread.of(times)}] for times in ([3.0, 9.0, 4.0], [2.0, 2.5, 8.0], [5.0])]
    assert fastest_of(instalments, "us") == [{"k": 16, "us": Spread(2.5, 2.0, 8.0), "us_of_each": [4.0, 2.5, 5.0]}]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Tables with the columns of the published ones; all texts differ, except for the first two."""
    folder = tmp_path_factory.mktemp("data")
    words = ["calm", "bright", "slow", "old", "tender", "wild"]
    texts = [f"A {words[n % 6]} story about {words[n % 5]} days and {n} nights." for n in range(30)]
    texts[1] = texts[0]
    numbers = [str(n) for n in range(30)]
    tables = {
        "reki/knowledge": {"prompt": [f"What is {n} about?" for n in numbers], "text": texts},
        "goodreads/items": {"item_id": numbers, "title": [f"Book {n}" for n in numbers]},
        "goodreads/item_knowledge": {"item_id": numbers, "text": texts},
    }
    for name, columns in tables.items():
        (folder / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    return folder


@pytest.mark.parametrize("corpus_of", [reki_corpus, goodreads_corpus])
def test_held_out_texts_are_in_no_pool(corpus_of, data):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SAMPLE_MODEL)
    corpus = corpus_of(tokenizer, data, CorpusSize(num_held_out=5, num_tuning=3, max_pool=100))
    pool = {text.tobytes() for text in corpus.pool}
    assert len(corpus.pool) == len(pool) == 29 - 5  # one of the two equal texts is dropped
    assert not pool & {document.text_ids.tobytes() for document in corpus.held_out}
    without_tuning = {text.tobytes() for text in corpus.pool_without_tuning}
    assert not without_tuning & {document.text_ids.tobytes() for document in corpus.tuning}
    for document in corpus.held_out:
        assert document.prompt_ids[-len(corpus.answer_mark) :].tolist() == corpus.answer_mark.tolist()


def test_the_command_runs_and_writes_what_it_measured(data, run_benchmark, capsys, monkeypatch):
    monkeypatch.setattr(drafting, "MAX_NODES", (16,))
    written = run_benchmark("drafting", "--smoke", "--data", data, "--model", "absent")
    assert written["tokenizer"] == "sample"
    assert {(row["drafter"], row["corpus"], row["k"]) for row in written["rows"]} == {
        (drafter, corpus, k) for drafter in DRAFTERS for corpus in ("reki", "goodreads") for k in (16,)
    }
    is_missing = SuffixDecodingCache is None
    assert all(("missing" in row) == (row["drafter"] == "arctic" and is_missing) for row in written["rows"])
    assert bool(written["unmeasured"]) == is_missing
    verdicts = [line.split()[0] for line in capsys.readouterr().out.split("\n\n")[0].splitlines()]
    assert verdicts == sorted(verdicts)  # "NOT" sorts before "met"
