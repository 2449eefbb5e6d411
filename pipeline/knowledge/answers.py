"""Checks that an answer does not repeat its prompt, does not loop, and is in the language of the question.

Languages are recognised by their scripts, and some of Latin script by their most common words. Titles and names that an
answer quotes from its prompt, and names of its fields, may be in any language and are ignored.
"""

import json
import re
import unicodedata
from collections import Counter
from functools import lru_cache
from itertools import pairwise

import numpy as np

from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge.prompts import Shown
from laserbatch.pipeline.knowledge.templates import PromptTemplate

COPIED_TOKENS = 24  # a run of this many tokens that is also in the prompt is a copy
MAX_SHARE_COPIED = 0.6  # an answer with a larger share of copied text repeats its prompt
LOOP_TOKENS, MAX_LOOPED = 96, 24  # an answer loops if LOOP_TOKENS tokens in a row repeat at most MAX_LOOPED tokens
MEANT = "; set `any_language: true` in the template if that is intended"
MIN_SHARE_OWN_SCRIPT = 0.5  # share of an answer's letters that must be in the question's script
MIN_LETTERS = 20  # shorter answers are not judged by their script
MIN_WORDS = 12  # shorter answers in Latin script are not judged by their language
MIN_SHARE_COMMON = 0.2  # a text is in a language if this share of its words are common words of the language
MAX_SHARE_OF_QUESTION_LANGUAGE = 0.25  # and the question's language has less than this fraction of that share
_WORD = re.compile(r"[^\W\d_]+")
# Common words of each language, if possible words that no other of these languages has.
COMMON_WORDS = {
    language: frozenset(words.split())
    for language, words in {
        "English": "the and of to in is on at was with for that this are by from who would their they or as "
        "which it its an be has",
        "French": "le la les et des du une est dans qui que pour avec sur par aux ce cette ses il elle ou mais "
        "son au un de elles",
        "German": "der die das und ist mit von den dem ein eine einen einer zu auf sich nicht auch wer als sie "
        "er im für",
        "Spanish": "el la los las y de del que en un una con por para es su se más al lo como sus este esta le "
        "son cuando",
        "Italian": "il la gli le di del della che in un una con per è si dei nel alla da come sono suo questo chi più",
        "Portuguese": "os as de do da dos das que em um uma com por para é se mais no na ao seu sua quem como",
        "Dutch": "de het een en van is met die voor op dat niet te zijn aan ook wie als hij zij deze door in naar om",
        "Polish": "w na z się do jest że nie to jak dla o który która przez oraz od po ze są tym lub ich",
        "Swedish": "och det att i en som på är av för med den till inte om ett har de vem eller hon han sig var",
    }.items()
}
_CJK = frozenset({"CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO", "IDEOGRAPHIC"})


def require_answer(
    template: PromptTemplate, text: str, token_ids: np.ndarray, prompt_ids: np.ndarray, shown: Shown | None = None
) -> None:
    """Raise RowError, `repeats-prompt`, `loops` or `wrong-language`, if a text is not a sound answer.

    Token ids are int32 (n,). `shown`: the data of the entity in the prompt; quotes from it may be in any language.
    """
    copied = copied_share(token_ids, prompt_ids)
    if copied > MAX_SHARE_COPIED:
        raise RowError(f"repeats-prompt: {copied:.0%} of the answer is copied from its prompt")
    if (period := looped(token_ids)) is not None:
        raise RowError(f"loops: the answer repeats the same {period} tokens")
    if template.any_language:
        return
    question = " ".join(filter(None, (template.system, template.instruction, template.request)))
    script = script_of(question)
    text = text if shown is None else own_words(text, template, shown, script)
    scripts = scripts_in(text)
    num_letters = sum(scripts.values())
    min_letters = MIN_SHARE_OWN_SCRIPT * num_letters
    if script is not None and num_letters >= MIN_LETTERS and scripts.get(script, 0) < min_letters:
        most = max(scripts, key=scripts.__getitem__)
        raise RowError(f"wrong-language: asked in {script.title()} script, answered in {most.title()}{MEANT}")
    expected, actual = language_of(question), language_of(text)
    if expected is not None and actual is not None and expected != actual:
        expected_words, actual_words = COMMON_WORDS[expected], COMMON_WORDS[actual]
        expected_share = _share(text, expected_words - actual_words)
        if expected_share < MAX_SHARE_OF_QUESTION_LANGUAGE * _share(text, actual_words - expected_words):
            raise RowError(f"wrong-language: asked in {expected}, answered in {actual}{MEANT}")


