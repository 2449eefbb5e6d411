"""Which texts a full pool does without: those that draft least for the others.

What a text is worth is measured in n-grams of three tokens (two that are matched and one that is drafted; a text's
start and end are tokens). An n-gram that c texts hold was wanted by c - 1 of them from the others. The first copy of it
in the pool drafts it; a second is worth a sixteenth of the first, and so on. So a text is worth nothing whose n-grams
stand nowhere else, and little when the pool has copies of them already. With a half-life an older text's wants count
less, 2^(-age / half-life): what only old nights wrote fades, what is still written does not. It is a frequency decay of
what is chosen and not of what is drafted: counts in the pool stay whole, so that queries cost the same and a pool is
the same files however often it was merged.

Texts are chosen greedily by what they add a token (threshold greedy: Badanidiyuru and Vondrak 2014).
"""

import numpy as np

from laserbatch.retrieval_pools.compiled import cached
from laserbatch.retrieval_pools.index.layout import TextSpans

NGRAM_TOKENS = 3
COPY_WORTH = 1 / 16  # of that of the copy before
BYTES_PER_CELL = 9
_MIN_TABLE_BITS, _MAX_TABLE_BITS = 16, 30
_STEP = 0.8  # from a threshold to the next
_LEAST = 1e-12  # of the largest worth: less is none


def choose_texts(
    tokens: np.ndarray,
    spans: TextSpans,
    ages_nights: np.ndarray,
    max_tokens: int,
    half_life_nights: float | None = None,
    memory_bytes: int | None = None,
) -> np.ndarray:
    """The texts to keep. Deterministic; of equal worth the younger, then the earlier text.

    Parameters
    ----------
    tokens : int32[n], texts laid end to end.
    spans : where they lie.
    ages_nights : float32[num_texts].
    max_tokens : of the kept texts together, separators not counted.
    half_life_nights : None: age decides between texts of equal worth only.
    memory_bytes : what the table of n-grams may take; in a smaller one more n-grams share a cell and seem more wanted
        than they are. None: eight cells a token.

    Returns
    -------
    int64[num_kept], increasing numbers of texts.
    """
    wants = np.ones(spans.num_texts, np.float32)
    if half_life_nights is not None:
        wants = np.exp2(-ages_nights.astype(np.float64) / half_life_nights).astype(np.float32)
    num_bits = max(len(tokens).bit_length() + 2, _MIN_TABLE_BITS)
    if memory_bytes is not None:
        num_bits = min(num_bits, max((memory_bytes // BYTES_PER_CELL).bit_length() - 1, _MIN_TABLE_BITS))
    num_bits = min(num_bits, _MAX_TABLE_BITS)
    wanted = _count_wants(tokens, spans.starts, wants, num_bits)
    turns = np.argsort(ages_nights, kind="stable")
    kept = _choose(tokens, spans.starts, wants, wanted, turns, max_tokens)
    return np.flatnonzero(kept)


@cached()
def _cell(tokens, position, num_cells):
    """Cell of the n-gram at a position, in a table whose size is a power of two."""
    value = np.uint64(0xCBF29CE484222325)
    for k in range(NGRAM_TOKENS):
        value = (value ^ np.uint64(tokens[position + k] + 1)) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(31)
    return np.int64(value & np.uint64(num_cells - 1))


@cached()
def _count_wants(tokens, starts, wants, num_bits):
    """float32[cells]: how much the texts that hold an n-gram want it, each text once."""
    num_cells = 1 << num_bits
    wanted = np.zeros(num_cells, np.float32)
    seen_in = np.full(num_cells, -1, np.int32)
    for text in range(starts.shape[0] - 1):
        for position in range(starts[text], starts[text + 1] - NGRAM_TOKENS + 2):
            cell = _cell(tokens, position, num_cells)
            if seen_in[cell] != text:
                seen_in[cell] = text
                wanted[cell] += wants[text]
    return wanted


@cached()
def _choose(tokens, starts, wants, wanted, turns, max_tokens):
    num_cells = wanted.shape[0]
    num_texts = starts.shape[0] - 1
    num_copies = np.zeros(num_cells, np.uint8)
    seen_by = np.full(num_cells, -1, np.int32)
    kept = np.zeros(num_texts, np.bool_)
    worth = np.empty(num_texts, np.float64)  # a token, as last looked at: it only falls
    most = 0.0
    num_looks = 0
    for text in range(num_texts):
        worth[text] = _worth(tokens, starts, text, wants[text], wanted, num_copies, seen_by, num_looks)
        num_looks += 1
        most = max(most, worth[text])
    room = max_tokens
    threshold = most
    while most > 0 and threshold >= most * _LEAST and room > 0:
        for text in turns:
            length = starts[text + 1] - starts[text] - 1
            if kept[text] or worth[text] < threshold or length > room:
                continue
            worth[text] = _worth(tokens, starts, text, wants[text], wanted, num_copies, seen_by, num_looks)
            num_looks += 1
            if worth[text] >= threshold:
                kept[text] = True
                room -= length
                _add_copies(tokens, starts, text, num_copies, seen_by, num_looks)
                num_looks += 1
        threshold *= _STEP
    for text in turns:  # room for what is worth nothing
        length = starts[text + 1] - starts[text] - 1
        if not kept[text] and length <= room:
            kept[text] = True
            room -= length
    return kept


@cached()
def _worth(tokens, starts, text, own_want, wanted, num_copies, seen_by, look):
    """What a text would add a token: for each of its n-grams what the pool's copies leave of others' wants."""
    worth = 0.0
    for position in range(starts[text], starts[text + 1] - NGRAM_TOKENS + 2):
        cell = _cell(tokens, position, wanted.shape[0])
        if seen_by[cell] != look:
            seen_by[cell] = look
            worth += max(wanted[cell] - own_want, 0.0) * COPY_WORTH ** num_copies[cell]
    return worth / (starts[text + 1] - starts[text])


@cached()
def _add_copies(tokens, starts, text, num_copies, seen_by, look):
    for position in range(starts[text], starts[text + 1] - NGRAM_TOKENS + 2):
        cell = _cell(tokens, position, num_copies.shape[0])
        if seen_by[cell] != look:
            seen_by[cell] = look
            num_copies[cell] = min(num_copies[cell] + 1, 255)
