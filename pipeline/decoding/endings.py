"""When a text ends: an end token, a stop string, or its limit.

Stop strings are looked for in the decoded text, of which only the end is decoded again at each step. Knows tokens and a
tokenizer; no model, no batch.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.decoding.sequence import Sequence


@dataclass(frozen=True)
class Ending:
    """A text is finished: why, how many of its output tokens belong to it, and its text where that is known by then."""

    reason: str
    num_tokens: int
    text: str | None = None


class Endings:
    """The rules by which texts end.

    Parameters
    ----------
    tokenizer : with `decode`; only needed for stop strings.
    stop_strings : a text is cut before the first of them that appears.
    """

    def __init__(self, tokenizer, stop_strings: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = tuple(s for s in stop_strings if s)
        # A token has at least one byte of text, unless it is a special one; a few more for characters cut in two.
        self._reach = max((len(s.encode()) for s in self._stop_strings), default=0) + 8

    def check(self, sequence: Sequence, num_new: int, at_end_token: bool) -> Ending | None:
        """Whether a sequence ended with its last `num_new` tokens; `at_end_token`: an end token follows them."""
        if self._stop_strings and num_new:
            stop = self._find_stop(sequence.output_ids, num_new)
            if stop is not None:
                return stop
        if not at_end_token and sequence.num_left > 0:
            return None
        reason = "end_of_text" if at_end_token else "length"
        return Ending(reason, sequence.num_output)

    def text(self, token_ids: np.ndarray) -> str:
        """Decoded text of output tokens, without special ones; empty where there is no tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)

    def text_before_stop(self, text: str) -> str | None:
        """The part of a text before the earliest stop string in it, None if there is none."""
        found = [place for s in self._stop_strings if (place := text.find(s)) >= 0]
        return text[: min(found)] if found else None

    def _find_stop(self, output_ids: np.ndarray, num_new: int) -> Ending | None:
        """An ending at the shortest prefix whose text holds all before the stop string, None if there is none."""
        tail = output_ids[-(num_new + self._reach) :]
        if self.text_before_stop(self.text(tail)) is None:
            return None
        before = self.text_before_stop(self.text(output_ids))
        if before is None:  # only an artefact of decoding from the middle
            return None
        low, high = 0, len(output_ids)
        while low < high:  # the text of a prefix only grows, but for a last character cut in two
            middle = (low + high) // 2
            if self.text(output_ids[:middle]).startswith(before):
                high = middle
            else:
                low = middle + 1
        return Ending("stop", low, before)
