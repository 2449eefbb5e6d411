"""What a step costs here: the engine's own steps, timed with drafts of every size at several batch sizes.

Steps are real ones (admit, forward, verify, commit) of texts that say nothing. Every second token of their drafts is
accepted, whatever the model says: an accepted node costs more than a rejected one, since on a CPU only of what follows
accepted ones logits are computed. Trees that were mostly rejected would make large ones seem cheap. Drafting is timed
apart. A few seconds for a small model: repetitions are fewer where steps are long.
"""

import datetime
import itertools
import os
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from laserbatch.pipeline.budget.choice import SOURCES
from laserbatch.pipeline.budget.step_cost import DraftCost, StepCost, StepPoint
from laserbatch.pipeline.decoding.drafters.drafter import draft_all
from laserbatch.pipeline.decoding.drafters.retrieval import RetrievalDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.requests import GenerationFailure, GenerationRequest, StepEvent
from laserbatch.pipeline.decoding.sequence import Sequence
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.decoding.token_tree import EMPTY_TREE, MAX_DEPTH, MAX_NODES, TokenTree
from laserbatch.pipeline.decoding.verifiers.from_settings import verifier_from
from laserbatch.pipeline.decoding.verifiers.verifier import NodeVerdicts
from laserbatch.retrieval_pools.calibration.calibrate import spread_positions
from laserbatch.retrieval_pools.index.calibration_record import MIN_ACCEPTANCES, SIZE_KNOTS
from laserbatch.retrieval_pools.index.suffix_order import SEPARATOR
from laserbatch.retrieval_pools.sources import SOURCE_POOL, SOURCE_TARGET

PROMPT_TOKENS = 320
NEW_TOKENS = 256  # then a text starts again; drafts deeper than what is left of it are cut, and not timed
MIN_ROUNDS, MAX_ROUNDS = 4, 15  # each two steps of every size, of which the second is timed
WARM_UP_ROUNDS = {"cpu": 1, "cuda": 2}  # before them; on CUDA a step's first run compiles and its second is captured
SECONDS = 2.0  # for one batch size, after which no further round begins
NUM_DRAFTS = 48  # sequences of a step whose drafting is timed
NUM_DRAFT_ROUNDS = 7
SEED = 0
PATIENCE = 8  # short steps in a row, while prompts are computed, before the batch is taken to be full


def measure_step_cost(
    engine: Engine, pool=None, sources: SequenceOf[str] = SOURCES, batch_sizes: SequenceOf[int] | None = None
) -> StepCost:
    """Time the engine's steps. Nothing else may generate with it meanwhile.

    Parameters
    ----------
    pool, sources : what drafting is timed with.
    batch_sizes : 1, 2, 4, ... and the engine's own by default. Where the KV cache holds fewer sequences, steps of as
        many as it holds are timed instead.
    """
    if batch_sizes is None:
        largest = engine.settings.batch_size
        batch_sizes = sorted({*(1 << power for power in range(largest.bit_length())), largest})
    points: dict[tuple[int, int], StepPoint] = {}
    load, spreads = os.getloadavg()[0] / (os.cpu_count() or 1), []
    for wanted in batch_sizes:
        batch_size, seconds, spread = _time_steps(engine, wanted)
        spreads += spread
        for num_drafted, duration in seconds.items():
            num_tokens = batch_size + num_drafted
            point = StepPoint(batch_size=batch_size, num_tokens=num_tokens, seconds=duration)
            points.setdefault((batch_size, num_tokens), point)
    return StepCost(
        name=f"measured: {engine.model_id} on {engine.device.type}",
        steps=tuple(points.values()),
        draft=_time_drafts(engine, pool, sources) if sources else DraftCost(),
        measured_on=datetime.date.today(),
        spread=float(np.median(spreads)),
        load=load,
    )


def _time_steps(engine: Engine, batch_size: int) -> tuple[int, dict[int, float], list[float]]:
    """The batch size that was reached, seconds of its steps by their draft tokens, and how far apart like ones lie."""
    from sklearn.isotonic import isotonic_regression  # takes a second to load; costs that are known need it not

    steps = _TimedSteps(engine, batch_size)
    texts = engine.generate(steps, steps, steps, steps.on_event, budget=Budget(MAX_NODES, 0.0))
    try:
        for outcome in texts:
            steps.num_live -= isinstance(outcome, GenerationFailure)
    except _Enough:
        pass
    finally:
        texts.close()
    typical = {
        drafts.num_tokens(steps.batch_size): undisturbed_seconds(seconds)
        for drafts, seconds in steps.seconds.items()
        if seconds
    }
    # A larger step costs no less: where it seems to, that is noise.
    rising = isotonic_regression([typical[num_drafted] for num_drafted in sorted(typical)])
    quartiles = [np.quantile(seconds, (0.25, 0.5, 0.75)) for seconds in steps.seconds.values() if seconds]
    spreads = [float((high - low) / middle) for low, middle, high in quartiles]
    return steps.batch_size, dict(zip(sorted(typical), rising.tolist(), strict=True)), spreads


