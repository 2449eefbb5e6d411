"""Is `laserbatch pools simulate` right? What replays predict, beside what the engine then does with the same pool.

    python benchmarks/simulation.py --quick --json simulation.json

A model writes texts; some are held back, with some the pool is calibrated, the rest become the pool. Predictions of
tokens per step are compared with real, drafted runs over prompts that no pool text answers: of the model's own greedy
texts on these very prompts, which a greedy run must repeat; and of texts on other prompts, as the simulation has them
before the night. Figures are reported, not judged: the exit code is 0 whether they are met or not.
"""

import argparse
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from command import add_data, add_engine, add_models, benchmark_parser, existing, finish, scale_of, show_progress
from common import SAMPLE_MODEL, Figure
from night_pools import own_texts
from night_systems import generate, load_engine
from night_tasks import Task, TaskSize, goodreads_items_task, reki_task, sample_tasks

from laserbatch.pipeline.decoding.budget import Budget
from laserbatch.pipeline.decoding.drafters import NoDrafter, drafter_from
from laserbatch.pipeline.decoding.engine import Engine, GenerationResult
from laserbatch.pipeline.decoding.verifiers import Greedy, verifier_from
from laserbatch.retrieval_pools.calibration.estimates import Bootstrap, Estimate, Tally
from laserbatch.retrieval_pools.calibration.replay import ReplayText
from laserbatch.retrieval_pools.simulating.simulate import (
    CalibrationTexts,
    DraftSetting,
    Grouping,
    PoolCorpus,
    Simulator,
)

logger = logging.getLogger("simulation")

SEED = 0
LARGEST_ERROR_SAME_TEXTS = 0.02
LARGEST_ERROR_OTHER_TEXTS = 0.10


@dataclass(frozen=True)
class Scale:
    """Prompts that are really run, texts that are held back, texts to calibrate with, texts in the pool."""

    num_prompts: int
    num_held_back: int
    num_calibration: int
    num_pool: int

    @property
    def num_texts(self) -> int:
        """Texts that the model writes before."""
        return self.num_held_back + self.num_calibration + self.num_pool


FULL, QUICK, SMOKE = Scale(150, 150, 150, 600), Scale(60, 60, 60, 240), Scale(4, 10, 4, 20)


def tasks_of(model_dir: Path, data: Path, tokenizer, scale: Scale) -> list[Task]:
    """The tasks that a model was trained for; their pool prompts are those of all texts that are written before."""
    size = TaskSize(scale.num_prompts, scale.num_texts)
    if model_dir.resolve() == SAMPLE_MODEL:
        return sample_tasks(tokenizer, size)
    return [reki_task(tokenizer, data, size), goodreads_items_task(tokenizer, data, size)]


def measure(engine: Engine, task: Task, cache: Path, scale: Scale, folder: Path) -> list[dict]:
    """Rows of one task: each verifier, predicted from the same texts and from others."""
    texts = own_texts(engine, task, cache)
    documents = [ReplayText(prompt, text) for prompt, text in zip(task.pool_prompts, texts, strict=True)]
    other, rest = documents[: scale.num_held_back], documents[scale.num_held_back :]
    calibration, in_pool = rest[: scale.num_calibration], rest[scale.num_calibration :]
    own = {one.request_id: one.token_ids for one in _run(engine, task, NoDrafter(), Greedy())}
    same = [ReplayText(prompt, own[str(number)]) for number, prompt in enumerate(task.held_out)]
    budget = Budget.of(engine.settings)
    setting = DraftSetting("whole", max_draft_tokens=budget.max_draft_tokens, min_acceptance=budget.min_acceptance)
    predicted, pool = {}, None
    for name, replayed in (("same texts", same), ("other texts", other)):
        simulator = _simulator(task, in_pool, replayed, CalibrationTexts(calibration, setting), folder / name)
        tally = simulator.replay(setting)
        predicted[name] = Bootstrap(len(tally), SEED).tokens_per_step(tally)
        pool = simulator.pool(setting)  # the same for both
    rows = []
    for verifier in ("greedy", "relaxed"):
        settings = engine.settings.model_copy(update={"verifier": verifier})
        results = _run(engine, task, drafter_from(settings, pool), verifier_from(settings))
        realised = Bootstrap(len(results), SEED).tokens_per_step(_tally(results))
        num_same = sum(np.array_equal(one.token_ids, own[one.request_id]) for one in results)
        rows += [_row(task, verifier, name, found, realised, num_same) for name, found in predicted.items()]
    return rows


