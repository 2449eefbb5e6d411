"""Measures the cost of a step here: the engine's steps are timed with drafts of every size at several batch sizes.

The steps are real (draft, forward, verify, commit), of random texts. Half of the tokens of their drafts are accepted,
whatever the model says: an accepted node costs more than a rejected one, since on a CPU logits are computed only after
accepted nodes. If most nodes were rejected, large trees would seem cheap. Drafting is timed apart, and so is the time
that a longer context adds to a step. Small batches come first: they are cheap, and each shard ends with them. After
MAX_SECONDS only the largest batch size begins; each batch size takes two rounds at least, however long they are.

A model is measured on a machine only once in a while, so that the budget, and with it relaxed texts, stay the same.
With another pool only drafting is timed again. Other work on the machine must not decide whether a night drafts: so on
a CPU a step counts as long as its thread computed, not as long as the clock says, and of equal steps the quickest
counts, since nothing can have made it shorter.
"""

import datetime
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from laserbatch.pipeline.decoding.drafters import Drafter, RetrievalDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.scheduler import Concurrency
from laserbatch.pipeline.decoding.sequence import DecodingSequence, GenerationFailure, GenerationRequest
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.decoding.token_tree import EMPTY_TREE, MAX_DEPTH, MAX_NODES, TokenTree
from laserbatch.pipeline.decoding.verifiers import NodeVerdicts, verifier_from
from laserbatch.pipeline.errors import RunFailed
from laserbatch.retrieval_pools.calibration.calibrate import spread_positions
from laserbatch.retrieval_pools.index.calibration_record import MIN_ACCEPTANCES, SIZE_KNOTS
from laserbatch.retrieval_pools.index.texts import SEPARATOR
from laserbatch.retrieval_pools.sources import SOURCE_POOL, SOURCE_TARGET
from laserbatch.retrieval_pools.step_cost import MIN_SHARE, DraftCost, StepCost, StepPoint

PROMPT_TOKENS, LONG_PROMPT_TOKENS = 64, 320  # prompts of timed steps, and of texts whose drafting is timed
LONG_CONTEXT_TOKENS = 832  # prompts whose steps show the cost of context; at 320 noise was as large as a draft's cost
NUM_CONTEXT_STEPS = 4  # steps after prompts of each of the two lengths
NUM_CONTEXT_TEXTS = 4  # texts of such a step on a CPU, where a text's context takes as long whatever the others
NEW_TOKENS = 256  # length of each text; drafts deeper than the rest of it are cut, and not timed
MIN_ROUNDS, MAX_ROUNDS = 2, 15  # a round times a step of every size
MAX_SLOWDOWN = 6  # a size is left out if its step takes longer than this many plain ones: no draft is worth it
MIN_SIZES = 4  # the number of smallest tree sizes that are always timed
MAX_SECONDS = 10.0  # after them only the largest batch size begins
WARM_UP_ROUNDS = {"cpu": 0, "cuda": 1}  # untimed; on CUDA a step's first run compiles and its second is captured
SECONDS = 1.25  # for one batch size; after them no further round begins
MAX_TRIES = 3  # a step is tried this often if ends of texts cut its drafts
NUM_DRAFTS = 48  # sequences of a step whose drafting is timed
NUM_DRAFT_ROUNDS = 7
SEED = 0
PATIENCE = 8  # after more steps in a row with too few texts, the batch counts as full


