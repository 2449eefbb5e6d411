"""From token ids and their sources to stretches of text, each from one source: what a report or a terminal colours.

Knows no colours. Works with any tokenizer of transformers, by decoding growing windows of ids: what a token means can
depend on the one before it (a leading space, the rest of a character).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from laserbatch.retrieval_pools.sources import SOURCE_NAMES

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no character (yet)


class Decoder(Protocol):
    """The one method of a tokenizer that is used here."""

    def decode(self, token_ids: Sequence[int], **options: object) -> str:
        """Text of token ids."""


@dataclass(frozen=True)
class Span:
    """Text that came from one source; `source` is a name of `retrieval_pools.sources.SOURCE_NAMES`."""

    text: str
    source: str


def text_spans(
    tokenizer: Decoder, token_ids: Sequence[int] | np.ndarray, sources: Sequence[int] | np.ndarray
) -> list[Span]:
    """Text of a generated sequence, cut where the source changes.

    A character whose bytes are spread over several tokens belongs to the token that completes it. Texts of the spans,
    joined, are `tokenizer.decode(token_ids, skip_special_tokens=True)`.

    Parameters
    ----------
    tokenizer : of transformers.
    token_ids : int32 (n,).
    sources : uint8 (n,), SOURCE_* of each token.

    Returns
    -------
    list of Span
        Neighbours differ in source; none is empty.

    Raises
    ------
    ValueError
        The two arrays differ in length, or a source code is not one.
    """
    ids, codes = [int(token) for token in token_ids], [int(code) for code in sources]
    if len(ids) != len(codes):
        raise ValueError(f"{len(ids)} token ids with {len(codes)} sources; expected one source a token")
    if unknown := {code for code in codes if not 0 <= code < len(SOURCE_NAMES)}:
        raise ValueError(f"source codes {sorted(unknown)} are unknown; expected 0 to {len(SOURCE_NAMES) - 1}")
    return merged(
        Span(text, SOURCE_NAMES[code]) for text, code in zip(_token_texts(tokenizer, ids), codes, strict=True)
    )


def merged(spans) -> list[Span]:
    """Neighbouring spans of one source joined, empty ones dropped."""
    joined: list[Span] = []
    for span in spans:
        if not span.text:
            continue
        if joined and joined[-1].source == span.source:
            joined[-1] = Span(joined[-1].text + span.text, span.source)
        else:
            joined.append(span)
    return joined


def _token_texts(tokenizer: Decoder, ids: list[int]) -> list[str]:
    """The characters that each token completes.

    `[start, read)` is the context: ids whose text is written already, kept so that the next ones decode as they do
    within the whole. The window moves on only where a character ends, so it stays a few tokens long.
    """
    texts: list[str] = []
    start = read = 0
    written = 0  # characters of the window [start, ...) already given out
    for index in range(len(ids)):
        window = _decode(tokenizer, ids[start : index + 1])
        whole = window if index == len(ids) - 1 else window.rstrip(UNFINISHED)
        texts.append(whole[written:])
        written = max(written, len(whole))
        if not window.endswith(UNFINISHED):
            context = _decode(tokenizer, ids[read : index + 1])
            if context:  # a context without text (a control token) would lose the leading space of what follows
                start, written = read, len(context)
            read = index + 1
    return texts


def _decode(tokenizer: Decoder, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
