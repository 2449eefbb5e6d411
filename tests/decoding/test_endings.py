from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from laserbatch.pipeline.decoding.endings import Endings
from laserbatch.pipeline.decoding.sequence import GenerationRequest, Sequence
from laserbatch.retrieval_pools.sources import SOURCE_TARGET


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Words, and bytes that are decoded together: of a run that is no UTF-8 every byte is a broken character."""
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581a", "b", "#", "\ufffd", "<turn>", "<end>"]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True))
    spaces = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<turn>", "<end>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


TOKENIZER, FALLBACK = byte_tokenizer(), fallback_tokenizer()
NOTHING = np.empty(0, np.int64)


def written(
    text: str | list[int],
    chunks: list[int],
    stops: tuple[str, ...],
    limit: int = 1000,
    at_end: bool = False,
    tokenizer=TOKENIZER,
):
    """The ending of a text that is written some tokens at a time, or None."""
    ids = tokenizer(text)["input_ids"] if isinstance(text, str) else text
    endings = Endings(tokenizer, stops)
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


# With the fallback tokenizer a byte is its own id; 256 is " a", and the last one a special token.
PIECES = [*(list(text.encode()) for text in ("#b", "字", "bé")), [0xE5], [0xFF], [256], [257], [259], [260]]


@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map(lambda pieces: list(chain.from_iterable(pieces))),
    st.lists(st.sampled_from(["#b", "字", "字#", "bé", "b a", "<turn>", "n> "]), min_size=1, max_size=3),
    st.lists(st.integers(1, 7), max_size=24),
)
def test_a_text_ends_at_the_same_place_whatever_number_of_tokens_a_step_adds(ids, stops, chunks):
    one_by_one = written(ids, [1] * len(ids), tuple(stops), tokenizer=FALLBACK)
    together = written(ids, chunks, tuple(stops), tokenizer=FALLBACK)
    assert (one_by_one is None) == (together is None)
    if one_by_one is not None:
        assert one_by_one[0] == together[0] and one_by_one[1].tolist() == together[1].tolist()


def test_a_stop_string_within_a_run_of_bytes_is_found_in_steps_of_any_size():
    ids = [*b"b#b", *"字".encode()[:2], 257]  # the last character is broken, and with it the whole run is
    for chunks in ([1] * 6, [6], [2, 3, 1]):
        ending, kept = written(ids, chunks, ("#b",), tokenizer=FALLBACK)
        assert (ending.text, len(kept)) == ("b", 1)


@pytest.mark.parametrize("stop, expected", [("<turn>", "b"), ("urn>", "b"), (" ab", "b<"), ("ab", "b< ")])
def test_special_tokens_are_found_and_are_no_text(stop, expected):
    turn = FALLBACK.convert_tokens_to_ids("<turn>")
    ending, _ = written([257, turn, ord("<"), turn, 256, 257], [], (stop,), tokenizer=FALLBACK)
    assert (ending.reason, ending.text) == ("stop", expected)