def measure_step_cost(
    engine: Engine, pool, sources: Sequence[str], batch_sizes: Sequence[int], known_steps: StepCost | None = None
) -> StepCost:
    """Time the engine's steps, and drafting from the pool and the text sources. Nothing else may generate meanwhile.

    `batch_sizes` ascend; if the KV cache holds fewer sequences, steps of as many as it holds are timed instead. The
    largest one is always timed, the others while there is time. With `known_steps`, the cost of these steps, only
    drafting is timed. Raises RunFailed if the engine cannot write the texts whose steps are timed.
    """
    draft = _time_drafts(engine, pool, sources) if sources else DraftCost()
    if known_steps is not None:
        return known_steps.model_copy(update={"draft": draft})
    num_texts = max(batch_sizes) if engine.device.type == "cuda" else min(NUM_CONTEXT_TEXTS, max(batch_sizes))
    context_s, with_drafts_s = (_context_seconds(engine, num_texts, drafts) for drafts in (_ROUND[0], _CONTEXT_DRAFTS))
    draft_context_s = max(0.0, with_drafts_s - context_s) / _CONTEXT_DRAFTS.size
    points: dict[tuple[int, int], StepPoint] = {}
    prompt, began_s = random_tokens(engine, _prompt_tokens(engine, PROMPT_TOKENS)), time.perf_counter()
    for max_sequences in batch_sizes:
        if max_sequences < batch_sizes[-1] and time.perf_counter() - began_s > MAX_SECONDS:
            continue
        steps = _TimedSteps(engine, max_sequences, [prompt], context_s, draft_context_s)
        try:
            steps.take_rounds()
        finally:
            steps.stream.scheduler.close()
        batch_size = steps.batch_size  # the one that was reached
        timed = sorted({drafts.num_tokens(batch_size): min(of) for drafts, of in steps.seconds.items() if of}.items())
        # A smaller step costs no more: if it seems to, each of its runs was disturbed.
        rising = np.minimum.accumulate([seconds for _, seconds in reversed(timed)])[::-1].tolist()
        for (num_drafted, _), duration in zip(timed, rising, strict=True):
            num_tokens = batch_size + num_drafted
            num_tokens = next((size for size in engine.token_buckets if size >= num_tokens), num_tokens)
            point = StepPoint(batch_size=batch_size, num_tokens=num_tokens, seconds=duration)
            points.setdefault((batch_size, num_tokens), point)
    return StepCost(
        name=f"measured: {engine.model_id} on {engine.device.type}",
        steps=tuple(points.values()),
        padded_to=engine.token_buckets,
        draft=draft,
        context_tokens=_prompt_tokens(engine, PROMPT_TOKENS),
        seconds_per_context_token=context_s,
        seconds_per_draft_context_token=draft_context_s,
        measured_on=datetime.date.today(),
    )