def _simulator(
    task: Task, in_pool: list[ReplayText], held_back: list[ReplayText], calibration: CalibrationTexts, folder: Path
) -> Simulator:
    corpus = PoolCorpus(task.side, [document.text_ids for document in in_pool], range(len(in_pool)))
    whole = Grouping(["all"] * len(in_pool), [None] * len(held_back), [None] * len(calibration.texts))
    return Simulator(corpus, held_back, {"whole": whole}, folder, SEED, calibration)


def _run(engine: Engine, task: Task, drafter, verifier) -> list[GenerationResult]:
    return list(generate(engine, task.held_out, task.max_new_tokens, drafter, verifier))


def _tally(results: Sequence[GenerationResult]) -> Tally:
    counts = ([getattr(one, name) for one in results] for name in ("num_steps", "num_drafted", "num_accepted"))
    return Tally(*(np.array(column, float) for column in counts))


def _row(task: Task, verifier: str, source: str, predicted: Estimate, realised: Estimate, num_same: int) -> dict:
    return {
        "task": task.name,
        "verifier": verifier,
        "predicted_from": source,
        "predicted": predicted,
        "realised": realised,
        "error": predicted.value / realised.value - 1,
        "realised_over_predicted": realised.value / predicted.value,
        "num_texts": len(task.held_out),
        "num_texts_as_plain": num_same,
    }


def figures_of(rows: list[dict]) -> list[Figure]:
    """What the rows say about the errors that were asked for: of greedy runs alone, which is what a replay counts."""
    limits = {"same texts": LARGEST_ERROR_SAME_TEXTS, "other texts": LARGEST_ERROR_OTHER_TEXTS}
    return [
        Figure.at_most(
            f"{row['model']}, {row['task']}, greedy, predicted from {row['predicted_from']}: error, percent",
            100 * abs(row["error"]),
            100 * limits[row["predicted_from"]],
        )
        for row in rows
        if row["verifier"] == "greedy"
    ]


def describe_rows(rows: list[dict]) -> str:
    """The rows as a table for a terminal."""
    head = f"{'model':14}{'task':17}{'verifier':10}{'predicted from':16}{'predicted':>22}{'realised':>22}{'error':>8}"
    lines = [
        f"{row['model']:14}{row['task']:17}{row['verifier']:10}{row['predicted_from']:16}"
        f"{_shown(row['predicted']):>22}{_shown(row['realised']):>22}{row['error']:8.1%}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def _shown(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(
        __doc__,
        quick="fewer texts: under 5 minutes on 2 cores",
        smoke="a handful of texts: does it run at all",
        writes="rows and figures",
    )
    add_models(parser, [SAMPLE_MODEL])
    add_data(parser)
    add_engine(parser)
    return parser.parse_args(words)


def main() -> None:
    """Measure, print, and write the JSON."""
    arguments = parse_arguments()
    show_progress("simulation", "night")
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    rows = []
    for model_dir in existing(arguments.model):
        engine = load_engine(model_dir, 16, arguments.threads)
        for task in tasks_of(model_dir, arguments.data, engine.tokenizer, scale):
            logger.info("%s: %s", model_dir.name, task.name)
            with tempfile.TemporaryDirectory() as folder:
                measured = measure(engine, task, arguments.cache, scale, Path(folder))
            rows += [{"model": model_dir.name, **row} for row in measured]
    finish(arguments.json, figures_of(rows), [describe_rows(rows)], {"rows": rows})


if __name__ == "__main__":
    main()
