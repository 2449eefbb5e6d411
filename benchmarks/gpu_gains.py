"""Items of `gpu_phases.py` with texts: the gain of drafts over plain decoding, and transformers on the same weights.

`pool_texts.py` wrote the prompts and the texts of the pools. In each round every system answers the same prompts once,
in turns, so that a ratio compares passes of the same minute. A round that would not end in time is left out.
"""

import dataclasses
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from common import turns
from engine_systems import WITH_POOL, drafting
from gpu_bench import Bench, memory_now, release_memory
from gpu_steps import StepClock
from pool_texts import SavedTask, read_task
from systems import MIN_ACCEPTANCE, EngineSystem, Pass, TransformersGenerate
from widen import GEOMETRIES, widened_on

from laserbatch.pipeline.budget.choice import by_step, side_budget
from laserbatch.pipeline.budget.measuring import measure_step_cost
from laserbatch.pipeline.decoding.drafters import RetrievalDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.retrieval_pools.index.pool import Pool

WARM_TOKENS = 24
MAX_COST_S = 15.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """The prompts, tokens, systems and rounds of an item; `systems` are (verifier, draft tokens), besides plain."""

    num_prompts: int
    max_new_tokens: int
    systems: tuple[tuple[str, int], ...]
    num_rounds: int


# Nearly all texts end by themselves before the limit. A pass has several batches of texts, since its last texts decode
# alone. Long answers have 380 tokens on average, descriptions 29. The first of two rounds captures the CUDA graphs that
# a night has after its first batches.
PLANS = {
    ("reki", 64): Plan(256, 512, (("greedy", 8), ("relaxed", 8)), 2),
    ("reki", 1): Plan(4, 192, (("greedy", 16), ("relaxed", 16), ("relaxed", 32)), 2),
    ("reki", 256): Plan(640, 512, (("greedy", 4), ("relaxed", 4), ("relaxed", 8)), 2),
    ("reki", 32): Plan(96, 512, (("greedy", 8), ("relaxed", 8)), 2),
    ("goodreads-items", 64): Plan(512, 128, (("greedy", 4), ("relaxed", 4), ("relaxed", 8)), 3),
    ("goodreads-items", 1): Plan(12, 128, (("relaxed", 8), ("relaxed", 16)), 2),
    ("goodreads-items", 32): Plan(256, 128, (("relaxed", 4), ("relaxed", 8)), 2),
    ("goodreads-items", 256): Plan(1200, 128, (("relaxed", 2), ("relaxed", 4)), 2),
}
CHOSEN_PROMPTS = {64: 128, 256: 400}
OTHER_BEGINNINGS = ("Please: ", "Now: ", "Next: ", "Again: ")
SMOKE = Plan(2, 8, (("greedy", 4), ("relaxed", 4)), 1)
PEER_AMOUNT = {1: (2, 96), 64: (64, 128)}  # prompts and tokens

_texts: dict[str, tuple[SavedTask, dict]] = {}  # cache of this process


def texts_of(bench: Bench, name: str) -> tuple[SavedTask, dict]:
    """A task and its pools, which are built once per process."""
    if name not in _texts:
        if bench.options.texts is None:
            raise FileNotFoundError("--texts is missing: a folder that pool_texts.py wrote")
        saved = read_task(bench.options.texts, name)
        start_s = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            pools = saved.pools(Path(folder))
        seconds = time.perf_counter() - start_s
        bench.rows.add("f", f"pools/{name}", seconds=seconds, num_texts=len(saved.pool_texts))
        _texts[name] = saved, pools
    return _texts[name]


class PassWatch:
    """The seconds of steps with and without prompts, and the number of tokens that steps without prompts write."""

    def __init__(self) -> None:
        self.prompt_s = self.decode_s = 0.0
        self.num_decoded = self.num_steps = 0

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        """Watch an engine within the block."""
        submit_step, finish_step = engine.submit_step, engine.finish_step
        state: dict = {}

        def submitted(stream):
            live = list(stream.scheduler.live)
            state.update(start_s=time.perf_counter(), live=live, before=[sequence.num_output for sequence in live])
            return submit_step(stream)

        def finished(step, stream):
            ended = finish_step(step, stream)
            seconds = time.perf_counter() - state["start_s"]
            self.num_steps += 1
            if all(state["before"]):
                self.decode_s += seconds
                self.num_decoded += sum(sequence.num_output for sequence in state["live"]) - sum(state["before"])
            else:
                self.prompt_s += seconds
            return ended

        engine.submit_step, engine.finish_step = submitted, finished
        try:
            yield
        finally:
            del engine.submit_step, engine.finish_step


