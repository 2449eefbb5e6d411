"""Lookahead decoding (Fu et al., ICML 2024): the target itself guesses the drafts, without texts or draft models.

Besides the draft, a step computes a window: the guesses of NGRAM - 1 earlier steps for the next WIDTH positions. The
oldest guesses are a chain below the root, and each later guess is a child of the guess one position before it (section
3.1, Figure 2), so the window is a tree like any draft. The target's choice after the last guess of a column completes
an n-gram; n-grams that begin with the last token of a text are drafted (section 3.2).
"""

from collections import OrderedDict, defaultdict

import numpy as np

from laserbatch.pipeline.decoding.drafters.drafter import Drafter, Observation
from laserbatch.pipeline.decoding.sequence import DecodingSequence
from laserbatch.pipeline.decoding.token_tree import ROOT, TokenTree
from laserbatch.retrieval_pools.sources import SOURCE_LOOKAHEAD

WIDTH, NGRAM = 4, 4
MAX_NGRAMS = 4  # number of n-grams kept per first token, the newest
LOG_ACCEPTANCE = np.log(0.6)  # acceptance of the next token of an n-gram, measured on sample profiles


class _Guesses:
    """The window of one text, int32 (NGRAM - 1, WIDTH), oldest row first, and its n-grams by their first token."""

    def __init__(self, sequence: DecodingSequence) -> None:
        self.window = np.resize(sequence.context[-WIDTH * (NGRAM - 1) :], (NGRAM - 1, WIDTH)).astype(np.int32)
        self.ngrams: defaultdict[int, OrderedDict[tuple[int, ...], None]] = defaultdict(OrderedDict)

    def remember(self, ngram: tuple[int, ...]) -> None:
        """Add an n-gram as the newest one with its first token; drop the oldest ones beyond MAX_NGRAMS."""
        newest = self.ngrams[ngram[0]]
        newest.pop(ngram[1:], None)
        newest[ngram[1:]] = None
        while len(newest) > MAX_NGRAMS:
            newest.popitem(last=False)


class LookaheadDrafter(Drafter):
    """Guesses WIDTH positions ahead; drafts the newest n-grams that begin with the last token."""

    observes = "decode"

    def __init__(self) -> None:
        self._guesses: dict[DecodingSequence, _Guesses] = {}

    def draft(self, sequence: DecodingSequence) -> TokenTree:
        guesses = self._guesses.get(sequence)
        if guesses is None:
            guesses = self._guesses[sequence] = _Guesses(sequence)
        tokens, parents = guesses.window.ravel().tolist(), [*range(-1, WIDTH - 1), *range(WIDTH * (NGRAM - 2))]
        acceptance = [0.0] * len(tokens)  # acceptance 1: always computed
        for ngram in reversed(guesses.ngrams.get(int(sequence.context[-1]), ())):
            for depth, token in enumerate(ngram):
                parents.append(ROOT if depth == 0 else len(tokens) - 1)
                tokens.append(token)
                acceptance.append(LOG_ACCEPTANCE * (depth + 1))
        source = np.full(len(tokens), SOURCE_LOOKAHEAD, np.uint8)
        arrays = np.array(tokens, np.int32), np.array(parents, np.int32), np.array(acceptance, np.float32)
        return TokenTree(*arrays, source)

    def observe(self, observation: Observation) -> None:
        """Add the target's choices after the columns of each window as new guesses."""
        looked_up: list[tuple[_Guesses, int, int]] = []  # a window, a column of it and the row of its last guess
        for number, sequence in enumerate(observation.sequences):
            guesses = self._guesses.get(sequence)
            if guesses is not None and observation.trees.sizes[number]:
                columns = columns_of(observation.trees[number], guesses.window)
                start = int(observation.starts[number]) + 1
                looked_up += [(guesses, column, start + place) for column, place in columns]
        if not looked_up:
            return
        chosen = observation.rows.of(np.array([row for _, _, row in looked_up])).argmax(-1).tolist()
        new = {guesses: guesses.window[-1].copy() for guesses, _, _ in looked_up}
        for (guesses, column, _), token in zip(looked_up, chosen, strict=True):
            guesses.remember((*guesses.window[:, column].tolist(), token))
            new[guesses][column] = token
        for guesses, row in new.items():
            guesses.window = np.vstack((guesses.window[1:], row))

    def forget(self, sequence: DecodingSequence) -> None:
        self._guesses.pop(sequence, None)


def columns_of(tree: TokenTree, window: np.ndarray) -> list[tuple[int, int]]:
    """The columns of the window that are completely in a verified tree, each with the node of its last guess."""
    keys = list(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True))
    below = {key: place for place, key in reversed(list(enumerate(keys)))}
    columns, oldest = [], ROOT
    for column, guesses in enumerate(window.T.tolist()):
        place = oldest = below.get((oldest, guesses[0]))
        for token in guesses[1:]:
            place = below.get((place, token))
        if place is not None:
            columns.append((column, place))
        if oldest is None:
            break
    return columns
