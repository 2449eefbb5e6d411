"""The scheduler decides which sequences are live and which wait, and what the live ones feed to a step.

A request is admitted when its prompt and expected output fit into the cache together with the expected lengths of the
live sequences. If memory runs out all the same, the youngest sequences give their slots back and wait with the output
that they have; their texts do not change. Prompts are prefilled in chunks, so that other texts keep growing.
"""

import logging
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from laserbatch.pipeline.decoding.batch import Feed
from laserbatch.pipeline.decoding.kv_cache import MIN_SHARED_TOKENS, KVCache
from laserbatch.pipeline.decoding.prefix_index import PrefixIndex
from laserbatch.pipeline.decoding.sequence import MAX_FORCED, DecodingSequence, GenerationFailure, GenerationRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestLimits:
    """The limits of a request: the model's context and vocabulary, and the room that a draft takes.

    `shares_prefixes` : a prefix that several prompts have in common is computed once.
    """

    max_context: int
    vocab_size: int
    max_draft_tokens: int
    shares_prefixes: bool = True


class Concurrency:
    """The number of sequences that may be live, and the expected length of a text, learned from finished texts.

    `current` falls when memory runs out, and rises by one once `current` more sequences have finished.
    """

    def __init__(self, max_sequences: int) -> None:
        self.max_sequences = self.current = max_sequences
        self._num_finished = 0  # since `current` last changed
        self.forget_lengths()

    def forget_lengths(self) -> None:
        self._num_texts = self._num_tokens = 0

    def lower(self, num_live: int) -> None:
        """Allow no more than the `num_live` sequences that stay live after memory ran out."""
        if self.current == self.max_sequences:
            logger.warning(
                "the KV cache has no room for %d texts at once; from now on %d are written at once. To avoid computing "
                "texts twice, lower decoding.batch_size or, if memory allows, raise decoding.max_cache_tokens",
                num_live + 1,
                max(1, num_live),
            )
        self.current = max(1, min(self.current, num_live))
        self._num_finished = 0

    def record_finished(self, num_output: int) -> None:
        """Count a finished text of `num_output` tokens."""
        self._num_texts += 1
        self._num_tokens += num_output
        self._num_finished += 1
        if self._num_finished >= self.current and self.current < self.max_sequences:
            self.current += 1
            self._num_finished = 0

    def expected_output(self, sequence: DecodingSequence) -> int:
        """The expected length of a text: that of the entity's previous text, otherwise the mean of finished texts."""
        expected = sequence.max_new_tokens
        if sequence.previous_ids is not None and len(sequence.previous_ids):
            expected = len(sequence.previous_ids)
        elif self._num_texts:
            expected = -(-self._num_tokens // self._num_texts)
        return min(expected, sequence.max_new_tokens)


class Scheduler:
    """The `live` sequences of one stream of requests, ordered by row as in a step, and the waiting ones."""

    def __init__(
        self, requests: Iterable[GenerationRequest], cache: KVCache, concurrency: Concurrency, limits: RequestLimits,
        max_prefill_tokens: int = 256,
    ) -> None:  # fmt: skip
        self.live: list[DecodingSequence] = []
        self._requests = enumerate(requests)
        self._waiting: list[DecodingSequence] = []  # preempted ones, the oldest first, then the one pulled last
        self._within_prompts: PrefixIndex[DecodingSequence] = PrefixIndex()  # live, prompt maybe incomplete
        self._cache = cache
        self._concurrency = concurrency
        self._limits = limits
        self._max_prefill_tokens = max_prefill_tokens

    def admit(self) -> Iterator[GenerationFailure]:
        """Give rows to waiting sequences, preempted ones first, while there is room; yield those that can never fit.

        Raises RuntimeError: another stream of the same engine holds all rows.
        """
        for sequence in self._within_prompts.values():
            if self._cache.lengths[sequence.row] >= sequence.num_prompt - 1:
                self._within_prompts.pop(sequence.row)
        while len(self.live) < self._concurrency.current and (waiting := self._first_waiting()) is not None:
            reason = self._why_refused(waiting)
            if reason is None:
                if self.live and self._peer_computes_prefix(waiting):
                    return
                if self._acquire(waiting):
                    self._waiting.pop(0)
                    continue
                if self.live:
                    return
                if self._cache.num_live_rows:
                    raise RuntimeError("every row of the engine is held by another, unfinished generate()")
                reason = self._too_long()
            self._waiting.pop(0)
            yield GenerationFailure(waiting.request.request_id, reason)

    def schedule(self) -> tuple[list[DecodingSequence], list[Feed], list[int]]:
        """The sequences of the next step, their feeds, and the indices of those that write a token in it.

        Prompts share the room of `max_prefill_tokens`, the oldest first; a prompt that gets no room waits. The few
        tokens that a grammar forced after a prompt need no room.
        """
        live = self.live
        num_cached = self._cache.lengths[[sequence.row for sequence in live]].tolist()
        chains = [sequence.context[cached:] for sequence, cached in zip(live, num_cached, strict=True)]
        is_whole = [True] * len(live)
        room = self._max_prefill_tokens
        is_long = [
            len(chain) > 1 and (cached < sequence.num_prompt or len(chain) > 1 + MAX_FORCED)
            for sequence, cached, chain in zip(live, num_cached, chains, strict=True)
        ]
        for i in sorted(np.flatnonzero(is_long).tolist(), key=lambda i: live[i].order):
            # A prompt or a preempted text is fed as far as there is room.
            is_whole[i] = len(chains[i]) <= room
            chains[i] = chains[i][:room]
            room -= len(chains[i])
        members = [i for i, chain in enumerate(chains) if len(chain)]
        feeds = [Feed(live[i].row, chains[i]) for i in members]
        return [live[i] for i in members], feeds, [place for place, i in enumerate(members) if is_whole[i]]

    def preempt(self, num_sequences: int) -> list[DecodingSequence]:
        """Take the rows of the youngest sequences, which go back to waiting with their output so far."""
        youngest = sorted(self.live, key=lambda sequence: sequence.order)[-num_sequences:]
        for sequence in youngest:
            self._leave(sequence)
            insort(self._waiting, sequence, key=lambda other: other.order)
        self._concurrency.lower(len(self.live))
        return youngest

    def max_tokens_of_a_text(self) -> int:
        """The most slots that any live or waiting sequence may come to need, draft included."""
        return max(map(self._most_tokens, (*self.live, *self._waiting)), default=0)

    def finish(self, sequence: DecodingSequence) -> None:
        self._leave(sequence)
        self._concurrency.record_finished(sequence.num_output)

    def close(self) -> None:
        """Give all rows back."""
        for sequence in list(self.live):
            self._leave(sequence)

    def _leave(self, sequence: DecodingSequence) -> None:
        self.live.remove(sequence)
        if sequence.row in self._within_prompts:
            self._within_prompts.pop(sequence.row)
        self._cache.release(sequence.row)

    def _first_waiting(self) -> DecodingSequence | None:
        """The sequence to admit next; a request is pulled only when none waits."""
        if not self._waiting and (pulled := next(self._requests, None)) is not None:
            order, request = pulled
            room = self._limits.max_context - len(request.prompt_ids)
            sequence = DecodingSequence(request, max(0, min(request.max_new_tokens, room)))
            sequence.order = order
            self._waiting.append(sequence)
        return self._waiting[0] if self._waiting else None

    def _most_tokens(self, sequence: DecodingSequence) -> int:
        return sequence.num_prompt + sequence.max_new_tokens + self._limits.max_draft_tokens

    def _acquire(self, sequence: DecodingSequence) -> bool:
        """Make a waiting sequence live; return whether there was a row for it."""
        num_remaining = max(0, self._concurrency.expected_output(sequence) - sequence.num_output)
        expected = len(sequence.context) + num_remaining + self._limits.max_draft_tokens
        expected = min(self._most_tokens(sequence), expected)
        lease = self._cache.acquire(sequence.context, expected, self._limits.shares_prefixes)
        if lease is None:
            return False
        sequence.row = lease.row
        if not sequence.num_steps:  # it was not preempted
            sequence.num_prompt_reused = lease.num_shared
        insort(self.live, sequence, key=lambda other: other.row)
        if lease.num_shared < sequence.num_prompt - 1:
            self._within_prompts.put(sequence.row, sequence.prompt_ids, sequence)
        return True

    def _peer_computes_prefix(self, sequence: DecodingSequence) -> bool:
        """Whether a live sequence is computing a prefix of this one, which is worth waiting a step for."""
        if not self._limits.shares_prefixes:
            return False
        token_ids = sequence.context[:-1]
        gain = self._within_prompts.longest(token_ids)[0] - MIN_SHARED_TOKENS
        return gain >= 0 and gain >= self._cache.longest_prefix(token_ids)[0]

    def _why_refused(self, sequence: DecodingSequence) -> str | None:
        request, limits = sequence.request, self._limits
        prompt = np.asarray(request.prompt_ids)
        if len(prompt) == 0:
            return "empty: the prompt has no tokens"
        if request.max_new_tokens < 1:
            return f"bad-limit: max_new_tokens is {request.max_new_tokens}; expected at least 1"
        if len(prompt) >= limits.max_context:
            allowed = limits.max_context - 1
            return f"too-long: the prompt has {len(prompt)} tokens; the model's context allows at most {allowed}"
        if prompt.min() < 0 or prompt.max() >= limits.vocab_size:
            bad = int(prompt[(prompt < 0) | (prompt >= limits.vocab_size)][0])
            return f"bad-token: the prompt has the token id {bad}; the vocabulary has {limits.vocab_size} tokens"
        return self._too_long() if self._most_tokens(sequence) > self._cache.max_tokens else None

    def _too_long(self) -> str:
        return f"too-long: prompt and answer exceed the KV cache of {self._cache.max_tokens} tokens"
