"""The engine: texts for a stream of requests, drafted and verified, as many at once as fit.

One step is four hops for all live sequences: draft, forward, verify, commit. Requests are pulled as rows of the KV
store come free, and results are yielded as they finish. A text depends on its own request alone: not on what shares
its batch, nor on the order of requests (but for rounding, which the shape of a forward can change).

Knows no entities, no files and no Ray.
"""

import logging
import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.decoding.acceptance import Acceptance, verify
from pipeline.decoding.alternatives import step_alternatives
from pipeline.decoding.drafters import Drafter, NoDrafter
from pipeline.decoding.endings import Endings
from pipeline.decoding.kv_store import KVStore, common_prefix
from pipeline.decoding.loading import LoadedModel, load_model
from pipeline.decoding.model_runner import Feed, ModelRunner
from pipeline.decoding.sequence import (
    GenerationFailure,
    GenerationRequest,
    GenerationResult,
    Sequence,
    StepEvent,
)
from pipeline.decoding.settings import DecodingSettings
from pipeline.decoding.token_tree import EMPTY_TREE, TokenTree, prune
from pipeline.decoding.verifiers import Verifier, verifier_from

__all__ = ["Engine", "GenerationFailure", "GenerationRequest", "GenerationResult", "StepEvent"]

logger = logging.getLogger(__name__)

WORTH_WAITING_TOKENS = 32  # a prompt waits a step for a peer that is computing at least this much more of its prefix
CUDA_CACHE_SHARE = 0.8  # of the memory that is free after loading


