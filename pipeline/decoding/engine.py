"""The engine: texts for a stream of requests, drafted and verified, as many at once as fit.

One step is four hops for all live sequences: draft, forward, verify, commit. Requests are pulled as rows of the KV
store come free, and results are yielded as they finish. On CUDA a step waits for the device once, where verdicts come
to the host: launches and what verification sends are queued behind the forward. Committing, endings, admission,
drafting and packing come between that and the next launch, with the device idle. Results of a step are decoded and
yielded behind the next launch, so that the device computes while the caller has them.

A text depends on its own request alone: not on what shares its batch, nor on the order of requests (but for rounding,
which the shape of a forward can change).

Knows no entities, no files and no Ray.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from laserbatch.pipeline.decoding.acceptance import Acceptance, verify
from laserbatch.pipeline.decoding.batch import Batch, Concurrency, RequestLimits
from laserbatch.pipeline.decoding.drafters import Drafter, NoDrafter, draft_all
from laserbatch.pipeline.decoding.endings import Ending, Endings
from laserbatch.pipeline.decoding.feed import Feed, Pack
from laserbatch.pipeline.decoding.memory.kv_cache import cache_bound, is_out_of_memory
from laserbatch.pipeline.decoding.memory.kv_store import KVStore
from laserbatch.pipeline.decoding.memory.token_store import TokenStore
from laserbatch.pipeline.decoding.model.load import LoadedModel, load_model
from laserbatch.pipeline.decoding.model.model_runner import ModelRunner, StepOutput
from laserbatch.pipeline.decoding.packed_trees import PackedTrees, prune_all
from laserbatch.pipeline.decoding.sequence import (
    GenerationFailure,
    GenerationRequest,
    GenerationResult,
    Sequence,
    StepEvent,
)
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.decoding.verifiers import Verifier, verifier_from

__all__ = ["Engine", "GenerationFailure", "GenerationRequest", "GenerationResult", "StepEvent"]

logger = logging.getLogger(__name__)

# Prompt tokens of one step. A CPU computes them fastest in parts of this size (per token 2 times faster than 2048), and
# such a part takes about as long as the step's drafts of a batch of 16: what decodes meanwhile goes at half speed.
PREFILL_TOKENS = {"cpu": 256, "cuda": 2048}
MOST_DRAFT_THREADS = 4  # two were measured (`benchmarks/drafting.py`: two thirds of the time of one), more were not
_NO_NODES = np.empty(0, np.int64)


class Engine:
    """A loaded model with its KV store.

    Use `Engine.from_pretrained`; the constructor takes a model that is already prepared.

    Parameters
    ----------
    num_sharing : engines of this machine that share its main memory.
    """

    def __init__(self, loaded: LoadedModel, settings: DecodingSettings | None = None, num_sharing: int = 1) -> None:
        self.settings = settings or DecodingSettings()
        self.loaded = loaded
        self.tokenizer = loaded.tokenizer
        self.model_id = loaded.model_id
        self.max_context = loaded.max_context
        self.end_ids = loaded.end_ids
        self.vocab_size = loaded.vocab_size
        self.device = loaded.device
        on_cuda = self.device.type == "cuda"
        max_tokens = self.settings.max_cache_tokens or cache_bound(self.device, loaded.bytes_per_token, num_sharing)
        holds_rows = self.settings.kv_cache == "rows" or (self.settings.kv_cache == "auto" and not on_cuda)
        self.store = (KVStore if holds_rows else TokenStore)(self.settings.batch_size, max_tokens)
        self.concurrency = Concurrency(self.settings.batch_size)
        self.max_prefill_tokens = self.settings.max_prefill_tokens or PREFILL_TOKENS["cuda" if on_cuda else "cpu"]
        self.runner = ModelRunner(loaded.model, self.store, self.device, self.settings.attention, loaded.splits_head)
        self.num_forwards = 0  # of all streams
        self._endings = Endings(self.tokenizer, self.settings.stop_strings)
        self._is_end = np.zeros(self.vocab_size, bool)
        self._is_end[list(self.end_ids)] = True

    @classmethod
    def from_pretrained(
        cls, model_dir, settings: DecodingSettings | None = None, device: str = "auto", num_sharing: int = 1
    ) -> "Engine":
        """Load a model folder ("sample": the bundled one) and set torch's number of threads.

        Raises
        ------
        pipeline.errors.ModelError : the folder holds no model that the engine can run.
        """
        settings = settings or DecodingSettings()
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        loaded = load_model(model_dir, settings.dtype, device, settings.adapter)
        return cls(loaded, settings, num_sharing)

    @property
    def num_draft_threads(self) -> int:
        """Threads that a drafter should take for the engine's steps.

        Beside a GPU the processor's cores are free while drafts are made; on a CPU torch's threads stay busy for a
        while after each of its operations, and others gain nothing.
        """
        return min(MOST_DRAFT_THREADS, torch.get_num_threads()) if self.device.type == "cuda" else 1

    def generate(
        self,
        requests: Iterable[GenerationRequest],
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        on_event: Callable[[StepEvent], None] | None = None,
        budget: Budget | None = None,
    ) -> Iterator[GenerationResult | GenerationFailure]:
        """Write the texts of all requests, yielding each as it finishes.

        Parameters
        ----------
        requests : pulled lazily, one ahead of the free rows.
        drafter : None decodes plainly, one token a step.
        verifier : None is the one the settings name.
        on_event : called after each step of each text.
        budget : how much of a draft is verified; None is that of the settings.
        """
        budget = budget or Budget.of(self.settings)
        drafter = drafter or NoDrafter()
        verifier = verifier or verifier_from(self.settings)
        limits = RequestLimits(self.max_context, self.vocab_size, budget.max_draft_tokens)
        batch = Batch(requests, self.store, self.concurrency, limits)
        ended: deque[tuple[Sequence, Ending | GenerationFailure]] = deque()  # whose results are not yielded yet
        try:
            while True:
                if not batch.live:  # no step to hand them over behind
                    yield from self._results(ended)
                yield from batch.admit()
                if not batch.live:
                    return
                step = self._launch(batch, drafter, budget)
                yield from self._results(ended)
                outcomes = self._land(step, batch, verifier, on_event)
                for sequence in [s for s in batch.live if id(s) in outcomes]:
                    batch.finish(sequence)
                    ended.append((sequence, outcomes[id(sequence)]))
        finally:
            batch.close()

    def forget_prompts(self) -> None:
        """Compute the prompts that follow anew, whatever earlier ones they begin like, and expect them as long as any.

        So sums are rounded in the same way whatever came before; within a stream prompts share what they can, and texts
        are admitted by how long its own were.
        """
        self.store.forget_ended()
        self.concurrency.forget_lengths()

    def _results(self, ended) -> Iterator[GenerationResult | GenerationFailure]:
        """Those of texts that ended, which are taken out of `ended` one by one."""
        while ended:
            sequence, outcome = ended.popleft()
            if isinstance(outcome, GenerationFailure):
                yield outcome
                continue
            text = outcome.text
            if text is None:
                text = self._endings.text(sequence.output_ids[: outcome.num_tokens])
            yield sequence.result(outcome.reason, outcome.num_tokens, text)

    def _launch(self, batch, drafter, budget) -> "_Step":
        """Begin a step of all live sequences: drafts and the forward, which on CUDA is only queued.

        Without output or error, there is no room even for one sequence.
        """
        step = self._feeds(batch.live, drafter, budget)
        while not self.store.make_room(step.num_tokens):
            if len(batch.live) == 1:
                return step
            batch.preempt(1)
            step = self._feeds(batch.live, drafter, budget)
        try:
            step.output = self._forward(step)
        except Exception as error:
            step.error = error
        step.number = self.num_forwards
        return step

    def _land(self, step: "_Step", batch, verifier, on_event) -> dict[int, Ending | GenerationFailure]:
        """End a step: verify and commit. Of the sequences that ended, by `id`, what came of them."""
        if step.output is None and step.error is None:
            return self._fail_alone(batch.live[0])
        try:
            if step.error is not None:
                raise step.error
            if step.number < self.num_forwards:  # the caller let another stream take a step meanwhile
                step.output = self._forward(step)
            moves = self._verify(step, verifier)
        except Exception as error:
            return self._recover(step, batch, verifier, on_event, error)
        return self._commit_all(step, moves, verifier, on_event)

    def _recover(self, step, batch, verifier, on_event, error: Exception) -> dict[int, Ending | GenerationFailure]:
        """A step failed: where memory ran out, fewer sequences go on; else those fail that cannot be run alone."""
        if is_out_of_memory(error) and len(batch.live) > 1:
            batch.preempt(len(batch.live) // 2)
            self.store.drop_unused()
            self._free_memory()
            return {}
        self._free_memory()
        logger.warning("a step of %d sequences failed (%s); trying them one at a time", len(step.sequences), error)
        return self._step_one_by_one(step, verifier, on_event)

    def _step_one_by_one(self, step, verifier, on_event) -> dict[int, Ending | GenerationFailure]:
        """The same step, a forward for each sequence, so that only those fail that cannot be run."""
        outcomes = {}
        for sequence, feed, tree in zip(step.sequences, step.feeds, step.trees, strict=True):
            alone = _Step([sequence], [feed], PackedTrees.of([tree]))
            try:
                alone.output = self._forward(alone)
                moves = self._verify(alone, verifier)
            except Exception as error:
                self._free_memory()
                lines = str(error).strip().splitlines() or [""]
                reason = f"model-error: {type(error).__name__}: {lines[0][:200]}"
                outcomes[id(sequence)] = GenerationFailure(sequence.request.request_id, reason)
                continue
            outcomes |= self._commit_all(alone, moves, verifier, on_event)
        return outcomes

    def _fail_alone(self, sequence: Sequence) -> dict[int, GenerationFailure]:
        """A lone sequence has no room, since memory for what its limit promised could not be had.

        Raises
        ------
        RuntimeError : another stream of the same engine holds the room.
        """
        if self.store.num_live_rows > 1:
            raise RuntimeError("the engine's KV cache is held by another, unfinished generate()")
        reason = f"too-long: prompt and answer exceed the KV cache of {self.store.max_tokens} tokens"
        return {id(sequence): GenerationFailure(sequence.request.request_id, reason)}

    def _draft(self, sequences: list[Sequence], drafter: Drafter, budget: Budget) -> PackedTrees:
        """The drafter's trees, cut to the budget: draft tokens, room left, estimated acceptance."""
        places = [place for place, sequence in enumerate(sequences) if sequence.num_left > 1]
        if not places or budget.max_draft_tokens == 0:
            return PackedTrees.empty(len(sequences))
        drafting = [sequences[place] for place in places]
        max_depths = [sequence.num_left - 1 for sequence in drafting]  # the step's last token is the target's own
        trees = prune_all(
            draft_all(drafter, drafting, max_depths),
            max_nodes=budget.max_draft_tokens,
            max_depths=max_depths,
            min_log_acceptance=budget.min_log_acceptance,
            vocab_size=self.vocab_size,
        )
        return trees.spread(places, len(sequences))

    def _feeds(self, live: list[Sequence], drafter: Drafter, budget: Budget) -> "_Step":
        """What each sequence adds to the step, in the order of `live`.

        Prompts share the step's room for them, the oldest first; one that gets no room waits. Only what writes a token
        in this step is drafted for.
        """
        num_cached = self.store.lengths[[sequence.row for sequence in live]].tolist()
        chains = [sequence.context[cached:] for sequence, cached in zip(live, num_cached, strict=True)]
        is_whole = [True] * len(live)
        room = self.max_prefill_tokens
        for i in sorted((i for i, chain in enumerate(chains) if len(chain) > 1), key=lambda i: live[i].order):
            # A prompt, or a preempted text: as much of it as there is room for.
            is_whole[i] = len(chains[i]) <= room
            chains[i] = chains[i][:room]
            room -= len(chains[i])
        members = [i for i, chain in enumerate(chains) if len(chain)]
        feeds = [Feed(live[i].row, chains[i]) for i in members]
        places = [place for place, i in enumerate(members) if is_whole[i]]
        trees = self._draft([live[members[place]] for place in places], drafter, budget)
        return _Step([live[i] for i in members], feeds, trees.spread(places, len(members)))

    def _forward(self, step: "_Step") -> StepOutput:
        """Run the model, or on CUDA have it run; the output holds until the next forward of any stream."""
        self.num_forwards += 1
        return self.runner.forward(step.feeds, step.trees)

    def _verify(self, step: "_Step", verifier: Verifier) -> "_Moves":
        """Accept drafts. Like the forward before it this changes nothing, so that both can be tried again."""
        output, trees = step.output, step.output.pack.trees
        rows = self.loaded.rules.on(output.rows, [sequence.context for sequence in step.sequences], trees)
        return _Moves(output.pack, verify(verifier, rows, trees, output.starts, self._is_end))

    def _commit_all(self, step: "_Step", moves: "_Moves", verifier, on_event) -> dict[int, Ending | GenerationFailure]:
        """Keep what was accepted, in the cache and in the texts; of the sequences that ended, what came of them.

        Where logits are not finite nothing is kept. A draft may have spoiled them, so that such a sequence takes the
        step again without one; it fails where it had none.
        """
        outcomes: dict[int, Ending | GenerationFailure] = {}
        pack = moves.pack
        is_sound = np.array([acceptance is not None for acceptance in moves.accepted])
        sound, spoiled = np.flatnonzero(is_sound), np.flatnonzero(~is_sound).tolist()
        paths = [moves.accepted[i].nodes for i in sound.tolist()]
        lengths = [len(path) for path in paths]
        nodes = np.concatenate([*paths, _NO_NODES]) + np.repeat(pack.trees.starts[sound], lengths)
        token_ids, sources = pack.trees.token_ids[nodes], pack.trees.source[nodes]
        if len(sound):
            is_kept = pack.kept(sound, nodes)
            counts = np.add.reduceat(is_kept, pack.offsets, dtype=np.int64)[sound]
            self.store.commit(pack.rows[sound], counts, pack.slots[is_kept])
        parts = [slice(*ends) for ends in pairwise(accumulate(lengths, initial=0))]  # of each path, of the tokens
        num_committed = pack.num_committed[sound].tolist()
        for i, path, part, num_before in zip(sound.tolist(), paths, parts, num_committed, strict=True):
            sequence = step.sequences[i]
            if num_before < sequence.num_prompt:  # it was within its prompt
                self.store.remember_prefix(sequence.row, sequence.prompt_ids[: self.store.lengths[sequence.row]])
            if self.store.lengths[sequence.row] >= len(sequence.context):  # else it waits for the rest of a long one
                sequence.count(pack.trees, i, path)
                ending = self._commit(sequence, token_ids[part], sources[part], moves, i, on_event)
                if ending is not None:
                    outcomes[id(sequence)] = ending
        for i in spoiled:
            sequence, reason = step.sequences[i], "not-finite: the model's logits are not finite"
            self.store.erase(sequence.row)
            if not pack.trees.sizes[i]:
                outcomes[id(sequence)] = GenerationFailure(sequence.request.request_id, reason)
        again = [i for i in spoiled if pack.trees.sizes[i]]
        if again:
            feeds = [step.feeds[i] for i in again]
            plain = _Step([step.sequences[i] for i in again], feeds, PackedTrees.empty(len(again)))
            outcomes |= self._step_one_by_one(plain, verifier, on_event)
        return outcomes

    def _commit(
        self, sequence: Sequence, token_ids: np.ndarray, sources: np.ndarray, moves: "_Moves", i: int, on_event
    ) -> Ending | None:
        """Add an accepted path's tokens and the target's own to a text; its ending if they ended it."""
        before, next_token = sequence.num_output, moves.accepted[i].next_token
        at_end = bool(self._is_end[next_token])
        sequence.append(token_ids, sources, None if at_end else next_token)
        ending = self._endings.check(sequence, sequence.num_output - before, at_end)
        if on_event is not None:
            new = slice(before, sequence.num_output)
            event = StepEvent(
                sequence.request.request_id,
                sequence.output_ids[new].copy(),
                sequence.sources[new].copy(),
                int(moves.pack.trees.sizes[i]),
                ending is not None,
            )
            on_event(event)
        return ending

    def _free_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass
class _Step:
    """A step under way.

    Attributes
    ----------
    sequences, feeds, trees : what each sequence adds to the step.
    output : of the forward, None where `error` says why there is none.
    number : of the newest forward when it was launched.
    """

    sequences: list[Sequence]
    feeds: list[Feed]
    trees: PackedTrees
    output: StepOutput | None = None
    error: Exception | None = None
    number: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.trees) + sum(len(feed.chain_ids) for feed in self.feeds)


@dataclass(frozen=True)
class _Moves:
    """What a step accepted of each sequence, a feed of its pack; None where logits are not finite."""

    pack: Pack
    accepted: list[Acceptance | None]