def undisturbed_seconds(durations: SequenceOf[float]) -> float:
    """The lower quartile of like steps: what else runs for a moment only ever makes some of them longer."""
    return float(np.quantile(durations, 0.25))


@dataclass(frozen=True)
class _Drafts:
    """Trees of one size for all sequences of a step, or for one of them alone.

    The first draft token of a step may cost more than others: a step without any can be computed in a simpler way.
    """

    size: int
    is_alone: bool = False

    def num_tokens(self, batch_size: int) -> int:
        """Draft tokens of a step of so many sequences."""
        return self.size * (1 if self.is_alone else batch_size)


_ROUND = (*map(_Drafts, SIZE_KNOTS), _Drafts(1, is_alone=True))


class _Enough(Exception):
    """All steps that are wanted were timed."""


class _TimedSteps:
    """Requests, drafter, verifier and clock of a measurement in one: they have to agree on whose turn it is.

    As an iterator it gives a request whenever fewer than `batch_size` texts are live, and the engine asks at each step.
    """

    def __init__(self, engine: Engine, batch_size: int) -> None:
        self.batch_size = batch_size
        self.num_live = 0
        self.seconds: dict[_Drafts, list[float]] = {drafts: [] for drafts in _ROUND}
        self._prompt = random_tokens(engine, min(PROMPT_TOKENS, engine.max_context // 2))
        deepest = max(1, min(NEW_TOKENS, engine.max_context - len(self._prompt)) // 4)
        self._trees = {size: _tree(engine, size, deepest) for size in SIZE_KNOTS}
        self._rule = verifier_from(engine.settings)
        self._names = itertools.count()
        self._rng = np.random.default_rng(SEED)
        self._round: list[tuple[_Drafts, bool]] = []  # and whether that step is timed, the next one last
        self._drafts, self._is_timed = _ROUND[0], False
        self._num_rounds = -1 - WARM_UP_ROUNDS["cuda" if engine.device.type == "cuda" else "cpu"]
        self._stepped: set[str] = set()  # texts that took the current step
        self._num_drafted = 0  # tokens, of these texts
        self._has_asked = False  # whether one of the current step's texts was drafted for
        self._num_left_to_retry = 0  # steps of the round
        self._num_short = 0  # steps in a row of fewer texts than are wanted
        self._began_s: float | None = None
        self._first_s = 0.0  # when the first round began

    def __iter__(self) -> "_TimedSteps":
        return self

    def __next__(self) -> GenerationRequest:
        if self.num_live >= self.batch_size:
            raise StopIteration
        self.num_live += 1
        return GenerationRequest(str(next(self._names)), self._prompt, max_new_tokens=NEW_TOKENS)

    def draft(self, sequence: Sequence) -> TokenTree:
        is_first, self._has_asked = not self._has_asked, True
        return self._trees[self._drafts.size] if is_first or not self._drafts.is_alone else EMPTY_TREE

    def __call__(self, logits, choices, parents, token_ids) -> NodeVerdicts:
        """The engine's own rule, for what it costs, and then another one that all texts follow alike.

        Where one text alone has drafts they are rejected, so that texts stay of one length.
        """
        log_probability = self._rule(logits, choices, parents, token_ids).log_probability
        return NodeVerdicts((token_ids % 2 == 0) & (not self._drafts.is_alone), log_probability)

    def on_event(self, event: StepEvent) -> None:
        if event.request_id in self._stepped:  # a second step began, and the first one was of fewer texts
            self._num_short += 1
            if self._num_short > PATIENCE:
                self.batch_size = len(self._stepped)
            self._begin(None)
        self._stepped.add(event.request_id)
        self.num_live -= event.is_last  # its result comes a step later
        self._num_drafted += event.num_drafted
        if len(self._stepped) < self.batch_size:
            return
        now_s = time.perf_counter()
        is_as_planned = self._num_drafted == self._drafts.num_tokens(self.batch_size)
        if not is_as_planned and self._is_timed and self._num_left_to_retry > 0:  # a text's end cut a draft
            self._num_left_to_retry -= 1
            self._add(self._drafts)
        if self._began_s is not None and is_as_planned and self._is_timed and self._num_rounds >= 0:
            self.seconds[self._drafts].append(now_s - self._began_s)
        self._num_short = 0
        self._next_drafts(now_s)
        self._begin(time.perf_counter())

    def _begin(self, began_s: float | None) -> None:
        self._stepped.clear()
        self._num_drafted, self._has_asked, self._began_s = 0, False, began_s

    def _next_drafts(self, now_s: float) -> None:
        if not self._round:
            self._num_rounds += 1
            if self._num_rounds <= 0:
                self._first_s = now_s
            late = now_s - self._first_s > SECONDS and self._num_rounds >= MIN_ROUNDS
            if late or self._num_rounds >= MAX_ROUNDS:
                raise _Enough
            self._num_left_to_retry = len(_ROUND)
            for place in self._rng.permutation(len(_ROUND)):
                self._add(_ROUND[place])
        self._drafts, self._is_timed = self._round.pop()

    def _add(self, drafts: _Drafts) -> None:
        """Two steps at the end of the round: as in a run, the timed one finds caches as one like it leaves them."""
        self._round[:0] = [(drafts, True), (drafts, False)]


def _time_drafts(engine: Engine, pool, sources: SequenceOf[str]) -> DraftCost:
    """What the engine's one call for all sequences of a step takes: small drafts beside large ones, one beside many.

    Each place of a text is asked about once, as in a run: what is asked again is found in the processor's cache.
    """
    num_threads = engine.num_draft_threads
    narrow = RetrievalDrafter(pool, tuple(sources), max_nodes=1, min_acceptance=1.0, num_threads=num_threads)
    wide = RetrievalDrafter(pool, tuple(sources), MAX_NODES, MIN_ACCEPTANCES[0], num_threads)
    texts = texts_of(engine, pool)
    prompt = random_tokens(engine, min(PROMPT_TOKENS, engine.max_context // 2))
    one_s, all_s, token_s = [], [], []
    shares = iter(np.linspace(0.0, 1.0, 3 * (NUM_DRAFT_ROUNDS + 1), endpoint=False))
    for number in range(NUM_DRAFT_ROUNDS + 1):  # the first warms up
        alone, few, many = (_midway(prompt, texts, next(shares)) for _ in range(3))
        of_one, _ = _timed_drafts(narrow, alone[number : number + 1])
        of_few, num_few = _timed_drafts(narrow, few)
        of_many, num_many = _timed_drafts(wide, many)
        if number > 0:
            one_s.append(of_one)
            all_s.append(of_few)
            token_s.append((of_many - of_few) / max(1, num_many - num_few))
    of_one, of_all = undisturbed_seconds(one_s), undisturbed_seconds(all_s)
    of_each = max(0.0, of_all - of_one) / (len(texts) - 1)
    per_token = max(0.0, float(np.median(token_s)))
    return DraftCost(seconds_per_step=max(0.0, of_one - of_each), seconds=of_each, seconds_per_token=per_token)


def texts_of(engine: Engine, pool) -> list[np.ndarray]:
    """NUM_DRAFTS texts of a pool, spread evenly, some of them twice where it has fewer; random ones without."""
    texts: list[np.ndarray] = []
    if pool is not None and pool.manifest.num_texts > 0:
        tokens = pool.index.tokens
        ends = np.flatnonzero(tokens == SEPARATOR)
        found = [np.array(tokens[ends[k] + 1 : ends[k + 1]]) for k in spread_positions(len(ends) - 1, NUM_DRAFTS)]
        texts = [text for text in found if len(text) > 1]
    texts = texts or np.split(random_tokens(engine, NUM_DRAFTS * PROMPT_TOKENS), NUM_DRAFTS)
    return [texts[number % len(texts)] for number in range(NUM_DRAFTS)]


def _midway(prompt: np.ndarray, texts: list[np.ndarray], share: float) -> list[Sequence]:
    """A sequence for each text, of which a share is written; its previous text is the same one."""
    sequences = []
    for text in texts:
        sequence = Sequence(GenerationRequest("", prompt, text), len(text))
        written = max(1, int(share * len(text)))
        sequence.append(text[:written], np.full(written, SOURCE_TARGET, np.uint8), None)
        sequences.append(sequence)
    return sequences


def _timed_drafts(drafter: RetrievalDrafter, sequences: list[Sequence]) -> tuple[float, int]:
    """Seconds of one call for all sequences, and the tokens that it drafts."""
    max_depths = [MAX_DEPTH] * len(sequences)
    start_s = time.perf_counter()
    trees = draft_all(drafter, sequences, max_depths)
    return time.perf_counter() - start_s, len(trees)


def random_tokens(engine: Engine, num_tokens: int) -> np.ndarray:
    """int32[num_tokens], the same for the same vocabulary; no end token among them."""
    return np.random.default_rng(SEED).choice(_allowed_tokens(engine), num_tokens)


def _allowed_tokens(engine: Engine) -> np.ndarray:
    return np.setdiff1d(np.arange(engine.vocab_size, dtype=np.int32), list(engine.end_ids))


def _tree(engine: Engine, num_nodes: int, deepest: int) -> TokenTree:
    """A chain of even token ids, half of the nodes but not more than `deepest`, beside odd ones that lead nowhere."""
    num_levels = min(-(-num_nodes // 2), deepest)
    level = np.arange(num_nodes) * num_levels // max(1, num_nodes)
    first = np.searchsorted(level, np.arange(num_levels))  # of each level: the chain's nodes
    parents = np.where(level == 0, -1, first[level - 1]).astype(np.int32)
    is_chain = np.isin(np.arange(num_nodes), first)
    allowed = _allowed_tokens(engine)
    even, odd = (allowed[allowed % 2 == parity] for parity in (0, 1))
    place = np.arange(num_nodes)
    tokens = np.where(is_chain, even[place % len(even)], odd[place % len(odd)])
    return TokenTree(tokens, parents, np.zeros(num_nodes, np.float32), np.full(num_nodes, SOURCE_POOL, np.uint8))
