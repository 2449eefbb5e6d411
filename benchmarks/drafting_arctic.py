"""The strongest peer of `drafting.py`: Arctic's SuffixDecoding, and the search for its best options.

It is optional: without the package there is nothing here to make, and the benchmark says so.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from drafting_corpora import Corpus, Document
from drafting_replay import Drafter, mean_accepted, replay

try:
    from arctic_inference.suffix_decoding import SuffixDecodingCache
except ImportError:
    SuffixDecodingCache = None

INSTALL = "pip install --no-deps arctic-inference==0.3.0"


def is_installed() -> bool:
    """Whether it can be measured here."""
    return SuffixDecodingCache is not None


@dataclass(frozen=True)
class ArcticSettings:
    """Options of Arctic's drafts, by its own names."""

    max_tree_depth: int
    max_spec_factor: float
    max_spec_offset: float
    min_token_prob: float

    @cached_property
    def speculation(self) -> dict[str, float]:
        """Those that every call takes."""
        return {
            "max_spec_factor": self.max_spec_factor,
            "max_spec_offset": self.max_spec_offset,
            "min_token_prob": self.min_token_prob,
        }


class Arctic(Drafter):
    """Arctic's SuffixDecoding in tree mode: one suffix tree of all responses and one of each live request.

    Responses begin with the last tokens of their prompt, so that it knows how texts begin. Its size is what it
    estimates for the tree of all responses.
    """

    name = "arctic"

    def __init__(self, corpus: Corpus, texts: Sequence[np.ndarray], settings: ArcticSettings) -> None:
        self.settings = settings
        self._num_mark = len(corpus.answer_mark)
        start_s = time.perf_counter()
        self._cache = SuffixDecodingCache(max_tree_depth=settings.max_tree_depth)
        for number, text in enumerate(texts):
            self._cache.start_request(number, corpus.answer_mark)
            self._cache.add_active_response(number, np.concatenate([corpus.answer_mark, text]))
            self._cache.stop_request(number)
        self.build_s = time.perf_counter() - start_s
        self.num_bytes = self._cache._global_tree.estimate_memory()
        self._request = len(texts)

    def begin(self, document: Document) -> None:
        super().begin(document)
        self._cache.start_request(self._request, document.prompt_ids[: -self._num_mark])
        self._cache.add_active_response(self._request, document.prompt_ids[-self._num_mark :])

    def draft(self, max_nodes: int) -> tuple[list[int], list[int]]:
        found = self._cache.speculate(
            self._request,
            self.tokens[max(0, self.length - self.settings.max_tree_depth) : self.length],
            max_spec_tokens=max_nodes,
            use_tree_spec=True,
            **self.settings.speculation,
        )
        return found.token_ids, found.parents

    def advance(self, num_tokens: int) -> None:
        if num_tokens:
            self._cache.add_active_response(self._request, self.tokens[self.length : self.length + num_tokens])
        super().advance(num_tokens)

    def end(self) -> None:
        self._cache.stop_request(self._request)
        self._cache.evict_cached_response(self._request)


@dataclass(frozen=True)
class ArcticGrid:
    """The options that are tried, every one with every other."""

    max_tree_depth: tuple[int, ...]
    max_spec_factor: tuple[float, ...]
    max_spec_offset: tuple[float, ...]
    min_token_prob: tuple[float, ...]

    def settings(self, max_tree_depth: int) -> list[ArcticSettings]:
        """Those of one depth: one tree serves them all."""
        others = itertools.product(self.max_spec_factor, self.max_spec_offset, self.min_token_prob)
        return [ArcticSettings(max_tree_depth, *other) for other in others]


def tuned(
    corpus: Corpus, grid: ArcticGrid, max_nodes: Sequence[int], num_texts: int | None = None
) -> dict[int, ArcticSettings]:
    """The options with the largest AAL for each size of tree, on texts of the pool that are left out of it for this.

    Parameters
    ----------
    num_texts : how many of the texts for tuning are replayed for each choice; None: all.
    """
    best: dict[int, tuple[float, ArcticSettings]] = {}
    for depth in grid.max_tree_depth:
        candidates = grid.settings(depth)
        drafter = Arctic(corpus, corpus.pool_without_tuning, candidates[0])
        for settings, k in itertools.product(candidates, max_nodes):
            drafter.settings = settings
            aal = mean_accepted([replay(drafter, document, k) for document in corpus.tuning[:num_texts]])
            if k not in best or aal > best[k][0]:
                best[k] = aal, settings
    return {k: settings for k, (_, settings) in best.items()}
