"""Ours and the peers of `drafting.py` that need no compiler, each behind the calls of `Drafter`.

All know the same: the pool's texts, where texts begin, the sequence's prompt and its output so far. A drafter that is
given a pool's texts builds its pool when it is made, and measures nothing but that.
"""

import gc
import heapq
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pygtrie
from drafting_corpora import Corpus, Document
from drafting_replay import Drafter

from laserbatch.retrieval_pools.calibration.calibrate import calibrate
from laserbatch.retrieval_pools.calibration.replay import DraftOptions, ReplayText
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.query import draft
from laserbatch.retrieval_pools.settings import PoolSettings

MIN_PROBABILITY = 1e-3  # low enough for full trees; a run cuts earlier and drafts faster


class Ours(Drafter):
    """`retrieval_pools`: a pool of one group, and the sequence's prompt and output.

    Calibrated for each size of tree, as a run is for its own, by replaying the texts for tuning against a pool without
    them.
    """

    name = "ours"

    def __init__(
        self, corpus: Corpus, folder: Path, max_nodes: Sequence[int], settings: PoolSettings | None = None
    ) -> None:
        start_s = time.perf_counter()
        self.pool = _pool_of(corpus, corpus.pool, folder / "pool", settings)
        self.build_s = time.perf_counter() - start_s
        self.num_bytes = sum(path.stat().st_size for path in (folder / "pool").iterdir())
        without_tuning = _pool_of(corpus, corpus.pool_without_tuning, folder / "without-tuning", settings)
        texts = [ReplayText(document.prompt_ids, document.text_ids) for document in corpus.tuning]
        start_s = time.perf_counter()
        calibrations = {
            k: calibrate(without_tuning, texts, DraftOptions(max_nodes=k, min_probability=MIN_PROBABILITY))
            for k in max_nodes
        }
        self.calibration_s = (time.perf_counter() - start_s) / len(max_nodes)
        self.escapes = {k: calibration.pool_escape for k, calibration in calibrations.items()}
        self.pools = {k: self.pool.with_calibration(calibration) for k, calibration in calibrations.items()}

    def draft(self, max_nodes: int) -> tuple[np.ndarray, np.ndarray]:
        tree = draft(
            self.pools.get(max_nodes, self.pool),
            self.tokens[: self.length],
            self.num_prompt,
            max_nodes=max_nodes,
            min_probability=MIN_PROBABILITY,
            use_previous=False,
        )
        return tree.token_ids, tree.parents


def _pool_of(corpus: Corpus, texts: Sequence[np.ndarray], folder: Path, settings: PoolSettings | None) -> Pool:
    return build_pool(
        (PoolText(token_ids=text) for text in texts),
        folder,
        side=corpus.side,
        tokenizer_hash="benchmark",  # the pool lives as long as the process
        model_id="benchmark",
        settings=settings,
    )


class PromptLookup(Drafter):
    """What followed the latest place in prompt and output where the last three tokens stood, or two, or one."""

    name = "prompt-lookup"
    longest_match = 3

    def draft(self, max_nodes: int) -> tuple[np.ndarray, range]:
        known = self.tokens[: self.length]
        ends = np.flatnonzero(known[:-1] == known[-1])
        for num_before in range(1, self.longest_match):
            longer = ends[ends >= num_before]
            longer = longer[known[longer - num_before] == known[-1 - num_before]]
            if not len(longer):
                break
            ends = longer
        if not len(ends):
            return known[:0], range(0)
        found = known[ends[-1] + 1 :][:max_nodes]
        return found, range(-1, len(found) - 1)


