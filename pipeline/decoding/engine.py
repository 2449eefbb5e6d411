"""The engine writes the texts of a stream of requests by speculative decoding, as many at once as memory allows.

One step has four parts, each for all live sequences: `_schedule` (with drafts), `_execute` (the forward), `_verify`,
`_update`. On CUDA `submit_step` only queues the forward; `finish_step` waits for the device once, for the verdicts.
Finished texts are yielded between the two, so that the device computes while the caller handles them.

A text depends on its own request alone, not on the other texts of its batch or on the order of requests. Rounding is
the exception: it can change with the shape of a forward.
"""

import logging
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import cast

import numpy as np
import torch

from laserbatch.pipeline.decoding import guided, recovery
from laserbatch.pipeline.decoding.acceptance import Acceptance, verify
from laserbatch.pipeline.decoding.attention.metadata import LaunchShape
from laserbatch.pipeline.decoding.device_memory import cache_bound, is_out_of_memory, step_bytes
from laserbatch.pipeline.decoding.drafters import Drafter, NoDrafter
from laserbatch.pipeline.decoding.grammar import Grammars
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.model.cuda_graphs import TOKEN_BUCKETS
from laserbatch.pipeline.decoding.model.load import LoadedModel, load_model
from laserbatch.pipeline.decoding.model.output_head import ContextIds, PenalisedLogits, StepLogits
from laserbatch.pipeline.decoding.model.runner import ModelRunner
from laserbatch.pipeline.decoding.model.sampling import SampledLogits
from laserbatch.pipeline.decoding.scheduler import Concurrency, RequestLimits, Scheduler
from laserbatch.pipeline.decoding.sequence import DecodingSequence, GenerationFailure, GenerationRequest, Outcome
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.decoding.step import Step, Stream, commit, observation_of
from laserbatch.pipeline.decoding.step_budget import StepBudget
from laserbatch.pipeline.decoding.token_tree import TreeBatch, prune
from laserbatch.pipeline.decoding.verifiers import Verifier, verifier_from
from laserbatch.pipeline.errors import RunFailed, first_line

logger = logging.getLogger(__name__)

# Most prompt tokens of one step. A CPU computes them fastest in chunks of this size (twice as fast as chunks of 2048).
# A chunk takes as long as verifying the drafts of a batch of 16, so texts that decode meanwhile run at half speed.
PREFILL_TOKENS = {"cpu": 256, "cuda": 2048}
MAX_DRAFT_THREADS = 4  # two threads take two thirds of the time of one (`benchmarks/drafting.py`); more: not measured


