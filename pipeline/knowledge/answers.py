"""Whether an answer is one at all: not the prompt over again, not in another script than the question, not a loop."""

import unicodedata
from functools import lru_cache

import numpy as np

from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge.templates import PromptTemplate

COPIED_TOKENS = 24  # in a row that stand in the prompt, too, are a copy
MOST_COPIED = 0.6  # of an answer
LOOP_TOKENS, MOST_LOOPED = 96, 24  # an answer that was cut loops where so many last tokens repeat at most so many
LEAST_OWN_SCRIPT = 0.5  # of an answer's letters that are of the question's script
FEWEST_LETTERS = 20  # of which that can be said
_CJK = frozenset({"CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO", "IDEOGRAPHIC"})


def require_answer(
    template: PromptTemplate, text: str, token_ids: np.ndarray, prompt_ids: np.ndarray, is_cut: bool = False
) -> None:
    """Raise RowError, `repeats-prompt`, `loops` or `wrong-language`, where a text is no answer.

    Token ids are int32 (n,). `is_cut` says that the token limit ended it, as it ends what says the same for ever.
    """
    copied = copied_share(token_ids, prompt_ids)
    if copied > MOST_COPIED:
        raise RowError(f"repeats-prompt: {copied:.0%} of the answer are stretches of its prompt")
    period = period_of(token_ids[-LOOP_TOKENS:]) if is_cut and len(token_ids) >= LOOP_TOKENS else None
    if period is not None and period <= MOST_LOOPED:
        raise RowError(f"loops: it was cut while it said the same {period} tokens again and again")
    if template.any_language:
        return
    asked, told = script_of(f"{template.system} {template.instruction} {template.request}"), scripts_in(text)
    num_letters = sum(told.values())
    if asked is not None and num_letters >= FEWEST_LETTERS and told.get(asked, 0) < LEAST_OWN_SCRIPT * num_letters:
        most = max(told, key=told.get)
        raise RowError(f"wrong-language: asked in {asked.title()} script, answered in {most.title()}")


def copied_share(token_ids: np.ndarray, prompt_ids: np.ndarray) -> float:
    """Share of some tokens that lie in runs of `COPIED_TOKENS` which stand in the prompt, too."""
    if len(token_ids) < COPIED_TOKENS or len(prompt_ids) < COPIED_TOKENS:
        return 0.0
    in_prompt = {run.tobytes() for run in _runs(prompt_ids)}
    is_copied = np.zeros(len(token_ids), bool)
    for start, run in enumerate(_runs(token_ids)):
        if run.tobytes() in in_prompt:
            is_copied[start : start + COPIED_TOKENS] = True
    return float(is_copied.mean())


def period_of(ids: np.ndarray) -> int | None:
    """The fewest tokens of which all others are repetitions: int32 (n,); None where nothing is repeated to the end."""
    return next((period for period in range(1, len(ids)) if np.array_equal(ids[period:], ids[:-period])), None)


def _runs(ids: np.ndarray) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(np.asarray(ids, np.int32), COPIED_TOKENS)


@lru_cache(maxsize=16)
def script_of(text: str) -> str | None:
    """The script that most letters of a text are of; None without a letter."""
    scripts = scripts_in(text)
    return max(scripts, key=scripts.get) if scripts else None


def scripts_in(text: str) -> dict[str, int]:
    """Letters of each script, by the first word of their Unicode names; those of East Asia count as one."""
    counts: dict[str, int] = {}
    for letter in text:
        if letter.isascii():
            name = "LATIN" if letter.isalpha() else None
        else:
            name = unicodedata.name(letter, "").split(" ")[0].split("-")[0] if letter.isalpha() else None
            name = "CJK" if name in _CJK else name
        if name:
            counts[name] = counts.get(name, 0) + 1
    return counts
