"""Drafters and rules of verification in one table: what each gains over plain decoding, and what it does to texts.

    python benchmarks/methods.py --quick --json OUT

All rules answer the same held-out prompts in turns, from one pool of the measuring model's texts on other prompts,
under the same budgets, alone and in batches. Rows are `{method, verifier, task, temperature, batch, budget,
tokens_per_step, tokens_per_s}`; drafters are compared under greedy verification, alone and blended with the pool, and
sampling rules at temperature 1 by the drafts of one small model, under equal budgets of draft tokens. What is trained
learns from the texts in the pool, and its card says what it took; `mbsu` is the speed-up if memory alone counted,
tokens a step over 1 + the drafter's share of the target's parameters times its forwards (RSD, section 5). Beside them the speed over plain decoding of the same prompts, the length of texts over
plain ones, and the share of texts that are plain ones word for word. `own_log_probability` is the model's mean log
probability of a token of what was written, in nats: how far a rule leads away from what the model would write.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import SAMPLE_MODEL, Figure, begin, benchmark_parser, finish, scale_of
from drafter_methods import LENGTH, Trained, made, settings_by_method, settings_by_rule, trained_drafters
from engine_passes import Amount, measure
from engine_pools import pools_of, unseen_prompts
from engine_systems import PLAIN, Contestant, Engines
from laser import compared
from systems import EngineSystem, Pass
from tasks import Task, TaskSize, tasks_of
from transformers import AutoModelForCausalLM

from laserbatch.pipeline.decoding.drafters import NoDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.settings import SAMPLING_RULES, Budget, DecodingSettings
from laserbatch.pipeline.decoding.verifiers import Greedy, verifier_from
from laserbatch.pipeline.decoding.verifiers.named import NAMED
from laserbatch.pipeline.drafter_training.train import TrainingOptions

RULES = [name for name in NAMED if name not in SAMPLING_RULES]
POOL = "preference"
MIN_ACCEPTANCE = 0.07
MAX_NEW_TOKENS = 1024  # texts that run on show it
DRAW_LENGTHS = (2, 5)  # deep, of draws at temperature 1
MOST_STRAY = 0.1  # of the length of plain texts


@dataclass(frozen=True)
class Scale:
    """Prompts, and texts in the pool, of long answers and of descriptions; batches, budgets, repetitions."""

    long: tuple[int, int]
    short: tuple[int, int]
    batches: tuple[int, ...]
    budgets: tuple[int, ...]
    num_repetitions: int
    draw_budgets: tuple[int, ...]
    epochs: int


FULL = Scale((24, 200), (96, 1000), (1, 4, 16), (8, 16, 32), 3, (6, 10, 14, 21, 30), 6)
QUICK = Scale((8, 60), (32, 300), (1, 16), (16,), 1, (6, 14, 30), 6)
SMOKE = Scale((2, 20), (4, 20), (2,), (8,), 1, (6,), 1)


def method_rows(model: Path, data: Path, cache: Path, scale: Scale) -> Iterator[dict]:
    """A row for each task, batch, budget, and drafter or rule."""
    engines = Engines(model, "float32", "cpu")
    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    largest = engines.of_batch(max(scale.batches))
    sizes = [TaskSize(*amounts) for amounts in (scale.long, scale.short)]
    tasks = [unseen_prompts(largest, task, cache) for task in tasks_of(model, data, engines.tokenizer, *sizes)]
    trained = trained_drafters(model, largest, tasks, cache, TrainingOptions(epochs=scale.epochs))
    for task in tasks:
        with tempfile.TemporaryDirectory() as folder:
            pool = pools_of(largest, task, cache, Path(folder), [POOL])[POOL]
            for batch in scale.batches:
                yield from greedy_and_relaxed_rows(engines.of_batch(batch), task, pool, trained, judge, scale)
        yield from sampled_rows(engines.of_batch(max(scale.batches)), task, trained["small"], scale)


def greedy_and_relaxed_rows(engine, task: Task, pool, trained, judge, scale: Scale) -> Iterator[dict]:
    """At temperature 0: every rule over the pool, and every drafter under greedy verification."""
    batch = engine.settings.batch_size
    systems, cells = [Contestant(PLAIN, None, EngineSystem(engine, NoDrafter(), Greedy()))], {}
    for size in scale.budgets:
        budget = Budget(size, MIN_ACCEPTANCE)
        for rule in RULES:
            cells["pool", rule, size] = settings_by_method(trained)["pool"].model_copy(update={"verifier": rule})
        for method, settings in settings_by_method(trained).items():
            cells[method, "greedy", size] = settings
        for (method, rule, of_size), settings in cells.items():
            if of_size == size:
                drafter = made(settings, engine, pool.pool, budget)
                groups = pool.groups if "pool" in settings.drafters else None
                runner = EngineSystem(engine, drafter, verifier_from(settings), budget, groups)
                systems.append(Contestant(f"{method}|{rule}", size, runner, budget))
    amount = Amount(len(task.held_out), scale.num_repetitions, len(task.held_out), scale.num_repetitions)
    passes = measure(systems, task.held_out, batch, MAX_NEW_TOKENS, amount, num_warm_up=1)
    for (name, size), own in passes.items():
        method, _, rule = name.partition("|")
        row = {"method": "none" if name == PLAIN else method, "verifier": rule or PLAIN, "task": task.name}
        row |= {"temperature": 0.0, "batch": batch, "budget": size or 0}
        row |= compared(own, passes[PLAIN, None])
        row["mbsu"] = row["tokens_per_step"] / (1 + forwards_share(method, trained))
        yield row | {"own_log_probability": own_log_probability(judge, task, Pass.joined(own[0]).texts)}


def forwards_share(method: str, trained) -> float:
    """Parameters that a step's drafting reads, as a share of the target's."""
    kind = method.removeprefix("pool + ").removesuffix(", tree").replace("model", "small")
    if kind not in trained:
        return 0.0
    return trained[kind].share * (1 if kind == "medusa" else LENGTH)


def sampled_rows(engine, task: Task, small: Trained, scale: Scale) -> Iterator[dict]:
    """At temperature 1: every rule by draws of the small model, of one length and of one budget."""
    batch = engine.settings.batch_size
    sampling = Engine(engine.loaded, DecodingSettings(verifier="greedy", temperature=1.0, batch_size=batch))
    budget = Budget(max(scale.draw_budgets), 0.0)
    systems = [Contestant(PLAIN, None, EngineSystem(sampling, NoDrafter(), Greedy()))]
    lengths = {}
    for length in DRAW_LENGTHS:
        for (rule, size), settings in settings_by_rule(small.folder, scale.draw_budgets, length).items():
            runner = EngineSystem(sampling, made(settings, sampling, None, budget), verifier_from(settings), budget)
            systems.append(Contestant(f"{rule}, {length} deep", size, runner, budget))
            lengths[f"{rule}, {length} deep"] = length
    amount = Amount(len(task.held_out), 1, len(task.held_out), 1)
    passes = measure(systems, task.held_out, batch, task.max_new_tokens, amount, num_warm_up=1)
    for (name, size), own in passes.items():
        row = {"method": "none" if name == PLAIN else "model", "verifier": name, "task": task.name}
        row |= {"temperature": 1.0, "batch": batch, "budget": size or 0} | compared(own, passes[PLAIN, None])
        yield row | {"mbsu": row["tokens_per_step"] / (1 + small.share * lengths.get(name, 0))}


@torch.inference_mode()
def own_log_probability(model, task: Task, texts: Sequence[Sequence[int]]) -> float:
    """Mean log probability of a token of the answers, each after its prompt and what came before it."""
    sums = np.zeros(2)
    for prompt, text in zip(task.held_out, texts, strict=True):
        ids = torch.tensor([[*prompt.tolist(), *text]])
        logits = model(input_ids=ids, use_cache=False).logits[0]
        written = torch.log_softmax(logits[len(prompt) - 1 : -1], -1).gather(1, ids[0, len(prompt) :, None])
        sums += float(written.sum()), len(text)
    return float(sums[0] / sums[1])


def figures_of(rows: Sequence[dict]) -> Iterator[Figure]:
    """Greedy texts are plain ones; no rule lets lengths drift; what blending gains; who draws best."""
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
        gain = at["pool", "relaxed"]["tokens_per_step"] / at["pool", "greedy"]["tokens_per_step"]
        yield Figure.at_least(f"{where}: tokens a step, relaxed over greedy", gain, 1)
        for name in RULES:
            stray = abs(at["pool", name]["length"] - 1)
            yield Figure.at_most(f"{where}: length over plain, {name}, from 1", stray, MOST_STRAY)
        for head in ("eagle", "hass"):
            if (head, "greedy") in at:
                paces = [at[name, "greedy"]["tokens_per_step"] for name in (f"pool + {head}", "pool", head)]
                gain = paces[0] / max(paces[1:])
                yield Figure.at_least(f"{where}: tokens a step, pool and {head} over the better alone", gain, 1.15)
    drawn = {(row["task"], row["verifier"], row["budget"]): row for row in rows if row["temperature"]}
    for task, rule, budget in drawn:
        if rule.startswith("rsd,"):
            length = rule.partition(", ")[2]
            others = [drawn[task, f"{other}, {length}", budget] for other in ("specinfer", "k_seq")]
            gain = drawn[task, rule, budget]["tokens_per_step"] / max(row["tokens_per_step"] for row in others)
            yield Figure.at_least(
                f"{task}, {budget} draft tokens, {length}: rsd over the better of the others", gain, 1
            )


COLUMNS = {
    "texts": "{task}", "T": "{temperature:g}", "batch": "{batch}", "budget": "{budget}", "drafter": "{method}",
    "verifier": "{verifier}", "a step": "{tokens_per_step:.2f}", "mbsu": "{mbsu:.2f}", "tokens/s over plain": "{speed}", "length": "{length:.2f}",
    "cut": "{share_cut:.0%}", "as plain": "{share_as_plain:.0%}",
}  # fmt: skip


def table(rows: Sequence[dict]) -> str:
    cells = [[form.format_map(row) for form in COLUMNS.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)) for line in (list(COLUMNS), *cells))


def main() -> None:
    """Measure, print, and write the JSON."""
    arguments = benchmark_parser(__doc__, "model", "data", "threads", "cache").parse_args()
    begin(arguments.threads)
    model = arguments.model if arguments.model.is_dir() else SAMPLE_MODEL
    rows = list(method_rows(model, arguments.data, arguments.cache, scale_of(arguments, FULL, QUICK, SMOKE)))
    finish(arguments.json, list(figures_of(rows)), [table(rows)], {"model": model.name, "rows": rows})


if __name__ == "__main__":
    main()
