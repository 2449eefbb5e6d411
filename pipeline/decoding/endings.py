"""When a text ends: an end token, a stop string, or its limit.

Stop strings are looked for in the decoded text, of which only the end is decoded again at each token.
"""

from dataclasses import dataclass

import numpy as np

from laserbatch.pipeline.decoding.sequence import Sequence


@dataclass(frozen=True)
class Ending:
    """A text is finished: why, how many of its output tokens belong to it, and its text where that is known by then."""

    reason: str
    num_tokens: int
    text: str | None = None


class Endings:
    """The rules by which texts end; one is cut before the first stop string, special tokens' names being text there."""

    def __init__(self, tokenizer, stop_strings: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = tuple(s for s in stop_strings if s)
        # A token has at least one byte of text; a few more for characters cut in two.
        self._reach = max((len(s.encode()) for s in self._stop_strings), default=0) + 8
        self._byte_ids = byte_ids(tokenizer) if self._stop_strings else frozenset()

    def check(self, sequence: Sequence, num_new: int, at_end_token: bool) -> Ending | None:
        """Whether a sequence ended with its last `num_new` tokens; `at_end_token`: an end token follows them."""
        if self._stop_strings:
            # One after another: what bytes spell may change with those behind them, and must not with a step's size.
            for length in range(sequence.num_output - num_new + 1, sequence.num_output + 1):
                stop = self._find_stop(sequence.output_ids[:length])
                if stop is not None:
                    return stop
        if at_end_token or sequence.num_left == 0:
            return Ending("end_of_text" if at_end_token else "length", sequence.num_output)
        return None

    def text(self, token_ids: np.ndarray, without_special: bool = True) -> str:
        """Decoded text of output tokens; empty where there is no tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=without_special)

    def _before_stop(self, token_ids: np.ndarray) -> str | None:
        """The text before the earliest stop string, None if there is none."""
        text = self.text(token_ids, without_special=False)
        found = [place for s in self._stop_strings if (place := text.find(s)) >= 0]
        return text[: min(found)] if found else None

    def _find_stop(self, output_ids: np.ndarray) -> Ending | None:
        """An ending at the shortest prefix whose text holds all before the stop string, None if there is none."""
        start = max(0, len(output_ids) - self._reach)
        while start and int(output_ids[start]) in self._byte_ids:  # which are decoded together
            start -= 1
        if self._before_stop(output_ids[start:]) is None:
            return None
        before = self._before_stop(output_ids)
        if before is None:  # only an artefact of decoding from the middle
            return None
        length = len(output_ids)
        while length and self.text(output_ids[: length - 1], without_special=False).startswith(before):
            length -= 1
        kept = output_ids[:length]
        num_behind = len(self.text(kept, without_special=False)) - len(before)
        text, text_before = self.text(kept), self.text(kept[:-1])  # the same where a special token's name is cut
        return Ending("stop", length, text if text == text_before else text[: len(text) - num_behind])


def byte_ids(tokenizer) -> frozenset[int]:
    """The tokens that stand for one byte each and are decoded together with their neighbours (byte fallback)."""
    names = {f"<0x{byte:02X}>" for byte in range(256)}
    return frozenset(token_id for name, token_id in tokenizer.get_vocab().items() if name in names)