def _prompt_tokens(engine: Engine, num_tokens: int) -> int:
    return min(num_tokens, engine.max_context // 2)


def _context_seconds(engine: Engine, num_texts: int, drafts: "_Drafts") -> float:
    """Seconds that each token of each text's context adds to a step: from steps after short and long prompts.

    No prompt is computed: the cache holds arbitrary values for them, which take as long to read. Steps of both lengths
    have as many texts: those that the cache holds with long prompts, which come first. 0.0 if they have not.
    """
    lengths = [_prompt_tokens(engine, number) for number in (PROMPT_TOKENS, LONG_CONTEXT_TOKENS)]
    seconds, batch_sizes = [], set()  # a text's share of a step, for each length
    for length in sorted(set(lengths), reverse=True):
        engine.cache.grow_to((num_texts + 1) * length)  # otherwise each prompt takes the place of the one before
        prompts = [random_tokens(engine, length, seed) for seed in range(num_texts)]
        prompts = prompts[: sum(_is_held(engine.cache, prompt) for prompt in prompts)]
        if not prompts:
            return 0.0
        steps = _TimedSteps(engine, len(prompts), prompts)
        try:
            steps.start()
            taken = (steps.take(drafts) for _ in range(NUM_CONTEXT_STEPS))
            seconds += [min(whole) / steps.batch_size] if (whole := list(filter(None, taken))) else []
            num_texts = steps.batch_size
            batch_sizes.add(num_texts)
        finally:
            steps.stream.scheduler.close()
            engine.reset_prefix_cache()
    is_alike = len(seconds) == 2 and len(batch_sizes) == 1
    return max(0.0, seconds[0] - seconds[1]) / (lengths[1] - lengths[0]) if is_alike else 0.0


def _is_held(cache: KVCache, prompt: np.ndarray) -> bool:
    """Make the cache treat a prompt as computed; return whether it has room for it and for a text."""
    lease = cache.acquire(prompt, 2 * len(prompt))
    if lease is None:
        return False
    is_held = cache.make_room(2 * len(prompt))
    if is_held:
        row, count = np.array([lease.row]), np.array([len(prompt) - lease.num_shared])
        cache.commit(row, count, cache.reserve(row, count))
        cache.remember_prefix(lease.row, prompt)
    cache.release(lease.row)
    return is_held


def clock_of(engine: Engine) -> Callable[[], float]:
    """The clock that times steps, in seconds: the thread's time on the processor, on CUDA the time that passes."""
    return time.perf_counter if engine.device.type == "cuda" else time.thread_time


@dataclass(frozen=True)
class _Drafts:
    """Trees of one size for all sequences of a step, or for only one: a step's first draft token may cost more."""

    size: int
    is_alone: bool = False

    def num_tokens(self, batch_size: int) -> int:
        return self.size * (1 if self.is_alone else batch_size)


_ROUND = (*map(_Drafts, SIZE_KNOTS), _Drafts(1, is_alone=True))
_CONTEXT_DRAFTS = _Drafts(8)  # their steps show what context adds to the cost of a draft token


class _TimedSteps(Drafter):
    """The requests, drafter and verifier of a measurement in one class, and the seconds of its steps."""

    def __init__(
        self, engine: Engine, batch_size: int, prompts: Sequence[np.ndarray], context_s=0.0, draft_context_s=0.0
    ) -> None:
        self.batch_size = batch_size
        self.seconds: dict[_Drafts, list[float]] = {drafts: [] for drafts in _ROUND}
        self._engine, self._clock = engine, clock_of(engine)
        self._prompts, self._context_s, self._draft_context_s = prompts, context_s, draft_context_s
        deepest = max(1, min(NEW_TOKENS, engine.max_context - len(prompts[0])) // 4)
        self._trees = {size: _tree(engine, size, deepest) for size in SIZE_KNOTS}
        self._rule = verifier_from(engine.settings)
        self._drafts, self._has_drafted = _ROUND[0], False
        self._concurrency = Concurrency(batch_size)
        self.stream = engine.open_stream(self._requests(), self, self, Budget(MAX_NODES, 0.0), self._concurrency)
        self._num_short = 0  # steps in a row with fewer texts than the batch size

    def _requests(self) -> Iterator[GenerationRequest]:
        for number in itertools.count():
            prompt = self._prompts[number % len(self._prompts)]
            yield GenerationRequest(str(number), prompt, max_new_tokens=NEW_TOKENS)

    def draft(self, sequence: DecodingSequence) -> TokenTree:
        is_first, self._has_drafted = not self._has_drafted, True
        return self._trees[self._drafts.size] if is_first or not self._drafts.is_alone else EMPTY_TREE

    def __call__(self, logits, choices, nodes) -> NodeVerdicts:
        """Run the engine's own rule for its cost, and then judge by another one that treats all texts alike.

        If only one text has drafts they are rejected, so that all texts keep the same length.
        """
        log_probability = self._rule(logits, choices, nodes).log_probability
        return NodeVerdicts((nodes.token_ids % 2 == 0) & (not self._drafts.is_alone), log_probability)

    def start(self) -> None:
        """Take steps until prompts are computed."""
        while self.take(_ROUND[0]) is None:
            pass

    def take_rounds(self) -> None:
        """Time every size in each round; rounds after the first shuffle the order.

        The first round ends at a size whose steps are too slow for any draft to pay: it and larger ones are left out.
        """
        rng, began_s = np.random.default_rng(SEED), 0.0
        self.start()
        for number in range(-WARM_UP_ROUNDS["cuda" if self._engine.device.type == "cuda" else "cpu"], MAX_ROUNDS):
            if number == 0:
                began_s = time.perf_counter()
            if number >= MIN_ROUNDS and time.perf_counter() - began_s > SECONDS:
                return
            sizes = sorted(self.seconds, key=lambda drafts: drafts.num_tokens(self.batch_size))
            for drafts in [sizes[place] for place in rng.permutation(len(sizes))] if number > 0 else sizes:
                seconds = self._timed(drafts)
                if number >= 0 and seconds is not None:
                    self.seconds[drafts].append(seconds)
                if number == 0 and self._is_too_slow(drafts):
                    for larger in [other for other in sizes if other.size >= drafts.size]:
                        del self.seconds[larger]
                    break

    def _is_too_slow(self, drafts: _Drafts) -> bool:
        """Whether a size took too long in the first round; False for the smallest ones, which are always timed."""
        plain_s, seconds = self.seconds[_ROUND[0]], self.seconds[drafts]
        is_slow = bool(plain_s and seconds) and seconds[0] > MAX_SLOWDOWN * plain_s[0]
        return is_slow and drafts.size > SIZE_KNOTS[MIN_SIZES - 1]

    def _timed(self, drafts: _Drafts) -> float | None:
        """Seconds of a step, on CUDA of the second of two; None if ends of texts cut it.

        On a CPU the first of two steps takes as long as the second.
        """
        is_first_timed = self._engine.device.type != "cuda"
        tries = ((is_first_timed or self.take(drafts)) and self.take(drafts) for _ in range(MAX_TRIES))
        return next(filter(None, tries), None)

    def take(self, drafts: _Drafts) -> float | None:
        """Time a step with these drafts, in seconds; None if the step held a prompt, cut drafts or fewer texts."""
        scheduler, self._drafts, self._has_drafted = self.stream.scheduler, drafts, False
        failures = list(itertools.islice(scheduler.admit(), 1))
        num_written = sum(sequence.num_output for sequence in scheduler.live)
        start_s = self._clock()
        step = self._engine.submit_step(self.stream)
        ended = self._engine.finish_step(step, self.stream)
        seconds = self._clock() - start_s
        context_s = self._context_s + self._draft_context_s * drafts.num_tokens(self.batch_size) / self.batch_size
        seconds = max(MIN_SHARE * seconds, seconds - context_s * num_written)
        failures += [outcome for _, outcome in ended if isinstance(outcome, GenerationFailure)]
        if failures:
            raise RunFailed(
                f"the cost of steps cannot be measured: {failures[0].reason}; set decoding.max_draft_tokens and "
                "decoding.min_acceptance, so that nothing has to be measured"
            )
        assert step is not None  # otherwise its only text failed
        num_texts = len(step.sequences)
        self._num_short = self._num_short + 1 if num_texts < self.batch_size else 0
        if self._num_short > PATIENCE and step.num_tokens == num_texts + drafts.num_tokens(num_texts):
            self.batch_size = self._concurrency.max_sequences = self._concurrency.current = num_texts
        return seconds if step.num_tokens == self.batch_size + drafts.num_tokens(self.batch_size) else None


def _time_drafts(engine: Engine, pool, sources: Sequence[str]) -> DraftCost:
    """Time the one call that drafts for all sequences of a step: small and large drafts, one and many texts.

    Each place of a text is drafted from once, as in a run: a second draft would hit the processor's cache.
    """
    num_threads = engine.num_draft_threads
    narrow = RetrievalDrafter(pool, tuple(sources), max_nodes=1, min_acceptance=1.0, num_threads=num_threads)
    wide = RetrievalDrafter(pool, tuple(sources), MAX_NODES, MIN_ACCEPTANCES[0], num_threads)
    texts = texts_of(engine, pool)
    prompt = random_tokens(engine, _prompt_tokens(engine, LONG_PROMPT_TOKENS))
    alone_times, few_times, token_times, clock = [], [], [], clock_of(engine)
    shares = iter(np.linspace(0.0, 1.0, 3 * (NUM_DRAFT_ROUNDS + 1), endpoint=False))
    for number in range(NUM_DRAFT_ROUNDS + 1):  # the first warms up
        alone, few, many = (_midway(prompt, texts, next(shares)) for _ in range(3))
        alone_s, _ = _timed_drafts(narrow, alone[number : number + 1], clock)
        few_s, num_few = _timed_drafts(narrow, few, clock)
        many_s, num_many = _timed_drafts(wide, many, clock)
        if number > 0:
            alone_times.append(alone_s)
            few_times.append(few_s)
            token_times.append((many_s - few_s) / max(1, num_many - num_few))
    alone_s, few_s = min(alone_times), min(few_times)
    each_s = max(0.0, few_s - alone_s) / (len(texts) - 1)
    token_s = max(0.0, float(np.median(token_times)))
    return DraftCost(seconds_per_step=max(0.0, alone_s - each_s), seconds=each_s, seconds_per_token=token_s)


def texts_of(engine: Engine, pool) -> list[np.ndarray]:
    """NUM_DRAFTS texts of a pool, spread evenly, some repeated if it has fewer; random texts without a pool."""
    texts: list[np.ndarray] = []
    if pool is not None and pool.manifest.num_texts > 0:
        tokens = pool.index.tokens
        ends = np.flatnonzero(tokens == SEPARATOR)
        spread = [np.array(tokens[ends[k] + 1 : ends[k + 1]]) for k in spread_positions(len(ends) - 1, NUM_DRAFTS)]
        texts = [text for text in spread if len(text) > 1]
    texts = texts or np.split(random_tokens(engine, NUM_DRAFTS * LONG_PROMPT_TOKENS), NUM_DRAFTS)
    return [texts[number % len(texts)] for number in range(NUM_DRAFTS)]


def _midway(prompt: np.ndarray, texts: list[np.ndarray], share: float) -> list[DecodingSequence]:
    """A sequence for each text, with a share of the text written; the text is also its previous text."""
    sequences = [DecodingSequence(GenerationRequest("", prompt, text), len(text)) for text in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        written = text[: max(1, int(share * len(text)))]
        sequence.append(written, np.full(len(written), SOURCE_TARGET, np.uint8), None)
    return sequences


def _timed_drafts(
    drafter: RetrievalDrafter, sequences: list[DecodingSequence], clock: Callable[[], float]
) -> tuple[float, int]:
    """Seconds of one call for all sequences, and the number of tokens that it drafts."""
    start_s = clock()
    trees = drafter.draft_all(sequences, [MAX_DEPTH] * len(sequences))
    return clock() - start_s, len(trees)


def random_tokens(engine: Engine, num_tokens: int, seed: int = SEED) -> np.ndarray:
    """Random tokens, int32[num_tokens], without end tokens; the same for the same vocabulary and seed."""
    return np.random.default_rng(seed).choice(_allowed_tokens(engine), num_tokens)


def _allowed_tokens(engine: Engine) -> np.ndarray:
    # Without `assume_unique` the vocabulary is sorted, for each prompt: 20 ms of 128,000 tokens.
    return np.setdiff1d(np.arange(engine.vocab_size, dtype=np.int32), list(engine.end_ids), assume_unique=True)


def _tree(engine: Engine, num_nodes: int, deepest: int) -> TokenTree:
    """A tree with a chain of even token ids, half of the nodes but at most `deepest`, and with odd ids as leaves."""
    num_levels = min(-(-num_nodes // 2), deepest)
    level = np.arange(num_nodes) * num_levels // max(1, num_nodes)
    first = np.searchsorted(level, np.arange(num_levels))  # the first node of each level is the chain's
    parents = np.where(level == 0, -1, first[level - 1]).astype(np.int32)
    is_chain = np.isin(np.arange(num_nodes), first)
    allowed = _allowed_tokens(engine)
    even, odd = (allowed[allowed % 2 == parity] for parity in (0, 1))
    place = np.arange(num_nodes)
    tokens = np.where(is_chain, even[place % len(even)], odd[place % len(odd)])
    return TokenTree(tokens, parents, np.zeros(num_nodes, np.float32), np.full(num_nodes, SOURCE_POOL, np.uint8))
