"""Our drafter and the peers of `drafting.py`, all with the interface of `Drafter`, and replays of texts against them.

All drafters know the same: the pool's texts, where texts begin, the sequence's prompt and its output so far. A drafter
that gets a pool's texts builds its pool in the constructor and measures only that.
"""

import gc
import heapq
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pygtrie
from corpora import Corpus, Document
from tasks import build

from laserbatch.retrieval_pools.calibration.calibrate import calibrate
from laserbatch.retrieval_pools.calibration.replay import ReplayText, steps_along
from laserbatch.retrieval_pools.draft import DraftOptions, draft
from laserbatch.retrieval_pools.settings import PoolSettings

try:
    from arctic_inference.suffix_decoding import SuffixDecodingCache
except ImportError:  # optional: without it the benchmark says that nothing was compared with it
    SuffixDecodingCache = None

INSTALL_ARCTIC = "pip install --no-deps arctic-inference==0.3.0"
MIN_ACCEPTANCE = 1e-3  # low enough for full trees; a night cuts earlier and drafts faster


class Drafter:
    """The interface of a measured drafter: it drafts for one sequence at a time, whose tokens are `tokens[:length]`.

    `build_s` and `num_bytes` are the time to build its pool and the pool's size in memory, or on disk if it is there.
    """

    name: str
    build_s: float = 0.0
    num_bytes: int = 0

    def begin(self, document: Document) -> None:
        """Start a sequence whose prompt is known."""
        self.tokens = np.concatenate([document.prompt_ids, document.text_ids])
        self.num_prompt = self.length = len(document.prompt_ids)

    def draft(self, max_nodes: int) -> tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]:
        """Token ids and parents of at most `max_nodes` likely next tokens; parents come first, -1 is the context."""
        raise NotImplementedError

    def advance(self, num_tokens: int) -> None:
        """Take the next `num_tokens` tokens of the text as known."""
        self.length += num_tokens

    def end(self) -> None:
        """Forget the sequence, so that no held-out text stays in the pool."""


class Tree(NamedTuple):
    """A draft tree of any drafter; parents come before their children, -1 is the context."""

    token_ids: Sequence[int] | np.ndarray
    parents: Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Replay:
    """The drafts along one text: microseconds, drafted tokens and accepted tokens of each."""

    draft_us: list[float]
    num_drafted: list[int]
    num_accepted: list[int]


def replay(drafter: Drafter, document: Document, max_nodes: int) -> Replay:
    """Draft along one text, like `retrieval_pools.calibration.replay`.

    Only the draft is timed, not the work to take in the prompt and the accepted tokens.
    """
    result = Replay([], [], [])
    num_tokens = len(document.text_ids)
    drafter.begin(document)
    for step in steps_along(document.text_ids, lambda _: Tree(*drafter.draft(max_nodes))):
        result.draft_us.append(step.draft_us)
        result.num_drafted.append(len(step.tree.token_ids))
        result.num_accepted.append(len(step.path))
        drafter.advance(min(len(step.path) + 1, num_tokens - step.position))
    drafter.end()
    return result


class Ours(Drafter):
    """`retrieval_pools`: drafts from a pool of one group and from the sequence's prompt and output.

    The pool is calibrated for each tree size, like a night's pool for its size, by replaying the texts for tuning
    against a pool without them.
    """

    name = "ours"

    def __init__(
        self, corpus: Corpus, folder: Path, max_nodes: Sequence[int], settings: PoolSettings | None = None
    ) -> None:
        start_s = time.perf_counter()
        self.pool = build(corpus.pool, folder / "pool", corpus.side, settings=settings)
        self.build_s = time.perf_counter() - start_s
        self.num_bytes = sum(path.stat().st_size for path in (folder / "pool").iterdir())
        without_tuning = build(corpus.pool_without_tuning, folder / "without-tuning", corpus.side, settings=settings)
        texts = [ReplayText(document.prompt_ids, document.text_ids) for document in corpus.tuning]
        start_s = time.perf_counter()
        calibrations = {
            k: calibrate(without_tuning, texts, DraftOptions(max_nodes=k, min_acceptance=MIN_ACCEPTANCE))
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
            options=DraftOptions(max_nodes, MIN_ACCEPTANCE, use_previous=False),
        )
        return tree.token_ids, tree.parents


class PromptLookup(Drafter):
    """Drafts the tokens after the latest earlier occurrence of the last three tokens, or else of two or one."""

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
        continuation = known[ends[-1] + 1 :][:max_nodes]
        return continuation, range(-1, len(continuation) - 1)


class Trie(Drafter):
    """A trie of token windows with counts, like LASER's published pools.

    The sequence's prompt and output are in it as temporary branches. A draft takes the most frequent continuations of
    the longest context and fills the rest of the tree from shorter contexts. `num_bytes` is the growth of the process'
    memory.
    """

    name = "pygtrie"
    window = 12
    longest_context = 4

    def __init__(self, corpus: Corpus, texts: Sequence[np.ndarray]) -> None:
        gc.collect()
        before_bytes, start_s = _resident_bytes(), time.perf_counter()
        self._trie = pygtrie.Trie()
        self._temporary: list[tuple[int, ...]] = []
        gc.disable()  # otherwise it walks the growing millions of nodes again and again
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
        while self._temporary:  # newest first: a window is removed before the windows that it continues
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
        """Add the most frequent continuations of `context` until the tree is full; walks the trie only that far."""
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


