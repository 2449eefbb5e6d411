"""Drafters and verification rules in one table: the gain of each over plain decoding, and its effect on texts.

    python benchmarks/methods.py --quick --json OUT

All systems answer the same held-out prompts in turns, at batch 1 and in batches, under the same budgets of draft
tokens. Drafters are compared under greedy verification, alone and blended with a pool of the measuring model's texts on
other prompts. Rules are compared on that pool's drafts; sampling rules at temperature 1 on the draws of one draft model
under equal budgets (RSD, section 5). Drafters are trained on the texts in the pool; a second table gives their accuracy
by depth, their training time, and the number of texts that pay it back. Besides the speed, rows have the length of
texts over that of plain ones, and the share of texts that equal plain ones. `mbsu` is the speed-up if only reading
parameters took time: tokens per step over 1 + the drafter's share of the target's parameters times its forwards.
`own_log_probability` is the model's mean log probability of the written tokens, in nats: it shows how far a rule leads
away from the model's own texts.
"""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import SAMPLE_MODEL, Figure, begin, benchmark_parser, finish, scale_of, table
from drafter_methods import (
    LENGTH,
    Trained,
    made,
    settings_by_method,
    settings_by_rule,
    trained_drafters,
)
from engine_passes import Amount, measure
from engine_pools import pools_of, unseen_prompts
from engine_systems import PLAIN, Contestant, Engines
from laser import compared
from systems import EngineSystem, Pass
from tasks import Task, TaskSize, tasks_of
from transformers import AutoModelForCausalLM

from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.decoding.verifiers import verifier_from
from laserbatch.research.drafter_training.train import TrainingOptions

RULES = ("greedy", "top_k", "probability", "relaxed", "typical", "aasd", "fly")
logger = logging.getLogger("benchmarks")

POOL = "preference"
MIN_ACCEPTANCE = 0.07
MAX_NEW_TOKENS = 1024  # high, to expose texts that do not end
MAX_STRAY = 0.1  # the mean length may differ from that of plain texts by this share


@dataclass(frozen=True)
class Scale:
    """The arguments of `TaskSize` for long answers and for descriptions; batch sizes, budgets, repetitions.

    At the largest batch size, drafters run with all budgets and rules with the first; only the first is repeated. At
    other batch sizes drafters run with the first budget, on fewer prompts.
    """

    long: tuple[int, ...]
    short: tuple[int, ...]
    batches: tuple[int, ...]
    budgets: tuple[int, ...]
    num_repetitions: int
    draw_budgets: tuple[int, ...]
    draw_lengths: tuple[int, ...]
    epochs: int


FULL = Scale((8, 200, 8), (48, 1000), (16, 4, 1), (16, 32), 2, (6, 14, 30), (5,), 3)
QUICK = Scale((6, 30), (16, 120), (16,), (16,), 1, (6, 30), (2,), 2)
SMOKE = Scale((2, 20), (4, 20), (2,), (8,), 1, (6,), (2,), 1)


def measured(model: Path, data: Path, cache: Path, scale: Scale) -> tuple[list[dict], list[dict]]:
    """The rows by task, temperature, batch size, budget, and drafter or rule; and the rows of trained drafters."""
    engines = Engines(model, "float32", "cpu")
    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    largest = engines.of_batch(max(scale.batches))
    sizes = [TaskSize(*amounts) for amounts in (scale.long, scale.short)]
    tasks = [unseen_prompts(largest, task, cache) for task in tasks_of(model, data, engines.tokenizer, *sizes)]
    trained, rows = trained_drafters(model, largest, tasks, cache, TrainingOptions(epochs=scale.epochs)), []
    for task in tasks:
        with tempfile.TemporaryDirectory() as folder:
            pool = pools_of(largest, task, cache, Path(folder), [POOL])[POOL]
            for batch in scale.batches:
                rows += deterministic_rows(engines.of_batch(batch), task, pool, trained, judge, scale)
        rows += sampled_rows(largest, task, trained["small"], scale)
    return rows, [facts_of(kind, drafter, rows) for kind, drafter in trained.items()]


