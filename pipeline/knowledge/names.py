"""Names and titles in a text, and which of them stand nowhere that the text could know them from.

No model is asked. A quoted title counts in any script, a run of capitalised words where the script has capitals; the
first word of a sentence, which is capitalised whatever it is, does not count. So a few are missed, and some that are
found are no names (a language may capitalise all nouns): figures are to be compared, not believed by themselves.
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
    """Quoted titles and runs of capitalised words, in lower case, their words parted by single spaces."""
    quoted = [match.group(1) for match in QUOTED.finditer(text)]
    runs, end = [[]], None
    text = QUOTED.sub(lambda match: " x" + " " * (len(match.group()) - 2), text)  # a word that is no name
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
    """Those of some names, as `names_in` gives them, that are in no value of some arrays of text, as whole words."""
    left = set(names)
    for values in places:
        if not left:
            break
        spaced = pc.binary_join_element_wise("", _plain(values), "", " ")
        while left:
            hits = spaced.filter(pc.match_substring_regex(spaced, " (" + "|".join(sorted(left)) + ") "))
            text = "".join(hits[:HITS_AT_ONCE].drop_null().to_pylist())
            left = {name for name in left if f" {name} " not in text}
            if len(hits) <= HITS_AT_ONCE:
                break
    return left


def texts_of(table: pa.Table) -> Iterator[pa.Array]:
    """All text in a table, that of lists too, some rows of a column at a time."""
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