def _counted(_, path, children, count: int = 0):
    return count, path[-1], children  # children are lazy


def _windows(tokens: list[int], first_end: int, size: int) -> Iterator[tuple[int, ...]]:
    """The windows of one to `size` tokens that end at each token from `first_end` on."""
    for end in range(first_end + 1, len(tokens) + 1):
        for start in range(end - 1, max(0, end - size) - 1, -1):
            yield tuple(tokens[start:end])


def _counted_windows(texts: Sequence[np.ndarray], size: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Each distinct window of one to `size` tokens, shorter ones first, and its number of occurrences in the texts."""
    tokens = np.concatenate(texts).astype(np.int64)
    as_list, alphabet = tokens.tolist(), int(tokens.max()) + 1
    ends = np.repeat(np.cumsum([len(text) for text in texts]), [len(text) for text in texts])
    starts, window = np.arange(len(tokens)), np.zeros(len(tokens), np.int64)
    for length in range(1, size + 1):
        is_whole = starts + length <= ends[starts]
        starts, window = starts[is_whole], window[is_whole]  # `window`: index of the window that is one token shorter
        _, first, window, counts = np.unique(
            window * alphabet + tokens[starts + length - 1], return_index=True, return_inverse=True, return_counts=True
        )
        for start, count in zip(starts[first].tolist(), counts.tolist(), strict=True):
            yield tuple(as_list[start : start + length]), count


def _resident_bytes() -> int:
    """The resident memory of this process in bytes, on Linux; 0 elsewhere."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ArcticSettings:
    """Options of Arctic's drafts, under Arctic's names."""

    max_tree_depth: int
    max_spec_factor: float
    max_spec_offset: float
    min_token_prob: float


class Arctic(Drafter):
    """Arctic's SuffixDecoding in tree mode: one suffix tree of all responses and one for each live request.

    Responses begin with the last tokens of their prompt, so that the tree knows how texts begin. `num_bytes` is
    Arctic's own estimate for the tree of all responses.
    """

    name = "arctic"

    def __init__(self, corpus: Corpus, texts: Sequence[np.ndarray], settings: ArcticSettings) -> None:
        self.choose(settings)
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

    def choose(self, settings: ArcticSettings) -> None:
        """Draft with these options from now on; the depth of the tree does not change."""
        options = asdict(settings)
        self._max_tree_depth = options.pop("max_tree_depth")
        self._options = options  # passed to every call

    def begin(self, document: Document) -> None:
        super().begin(document)
        self._cache.start_request(self._request, document.prompt_ids[: -self._num_mark])
        self._cache.add_active_response(self._request, document.prompt_ids[-self._num_mark :])

    def draft(self, max_nodes: int) -> tuple[list[int], list[int]]:
        draft = self._cache.speculate(
            self._request,
            self.tokens[max(0, self.length - self._max_tree_depth) : self.length],
            max_spec_tokens=max_nodes,
            use_tree_spec=True,
            **self._options,
        )
        return draft.token_ids, draft.parents

    def advance(self, num_tokens: int) -> None:
        if num_tokens:
            self._cache.add_active_response(self._request, self.tokens[self.length : self.length + num_tokens])
        super().advance(num_tokens)

    def end(self) -> None:
        self._cache.stop_request(self._request)
        self._cache.evict_cached_response(self._request)


@dataclass(frozen=True)
class ArcticGrid:
    """The options to try, in all combinations."""

    max_tree_depth: tuple[int, ...]
    max_spec_factor: tuple[float, ...]
    max_spec_offset: tuple[float, ...]
    min_token_prob: tuple[float, ...]

    def settings(self, max_tree_depth: int) -> list[ArcticSettings]:
        """All combinations at one depth; they share one tree."""
        others = itertools.product(self.max_spec_factor, self.max_spec_offset, self.min_token_prob)
        return [ArcticSettings(max_tree_depth, *other) for other in others]


def tuned_arctic(
    corpus: Corpus, grid: ArcticGrid, max_nodes: Sequence[int], num_texts: int | None = None
) -> dict[int, ArcticSettings]:
    """The options with the largest AAL for each tree size, on the texts for tuning, which the tuned pool lacks.

    Parameters
    ----------
    num_texts : number of texts for tuning to replay for each choice; None: all.
    """
    best: dict[int, tuple[float, ArcticSettings]] = {}
    for depth in grid.max_tree_depth:
        candidates = grid.settings(depth)
        drafter = Arctic(corpus, corpus.pool_without_tuning, candidates[0])
        for settings, k in itertools.product(candidates, max_nodes):
            drafter.choose(settings)
            replays = [replay(drafter, document, k) for document in corpus.tuning[:num_texts]]
            aal = np.concatenate([measured.num_accepted for measured in replays]).mean()
            if k not in best or aal > best[k][0]:
                best[k] = aal, settings
    return {k: settings for k, (_, settings) in best.items()}