class Trie(Drafter):
    """A trie of token windows with counts, in the manner of LASER's published pools.

    The sequence's prompt and output are in it as temporary branches. A draft takes the most frequent continuations of
    the longest context; what is then free of the tree is filled from shorter contexts. Its size is what the process
    grew by.
    """

    name = "pygtrie"
    window = 12
    longest_context = 4

    def __init__(self, corpus: Corpus, texts: Sequence[np.ndarray]) -> None:
        gc.collect()
        before_bytes, start_s = _resident_bytes(), time.perf_counter()
        self._trie = pygtrie.Trie()
        self._temporary: list[tuple[int, ...]] = []
        gc.disable()  # else it walks the millions of nodes again and again while they grow
        try:
            marked = [np.concatenate([corpus.answer_mark, text]) for text in texts]
            for key, count in _counted_windows(marked, self.window):
                self._trie[key] = count
        finally:
            gc.enable()
        self.build_s = time.perf_counter() - start_s
        self.num_bytes = _resident_bytes() - before_bytes

    def begin(self, document: Document) -> None:
        super().begin(document)
        self._remember(0, self.length)

    def advance(self, num_tokens: int) -> None:
        super().advance(num_tokens)
        self._remember(self.length - num_tokens, self.length)

    def end(self) -> None:
        while self._temporary:  # the latest first: a window goes before those that it continues
            key = self._temporary.pop()
            count = self._trie[key] - 1
            if count:
                self._trie[key] = count
            else:
                del self._trie[key]

    def draft(self, max_nodes: int) -> tuple[list[int], list[int]]:
        tree: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        context = tuple(self.tokens[max(0, self.length - self.longest_context) : self.length].tolist())
        for start in range(len(context)):
            self._fill(tree, context[start:], max_nodes)
        return [token for _, token in tree], [parent for parent, _ in tree]

    def _fill(self, tree: dict[tuple[int, int], int], context: tuple[int, ...], max_nodes: int) -> None:
        """Add what most often followed `context`, the most frequent first; the trie is walked only that far."""
        if len(tree) == max_nodes or not self._trie.has_node(context):
            return
        _, _, children = self._trie.traverse(_counted, prefix=context)
        frontier = [(-count, -1, token, below) for count, token, below in children]
        heapq.heapify(frontier)
        while frontier and len(tree) < max_nodes:
            _, parent, token, children = heapq.heappop(frontier)
            node = tree.setdefault((parent, token), len(tree))
            for count, next_token, below in children:
                heapq.heappush(frontier, (-count, node, next_token, below))

    def _remember(self, start: int, end: int) -> None:
        for key in _windows(self.tokens[:end].tolist(), start, self.window):
            self._trie[key] = self._trie.get(key, 0) + 1
            self._temporary.append(key)


def _counted(_, path: tuple[int, ...], children: Iterable, count: int = 0) -> tuple[int, int, Iterable]:
    return count, path[-1], children  # children are made when they are asked for


def _windows(tokens: list[int], first_end: int, size: int) -> Iterator[tuple[int, ...]]:
    """What ends at each token from `first_end` on, one to `size` tokens long."""
    for end in range(first_end + 1, len(tokens) + 1):
        for start in range(end - 1, max(0, end - size) - 1, -1):
            yield tuple(tokens[start:end])


def _counted_windows(texts: Sequence[np.ndarray], size: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Each different window of one to `size` tokens, the shorter ones first, and how often it stands in the texts."""
    tokens = np.concatenate(texts).astype(np.int64)
    as_list, alphabet = tokens.tolist(), int(tokens.max()) + 1
    ends = np.repeat(np.cumsum([len(text) for text in texts]), [len(text) for text in texts])
    starts, window = np.arange(len(tokens)), np.zeros(len(tokens), np.int64)
    for length in range(1, size + 1):
        is_whole = starts + length <= ends[starts]
        starts, window = starts[is_whole], window[is_whole]  # which of the windows that are a token shorter
        _, first, window, counts = np.unique(
            window * alphabet + tokens[starts + length - 1], return_index=True, return_inverse=True, return_counts=True
        )
        for start, count in zip(starts[first].tolist(), counts.tolist(), strict=True):
            yield tuple(as_list[start : start + length]), count


def _resident_bytes() -> int:
    """Memory of this process that is in use, as Linux counts it; 0 elsewhere."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