def own_words(text: str, template: PromptTemplate, shown: Shown, script: str | None) -> str:
    """The words of a text in lower case, without those that it quotes from its prompt's data or the answer's form.

    Two or more words that follow each other there, too, are quoted, and so is a word from there in another script than
    `script`: the names of JSON fields are often English.
    """
    titles = (part for event in shown.events for part in event[:2])
    schema = json.dumps(template.json_schema, ensure_ascii=False)
    form = (*template.fields, *template.factors, template.regex, template.grammar, schema)
    lines = "\n".join(filter(None, (shown.attributes, *titles, *form))).lower()
    pairs = {pair for line in lines.splitlines() for pair in pairwise(_WORD.findall(line))}
    words = _WORD.findall(text.lower())
    quoted = {place + step for place, pair in enumerate(pairwise(words)) if pair in pairs for step in (0, 1)}
    quoted |= {place for place, word in enumerate(words) if word in lines and script_of(word) != script}
    return " ".join(word for place, word in enumerate(words) if place not in quoted)


@lru_cache(maxsize=16)
def language_of(text: str) -> str | None:
    """The language whose common words have the largest share of a text; None for a short text or a small share."""
    shares = {name: _share(text, words) for name, words in COMMON_WORDS.items()}
    most = max(shares, key=shares.__getitem__)
    return most if len(_WORD.findall(text)) >= MIN_WORDS and shares[most] >= MIN_SHARE_COMMON else None


def _share(text: str, words: frozenset[str]) -> float:
    tokens = _WORD.findall(text.lower())
    return sum(word in words for word in tokens) / max(len(tokens), 1)


def copied_share(token_ids: np.ndarray, prompt_ids: np.ndarray) -> float:
    """The share of tokens in runs of `COPIED_TOKENS` that are also in the prompt."""
    if len(token_ids) < COPIED_TOKENS or len(prompt_ids) < COPIED_TOKENS:
        return 0.0
    in_prompt = {run.tobytes() for run in _runs(prompt_ids)}
    is_copied = np.zeros(len(token_ids), bool)
    for start, run in enumerate(_runs(token_ids)):
        if run.tobytes() in in_prompt:
            is_copied[start : start + COPIED_TOKENS] = True
    return float(is_copied.mean())


def looped(ids: np.ndarray) -> int | None:
    """The shortest period of LOOP_TOKENS in a row of `ids`, int32 (n,), if it is at most MAX_LOOPED; otherwise None."""
    for period in range(1, MAX_LOOPED + 1) if len(ids) >= LOOP_TOKENS else ():
        ends = np.flatnonzero(np.append(ids[period:] != ids[:-period], True))
        if np.diff(ends, prepend=-1).max() > LOOP_TOKENS - period:
            return period
    return None


def _runs(ids: np.ndarray) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(np.asarray(ids, np.int32), COPIED_TOKENS)


@lru_cache(maxsize=16)
def script_of(text: str) -> str | None:
    """The script of most letters of a text; None if it has no letter."""
    scripts = scripts_in(text)
    return max(scripts, key=scripts.__getitem__) if scripts else None


def scripts_in(text: str) -> dict[str, int]:
    """The number of letters by script, the first word of their Unicode names; the scripts of East Asia count as one."""
    counts: Counter[str] = Counter()
    for letter, num in Counter(text).items():
        name = unicodedata.name(letter, "").split(" ")[0].split("-")[0] if letter.isalpha() else ""
        if name:
            counts["CJK" if name in _CJK else name] += num
    return counts
