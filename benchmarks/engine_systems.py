"""The systems that `engine.py` compares: peers, plain decoding, and our engine with each pool and verifier.

Only the cost of a step is measured here; it chooses the adaptive budgets.
"""

import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from engine_pools import GroupedPool, calibrated_by
from roofline import WatchedPlain
from systems import EngineSystem, TransformersGenerate
from tasks import Task
from transformers import AutoModelForCausalLM

from laserbatch.pipeline.budget.choice import by_step, side_budget
from laserbatch.pipeline.budget.measuring import measure_step_cost
from laserbatch.pipeline.decoding.drafters import NoDrafter, RetrievalDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.load import LoadedModel, load_model
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.decoding.verifiers import verifier_from
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.step_cost import StepCost

logger = logging.getLogger("benchmarks")

PEER, LOOKUP, ASSISTED, PLAIN = (
    "transformers-generate",
    "transformers-prompt-lookup",
    "transformers-assisted",
    "plain",
)
OWN_TEXT = ("prompt", "output")
WITH_POOL = (*OWN_TEXT, "pool")
ADAPTIVE = "adaptive"
FIXED_BUDGETS = (4, 8, 16, 32, 64)
LOOKUP_TOKENS = 10
STEP_BATCHES = (1, 4, 16, 64)  # smaller batch sizes whose steps are timed besides those of the engine's batch size


class Speculation(NamedTuple):
    """A verifier and a kind of pool of `engine_pools`; pool None drafts only from the prompt and the output."""

    pool: str | None
    verifier: str

    @property
    def pool_name(self) -> str:
        """The name of the pool as nights with this verifier calibrate it (see `relaxed_pools`), if it has a pool."""
        return (self.pool or "") + ("" if self.verifier == "greedy" else ", relaxed")


SPECULATIONS = {
    "own-text": Speculation(None, "greedy"),
    "resd": Speculation("global", "greedy"),
    "crp": Speculation("group", "greedy"),
    "rrp": Speculation("random", "greedy"),
    "laser": Speculation("preference", "relaxed"),
    "resd, relaxed": Speculation("global", "relaxed"),
}


@dataclass(frozen=True)
class Contestant:
    """A system, ready to run, under one budget: "adaptive", a number of draft tokens, or None if it has no budget.

    `settled` is the budget in full; None if the system has no budget.
    """

    system: str
    budget: str | int | None
    runner: TransformersGenerate | EngineSystem | WatchedPlain
    settled: Budget | None = None

    @property
    def is_peer(self) -> bool:
        """Whether the system is not ours, but of transformers."""
        return self.system in (PEER, LOOKUP, ASSISTED)

    @property
    def is_slow(self) -> bool:
        """Whether the system drafts from no pool, or only from the pool of a group."""
        return self.system not in SPECULATIONS or SPECULATIONS[self.system].pool in (None, "group", "random")

    @property
    def key(self) -> tuple[str, str | int | None]:
        return self.system, self.budget


class Engines:
    """Engines of one loaded model, one batch size at a time: a new engine frees the KV cache of the last."""

    def __init__(self, model_dir: Path, dtype: str, device: str) -> None:
        self._loaded: LoadedModel = load_model(model_dir, dtype, device)
        self._engine: Engine | None = None
        self._step_costs: dict[int, StepCost] = {}

    @property
    def tokenizer(self):
        return self._loaded.tokenizer

    @property
    def device(self) -> torch.device:
        return self._loaded.device

    def of_batch(self, batch: int) -> Engine:
        """The engine of a batch size; engines of other batch sizes must not be used any more."""
        if self._engine is None or self._engine.settings.batch_size != batch:
            self._engine = None
            gc.collect()
            if self._loaded.device.type == "cuda":
                torch.cuda.empty_cache()
            self._engine = Engine(self._loaded, DecodingSettings(batch_size=batch))
        return self._engine

    def step_cost(self, batch: int, pool: Pool | None) -> StepCost:
        """The cost of a step up to a batch size, and of a draft from the pool; measured once per batch size."""
        if batch not in self._step_costs:
            sizes = [*(size for size in STEP_BATCHES if size < batch), batch]
            self._step_costs[batch] = measure_step_cost(self.of_batch(batch), pool, WITH_POOL, sizes)
        return self._step_costs[batch]