class Engine:
    """A loaded model with its KV cache.

    Parameters
    ----------
    num_sharing : number of engines that share the machine's main memory or, on a GPU, the GPU's memory.
    drafter_bytes_per_token : bytes that a token takes in the KV caches of drafters, which are loaded before; the bound
        of the engine's own cache leaves room for them.
    """

    def __init__(
        self, loaded: LoadedModel, settings: DecodingSettings | None = None, num_sharing: int = 1,
        drafter_bytes_per_token: int = 0,
    ) -> None:  # fmt: skip
        self.settings = settings or DecodingSettings()
        self.loaded = loaded
        self.tokenizer = loaded.tokenizer
        self.model_id = loaded.model_id
        self.max_context = loaded.max_context
        self.end_ids = loaded.end_ids
        self.vocab_size = loaded.vocab_size
        self.device = loaded.device
        self.max_prefill_tokens = PREFILL_TOKENS["cuda" if self.device.type == "cuda" else "cpu"]
        bytes_per_token = loaded.bytes_per_token + drafter_bytes_per_token
        max_tokens = self.settings.max_cache_tokens or cache_bound(
            self.device, bytes_per_token, num_sharing, self._reserved_bytes()
        )
        self.cache = KVCache(self.settings.batch_size, max_tokens)
        self.concurrency = Concurrency(self.settings.batch_size)
        self.runner = ModelRunner(loaded.model, self.cache, self.device, self.settings.attention)
        self._context_ids = ContextIds(self.settings.batch_size, self.device)
        self.num_forwards = 0  # forwards of all streams
        self.costliest_step_s = 0.0  # submitting and finishing, without what the caller does between them
        self._has_drafter_lacked_memory = False
        self._grammars: Grammars | None = None  # made for the first text that has one
        self._is_end = np.zeros(self.vocab_size, bool)
        self.end_at(())

    @classmethod
    def from_pretrained(
        cls, model_dir, settings: DecodingSettings | None = None, device: str = "auto", num_sharing: int = 1
    ) -> "Engine":
        """Load a model folder ("sample": the bundled one).

        Raises ModelError: the folder holds no model that the engine can run.
        """
        settings = settings or DecodingSettings()
        return cls(load_model(model_dir, settings.dtype, device, settings.adapter), settings, num_sharing)

    def end_at(self, token_ids: Iterable[int]) -> None:
        """Treat more tokens as end tokens; ids outside the vocabulary are ignored, as the model never writes them."""
        self.end_ids = tuple(sorted({*self.end_ids, *(i for i in token_ids if i < self.vocab_size)}))
        self._is_end[list(self.end_ids)] = True

    @property
    def grammars(self) -> Grammars:
        """Compiled grammars of requests. Raises ConfigError: they cannot be compiled for the tokenizer."""
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self.vocab_size, self.loaded.end_ids)
        return self._grammars

    @property
    def num_draft_threads(self) -> int:
        """Number of threads for a drafter; 1 on a CPU, where torch's own threads stay busy and more gain nothing."""
        return min(MAX_DRAFT_THREADS, torch.get_num_threads()) if self.device.type == "cuda" else 1

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """The numbers of tokens to which steps are padded, ascending; empty if steps are not padded."""
        return () if self.runner.buffered is None else TOKEN_BUCKETS

    def _reserved_bytes(self) -> int:
        """GPU memory that steps take; 0 on a CPU, where the cache leaves half of the free memory anyway."""
        if self.device.type != "cuda":
            return 0
        batch_size = self.settings.batch_size
        num_decoding = batch_size * (1 + Budget.of(self.settings).max_draft_tokens)
        num_parts = LaunchShape.of(self.max_context, num_decoding, batch_size, num_kv_heads=1).num_parts
        num_tokens = num_decoding + self.max_prefill_tokens
        return step_bytes(self.loaded.model.config, num_decoding, num_tokens, num_parts)

    def generate(
        self, requests: Iterable[GenerationRequest], drafter: Drafter | None = None, verifier: Verifier | None = None,
        budget: Budget | None = None, step_budget: StepBudget | None = None,
    ) -> Iterator[Outcome]:  # fmt: skip
        """Write the texts of all requests, yielding each as it finishes.

        Parameters
        ----------
        requests : pulled lazily, at most one ahead of the free rows.
        drafter : None decodes plainly, one token a step.
        verifier : None is the one the settings name.
        budget : limits on the part of a draft that is verified; None: the settings' budget.
        step_budget : chooses the part that each step verifies, for rules whose texts do not depend on it; None: all.

        Raises
        ------
        DeviceLost : a CUDA error after which this process can compute nothing more; no text is reported as failed.
        """
        verifier = verifier or verifier_from(self.settings)
        budget = budget or Budget.of(self.settings)
        stream = self.open_stream(requests, drafter or NoDrafter(), verifier, budget, step_budget=step_budget)
        scheduler = stream.scheduler
        ended: list[tuple[DecodingSequence, str | GenerationFailure]] = []  # not yielded yet
        is_grown = self.runner.buffered is None
        try:
            while True:
                if not scheduler.live:  # no forward to overlap with
                    yield from (self.result(*each) for each in ended)
                    ended = []
                yield from scheduler.admit()
                if not scheduler.live:
                    return
                # The first step allocates the cache. A stream that never fills the batch needs little of it.
                if not is_grown and self.cache.layers and len(scheduler.live) == self.concurrency.current:
                    self._grow_cache(stream)
                    is_grown = True
                step = self.submit_step(stream)
                yield from (self.result(*each) for each in ended)
                ended = self.finish_step(step, stream)
        except Exception as error:  # raised by a drafter, for example
            recovery.require_device(error)
            raise
        finally:
            scheduler.close()

    def open_stream(
        self, requests: Iterable[GenerationRequest], drafter: Drafter, verifier: Verifier, budget: Budget,
        concurrency: Concurrency | None = None, step_budget: StepBudget | None = None,
    ) -> Stream:  # fmt: skip
        """A stream for callers that repeat `scheduler.admit`, `submit_step` and `finish_step`, as `generate` does."""
        shares = drafter.observes != "prefill"
        limits = RequestLimits(self.max_context, self.vocab_size, budget.max_draft_tokens, shares)
        scheduler = Scheduler(requests, self.cache, concurrency or self.concurrency, limits, self.max_prefill_tokens)
        return Stream(scheduler, drafter, verifier, budget, step_budget)

    def _grow_cache(self, stream: Stream) -> None:
        """Grow the cache to the expected length of a full batch's texts, as growing later voids CUDA graphs."""
        live = stream.scheduler.live
        num_expected = sum(sequence.num_prompt + self.concurrency.expected_output(sequence) for sequence in live)
        self.cache.grow_to(num_expected + len(live) * stream.budget.max_draft_tokens + self.max_prefill_tokens)

    def submit_step(self, stream: Stream) -> Step | None:
        """Draft, and start the forward; None if the cache has no room even for one sequence."""
        step = self._schedule(stream)
        while not self.cache.make_room(step.num_tokens):
            if len(stream.scheduler.live) == 1:
                return None
            stream.scheduler.preempt(1)
            step = self._schedule(stream)
        began_s = time.perf_counter()
        try:
            self._execute(step)
        except Exception as error:  # raised by `finish_step`
            step.error = error
        step.submit_s = time.perf_counter() - began_s
        return step

    def finish_step(self, step: Step | None, stream: Stream) -> list[tuple[DecodingSequence, str | GenerationFailure]]:
        """Verify and update; return the sequences that ended, each with its finish reason or failure."""
        scheduler, began_s = stream.scheduler, time.perf_counter()
        outcomes = recovery.fail_alone(self.cache, scheduler.live[0]) if step is None else self._outcomes(step, stream)
        ended = [(sequence, outcomes[sequence]) for sequence in scheduler.live if sequence in outcomes]
        for sequence, _ in ended:
            scheduler.finish(sequence)
            stream.drafter.forget(sequence)
        if step is not None:
            self.costliest_step_s = max(self.costliest_step_s, step.submit_s + time.perf_counter() - began_s)
        return ended

    def _outcomes(self, step: Step, stream: Stream) -> recovery.Outcomes:
        try:
            if step.error is not None:
                raise step.error
            if step.number < self.num_forwards:  # the caller let another stream take a step meanwhile
                self._execute(step)
            accepted = self._verify(step, stream.verifier)
        except Exception as error:  # `recover` decides which texts fail
            return recovery.recover(self, step, stream, error)
        return self._update(step, accepted, stream)

    def _schedule(self, stream: Stream) -> Step:
        """The next step: the tokens that each live sequence feeds, and drafts for those that write a token in it."""
        if any(sequence.guide is None and sequence.request.grammar is not None for sequence in stream.scheduler.live):
            guided.begin(stream.scheduler.live, self.grammars)
        sequences, feeds, writing = stream.scheduler.schedule()
        trees = self._trees([sequences[place] for place in writing], stream.drafter, stream.budget)
        if stream.step_budget is not None:
            num_context_tokens = sum(sequences[place].length for place in writing) / max(1, len(writing))
            trees = stream.step_budget.admit(trees, len(writing), num_context_tokens)
        return Step(sequences, feeds, trees.scatter(writing, len(sequences)))

    def _trees(self, sequences: list[DecodingSequence], drafter: Drafter, budget: Budget) -> TreeBatch:
        """The drafter's trees, cut to the budget's limits and to the room that each text has left."""
        if budget.max_draft_tokens == 0:
            return TreeBatch.empty(len(sequences))
        places = [place for place, sequence in enumerate(sequences) if sequence.num_left > 1]
        if not places:
            return TreeBatch.empty(len(sequences))
        drafting = [sequences[place] for place in places]
        max_depths = [sequence.num_left - 1 for sequence in drafting]  # a step's last token is the target's choice
        try:
            trees = prune(
                drafter.draft_all(drafting, max_depths), max_nodes=budget.max_draft_tokens, max_depths=max_depths,
                min_log_acceptance=budget.min_log_acceptance, vocab_size=self.vocab_size,
            )  # fmt: skip
        except Exception as error:  # a drafter may run forwards with its own KV cache
            if not is_out_of_memory(error):
                recovery.require_device(error)
                names = ", ".join(self.settings.drafters)
                raise RunFailed(f"drafting failed ({names}): {type(error).__name__}: {first_line(error)}") from error
            if not self._has_drafter_lacked_memory:
                logger.warning("steps for which a drafter lacks memory run without drafts: %s", first_line(error))
            self._has_drafter_lacked_memory = True
            traceback.clear_frames(error.__traceback__)
            torch.cuda.empty_cache()
            return TreeBatch.empty(len(sequences))
        return trees.scatter(places, len(sequences))

    def _execute(self, step: Step) -> None:
        """Run the model (on CUDA: queue it); the output is valid until the next forward of any stream."""
        self.num_forwards += 1
        step.number = self.num_forwards
        step.output = self.runner.forward(step.feeds, step.trees)

    def _verify(self, step: Step, verifier: Verifier) -> list[Acceptance | None]:
        """Accept drafts. Neither this nor `_execute` changes texts or commits tokens, so that both can be repeated."""
        assert step.output is not None
        rows: StepLogits = step.output.rows
        penalty = self.loaded.repetition_penalty
        if penalty != 1.0:
            rows = PenalisedLogits(penalty, rows, self._context_ids.of(step.sequences), step.trees)
        guides = [sequence.guide for sequence in step.sequences]
        guided_rows = guided.GuidedLogits(rows, guides, step.trees) if any(guides) else None
        if self.settings.temperature:
            sampled = getattr(verifier, "sampled", SampledLogits)
            seeds = [sequence.request.seed for sequence in step.sequences]
            lengths = [len(sequence.context) for sequence in step.sequences]
            how = seeds, lengths, step.trees
            rows = sampled(self.settings.temperature, rows, *how)
            guided_rows = guided_rows and sampled(self.settings.temperature, guided_rows, *how)
        return verify(verifier, rows, step.trees, step.output.batch.logit_starts, self._is_end, guides, guided_rows)

    def _update(self, step: Step, accepted: list[Acceptance | None], stream: Stream) -> recovery.Outcomes:
        """Commit the accepted tokens to the cache and the texts; return the outcomes of the sequences that ended."""
        outcomes: recovery.Outcomes = dict(commit(step, accepted, self.cache, self._is_end))
        if stream.drafter.observes != "nothing":
            stream.drafter.observe(observation_of(step, accepted))
        if stream.step_budget is not None:
            stream.step_budget.observe(step.trees, accepted)
        outcomes |= guided.advance(sequence for sequence in step.sequences if sequence not in outcomes)
        return outcomes | recovery.without_drafts(self, step, accepted, stream)

    def result(self, sequence: DecodingSequence, outcome: str | GenerationFailure) -> Outcome:
        """The result of a sequence that ended with this finish reason or failure, for `generate` to yield."""
        if isinstance(outcome, GenerationFailure):
            return outcome
        text = ""
        if self.tokenizer is not None:
            text = cast("str", self.tokenizer.decode(sequence.output_ids.tolist(), skip_special_tokens=True))
        return sequence.result(outcome, text)

    def reset_prefix_cache(self) -> None:
        """Drop cached prefixes and statistics of lengths, so that results do not depend on earlier calls."""
        self.cache.drop_prefixes()
        self.concurrency.forget_lengths()
