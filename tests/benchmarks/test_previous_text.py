"""The benchmark of previous texts: how texts begin, the first draft's path, and questions one film apart."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from previous_text import main, num_agreed, steps_to_save
from previous_text_tasks import LAST_FILM, SET_OF_FILMS
from previous_text_writer import PathFirst

from laserbatch.pipeline.decoding.drafters import NoDrafter
from laserbatch.pipeline.decoding.sequence import DecodingSequence, GenerationRequest


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.mark.parametrize(
    ("previous", "expected"), [(ids(1, 2, 3), 3), (ids(1, 2), 2), (ids(1, 9, 3), 1), (ids(9), 0), (ids(), 0)]
)
def test_texts_agree_up_to_their_first_different_token(previous, expected):
    assert num_agreed(ids(1, 2, 3), previous) == expected


def test_all_but_one_step_of_the_beginning_could_be_saved():
    # The first text agrees with the previous one for 5 tokens: its steps begin at 0, 3 and 5.
    now = SimpleNamespace(starts=[[0, 3, 5, 6], [0, 2]], num_steps=np.array([4, 2]))
    assert steps_to_save(now, np.array([5, 0])).value == pytest.approx(2 / 6)


def test_only_the_first_draft_of_a_text_has_the_path():
    sequence = DecodingSequence(GenerationRequest("0", ids(7)), 8)
    drafter = PathFirst(NoDrafter(), {"0": ids(1, 2, 3)}, np.array([1.0, 0.5, 0.25, 0.25]))
    first = drafter.draft_all([sequence], [7])[0]
    assert first.token_ids.tolist() == [1, 2, 3] and first.parents.tolist() == [-1, 0, 1]
    assert np.exp(first.log_acceptance).tolist() == pytest.approx([0.5, 0.25, 0.25])
    sequence.append(ids(1), np.array([1], np.uint8), 5)
    assert len(drafter.draft_all([sequence], [5])) == 0 and drafter.starts == {"0": [0, 2]}


def test_a_path_goes_on_behind_what_a_form_began_with_and_ends_where_that_differs():
    for begun, expected in (([1], [2, 3]), ([4], [])):
        sequence = DecodingSequence(GenerationRequest("0", ids(7)), 8)
        sequence.append_forced(begun)
        drafted = PathFirst(NoDrafter(), {"0": ids(1, 2, 3)}).draft_all([sequence], [7])
        assert drafted.token_ids.tolist() == expected


def test_the_last_film_of_a_set_is_what_is_new():
    question = "Given a set of movies consisting of A, The (1990), B (1991), C, or D (1992),  please describe them."
    match = SET_OF_FILMS.fullmatch(question)
    assert match is not None and LAST_FILM.sub("", match[2]) == "A, The (1990), B (1991)"


def test_without_the_models_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["previous_text.py", "--models", str(tmp_path), "--smoke"])
    main()
    printed = capsys.readouterr().err
    assert "smollm2-135m-instruct is not there" in printed and "bench-target is not there" in printed