def deterministic_rows(engine, task: Task, pool, trained, judge, scale: Scale) -> Iterator[dict]:
    """Rows at temperature 0: every drafter under greedy verification, and every rule on the pool's drafts."""
    batch, is_largest = engine.settings.batch_size, engine.settings.batch_size == max(scale.batches)
    prompts = task.held_out if is_largest else task.held_out[: 2 * batch + 2 if task.is_long else 4 * batch + 8]
    methods = settings_by_method(trained)
    for size in scale.budgets if is_largest else scale.budgets[:1]:
        is_first, budget = size == scale.budgets[0], Budget(size, MIN_ACCEPTANCE)
        cells = {(name, "greedy"): settings for name, settings in methods.items()}
        if is_largest and is_first:
            cells |= {("pool", rule): methods["pool"].model_copy(update={"verifier": rule}) for rule in RULES}
        systems = [Contestant(PLAIN, None, EngineSystem.plain(engine))]
        for (method, rule), settings in cells.items():
            drafter = made(settings, engine, pool.pool, budget)
            groups = pool.groups if "pool" in settings.drafters else None
            runner = EngineSystem(engine, drafter, verifier_from(settings), budget, groups)
            systems.append(Contestant(f"{method}|{rule}", size, runner, budget))
        num_repetitions = scale.num_repetitions if is_largest and is_first else 1
        amount = Amount(len(prompts), num_repetitions, len(prompts), num_repetitions)
        passes = measure(systems, prompts, batch, MAX_NEW_TOKENS, amount, num_warm_up=1)
        logger.info("%s, batch %d: measuring trees of %d", task.name, batch, size)
        for (name, of_size), own in passes.items():
            if name == PLAIN and not is_first:
                continue
            method, _, rule = name.partition("|")
            row = {"method": "none" if name == PLAIN else method, "verifier": rule or PLAIN, "task": task.name}
            row |= {"temperature": 0.0, "batch": batch, "budget": of_size or 0} | compared(own, passes[PLAIN, None])
            row["mbsu"] = row["tokens_per_step"] / (1 + forwards_share(method, trained))
            texts = Pass.joined(own[0]).texts
            yield row | {"own_log_probability": own_log_probability(judge, prompts, texts)}


def forwards_share(method: str, trained) -> float:
    """The parameters that drafting reads in a step, as a share of the target's."""
    kind = method.removeprefix("pool + ").removesuffix(", tree").replace("model", "small")
    if kind not in trained:
        return 0.0
    return trained[kind].share * (1 if kind == "medusa" else LENGTH)


def sampled_rows(engine, task: Task, small: Trained, scale: Scale) -> Iterator[dict]:
    """Rows at temperature 1: every sampling rule on the draft model's draws, by length and budget."""
    batch = engine.settings.batch_size
    sampling = Engine(engine.loaded, DecodingSettings(verifier="greedy", temperature=1.0, batch_size=batch))
    budget = Budget(max(scale.draw_budgets), 0.0)
    systems, lengths = [Contestant(PLAIN, None, EngineSystem.plain(sampling))], {}
    for length in scale.draw_lengths:
        for (rule, size), settings in settings_by_rule(small.folder, scale.draw_budgets, length).items():
            runner = EngineSystem(sampling, made(settings, sampling, None, budget), verifier_from(settings), budget)
            systems.append(Contestant(f"{rule}, {length} deep", size, runner, budget))
            lengths[f"{rule}, {length} deep"] = length
    prompts = task.held_out[: 8 if task.is_long else 24]
    amount = Amount(len(prompts), 1, len(prompts), 1)
    passes = measure(systems, prompts, batch, task.max_new_tokens, amount, num_warm_up=1)
    for (name, size), own in passes.items():
        row = {"method": "none" if name == PLAIN else "model", "verifier": name, "task": task.name}
        row |= {"temperature": 1.0, "batch": batch, "budget": size or 0} | compared(own, passes[PLAIN, None])
        yield row | {"mbsu": row["tokens_per_step"] / (1 + small.share * lengths.get(name, 0))}


def facts_of(kind: str, drafter: Trained, rows: Sequence[dict]) -> dict:
    """A trained drafter's accuracy, and the number of texts of each task that pay back its training time.

    It compares the pool with and without the drafter at the largest batch and first budget; None: no time is saved.
    """
    pays_back, first = {}, next(row["budget"] for row in rows if row["budget"])
    name = {"small": "model, tree"}.get(kind, kind)
    for task in dict.fromkeys(row["task"] for row in rows):
        batch = max(row["batch"] for row in rows)
        wanted = (task, batch, 0, first, "greedy")
        seconds = {
            row["method"]: row["mean_length"] / row["tokens_per_s"].median
            for row in rows
            if tuple(row[key] for key in ("task", "batch", "temperature", "budget", "verifier")) == wanted
        }
        saved = seconds["pool"] - seconds[f"pool + {name}"]
        pays_back[task] = round(drafter.card.training_seconds / saved) if saved > 0 else None
    names = ("acceptance", "tokens_per_step", "training_seconds", "num_texts", "num_held_back")
    return {"kind": kind, "share": drafter.share, "pays_back": pays_back} | {n: getattr(drafter.card, n) for n in names}


