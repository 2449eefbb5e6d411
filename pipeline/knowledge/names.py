"""Names and titles in a text, and those that none of the text's sources contains.

No model is used. A quoted title counts in any script, a run of capitalised words in scripts with capitals; the first
word of a sentence does not count, since it is always capitalised. So a few names are missed, and some finds are no
names (a language may capitalise all nouns): compare the figures, rather than trust one by itself.
"""

import re
from collections.abc import Collection, Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

QUOTED = re.compile(r"[“„\"«「『《]([^“”„\"«»「」『』《》\n]{2,80})[”“\"»」』》]")
WORD = re.compile(r"[^\W\d_]\w*(?:-\w+)*")
NOT_A_START = re.compile(r"[^\S\n]*[,(/&'’]?[^\S\n]*")  # between words of one sentence; anything else may begin another
ROWS_AT_ONCE = 64 * 1024
HITS_AT_ONCE = 1024


def names_in(text: str) -> set[str]:
    """Quoted titles and runs of capitalised words, in lower case, with single spaces between words."""
    quoted = [match.group(1) for match in QUOTED.finditer(text)]
    runs, end = [[]], None
    text = QUOTED.sub(lambda match: " x" + " " * (len(match.group()) - 2), text)  # becomes a word that is no name
    for match in WORD.finditer(text):
        word, between = match.group(), "" if end is None else text[end : match.start()]
        is_start = end is None or NOT_A_START.fullmatch(between) is None
        if is_start or between != " " or not word[0].isupper():
            runs.append([])
        if word[0].isupper() and not is_start:
            runs[-1].append(word)
        end = match.end()
    candidates = [" ".join(run) for run in runs] + [title for title in quoted if not title[0].islower()]
    return {name for name in _plain(pa.array(candidates, pa.string())).to_pylist() if len(name) > 1}


def unfounded(names: Collection[str], places: Iterable[pa.Array]) -> set[str]:
    """The names, as from `names_in`, that occur as whole words in no value of the arrays of text `places`."""
    left = set(names)
    for values in places:
        if not left:
            break
        nothing, space = (pa.scalar(text, values.type) for text in ("", " "))
        spaced = pc.binary_join_element_wise(nothing, _plain(values), nothing, space)
        while left:
            hits = spaced.filter(pc.match_substring_regex(spaced, " (" + "|".join(sorted(left)) + ") "))
            text = "".join(hits[:HITS_AT_ONCE].drop_null().to_pylist())
            left = {name for name in left if f" {name} " not in text}
            if len(hits) <= HITS_AT_ONCE:
                break
    return left


def texts_of(table: pa.Table) -> Iterator[pa.Array]:
    """All text in a table, also in lists, as arrays of some rows of a column."""
    for batch in table.to_batches(ROWS_AT_ONCE):
        for column in batch.columns:
            while pt.is_list(column.type) or pt.is_large_list(column.type):
                column = column.flatten()
            if pt.is_dictionary(column.type):
                column = column.cast(column.type.value_type)
            if pt.is_string(column.type) or pt.is_large_string(column.type):
                yield column


def _plain(values: pa.Array) -> pa.Array:
    return pc.utf8_trim(pc.replace_substring_regex(pc.utf8_lower(values), r"[^\pL\pM\pN]+", " "), " ")