class Peers:
    """The systems of transformers, with their own copy of the weights; assisted, the model's first layers draft."""

    def __init__(self, model_dir: Path, dtype: str, device: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype), device_map=device).eval()
        half = max(1, model.config.get_text_config().num_hidden_layers // 2)
        self._generate = TransformersGenerate(model)
        self._one_by_one = {
            LOOKUP: TransformersGenerate(model, prompt_lookup_num_tokens=LOOKUP_TOKENS),
            ASSISTED: TransformersGenerate(model, assistant_early_exit=half),
        }

    def at_batch(self, batch: int) -> Iterator[Contestant]:
        """Yield the systems that work at a batch size: transformers drafts only for one prompt at a time."""
        yield Contestant(PEER, None, self._generate)
        if batch == 1:
            yield from (Contestant(name, None, runner) for name, runner in self._one_by_one.items())


def relaxed_pools(
    writer: Engine, pools: dict[str, GroupedPool], task: Task, systems: Sequence[str]
) -> dict[str, GroupedPool]:
    """The pools of relaxed systems, calibrated like after a relaxed night: by texts that were drafted from them.

    If the task has no earlier prompts, the pools are unchanged.
    """
    relaxed = {}
    for speculation in dict.fromkeys(SPECULATIONS[system] for system in systems if system in SPECULATIONS):
        if speculation.pool is None or speculation.verifier == "greedy":
            continue
        grouped = relaxed[speculation.pool_name] = pools[speculation.pool]
        if task.earlier_prompts:
            night = drafting(writer, grouped.pool, WITH_POOL, grouped.groups, Budget(), speculation.verifier)
            texts = night.timed(task.earlier_prompts, task.max_new_tokens).texts
            relaxed[speculation.pool_name] = calibrated_by(grouped, task.earlier_prompts, texts)
    return relaxed


def adaptive_budget(step_cost: StepCost, batch: int, pools: dict[str, GroupedPool], system: str) -> Budget:
    """The budget that measured costs choose for one of SPECULATIONS at a batch size."""
    speculation = SPECULATIONS[system]
    grouped = pools.get(speculation.pool_name)
    pool, sources = drafted_from(grouped)
    decoding = DecodingSettings(batch_size=batch, drafters=sources, verifier=speculation.verifier)
    return side_budget(decoding, pool, step_cost, 0.0).budget


def as_a_night(
    engines: Engines, batch: int, pools: dict[str, GroupedPool], system: str, num_context_tokens: float
) -> EngineSystem:
    """One of SPECULATIONS with the budget that a night chooses for texts and prompts of `num_context_tokens` tokens.

    Under greedy verification each step drafts as much as pays in that step.
    """
    speculation = SPECULATIONS[system]
    grouped = pools.get(speculation.pool_name)
    pool, sources = drafted_from(grouped)
    step_cost = engines.step_cost(batch, pool).at_context(num_context_tokens)
    decoding = DecodingSettings(batch_size=batch, drafters=sources, verifier=speculation.verifier)
    budget = by_step(decoding, side_budget(decoding, pool, step_cost, 0.0)).budget
    logger.info("batch %d, %s: %s", batch, system, budget)
    groups = grouped and grouped.groups
    given = step_cost if budget.is_by_step else None
    return drafting(engines.of_batch(batch), pool, sources, groups, budget, speculation.verifier, given)


def speculating(
    engine: Engine, pools: dict[str, GroupedPool], system: str, budget: str | int, settled: Budget
) -> Contestant:
    """One of SPECULATIONS under a budget; `settled` is that budget in full."""
    speculation = SPECULATIONS[system]
    grouped = pools.get(speculation.pool_name)
    pool, sources = drafted_from(grouped)
    runner = drafting(engine, pool, sources, grouped and grouped.groups, settled, speculation.verifier)
    return Contestant(system, budget, runner, settled)


def drafted_from(grouped: GroupedPool | None) -> tuple[Pool | None, tuple[str, ...]]:
    """The pool, or None, and the names of the draft sources."""
    return (None, OWN_TEXT) if grouped is None else (grouped.pool, WITH_POOL)


def drafting(
    engine: Engine,
    pool: Pool | None,
    sources: tuple[str, ...],
    groups,
    budget: Budget,
    verifier_name: str,
    step_cost: StepCost | None = None,
) -> EngineSystem:
    """Our engine with drafts from texts, a budget and a verifier; `step_cost` is passed to `EngineSystem`."""
    drafter = NoDrafter()
    if budget.max_draft_tokens:
        limits = budget.max_draft_tokens, budget.min_acceptance
        drafter = RetrievalDrafter(pool, sources, *limits, engine.num_draft_threads)
    verifier = verifier_from(engine.settings.model_copy(update={"verifier": verifier_name}))
    return EngineSystem(engine, drafter, verifier, budget, groups, step_cost)


def twins_of(contestants: Sequence[Contestant]) -> dict[tuple, tuple]:
    """The key of the fixed budget that equals an adaptive one of the same system, by the key of the adaptive one.

    Both are the same program, so it is measured only once: two measurements would differ by chance.
    """
    fixed = {(each.system, each.settled): each.key for each in contestants if isinstance(each.budget, int)}
    twins = {each.key: fixed.get((each.system, each.settled)) for each in contestants if each.budget == ADAPTIVE}
    return {key: twin for key, twin in twins.items() if twin is not None}


def pool_kinds(systems: Sequence[str]) -> list[str]:
    """The kinds of pools that the systems draft from."""
    kinds = {SPECULATIONS[name].pool for name in systems if name in SPECULATIONS}
    return sorted(kind for kind in kinds if kind is not None)