def run_pass(bench: Bench, engine: Engine, system: EngineSystem, prompts, max_new_tokens: int) -> tuple[Pass, dict]:
    """Write one system's texts for all prompts; return the pass and the values of its row."""
    watch, clock = PassWatch(), StepClock()
    with watch.watching(engine), clock.watching(engine):
        done = system.run(prompts, engine.settings.batch_size, max_new_tokens)
    return done, {
        "wall_s": done.wall_s,
        "num_texts": len(done.texts),
        "num_tokens": done.num_tokens,
        "tokens_per_s": done.tokens_per_s,
        "tokens_per_step": done.tokens_per_step,
        "num_steps": watch.num_steps,
        "drafted_per_step": done.num_drafted / done.num_steps,
        "draft_ms_a_step": 1e3 * done.drafting_s / max(1, watch.num_steps),
        "prompt_s": watch.prompt_s,
        "decode_tokens_per_s": watch.num_decoded / watch.decode_s if watch.decode_s else 0.0,
        "decode_tokens": watch.num_decoded,
        "captures": clock.num_captures,
        "replays": clock.num_replays,
        **memory_now(bench.device),
    }


def measure_systems(
    bench: Bench, item: str, engine: Engine, systems: dict[str, EngineSystem], prompts, plan: Plan, extra: dict
) -> None:
    """Run rounds of all systems after a short warm-up that compiles and captures; write a row for each pass."""
    warm = prompts[: engine.settings.batch_size]
    for system in systems.values():
        system.run(warm, engine.settings.batch_size, min(WARM_TOKENS, plan.max_new_tokens))
    plain_texts: tuple = ()
    orders = turns([name for name in systems if name != "plain"])
    for number in range(plan.num_rounds):
        start_s = time.monotonic()
        for name in ("plain", *next(orders)):  # plain first, so that a round that is cut off has ratios
            done, values = run_pass(bench, engine, systems[name], prompts, plan.max_new_tokens)
            plain_texts = plain_texts or done.texts
            same = sum(text == other for text, other in zip(done.texts, plain_texts, strict=True))
            values |= {"system": name, "round": number, "equal_to_plain": same / len(plain_texts), **extra}
            values["min_probability"] = engine.settings.min_probability  # of relaxed systems
            bench.rows.add("f", item, **values)
            print(f"{item}: {name} {values['tokens_per_s']:.0f} tokens/s", flush=True)
        round_s = time.monotonic() - start_s
        if time.monotonic() + 1.1 * round_s > bench.options.end_s:
            return


def prompts_of(bench: Bench, saved: SavedTask, pools: dict, count: int) -> list[np.ndarray]:
    """The first `count` prompts; if there are fewer, the same questions are repeated behind another first word.

    So the copies share only the template's prefix, get texts of their own, and stay in the question's group.
    """
    prompts = list(saved.task.held_out)
    num_shared = next(i for i, ids in enumerate(zip(*prompts, strict=False)) if len(set(map(int, ids))) > 1)
    for beginning in OTHER_BEGINNINGS:
        ids = np.array(bench.loaded.tokenizer(beginning, add_special_tokens=False)["input_ids"], np.int32)
        for question in saved.task.held_out:
            prompts.append(np.concatenate((question[:num_shared], ids, question[num_shared:])))
            for groups in (grouped.groups for grouped in pools.values() if grouped.groups):
                groups[prompts[-1].tobytes()] = groups[question.tobytes()]
    return prompts[:count]


def measure_gains(bench: Bench, item: str, name: str, batch_word: str) -> None:
    """Measure plain decoding and drafts of fixed sizes."""
    batch = int(batch_word)
    plan = SMOKE if bench.options.smoke else PLANS[name, batch]
    saved, pools = texts_of(bench, name)
    prompts = prompts_of(bench, saved, pools, plan.num_prompts)
    engine = bench.engine(batch)
    systems = {"plain": EngineSystem.plain(engine)}
    for verifier, size in plan.systems:
        grouped, budget = pools[verifier], Budget(size, MIN_ACCEPTANCE)
        systems[f"{verifier} K{size}"] = drafting(engine, grouped.pool, WITH_POOL, grouped.groups, budget, verifier)
    measure_systems(bench, item, engine, systems, prompts, plan, {"task": name, "batch": batch})


