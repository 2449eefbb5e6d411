"""A text being written: its prompt, its output so far, and the counts its result will carry."""

import numpy as np

from laserbatch.pipeline.decoding.requests import GenerationRequest, GenerationResult
from laserbatch.pipeline.decoding.token_tree import MAX_DEPTH, TreeBatch
from laserbatch.retrieval_pools.sources import NUM_SOURCES, SOURCE_TARGET

COUNTED_TOGETHER = 64  # drafts of a text: a call for each took longer than all else that is done with it


class Sequence:
    """A live text. Drafters read `prompt_ids`, `output_ids`, `context`, `previous_ids` and `group`.

    `scratch` is a dictionary in which a drafter may keep what it wants for this sequence; it dies with it.
    """

    def __init__(self, request: GenerationRequest, max_new_tokens: int) -> None:
        self.request = request
        self.num_prompt = len(request.prompt_ids)
        self.max_new_tokens = max_new_tokens
        self.scratch: dict = {}
        self.row = -1  # of the KV store, once it has one
        self.order = -1  # of admission; kept when it is preempted
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
    def previous_ids(self) -> np.ndarray | None:
        return self.request.previous_ids

    @property
    def group(self) -> str | None:
        return self.request.group

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
