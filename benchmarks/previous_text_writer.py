"""Writes the texts of `previous_text.py` and records their steps; may add a path to the first draft of a text.

It judges nothing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from previous_text_tasks import ChangeTask
from systems import in_order

from laserbatch.pipeline.decoding.drafters import Drafter
from laserbatch.pipeline.decoding.drafters.blended import blend
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.sequence import (
    DecodingSequence,
    GenerationRequest,
    GenerationResult,
)
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.decoding.step import Step, Stream
from laserbatch.pipeline.decoding.step_budget import StepBudget
from laserbatch.pipeline.decoding.token_tree import EMPTY_TREE, MAX_NODES, TokenTree, TreeBatch
from laserbatch.pipeline.decoding.verifiers import verifier_from
from laserbatch.retrieval_pools.sources import SOURCE_LOOKAHEAD

MIN_ACCEPTANCE = 0.02


@dataclass(frozen=True)
class Written:
    """One pass over the texts: results in order, start of each step in its text, tokens by forward, seconds."""

    results: list[GenerationResult]
    starts: list[list[int]]
    forwards: np.ndarray  # int64[num_forwards]
    seconds: float
    beginnings: Sequence[np.ndarray]  # int32[n] each, the beginning of a text that followed the prompt in the request

    @property
    def num_steps(self) -> np.ndarray:
        """int64[num_texts]"""
        return np.array([result.num_steps for result in self.results])

    @property
    def texts(self) -> list[np.ndarray]:
        return [np.concatenate(both) for both in zip(self.beginnings, (r.token_ids for r in self.results), strict=True)]

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all texts with their end tokens."""
        return sum(map(len, self.texts)) + sum(result.end_id is not None for result in self.results)


class PathFirst(Drafter):
    """Wraps a drafter, and adds a path from the entity's previous text to the first draft of a text.

    Parameters
    ----------
    paths : by request, int32[n], tokens from the beginning of the text on; requests without a path are missing.
    shares : float64[m], at i the share of texts that begin with at least i tokens of their previous text.
    """

    def __init__(self, drafter: Drafter, paths: dict[str, np.ndarray], shares: np.ndarray | None = None) -> None:
        self._drafter, self._paths, self._shares = drafter, paths, shares
        self.starts: dict[str, list[int]] = {}  # by request, the number of output tokens before each step

    def draft_all(self, sequences: list[DecodingSequence], max_depths: list[int]) -> TreeBatch:
        trees, paths = self._drafter.draft_all(sequences, max_depths), []
        for sequence in sequences:
            request_id = sequence.request.request_id
            is_first = request_id not in self.starts
            self.starts.setdefault(request_id, []).append(sequence.num_output)
            paths.append(self._path(sequence) if is_first else EMPTY_TREE)
        return blend([TreeBatch.of(paths), trees], MAX_NODES) if any(map(len, paths)) else trees

    def _path(self, sequence: DecodingSequence) -> TokenTree:
        before, path = sequence.num_output, self._paths.get(sequence.request.request_id, np.empty(0, np.int32))
        if not np.array_equal(path[:before], sequence.output_ids):
            return EMPTY_TREE
        token_ids = path[before:][:MAX_NODES]
        places = np.arange(len(token_ids), dtype=np.int32)
        log_acceptance = np.zeros(len(token_ids), np.float32)
        if self._shares is not None:
            log_acceptance += np.log(self._shares[before + 1 + places] / self._shares[before])
        # A separate source, so that a budget does not mix what it learns of paths and of suffix matches.
        return TokenTree(token_ids, places - 1, log_acceptance, np.full(len(token_ids), SOURCE_LOOKAHEAD, np.uint8))


class Writer:
    """Writes the texts of one task with one engine."""

    def __init__(self, engine: Engine, task: ChangeTask) -> None:
        self.engine, self.task = engine, task
        self._forwards: list[int] = []  # number of tokens of each forward of the pass
        submit_step = engine.submit_step

        def watched(stream: Stream) -> Step | None:
            if (step := submit_step(stream)) is not None:
                self._forwards.append(step.num_tokens)
            return step

        engine.submit_step = watched

    def write(
        self, prompts: Sequence[np.ndarray], previous: Sequence[np.ndarray] | None, drafter: Drafter,
        step_budget: StepBudget | None = None, rule: str = "greedy", beginnings: Sequence[np.ndarray] | None = None,
    ) -> Written:  # fmt: skip
        """Write all texts, each after its beginning in `beginnings`, if any; the prefix cache is emptied before."""
        most, grammar = self.task.max_new_tokens, self.task.grammar
        none = [None] * len(prompts)
        beginnings = beginnings or [np.empty(0, np.int32)] * len(prompts)
        requests = [
            GenerationRequest(str(i), np.concatenate((prompt, begun)), own, None, most - len(begun), 0, grammar)
            for i, (prompt, begun, own) in enumerate(zip(prompts, beginnings, previous or none, strict=True))
        ]
        budget = Budget(MAX_NODES, MIN_ACCEPTANCE)
        verifier = verifier_from(self.engine.settings.model_copy(update={"verifier": rule}))
        watched = drafter if isinstance(drafter, PathFirst) else PathFirst(drafter, {})
        self.engine.reset_prefix_cache()
        self._forwards = []
        start_s = time.process_time()
        results = in_order(self.engine.generate(requests, watched, verifier, budget, step_budget))
        seconds = time.process_time() - start_s
        starts = [watched.starts.get(result.request_id, []) for result in results]
        return Written(results, starts, np.array(self._forwards), seconds, beginnings)
