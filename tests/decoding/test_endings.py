import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import byte_tokenizer

from pipeline.decoding.endings import Endings
from pipeline.decoding.sequence import GenerationRequest, Sequence
from retrieval_pools.sources import SOURCE_TARGET

TOKENIZER = byte_tokenizer()
NOTHING = np.empty(0, np.int64)


def written(text: str, chunks: list[int], stops: tuple[str, ...], limit: int = 1000, at_end: bool = False):
    """The ending of a text that is written some tokens at a time, or None."""
    ids = TOKENIZER(text)["input_ids"]
    endings = Endings(TOKENIZER, stops)
    sequence = Sequence(GenerationRequest("a", np.array([1], np.int32)), limit)
    done = 0
    for size in [*chunks, len(ids)]:
        new = ids[done : done + max(1, size)]
        if not new:
            break
        sequence.append(new[:-1], np.full(len(new) - 1, SOURCE_TARGET), new[-1])
        done += len(new)
        ending = endings.check(sequence, len(new), at_end and done == len(ids))
        if ending is not None:
            return ending, sequence.output_ids[: ending.num_tokens]
    return None


@given(
    st.text("ab#é\n字", max_size=30),
    st.text("ab#é\n字", max_size=30),
    st.sampled_from(["##", "字", "#\n", "bé#"]),
    st.lists(st.integers(1, 7), max_size=30),
)
def test_text_is_cut_before_the_first_stop_string(before, after, stop, chunks):
    text = before + stop + after
    ending, ids = written(text, chunks, (stop, "never"))
    expected = text[: text.index(stop)]
    assert (ending.reason, ending.text) == ("stop", expected)
    assert TOKENIZER.decode(ids.tolist()).startswith(expected)
    assert len(ids) == len(expected.encode())  # byte tokens: no shorter prefix holds it


@given(st.text("ab#é字", max_size=30), st.lists(st.integers(1, 7), max_size=30))
def test_text_without_stop_string_goes_on(text, chunks):
    assert written(text, chunks, ("##b", "never")) is None or "##b" in text


def test_earliest_of_several_stop_strings_counts():
    ending, _ = written("one STOP two END three", [], ("END", "STOP"))
    assert ending.text == "one "


def test_stop_string_wins_over_an_end_token_behind_it():
    assert written("abc##", [], ("##",), at_end=True)[0].reason == "stop"


@pytest.mark.parametrize("at_end, reason", [(True, "end_of_text"), (False, "length")])
def test_reason_is_recorded(at_end, reason):
    ending, ids = written("abc", [], (), limit=3, at_end=at_end)
    assert (ending.reason, ending.text, len(ids)) == (reason, None, 3)  # the whole text is decoded later


def test_no_tokenizer_is_needed_without_stop_strings():
    sequence = Sequence(GenerationRequest("a", np.array([1], np.int32)), 1)
    sequence.append(NOTHING, NOTHING, 7)
    assert Endings(None).check(sequence, 1, at_end_token=False).reason == "length"
