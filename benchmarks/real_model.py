"""A small real language model on a CPU, in float32 and bfloat16, plain and drafted, compared with vLLM in bfloat16.

    make .venv-vllm/.installed
    .venv-vllm/bin/python benchmarks/real_model.py --models DIR --quick --json real_model.json

DIR has the folder `smollm2-135m-instruct`, SmolLM2-135M-Instruct as safetensors; without it nothing is measured.
Prompts are KAR's questions about viewers and films of MovieLens 100K. Drafts come from pools of the model's own plain
texts about other entities, with the budget that a night chooses. Systems are `float32` and `bfloat16`, our engine
without drafts; `greedy` and `relaxed`, with drafts in bfloat16; `vllm` and `vllm-ngram` in bfloat16, if vLLM is
installed. They answer the same prompts, each round in a newly drawn order: trust only ratios within one run.
`prompt_share` is the time in which a system writes only the first tokens of all texts, over the time of the texts.
"""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from common import SMOLLM2, Figure, Spread, begun_with_smollm2, finish, scale_of
from engine_pools import GroupedPool, pools_of, unseen_prompts
from engine_systems import PLAIN, Engines, relaxed_pools
from peers import NGRAM, ON_A_CPU, POOL, SPECULATIONS, Served, of_our_engine, passes_in_turns
from systems import EngineSystem
from tasks import Task, TaskSize, movielens_tasks

logger = logging.getLogger("benchmarks")

FLOAT32, BFLOAT16, VLLM, VLLM_NGRAM = "float32", "bfloat16", "vllm", "vllm-ngram"
MAX_NEW_TOKENS = 160
NUM_AT_BATCH_1 = 2  # number of prompts at batch 1


@dataclass(frozen=True)
class Scale:
    """Prompts, batch sizes, rounds, and tokens of a text."""

    size: TaskSize
    batches: tuple[int, ...]
    num_rounds: int
    max_new_tokens: int = MAX_NEW_TOKENS


FULL = Scale(TaskSize(24, 120, 0, 24), (1, 4, 16), num_rounds=5)
QUICK = Scale(TaskSize(16, 24, 0, 16), (1, 16), num_rounds=1, max_new_tokens=80)
SMOKE = Scale(TaskSize(3, 6, 0, 2), (1, 2), num_rounds=1, max_new_tokens=8)


def systems_at(
    engines: dict[str, Engines], pools: dict[str, GroupedPool], batch: int, task: Task, max_new_tokens: int
) -> dict[str, EngineSystem]:
    """Our engine without drafts in both dtypes, and with drafts in bfloat16."""
    ours = of_our_engine(engines[BFLOAT16], batch, pools, task, max_new_tokens)
    return {BFLOAT16: ours.pop(PLAIN), FLOAT32: EngineSystem.plain(engines[FLOAT32].of_batch(batch))} | ours


def measure(
    systems: dict[str, Served | EngineSystem], task: Task, batch: int, scale: Scale, plain: dict[bytes, tuple]
) -> Iterator[dict]:
    """Yield a row for each system; `plain` collects the texts of plain bfloat16 by prompt, over all batch sizes."""
    prompts = task.held_out[: NUM_AT_BATCH_1 if batch == 1 else None]
    passes = passes_in_turns(systems, prompts, batch, scale.num_rounds, scale.max_new_tokens)
    for prompt, text in zip(prompts, passes[BFLOAT16][0].texts, strict=True):
        plain.setdefault(prompt.tobytes(), text)
    expected = [plain[prompt.tobytes()] for prompt in prompts]
    first_token_s = {name: system.run(prompts, batch, 1).wall_s for name, system in systems.items()}
    for name, own in passes.items():
        yield {
            "system": name,
            "task": task.name,
            "batch": batch,
            "tokens_per_s": Spread.of([run.tokens_per_s for run in own]),
            "tokens_per_step": own[0].tokens_per_step,
            "num_tokens": own[0].num_tokens,
            "ratios": {
                other: Spread.of([a.tokens_per_s / b.tokens_per_s for a, b in zip(own, theirs, strict=True)])
                for other, theirs in passes.items()
                if other in (FLOAT32, BFLOAT16, VLLM)
            },
            "prompt_share": first_token_s[name] / Spread.of([run.wall_s for run in own]).median,
            "num_texts": len(prompts),
            "num_texts_as_plain_bfloat16": sum(map(tuple.__eq__, own[0].texts, expected)),
        }


def figures_of(rows: Sequence[dict]) -> Iterator[Figure]:
    """The figures: speed ratios, and the share of texts that are the same at every batch size."""
    wanted = {(BFLOAT16, FLOAT32): {1: 1.5, 16: 3.0}, (BFLOAT16, VLLM): {1: 1.2, 16: 1.3}}
    for row in rows:
        system, batch, where = row["system"], row["batch"], f"{row['task']}, batch {row['batch']}"
        for (own, other), at_least in wanted.items():
            if system == own and batch in at_least and other in row["ratios"]:
                about = f"{where}: plain bfloat16 over {other}, tokens a second"
                yield Figure.at_least(about, row["ratios"][other].median, at_least[batch])
        if system in SPECULATIONS:
            about = f"{where}: {system} drafts over plain, bfloat16, tokens a second"
            yield Figure.at_least(about, row["ratios"][BFLOAT16].median, 1.0)
        if system in (BFLOAT16, "greedy"):
            share = row["num_texts_as_plain_bfloat16"] / row["num_texts"]
            yield Figure.at_least(f"{where}: share of {system} texts that are the same at every batch size", share, 1.0)


def main() -> None:
    """Write the pools' texts, then measure all systems."""
    arguments, model = begun_with_smollm2(__doc__, "cache")
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    environment = ON_A_CPU | dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), str(arguments.threads))
    peers = {}
    if find_spec("vllm"):
        peers = {
            name: Served(model, drafts, environment, BFLOAT16)
            for name, drafts in {VLLM: None, VLLM_NGRAM: NGRAM}.items()
        }
    engines, rows = {dtype: Engines(model, dtype, "cpu") for dtype in (FLOAT32, BFLOAT16)}, []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = engines[BFLOAT16].tokenizer
        for task in movielens_tasks(tokenizer, arguments.data, scale.size, scale.max_new_tokens):
            writer, plain = engines[BFLOAT16].of_batch(max(scale.batches)), {}
            task = unseen_prompts(writer, task, arguments.cache)
            pools = pools_of(writer, task, arguments.cache, Path(folder) / task.name, [POOL])
            pools |= relaxed_pools(writer, pools, task, list(SPECULATIONS.values()))
            for peer in peers.values():  # they start while texts are written, not while anything is measured
                peer.ready()
            for batch in sorted(scale.batches, reverse=True):
                systems = peers | systems_at(engines, pools, batch, task, scale.max_new_tokens)
                rows += measure(systems, task, batch, scale, plain)
    for peer in peers.values():
        peer.close()
    table = [
        f"{row['task']:15} batch {row['batch']:2}  {row['system']:10}  {row['tokens_per_s']} tokens/s, "
        f"{row['tokens_per_step']:.2f} per step, {row['ratios'][BFLOAT16]} of plain bfloat16, "
        f"prompts {row['prompt_share']:.2f} of the time, "
        f"{row['num_texts_as_plain_bfloat16']} of {row['num_texts']} texts as plain"
        for row in rows
    ]
    finish(arguments.json, list(figures_of(rows)), ["\n".join(table)], {"rows": rows, "model": SMOLLM2})


if __name__ == "__main__":
    main()