class Engine:
    """A loaded model with its KV store.

    Use `Engine.from_pretrained`; the constructor takes a model that is already prepared.
    """

    def __init__(self, loaded: LoadedModel, settings: DecodingSettings | None = None) -> None:
        self.settings = settings or DecodingSettings()
        self.tokenizer = loaded.tokenizer
        self.model_id = loaded.model_id
        self.max_context = loaded.max_context
        self.end_ids = loaded.end_ids
        self.vocab_size = loaded.vocab_size
        self.device = loaded.device
        max_tokens = self.settings.max_cache_tokens
        if max_tokens is None and self.device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(self.device)
            max_tokens = int(free_bytes * CUDA_CACHE_SHARE) // max(1, loaded.bytes_per_token)
        self.store = KVStore(self.settings.batch_size, max_tokens)
        self.runner = ModelRunner(loaded.model, self.store, self.device)
        self._endings = Endings(self.tokenizer, self.settings.stop_strings)
        self._is_end = np.zeros(self.vocab_size, bool)
        self._is_end[list(self.end_ids)] = True

    @classmethod
    def from_pretrained(cls, model_dir, settings: DecodingSettings | None = None, device: str = "auto") -> "Engine":
        """Load a model folder ("sample": the bundled one) and set torch's number of threads.

        Raises
        ------
        pipeline.errors.ModelError : the folder holds no model that the engine can run.
        """
        settings = settings or DecodingSettings()
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        return cls(load_model(model_dir, settings.dtype, device), settings)

    def generate(
        self,
        requests: Iterable[GenerationRequest],
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        on_event: Callable[[StepEvent], None] | None = None,
    ) -> Iterator[GenerationResult | GenerationFailure]:
        """Write the texts of all requests, yielding each as it finishes.

        Parameters
        ----------
        requests : pulled lazily, one ahead of the free rows.
        drafter : None decodes plainly, one token a step.
        verifier : None is the one the settings name.
        on_event : called after each step of each text.
        """
        drafter = drafter or NoDrafter()
        verifier = verifier or verifier_from(self.settings)
        waiting = _Lookahead(requests)
        live: list[Sequence] = []
        try:
            while True:
                yield from self._admit(waiting, live)
                if not live:
                    return
                outcomes = self._step(live, drafter, verifier, on_event)
                for sequence in [s for s in live if id(s) in outcomes]:
                    live.remove(sequence)
                    self.store.release(sequence.row)
                    yield outcomes[id(sequence)]
        finally:
            for sequence in live:
                self.store.release(sequence.row)

    def _admit(self, waiting: "_Lookahead", live: list[Sequence]) -> Iterator[GenerationFailure]:
        """Give rows to waiting requests, in order, while there are some; yields those that cannot be done."""
        while (request := waiting.peek()) is not None:
            failure = self._refuse(request)
            if failure is not None:
                waiting.pop()
                yield failure
                continue
            if live and self._peer_computes_prefix(request, live):
                return
            max_new_tokens = min(request.max_new_tokens, self.max_context - len(request.prompt_ids))
            sequence = Sequence(request, max_new_tokens, self.settings.record_alternatives)
            num_tokens = sequence.num_prompt + sequence.max_new_tokens + self.settings.max_draft_tokens
            lease = self.store.acquire(sequence.prompt_ids, num_tokens)
            if lease is None:
                if not live:
                    raise RuntimeError("every row of the engine is held by another, unfinished generate()")
                return
            sequence.row = lease.row
            insort(live, sequence, key=lambda other: other.row)  # packed in the order of rows, nothing is reordered
            waiting.pop()

    def _refuse(self, request: GenerationRequest) -> GenerationFailure | None:
        prompt = np.asarray(request.prompt_ids)
        if len(prompt) == 0:
            reason = "empty: the prompt has no tokens"
        elif request.max_new_tokens < 1:
            reason = f"bad-limit: max_new_tokens is {request.max_new_tokens}, at least 1 is expected"
        elif len(prompt) > self.max_context - 1:
            reason = f"too-long: the prompt has {len(prompt)} tokens, the model's context allows {self.max_context - 1}"
        elif prompt.min() < 0 or prompt.max() >= self.vocab_size:
            bad = int(prompt[(prompt < 0) | (prompt >= self.vocab_size)][0])
            reason = f"bad-token: the prompt holds token {bad}, the vocabulary has {self.vocab_size}"
        elif not self.store.fits(len(prompt) + request.max_new_tokens + self.settings.max_draft_tokens):
            reason = f"too-long: prompt and answer exceed the KV cache of {self.store.max_tokens} tokens"
        else:
            return None
        return GenerationFailure(request.request_id, reason)

    def _peer_computes_prefix(self, request: GenerationRequest, live: list[Sequence]) -> bool:
        """Whether a sequence admitted for this very step computes a prefix that would otherwise be computed twice."""
        cached, _ = self.store.longest_prefix(request.prompt_ids[:-1])
        pending = [s for s in live if self.store.lengths[s.row] < s.num_prompt - 1]
        peers = (common_prefix(s.prompt_ids, request.prompt_ids[:-1]) for s in pending)
        return max(peers, default=0) >= cached + WORTH_WAITING_TOKENS

    def _step(self, live, drafter, verifier, on_event) -> dict[int, GenerationResult | GenerationFailure]:
        """One step of all live sequences; of those that ended, by `id`, what came of them."""
        drafts = [self._draft(sequence, drafter) for sequence in live]
        try:
            moves = self._forward_and_verify(live, drafts, verifier)
        except Exception as error:
            logger.warning("a step of %d sequences failed (%s); trying them one at a time", len(live), error)
            self._free_memory()
            return self._step_one_by_one(live, drafts, verifier, on_event)
        return self._commit_all(moves, on_event)

    def _step_one_by_one(self, live, drafts, verifier, on_event) -> dict[int, GenerationResult | GenerationFailure]:
        """The same step, a forward for each sequence, so that only those fail that cannot be run."""
        outcomes = {}
        for sequence, draft in zip(live, drafts, strict=True):
            try:
                moves = self._forward_and_verify([sequence], [draft], verifier)
            except Exception as error:
                self._free_memory()
                lines = str(error).strip().splitlines() or [""]
                reason = f"model-error: {type(error).__name__}: {lines[0][:200]}"
                outcomes[id(sequence)] = GenerationFailure(sequence.request.request_id, reason)
                continue
            outcomes |= self._commit_all(moves, on_event)
        return outcomes

    def _draft(self, sequence: Sequence, drafter: Drafter) -> TokenTree:
        """The drafter's tree, cut to the budget: draft tokens, room left, estimated acceptance."""
        settings = self.settings
        max_depth = sequence.num_left - 1  # the step's last token is the target's own
        if max_depth <= 0 or self._num_pending(sequence) > settings.max_prefill_tokens:
            return EMPTY_TREE
        return prune(
            drafter.draft(sequence),
            max_nodes=settings.max_draft_tokens,
            max_depth=max_depth,
            min_log_acceptance=math.log(settings.min_acceptance) if settings.min_acceptance > 0 else -math.inf,
            vocab_size=self.vocab_size,
        )

    def _num_pending(self, sequence: Sequence) -> int:
        """Committed tokens that are not in the cache: the last one, or a prompt's rest."""
        return len(sequence.context) - int(self.store.lengths[sequence.row])

    def _forward_and_verify(self, live: list[Sequence], drafts: list[TokenTree], verifier: Verifier) -> list["_Move"]:
        """Run the model and accept drafts. Changes nothing, so that it can be tried again."""
        feeds, fed = [], []
        room = self.settings.max_prefill_tokens
        for sequence, draft in zip(live, drafts, strict=True):
            pending = sequence.context[self.store.lengths[sequence.row] :]
            num_pending = len(pending)
            if num_pending > 1:  # a prompt: as much of it as this step has room for
                if room == 0:
                    continue
                pending = pending[:room]
                room -= len(pending)
            complete = len(pending) == num_pending
            feeds.append(Feed(sequence.row, pending, draft if complete else EMPTY_TREE, wants_logits=complete))
            fed.append(sequence)
        output = self.runner.forward(feeds)
        complete = [i for i, feed in enumerate(feeds) if feed.wants_logits]
        accepted: list[Acceptance | None] = []
        alternatives: list[np.ndarray | None] = [None] * len(complete)
        if complete:
            trees, starts = [feeds[i].tree for i in complete], output.starts[complete]
            accepted = verify(verifier, output.logits, trees, starts, self._is_end)
            if self.settings.record_alternatives:
                alternatives = step_alternatives(output.logits, trees, starts, accepted, self._is_end)
        verified = dict(zip(complete, zip(accepted, alternatives, strict=True), strict=True))
        return [
            _Move(sequence, feed, output.slots[i], *verified.get(i, (None, None)))
            for i, (sequence, feed) in enumerate(zip(fed, feeds, strict=True))
        ]

    def _commit_all(self, moves: list["_Move"], on_event) -> dict[int, GenerationResult | GenerationFailure]:
        """Keep what was accepted, in the cache and in the texts; of the sequences that ended, what came of them."""
        outcomes: dict[int, GenerationResult | GenerationFailure] = {}
        sound = []
        for move in moves:
            if move.feed.wants_logits and move.acceptance is None:
                reason = "not-finite: the model's logits are not finite"
                outcomes[id(move.sequence)] = GenerationFailure(move.sequence.request.request_id, reason)
            else:
                sound.append(move)
        if not sound:
            return outcomes
        self.store.commit([move.feed.row for move in sound], [move.kept_slots for move in sound])
        for move in sound:
            sequence = move.sequence
            if sequence.num_output == 0:  # still, or just now, within its prompt
                num_cached = min(self.store.lengths[sequence.row], sequence.num_prompt)
                self.store.remember_prefix(sequence.row, sequence.prompt_ids[:num_cached])
            if move.acceptance is not None:
                result = self._commit(sequence, move, on_event)
                if result is not None:
                    outcomes[id(sequence)] = result
        return outcomes

    def _commit(self, sequence: Sequence, move: "_Move", on_event) -> GenerationResult | None:
        """Add a step's tokens to a text; its result if that ended it."""
        before, tree, acceptance = sequence.num_output, move.feed.tree, move.acceptance
        at_end = bool(self._is_end[acceptance.next_token])
        sequence.append(tree, acceptance.nodes, None if at_end else acceptance.next_token, move.alternatives)
        if on_event is not None:
            new = slice(before, sequence.num_output)
            event = StepEvent(
                sequence.request.request_id,
                sequence.output_ids[new].copy(),
                sequence.sources[new].copy(),
                len(tree),
            )
            on_event(event)
        ending = self._endings.check(sequence, sequence.num_output - before, at_end)
        return None if ending is None else sequence.result(ending.reason, ending.num_tokens, ending.text)

    def _free_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class _Move:
    """What a step found for one sequence; `acceptance` is None within a long prompt or where logits are not finite.

    `alternatives` int32[num_accepted + 1] are the target's runners-up, None unless they are recorded.
    """

    sequence: Sequence
    feed: Feed
    slots: np.ndarray
    acceptance: Acceptance | None
    alternatives: np.ndarray | None

    @property
    def kept_slots(self) -> np.ndarray:
        """The slots of the chain and of the accepted path."""
        num_chain = len(self.feed.chain_ids)
        if self.acceptance is None or self.acceptance.num_accepted == 0:
            return self.slots[:num_chain]
        return np.concatenate((self.slots[:num_chain], self.slots[num_chain:][self.acceptance.nodes]))


class _Lookahead:
    """The next request of a stream, pulled only when asked for."""

    def __init__(self, requests: Iterable[GenerationRequest]) -> None:
        self._requests = iter(requests)
        self._next: GenerationRequest | None = None

    def peek(self) -> GenerationRequest | None:
        if self._next is None:
            self._next = next(self._requests, None)
        return self._next

    def pop(self) -> None:
        self._next = None
