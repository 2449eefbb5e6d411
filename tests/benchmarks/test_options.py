"""The benchmark of drafting options: what a row counts, what is measured, and that the command runs."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # its modules find one another as neighbours of the command

from night_pools import own_texts  # noqa: E402
from options import Counts, figures_of, load_engine, variants_of  # noqa: E402
from options_pools import Pools  # noqa: E402
from options_tasks import readers_task  # noqa: E402


@pytest.fixture(scope="module")
def engine():
    return load_engine(ROOT / "models" / "sample", 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Invented readers and books in the form of the goodreads files."""
    folder = tmp_path_factory.mktemp("data")
    books = [f"b{number}" for number in range(40)]
    rng = np.random.default_rng(0)
    histories = [[books[k] for k in rng.permutation(40)[:6]] for _ in range(60)]
    (folder / "goodreads").mkdir()
    users = pa.table({"user_id": [str(number) for number in range(60)], "history": histories})
    items = pa.table({"item_id": books, "title": [f"Title of {book}" for book in books]})
    pq.write_table(users, folder / "goodreads" / "users.parquet")
    pq.write_table(items, folder / "goodreads" / "items.parquet")
    return folder


@pytest.fixture(scope="module")
def task(engine, data):
    return readers_task(engine.tokenizer, data, num_readers=20, num_measured=4)


def test_readers_come_back_with_one_book_more(engine, task):
    assert len(task.first.pool_prompts) == len(task.pool_groups) == 20
    assert len(task.prompts) == len(task.previous) == len(task.groups) == 4
    for prompt, before in zip(task.prompts, task.previous, strict=True):
        old, new = (engine.tokenizer.decode(ids).split("\n") for ids in (task.first.pool_prompts[before], prompt))
        assert (
            len([line for line in new if "Title of" in line]) == len([line for line in old if "Title of" in line]) + 1
        )
        assert [line for line in old if "Title of" in line] == [line for line in new if "Title of" in line][:-1]


def test_pools_hold_the_same_texts_whatever_their_options(engine, task, tmp_path):
    texts = own_texts(engine, task.first, tmp_path / "cache")
    variants = list(variants_of(task, Pools(task, texts, engine, tmp_path)))
    assert {variant.option for variant in variants} >= {"sources", "min_support"}
    tokens = [variant.pool.index.tokens.tolist() for variant in variants]
    assert all(found == tokens[0] for found in tokens)
    measured = {(variant.key, variant.max_nodes) for variant in variants}
    assert len(measured) == len(variants)
    assert all((variant.gain_over, variant.max_nodes) in measured for variant in variants)


def test_tokens_per_step_are_of_all_texts_together():
    counts = Counts(np.array([10.0, 2.0]), np.array([2.0, 2.0]))
    assert counts.tokens_per_step() == 3.0
    assert counts.tokens_per_step(np.array([[0, 0], [1, 1]])).tolist() == [5.0, 1.0]


def test_the_figure_is_the_previous_texts_gain():
    row = {"task": "readers", "verification": "greedy", "value": "previous, pool", "gain": 1.2}
    assert [figure.met for figure in figures_of([row, row | {"gain": 1.1}, row | {"value": "pool"}])] == [True, False]