@torch.inference_mode()
def own_log_probability(model, prompts: Sequence[np.ndarray], texts: Sequence[Sequence[int]]) -> float:
    """The model's mean log probability of the tokens of all texts, each given its prompt and the tokens before it."""
    sums = np.zeros(2)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([[*prompt.tolist(), *text]])
        logits = model(input_ids=ids, use_cache=False).logits[0]
        written = torch.log_softmax(logits[len(prompt) - 1 : -1], -1).gather(1, ids[0, len(prompt) :, None])
        sums += float(written.sum()), len(text)
    return float(sums[0] / sums[1])


def figures_of(rows: Sequence[dict], drafters: Sequence[dict]) -> Iterator[Figure]:
    """The figures: equality of greedy texts, drift of lengths, gains of blending, sampling rules, heads by depth."""
    first = next(row["budget"] for row in rows if row["budget"])
    for task, batch in dict.fromkeys((row["task"], row["batch"]) for row in rows if row["temperature"] == 0):
        at = {
            (row["method"], row["verifier"]): row
            for row in rows
            if (row["task"], row["batch"], row["temperature"]) == (task, batch, 0) and row["budget"] in (0, first)
        }
        where = f"{task}, batch {batch}"
        same = min(row["share_as_plain"] for (_, rule), row in at.items() if rule == "greedy")
        yield Figure.at_least(f"{where}: least share of greedy texts that are plain ones", same, 1)
        for name in RULES:
            if name != "greedy" and ("pool", name) in at:
                stray = abs(at["pool", name]["length"] - 1)
                yield Figure.at_most(f"{where}: length over plain, {name}, from 1", stray, MAX_STRAY)
        if ("pool", "relaxed") in at:
            gain = at["pool", "relaxed"]["tokens_per_step"] / at["pool", "greedy"]["tokens_per_step"]
            yield Figure.at_least(f"{where}: tokens a step, relaxed over greedy", gain, 1)
        for head in ("eagle", "hass"):
            paces = [at[name, "greedy"]["tokens_per_step"] for name in (f"pool + {head}", "pool", head)]
            gain = paces[0] / max(paces[1:])
            yield Figure.at_least(f"{where}: tokens a step, pool and {head} over the better alone", gain, 1.15)
    drawn = {
        (row["task"], row["verifier"], row["budget"]): row["tokens_per_step"] for row in rows if row["temperature"]
    }
    for (task, rule, budget), pace in drawn.items():
        kind, _, length = rule.partition(", ")
        if kind == "rsd":
            best = max(drawn[task, f"{other}, {length}", budget] for other in ("specinfer", "k_seq"))
            name = f"{task}, {budget} draft tokens, {length}: tokens a step, rsd over the better of specinfer and k_seq"
            yield Figure.at_least(name, pace / best, 1)
    of = {drafter["kind"]: drafter["acceptance"] for drafter in drafters}
    for depth, pair in enumerate(zip(of["eagle"], of["hass"], strict=True), 1):
        if depth >= 3:
            yield Figure.at_least(f"depth {depth}: acceptance, hass over eagle", pair[1] / max(pair[0], 1e-9), 1)


COLUMNS = {
    "texts": "{task}", "T": "{temperature:g}", "batch": "{batch}", "budget": "{budget}", "drafter": "{method}",
    "verifier": "{verifier}", "a step": "{tokens_per_step:.2f}", "mbsu": "{mbsu:.2f}", "tokens/s over plain": "{speed}",
    "length": "{length:.2f}", "cut": "{share_cut:.0%}", "as plain": "{share_as_plain:.0%}",
}  # fmt: skip
OF_DRAFTERS = {
    "drafter": "{kind}", "share of the target": "{share:.2f}", "right by depth": "{acceptance}",
    "a step alone": "{tokens_per_step:.2f}", "texts": "{num_texts}", "training s": "{training_seconds:.0f}",
    "paid back by texts": "{pays_back}",
}  # fmt: skip


def main() -> None:
    """Measure, print, and write the JSON."""
    arguments = benchmark_parser(__doc__, "model", "data", "threads", "cache").parse_args()
    begin(arguments.threads)
    model = arguments.model if arguments.model.is_dir() else SAMPLE_MODEL
    rows, drafters = measured(model, arguments.data, arguments.cache, scale_of(arguments, FULL, QUICK, SMOKE))
    tables = [table(rows, COLUMNS), table(drafters, OF_DRAFTERS)]
    content = {"model": model.name, "rows": rows, "drafters": drafters}
    finish(arguments.json, list(figures_of(rows, drafters)), tables, content)


if __name__ == "__main__":
    main()