def measure_chosen(bench: Bench, item: str, name: str, batch_word: str) -> None:
    """Measure plain decoding and the budgets that measured step costs choose."""
    batch = int(batch_word)
    plan = SMOKE
    if not bench.options.smoke:
        plan = dataclasses.replace(PLANS[name, batch], num_prompts=CHOSEN_PROMPTS[batch])
    saved, pools = texts_of(bench, name)
    engine = bench.engine(batch)
    start_s = time.perf_counter()
    cost = measure_step_cost(engine, pools["relaxed"].pool, WITH_POOL, [batch])
    cost_s = time.perf_counter() - start_s
    measured = cost.model_dump(include={"steps", "seconds_per_context_token", "seconds_per_draft_context_token"})
    bench.rows.add("f", item, task=name, batch=batch, cost_s=cost_s, **measured)
    if cost_s > MAX_COST_S:
        print(f"{item}: measuring the cost of steps took {cost_s:.0f} s", flush=True)
    prompts = prompts_of(bench, saved, pools, plan.num_prompts)
    # The same choice as in a night: for texts of this length, and by step under greedy verification.
    text_tokens = np.mean([len(text) for text in saved.pool_texts])
    cost = cost.at_context(float(np.mean([len(prompt) for prompt in prompts]) + text_tokens / 2))
    systems = {"plain": EngineSystem.plain(engine)}
    budgets = {}
    for verifier in ("relaxed", "greedy"):
        grouped = pools[verifier]
        decoding = DecodingSettings(batch_size=batch, drafters=WITH_POOL, verifier=verifier)
        budget = by_step(decoding, side_budget(decoding, grouped.pool, cost, 0.0)).budget
        chosen = f"chosen {verifier}"
        budgets[chosen] = [budget.max_draft_tokens, budget.min_acceptance]
        given = cost if budget.is_by_step else None
        systems[chosen] = drafting(engine, grouped.pool, WITH_POOL, grouped.groups, budget, verifier, given)
    extra = {"task": name, "batch": batch, "budgets": budgets}
    measure_systems(bench, item, engine, systems, prompts, plan, extra)


def measure_peers(bench: Bench, item: str, batch_word: str) -> None:
    """Measure `transformers.generate` on its own copy of the weights, by default: eager launches, a growing cache."""
    batch = int(batch_word)
    saved = read_task(bench.options.texts, "reki")
    num_prompts, max_new_tokens = (2, 4) if bench.options.smoke else PEER_AMOUNT[batch]
    bench.__dict__.pop("loaded", None)  # frees our model; a later item loads it again
    release_memory(bench.device)
    model = widened_on(bench.options.model, GEOMETRIES[bench.options.geometry], bench.dtype, bench.device)
    model.set_attn_implementation("sdpa")
    peer = TransformersGenerate(model)
    prompts = saved.task.held_out[:num_prompts]
    peer.run(prompts[:batch], batch, 4)
    done = peer.run(prompts, batch, max_new_tokens)
    values = {"tokens_per_s": done.tokens_per_s, "num_tokens": done.num_tokens, "wall_s": done.wall_s}
    step_ms = 1e3 * done.wall_s / max(1, max(done.text_tokens) * -(-num_prompts // batch))
    bench.rows.add("p", item, batch=batch, step_ms=step_ms, **values, **memory_now(bench.device))


def measure_drafts(bench: Bench, item: str) -> None:
    """Build every pool and draft from it: this compiles code that later processes read from the compiler's cache."""
    start_s = time.perf_counter()
    for name in ("reki", "goodreads-items"):
        saved, pools = texts_of(bench, name)
        for verifier, grouped in pools.items():
            num_drafted = _drafts_from(grouped.pool, saved, grouped.groups)
            bench.rows.add("drafts", item, task=name, verifier=verifier, num_drafted=num_drafted)
    bench.rows.add("drafts", item, seconds=time.perf_counter() - start_s)


def _drafts_from(pool: Pool, saved: SavedTask, groups) -> int:
    """The number of draft tokens for a few texts of the pool, drafted halfway through each."""
    from laserbatch.pipeline.decoding.sequence import DecodingSequence, GenerationRequest

    sequences = []
    for prompt, text in list(zip(saved.task.pool_prompts, saved.pool_texts, strict=True))[:4]:
        group = groups and groups[prompt.tobytes()]
        request = GenerationRequest("0", prompt, None, group, len(text) + 8)
        sequence = DecodingSequence(request, len(text) + 8)
        half = text[: max(1, len(text) // 2)]
        sequence.append(half, np.zeros(len(half), np.uint8), None)
        sequences.append(sequence)
    num_threads = 4 if torch.cuda.is_available() else 1
    drafter = RetrievalDrafter(pool, WITH_POOL, 8, MIN_ACCEPTANCE, num_threads)
    return len(drafter.draft_all(sequences, [8] * len(sequences)))
