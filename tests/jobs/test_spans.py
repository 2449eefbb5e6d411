"""Spans of a text: joined, they are the decoded text; they are cut where the source changes, and split no character."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from laserbatch.jobs.stages.spans import text_spans
from laserbatch.pipeline.storage.figures import SampleSpan as Span
from laserbatch.retrieval_pools.sources import SOURCE_NAMES, SOURCE_OUTPUT, SOURCE_POOL, SOURCE_PROMPT, SOURCE_TARGET


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: one token a byte, so that every long character is spread over tokens."""
    vocabulary = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"eos_token": "<|end|>"})
    return fast


@pytest.fixture(scope="module")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose words begin with their space, the first of which is dropped in decoding, like SentencePiece."""
    words = ["▁", "▁a", "▁good", "▁book", "s", "<unk>", "<0xE4>", "<0xBD>", "<0xA0>"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_spans_are_cut_where_the_source_changes(byte_tokenizer):
    ids = ids_of(byte_tokenizer, "abcdef")
    sources = [SOURCE_POOL, SOURCE_POOL, SOURCE_TARGET, SOURCE_PROMPT, SOURCE_PROMPT, SOURCE_PROMPT]
    assert text_spans(byte_tokenizer, ids, sources) == [Span("ab", "pool"), Span("c", "target"), Span("def", "prompt")]


def test_bytes_of_one_span_are_joined_before_decoding(byte_tokenizer):
    ids = ids_of(byte_tokenizer, "Tomé 你好 🌙")
    assert len(ids) > len("Tomé 你好 🌙")
    assert text_spans(byte_tokenizer, ids, [SOURCE_POOL] * len(ids)) == [Span("Tomé 你好 🌙", "pool")]


def test_character_spread_over_two_sources_belongs_to_the_one_that_completes_it(byte_tokenizer):
    ids = ids_of(byte_tokenizer, "xéy")
    spans = text_spans(byte_tokenizer, ids, [SOURCE_POOL, SOURCE_POOL, SOURCE_TARGET, SOURCE_TARGET])
    assert spans == [Span("x", "pool"), Span("éy", "target")]


def test_text_that_ends_within_a_character_keeps_the_mark_of_it(byte_tokenizer):
    ids = ids_of(byte_tokenizer, "ab🌙")[:-1]
    spans = text_spans(byte_tokenizer, ids, [SOURCE_OUTPUT] * len(ids))
    assert "".join(span.text for span in spans) == byte_tokenizer.decode(ids)
    assert spans[0].text.startswith("ab\ufffd")


def test_leading_spaces_of_words_are_kept(word_tokenizer):
    ids = [1, 2, 3, 4, 0, 3]
    spans = text_spans(
        word_tokenizer, ids, [SOURCE_POOL, SOURCE_TARGET, SOURCE_POOL, SOURCE_TARGET, SOURCE_TARGET, SOURCE_POOL]
    )
    assert "".join(span.text for span in spans) == word_tokenizer.decode(ids)
    assert spans[1] == Span(" good", "target")


def test_byte_fallback_characters_are_joined(word_tokenizer):
    ids = [1, 6, 7, 8, 2]
    spans = text_spans(word_tokenizer, ids, [SOURCE_POOL, SOURCE_POOL, SOURCE_TARGET, SOURCE_TARGET, SOURCE_POOL])
    assert spans == [Span("a", "pool"), Span("你", "target"), Span(" good", "pool")]


def test_special_tokens_are_left_out(byte_tokenizer):
    ids = [*ids_of(byte_tokenizer, "ab"), byte_tokenizer.eos_token_id, *ids_of(byte_tokenizer, "c")]
    assert text_spans(byte_tokenizer, ids, [SOURCE_POOL] * 4) == [Span("abc", "pool")]


@settings(max_examples=30)
@given(data=st.data(), text=st.text(max_size=30))
def test_joined_spans_are_the_decoded_text(byte_tokenizer, data, text):
    ids = ids_of(byte_tokenizer, text)
    cut = data.draw(st.integers(0, len(ids)))
    ids = ids[cut:] + ids[:cut]  # this also makes byte sequences that are no text
    sources = data.draw(st.lists(st.integers(0, len(SOURCE_NAMES) - 1), min_size=len(ids), max_size=len(ids)))
    spans = text_spans(byte_tokenizer, ids, sources)
    assert "".join(span.text for span in spans) == byte_tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert all(left.source != right.source for left, right in pairwise(spans))


def test_no_tokens_give_no_spans(byte_tokenizer):
    assert text_spans(byte_tokenizer, [], []) == []
