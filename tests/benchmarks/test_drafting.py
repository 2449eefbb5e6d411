"""The drafting benchmark: what a replay counts, that drafters forget held-out texts, and that the command runs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # its modules find one another as neighbours of the command

from drafting_arctic import Arctic, ArcticGrid, is_installed, tuned  # noqa: E402
from drafting_corpora import Corpus, CorpusSize, Document, goodreads_corpus, reki_corpus  # noqa: E402
from drafting_peers import Ours, PromptLookup, Trie  # noqa: E402
from drafting_replay import Replay, accepted_interval, accepted_ratio, replay  # noqa: E402

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
    if is_installed():
        grid = ArcticGrid((8,), (8, 100), (0,), (0.01,))
        made["arctic"] = Arctic(corpus, corpus.pool, tuned(corpus, grid, [16])[16])
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
        name: accepted_interval([replay(one, document, 16) for document in corpus.held_out], 0).value
        for name, one in drafters.items()
    }
    assert all(aal[name] > aal["prompt-lookup"] for name in aal if name != "prompt-lookup")


def test_a_ratio_is_resampled_in_pairs():
    replays = [Replay([1.0] * 3, [4] * 3, accepted) for accepted in ([1, 2, 3], [0, 0, 4], [5, 5, 5])]
    twice = [Replay(one.draft_us, one.num_drafted, [2 * n for n in one.num_accepted]) for one in replays]
    ratio = accepted_ratio(twice, replays, seed=1)
    assert ratio.value == ratio.low == ratio.high == 2.0
    interval = accepted_interval(replays, seed=1)
    assert interval.low < interval.value < interval.high


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Tables with the columns of the published ones; every text but the first two is there once."""
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

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "sample")
    corpus = corpus_of(tokenizer, data, CorpusSize(num_held_out=5, num_tuning=3, max_pool=100))
    pool = {text.tobytes() for text in corpus.pool}
    assert len(corpus.pool) == len(pool) == 29 - 5  # one of two equal texts is dropped
    assert not pool & {document.text_ids.tobytes() for document in corpus.held_out}
    without_tuning = {text.tobytes() for text in corpus.pool_without_tuning}
    assert not without_tuning & {document.text_ids.tobytes() for document in corpus.tuning}
    for document in corpus.held_out:
        assert document.prompt_ids[-len(corpus.answer_mark) :].tolist() == corpus.answer_mark.tolist()


@pytest.mark.slow
def test_the_command_runs_and_writes_what_it_measured(data, tmp_path):
    out = tmp_path / "drafting.json"
    words = ["--smoke", "--json", str(out), "--data", str(data), "--model", "absent"]
    ran = subprocess.run(
        [sys.executable, "benchmarks/drafting.py", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    written = json.loads(out.read_text(encoding="utf-8"))
    assert list(written)[:2] == ["command", "machine"]
    assert written["tokenizer"] == "sample"
    assert {(row["drafter"], row["corpus"], row["k"]) for row in written["rows"]} == {
        (drafter, corpus, k) for drafter in DRAFTERS for corpus in ("reki", "goodreads") for k in (16, 32, 64)
    }
    assert all(("missing" in row) == (row["drafter"] == "arctic" and not is_installed()) for row in written["rows"])
    assert ("pip install" in ran.stderr) != is_installed()
    assert str(tmp_path) not in out.read_text(encoding="utf-8")
    verdicts = [line.split()[0] for line in ran.stdout.split("\n\n")[0].splitlines()]
    assert verdicts == sorted(verdicts)  # "NOT" is before "met"
