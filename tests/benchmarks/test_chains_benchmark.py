"""The benchmark of chains: what it compares, and that it counts right."""

import chains
import numpy as np
import pytest
from chains import FORMS, first_branch, gain_row
from corpora import Corpus, Document
from tasks import build

from laserbatch.retrieval_pools.draft import draft
from laserbatch.retrieval_pools.library import OpenPool

PROMPT = np.array([9], np.int32)
TEXT = np.array([1, 2, 3, 4, 5, 6], np.int32)


def test_the_first_branch_follows_the_likeliest_token(tmp_path):
    pool = build([np.array(text, np.int32) for text in ([1, 2, 3], [1, 2, 3], [1, 4, 5])], tmp_path / "p", "user")
    tree = draft(pool, np.array([1], np.int32), 0, min_acceptance=0)
    assert tree.token_ids.tolist()[0] == 2 and 4 in tree.token_ids
    assert first_branch(tree).tolist() == [2, 3]
    assert first_branch(draft(None, PROMPT, 1)).tolist() == []


def test_gains_count_what_a_text_grows_by_in_a_step(tmp_path):
    corpus = Corpus("invented", "user", (TEXT,), (), (Document(PROMPT, TEXT),), PROMPT)
    pools = OpenPool(build([TEXT] * 4, tmp_path / "p", "user"))
    row = gain_row(corpus, pools, 8)
    assert len(pools) == 0
    for form in FORMS:
        assert row[form] == pytest.approx(7)  # all of it in one step, and its end
    assert chains.gain_row(corpus, pools, 1)[FORMS[0]] == pytest.approx(7 / 4)
