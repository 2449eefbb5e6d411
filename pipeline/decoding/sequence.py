"""A text: what is asked for, what is written of it so far, and what comes of it."""

from dataclasses import dataclass

import numpy as np

from laserbatch.pipeline.decoding.token_tree import MAX_DEPTH, TreeBatch
from laserbatch.retrieval_pools.sources import NUM_SOURCES, SOURCE_TARGET

COUNTED_TOGETHER = 64  # drafts of a text: a call for each took longer than all else that is done with it


@dataclass(frozen=True)
class GenerationRequest:
    """One text to write.

    Parameters
    ----------
    request_id : comes back with the result.
    prompt_ids : int32[n], n >= 1.
    previous_ids : int32[m], this entity's earlier text, to draft from; or None.
    group : name of the pool group to prefer, or None.
    max_new_tokens : limit of this text's tokens.
    """

    request_id: str
    prompt_ids: np.ndarray
    previous_ids: np.ndarray | None = None
    group: str | None = None
    max_new_tokens: int = 512


@dataclass(frozen=True)
class GenerationResult:
    """A finished text.

    `token_ids` int32[k] without the end token; `text`, their decoded text, cut before a stop string (empty where the
    engine has no tokenizer); `sources` uint8[k], a code of `retrieval_pools.sources` a token; `finish_reason`
    "end_of_text", "stop" or "length". Of `num_drafted` draft tokens `num_accepted` became part of the text, by source
    int64[NUM_SOURCES] and by depth int64[MAX_DEPTH] (index 0 is depth 1). Tokens per step is
    `(num_accepted + num_steps) / num_steps`, the bonus token of each step counted.
    """

    request_id: str
    token_ids: np.ndarray
    sources: np.ndarray
    text: str
    finish_reason: str
    num_steps: int
    num_drafted: int
    num_accepted: int
    drafted_by_source: np.ndarray
    accepted_by_source: np.ndarray
    drafted_by_depth: np.ndarray
    accepted_by_depth: np.ndarray


@dataclass(frozen=True)
class GenerationFailure:
    """A request that could not be done; `reason` begins with a stable word ("too-long", "bad-token", ...)."""

    request_id: str
    reason: str


@dataclass(frozen=True)
class StepEvent:
    """What one step added to one text: int32[a] tokens and their sources, of `num_drafted` drafted.

    `is_last` : the text has ended, though a stop string may cut it before these tokens.
    """

    request_id: str
    token_ids: np.ndarray
    sources: np.ndarray
    num_drafted: int
    is_last: bool = False


class Sequence:
    """A text being written. Drafters read `prompt_ids`, `output_ids`, `context`, `previous_ids` and `group`."""

    def __init__(self, request: GenerationRequest, max_new_tokens: int) -> None:
        self.request = request
        self.previous_ids, self.group = request.previous_ids, request.group
        self.num_prompt = len(request.prompt_ids)
        self.max_new_tokens = max_new_tokens
        self.row = -1  # of the KV cache, once it has one
        self.order = -1  # in which it was asked for
        self.num_steps = self.num_drafted = self.num_accepted = 0
        self._by_source = np.zeros((2, NUM_SOURCES), np.int64)  # drafted tokens, and of them the accepted ones
        self._by_depth = np.zeros((2, MAX_DEPTH), np.int64)
        self._uncounted: list[tuple[TreeBatch, int, np.ndarray]] = []  # drafts that these sums do not have yet
        self._tokens = np.empty(self.num_prompt + max_new_tokens, np.int32)
        self._tokens[: self.num_prompt] = request.prompt_ids
        self._sources = np.empty(max_new_tokens, np.uint8)
        self._length = self.num_prompt

    @property
    def context(self) -> np.ndarray:
        """int32 view: prompt, then output so far."""
        return self._tokens[: self._length]

    @property
    def prompt_ids(self) -> np.ndarray:
        return self._tokens[: self.num_prompt]

    @property
    def output_ids(self) -> np.ndarray:
        return self._tokens[self.num_prompt : self._length]

    @property
    def sources(self) -> np.ndarray:
        """uint8 view: where each output token came from."""
        return self._sources[: self._length - self.num_prompt]

    @property
    def num_output(self) -> int:
        return self._length - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens that may still be written."""
        return self.max_new_tokens - self.num_output

    def append(self, token_ids: np.ndarray, sources: np.ndarray, next_token: int | None) -> None:
        """Commit a step: an accepted path's tokens and their sources, [n] both, and unless None the target's own."""
        end = self._length + len(token_ids)
        if len(token_ids):
            self._tokens[self._length : end] = token_ids
            self._sources[self._length - self.num_prompt : end - self.num_prompt] = sources
        if next_token is not None:
            self._tokens[end] = next_token
            self._sources[end - self.num_prompt] = SOURCE_TARGET
            end += 1
        self._length = end
        self.num_steps += 1

    def count(self, trees: TreeBatch, number: int, path: np.ndarray) -> None:
        """One of a step's drafts and, int64[num_accepted], its nodes that were accepted."""
        size = int(trees.sizes[number])
        if size:
            self.num_drafted += size
            self.num_accepted += len(path)
            self._uncounted.append((trees, number, path))
            if len(self._uncounted) == COUNTED_TOGETHER:
                self._count_all()

    def _count_all(self) -> None:
        """Add the newest drafts to the sums, together."""
        if not self._uncounted:
            return
        drafts = [(trees, trees.nodes_of(number)) for trees, number, _ in self._uncounted]
        paths = [path for _, _, path in self._uncounted]
        starts = np.cumsum([0, *(nodes.stop - nodes.start for _, nodes in drafts)])[:-1]
        accepted = np.repeat(starts, [len(path) for path in paths]) + np.concatenate(paths)
        source = np.concatenate([trees.source[nodes] for trees, nodes in drafts])
        depth = np.minimum(np.concatenate([trees.depths[nodes] for trees, nodes in drafts]), MAX_DEPTH) - 1
        for sums, values in ((self._by_source, source), (self._by_depth, depth)):
            for total, counted in zip(sums, (values, values[accepted]), strict=True):
                total += np.bincount(counted, minlength=len(total))
        self._uncounted.clear()

    def result(self, finish_reason: str, num_tokens: int, text: str) -> GenerationResult:
        """The finished text, cut to its first `num_tokens` output tokens, which decode to `text`."""
        self._count_all()
        return GenerationResult(
            request_id=self.request.request_id,
            token_ids=self.output_ids[:num_tokens].copy(),
            sources=self.sources[:num_tokens].copy(),
            text=text,
            finish_reason=finish_reason,
            num_steps=self.num_steps,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            drafted_by_source=self._by_source[0],
            accepted_by_source=self._by_source[1],
            drafted_by_depth=self._by_depth[0],
            accepted_by_depth=self._by_depth[1],
        )
