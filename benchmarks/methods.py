"""Rules of verification in one table: what each gains over plain decoding, and what it does to texts.

    python benchmarks/methods.py --quick --json OUT

All rules answer the same held-out prompts in turns, from one pool of the measuring model's texts on other prompts,
under the same budgets, alone and in batches. Rows are `{method, verifier, task, temperature, batch, budget,
tokens_per_step, tokens_per_s}`; beside them the speed over plain decoding of the same prompts, the length of texts over
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
from engine_passes import Amount, measure
from engine_pools import pools_of, unseen_prompts
from engine_systems import PLAIN, WITH_POOL, Contestant, Engines
from laser import compared
from systems import EngineSystem, Pass
from tasks import Task, TaskSize, tasks_of
from transformers import AutoModelForCausalLM

from laserbatch.pipeline.decoding.drafters import NoDrafter, RetrievalDrafter
from laserbatch.pipeline.decoding.settings import SAMPLING_RULES, Budget, DecodingSettings
from laserbatch.pipeline.decoding.verifiers import Greedy, verifier_from
from laserbatch.pipeline.decoding.verifiers.named import NAMED

RULES = [name for name in NAMED if name not in SAMPLING_RULES]
POOL = "preference"
MIN_ACCEPTANCE = 0.07
MAX_NEW_TOKENS = 1024  # texts that run on show it
MOST_STRAY = 0.1  # of the length of plain texts


@dataclass(frozen=True)
class Scale:
    """Prompts, and texts in the pool, of long answers and of descriptions; batches, budgets, repetitions."""

    long: tuple[int, int]
    short: tuple[int, int]
    batches: tuple[int, ...]
    budgets: tuple[int, ...]
    num_repetitions: int


FULL = Scale((24, 200), (96, 1000), (1, 4, 16), (8, 16, 32), 3)
QUICK = Scale((8, 60), (32, 300), (1, 16), (16,), 2)
SMOKE = Scale((2, 20), (4, 20), (2,), (8,), 1)


def method_rows(model: Path, data: Path, cache: Path, scale: Scale) -> Iterator[dict]:
    """A row for each task, batch, budget and rule."""
    engines = Engines(model, "float32", "cpu")
    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    largest = engines.of_batch(max(scale.batches))
    sizes = [TaskSize(*amounts) for amounts in (scale.long, scale.short)]
    for task in tasks_of(model, data, engines.tokenizer, *sizes):
        with tempfile.TemporaryDirectory() as folder:
            task = unseen_prompts(largest, task, cache)
            pool = pools_of(largest, task, cache, Path(folder), [POOL])[POOL]
            for batch in scale.batches:
                engine = engines.of_batch(batch)
                systems = [Contestant(PLAIN, None, EngineSystem(engine, NoDrafter(), Greedy()))]
                for size in scale.budgets:
                    drafter = RetrievalDrafter(pool.pool, WITH_POOL, size, MIN_ACCEPTANCE, engine.num_draft_threads)
                    budget = Budget(size, MIN_ACCEPTANCE)
                    for name in RULES:
                        rule = verifier_from(DecodingSettings(verifier=name))
                        runner = EngineSystem(engine, drafter, rule, budget, pool.groups)
                        systems.append(Contestant(name, size, runner, budget))
                amount = Amount(len(task.held_out), scale.num_repetitions, len(task.held_out), scale.num_repetitions)
                passes = measure(systems, task.held_out, batch, MAX_NEW_TOKENS, amount, num_warm_up=1)
                for (name, size), own in passes.items():
                    texts = Pass.joined(own[0]).texts
                    row = {"method": "none" if name == PLAIN else "pool", "verifier": name, "task": task.name}
                    row |= {"temperature": 0.0, "batch": batch, "budget": size or 0}
                    row |= compared(own, passes[PLAIN, None])
                    yield row | {"own_log_probability": own_log_probability(judge, task, texts)}


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
    """Greedy texts are plain ones; no rule lets lengths drift; the default is not slower than its strict half."""
    for task, batch in dict.fromkeys((row["task"], row["batch"]) for row in rows):
        at = {
            row["verifier"]: row
            for row in rows
            if (row["task"], row["batch"]) == (task, batch) and row["budget"] in (0, rows[1]["budget"])
        }
        where = f"{task}, batch {batch}"
        yield Figure.at_least(f"{where}: share of greedy texts that are plain ones", at["greedy"]["share_as_plain"], 1)
        gain = at["relaxed"]["tokens_per_step"] / at["greedy"]["tokens_per_step"]
        yield Figure.at_least(f"{where}: tokens a step, relaxed over greedy", gain, 1)
        for name in RULES:
            stray = abs(at[name]["length"] - 1)
            yield Figure.at_most(f"{where}: length over plain, {name}, from 1", stray, MOST_STRAY)


COLUMNS = {
    "texts": "{task}", "batch": "{batch}", "budget": "{budget}", "verifier": "{verifier}",
    "a step": "{tokens_per_step:.2f}", "tokens/s over plain": "{speed}", "length": "{length:.2f}",
    "cut": "{share_cut:.0%}", "as plain": "{share_as_plain:.0%}", "log p": "{own_log_probability:.3f}",
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
