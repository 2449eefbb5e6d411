"""The possible gain from verifying a changed entity's whole previous text in the step of its prompt (SPEC-RL).

    python benchmarks/previous_text.py --models DIR --quick --json previous_text.json

Each entity has prompts for two nights: the earlier prompt lacks what is new (the last one to four events of a history;
the last film of a set). Texts of both nights are greedy, at batch 16. The second night drafts from a pool of the
model's own texts about other entities, the prompt, the output and the entity's previous text.

Systems differ only in the first draft of a text, which is verified in the step of its prompt. `now`: a tree like in any
step. `first N`: this tree and, as one path, the first N tokens of the previous text. `known`: the path is exactly the
beginning that both texts share, up to 64 tokens; only an oracle could draft it, so it bounds the others. `known,
whole`: all of that beginning as a longer prompt, which takes its part of a step's room for prompts. Trees have up to 8
tokens, and the path comes on top. `by step` drafts in each step what pays (`StepBudget`), by the cost of steps that was
measured here or by that of an H200 (`H200`). `priced` also offers the path, whose estimated acceptance is the share of
these very texts that begin with as much of their previous text; the step decides. `relaxed` uses the default rule,
whose texts depend on the drafts.

Greedy texts must be the same under all systems. Steps and forwarded tokens are counted and priced by both costs, so
that load does not change them (prompts are computed in parts of 256 tokens, also at the H200's price). `rest` adds the
cost of the previous text's rejected tokens to `known, whole`. Times are processor times; systems take turns. DIR has
`smollm2-135m-instruct` and `bench-target`; tasks of a missing model are left out.
"""

import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import (
    Figure,
    Interval,
    Spread,
    begin,
    benchmark_parser,
    finish,
    jsonable,
    resampled_totals,
    scale_of,
    table,
    turns,
)
from engine_pools import calibrated_pool
from previous_text_tasks import ChangeSize, ChangeTask, reader_task, set_task, viewer_task
from previous_text_writer import MIN_ACCEPTANCE, PathFirst, Writer, Written
from tasks import Task

from laserbatch.pipeline.budget.measuring import measure_step_cost
from laserbatch.pipeline.decoding.drafters import RetrievalDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.step_budget import StepBudget
from laserbatch.pipeline.decoding.token_tree import MAX_NODES
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.settings import PoolSettings
from laserbatch.retrieval_pools.step_cost import StepCost, StepPoint

logger = logging.getLogger("benchmarks")

VIEWERS_MODEL, READERS_MODEL = "smollm2-135m-instruct", "bench-target"
BATCH, MAX_DRAFT_TOKENS = 16, 8
SOURCES = ("previous", "prompt", "output", "pool")
COST_BATCHES = (4, 16)
WANTED = 1.03  # speed over `now` from which a system is worth its code
NOW, KNOWN, WHOLE, PRICED = "now", "known", "known, whole", "priced"
HERE, THERE = "here", "H200"  # machines whose cost of steps is used
# Milliseconds of an 8 B model's step by its tokens, for any number of texts: medians of `docs/gpu.md`, batch 1 and 32.
H200_STEPS = {1: 5.7, 17: 6.5, 32: 6.65, 544: 16.4, 1088: 28.2}
COLUMNS = {
    "task": "{task}", "system": "{system}", "per step": "{tokens_per_step:.2f}", "steps of now": "{share_of_steps:.3f}",
    "forwards": "{num_forwards}", "tokens of now": "{share_of_forwarded:.3f}", "speed here": "{counted[here]:.3f}",
    "on H200": "{counted[H200]:.3f}", "with rest here": "{with_rest[here]:.3f}", "on H200 ": "{with_rest[H200]:.3f}",
    "by processor": "{speed}", "as now": "{num_as_now}/{num_texts}",
}  # fmt: skip
BEGINNING_COLUMNS = {
    "task": "{task}", "tokens": "{mean_tokens:.0f}", "begin alike": "{mean_agreed:.1f}",
    "quartiles": "{agreed_quartiles}", "beyond 64": "{share_beyond_64:.2f}", "the same": "{share_same:.2f}",
    "steps": "{mean_steps:.1f}", "tokens of the first": "{mean_tokens_of_first_step:.1f}",
    "steps to save": "{steps_to_save[now].value:.3f}", "by step": "{steps_to_save[now, by step here].value:.3f}",
}  # fmt: skip


@dataclass(frozen=True)
class System:
    """A drafting method: the path of the first draft (NOW: none), the machine whose cost limits steps, and the rule."""

    path: str | int
    by_step: str | None = None
    rule: str = "greedy"

    @property
    def name(self) -> str:
        path = f"first {self.path}" if isinstance(self.path, int) else self.path
        by_step = f", by step {self.by_step}" if self.by_step else ""
        return f"{path}{by_step}" if self.rule == "greedy" else f"{path}{by_step}, {self.rule}"

    @property
    def today(self) -> str:
        """The name of the system to compare with."""
        return System(NOW, self.by_step, self.rule).name


SYSTEMS = (
    *(System(path) for path in (NOW, 16, 64, KNOWN, WHOLE)),
    *(System(path, by_step) for by_step in (HERE, THERE) for path in (NOW, PRICED, WHOLE)),
    *(System(path, rule="relaxed") for path in (NOW, 64)),
)


@dataclass(frozen=True)
class Scale:
    """Entities of each task, maximum tokens of viewers' and sets' texts, rounds of viewers and of the other tasks."""

    viewers: ChangeSize
    readers: ChangeSize
    sets: ChangeSize
    viewer_tokens: int
    set_tokens: int
    viewer_rounds: int
    num_rounds: int


FULL = Scale(ChangeSize(48, 48), ChangeSize(192, 400), ChangeSize(48, 100), 200, 512, 2, 3)
QUICK = Scale(ChangeSize(16, 16), ChangeSize(64, 200), ChangeSize(16, 40), 160, 512, 1, 1)
SMOKE = Scale(ChangeSize(2, 4), ChangeSize(2, 6), ChangeSize(2, 4), 8, 8, 1, 1)


def num_agreed(text: np.ndarray, previous: np.ndarray) -> int:
    """The number of tokens in the common beginning of two texts."""
    length = min(len(text), len(previous))
    differs = np.flatnonzero(text[:length] != previous[:length])
    return int(differs[0]) if len(differs) else length


@dataclass(frozen=True)
class Night:
    """The pool and previous texts of a night, and the number of tokens that each text shares with its previous one."""

    pool: Pool
    previous: list[np.ndarray]
    agreed: np.ndarray  # int64[num_texts]

    def drafter_of(self, system: System) -> PathFirst:
        """A new drafter for one pass."""
        limits = (MAX_NODES, MIN_ACCEPTANCE) if system.by_step else (MAX_DRAFT_TOKENS, MIN_ACCEPTANCE)
        paths, shares = {}, None
        if system.path not in (NOW, WHOLE):
            lengths = self.agreed
            if system.path != KNOWN:
                lengths = np.full(len(self.previous), MAX_NODES if system.path == PRICED else system.path)
            paths = {str(i): text[:length] for i, (text, length) in enumerate(zip(self.previous, lengths, strict=True))}
        if system.path == PRICED:
            places = np.arange(max(map(len, self.previous)) + 1)
            shares = np.maximum((self.agreed[:, None] >= places).mean(axis=0), 1e-6)
        return PathFirst(RetrievalDrafter(self.pool, SOURCES, *limits), paths, shares)


def night_of(writer: Writer, folder: Path) -> Night:
    """Write the pool's texts and both nights' texts; return what tonight's texts are drafted from."""
    task, own = writer.task, RetrievalDrafter(None, ("prompt", "output"), MAX_DRAFT_TOKENS)
    pool_texts = writer.write(task.pool_prompts, None, own).texts
    as_task = Task(task.name, task.side, (), task.pool_prompts, task.max_new_tokens, is_long=False)
    pool = calibrated_pool(as_task, pool_texts, None, PoolSettings(), folder).pool
    drafter = RetrievalDrafter(pool, SOURCES, MAX_DRAFT_TOKENS, MIN_ACCEPTANCE)
    previous = writer.write([change.before for change in task.changes], None, drafter).texts
    now = writer.write([change.now for change in task.changes], previous, drafter).texts
    agreed = np.array([num_agreed(*pair) for pair in zip(now, previous, strict=True)])
    return Night(pool, previous, agreed)


def measure(writer: Writer, night: Night, costs: dict[str, StepCost], num_rounds: int) -> tuple[dict, list[dict]]:
    """The row on the beginnings of texts, and a row for each system."""
    prompts, passes = [change.now for change in writer.task.changes], {}
    systems = [system for system in SYSTEMS if system.path != WHOLE or writer.task.grammar is None]
    most = np.minimum(night.agreed, writer.task.max_new_tokens - 1).tolist()
    begun = [text[:length] for text, length in zip(night.previous, most, strict=True)]
    orders = turns(systems)
    for _ in range(num_rounds):
        for system in next(orders):
            budget = StepBudget(costs[system.by_step]) if system.by_step else None
            beginnings = begun if system.path == WHOLE else None
            drafter = night.drafter_of(system)
            written = writer.write(prompts, night.previous, drafter, budget, system.rule, beginnings)
            passes.setdefault(system, []).append(written)
            num_steps = written.num_steps.sum()
            logger.info("%s, %s: %.1f s, %d steps", writer.task.name, system.name, written.seconds, num_steps)
    by_name = {system.name: passes[system] for system in systems}
    rows = [row_of(writer.task, system, night, by_name, costs) for system in systems]
    return beginning_of(writer, night, by_name), rows


def beginning_of(writer: Writer, night: Night, passes: dict[str, list[Written]]) -> dict:
    """The row on the common beginnings of new and previous texts, and the steps that they take now.

    `steps_to_save` is the share of all steps that are saved if one step verifies the whole common beginning.
    """
    now = passes[NOW][0]
    lengths = np.array([len(text) for text in now.texts])
    same = [np.array_equal(*pair) for pair in zip(now.texts, night.previous, strict=True)]
    return {
        "task": writer.task.name,
        "num_texts": len(lengths),
        "mean_tokens": lengths.mean(),
        "mean_prompt_tokens": np.mean([len(change.now) for change in writer.task.changes]),
        "mean_agreed": night.agreed.mean(),
        "agreed_quartiles": np.percentile(night.agreed, [25, 50, 75]).tolist(),
        "share_agreed": night.agreed.sum() / lengths.sum(),
        "share_beyond_64": (night.agreed > MAX_NODES).mean(),
        "share_same": np.mean(same),
        "mean_steps": now.num_steps.mean(),
        "mean_tokens_of_first_step": np.mean([own[1] - own[0] for own in now.starts if len(own) > 1]),
        "steps_to_save": {name: steps_to_save(passes[name][0], night.agreed) for name in (NOW, System(NOW, HERE).name)},
    }


def steps_to_save(now: Written, agreed: np.ndarray) -> Interval:
    """The share of steps, except one per text, that start within the common beginning of both texts."""
    begun = [sum(start <= most for start in own) for own, most in zip(now.starts, agreed.tolist(), strict=True)]
    saved = resampled_totals(np.maximum(np.array(begun) - 1, 0))
    return Interval.of(saved / resampled_totals(now.num_steps))


def row_of(
    task: ChangeTask, system: System, night: Night, passes: dict[str, list[Written]], costs: dict[str, StepCost]
) -> dict:
    """The row of one system, compared with that of today; speeds are in tokens of texts."""
    own, now = passes[system.name], passes[system.today]
    first, first_now = own[0], now[0]
    steps, steps_now = (resampled_totals(run.num_steps) for run in (first, first_now))
    num_rest = sum(map(len, night.previous)) - int(night.agreed.sum()) if system.path == WHOLE else 0
    gain = first.num_tokens / first_now.num_tokens
    counted, with_rest = {}, {}
    for name, cost in costs.items():
        spent, spent_now = (float(cost.seconds(BATCH, run.forwards).sum()) for run in (first, first_now))
        of_token = float(np.diff(cost.seconds(BATCH, np.array([256, 512])))[0]) / 256
        counted[name], with_rest[name] = gain * spent_now / spent, gain * spent_now / (spent + num_rest * of_token)
    return {
        "task": task.name,
        "system": system.name,
        "num_texts": len(first.texts),
        "num_as_now": sum(np.array_equal(*pair) for pair in zip(first.texts, first_now.texts, strict=True)),
        "num_tokens": first.num_tokens,
        "num_steps": int(first.num_steps.sum()),
        "tokens_per_step": first.num_tokens / first.num_steps.sum(),
        "share_of_steps": steps[0] / steps_now[0],
        "share_of_steps_interval": Interval.of(steps / steps_now),
        "num_forwards": len(first.forwards),
        "num_forwarded": int(first.forwards.sum()),
        "share_of_forwarded": first.forwards.sum() / first_now.forwards.sum(),
        "counted": counted,
        "with_rest": with_rest,
        "seconds": Spread.of([run.seconds for run in own]),
        "speed": Spread.of([gain * b.seconds / a.seconds for a, b in zip(own, now, strict=True)]),
    }


def figures_of(rows: Sequence[dict]) -> Iterator[Figure]:
    """Counted speeds, over today's, of systems that a night could use: a fixed path, or one that the step may cut."""
    for row in rows:
        if row["system"].startswith(("first", PRICED)):
            where = THERE if row["system"].endswith(THERE) else HERE
            yield Figure.at_least(f"{row['task']}: {row['system']}, speed over now", row["counted"][where], WANTED)
    others = [row["num_texts"] - row["num_as_now"] for row in rows if "relaxed" not in row["system"]]
    yield Figure.at_most("greedy texts that are others than now", sum(others), 0)


def h200_cost() -> StepCost:
    """The cost of steps from H200_STEPS, for any number of texts."""
    steps = [StepPoint(batch_size=BATCH, num_tokens=n, seconds=ms / 1000) for n, ms in H200_STEPS.items()]
    return StepCost(name="an H200", steps=tuple(steps))


def tasks_of(model: str, tokenizer, data: Path, scale: Scale) -> Iterator[ChangeTask]:
    """The tasks of a model."""
    if model == VIEWERS_MODEL:
        yield viewer_task(tokenizer, data, scale.viewers, scale.viewer_tokens)
    else:
        yield reader_task(tokenizer, data, scale.readers)
        yield set_task(tokenizer, data, scale.sets, scale.set_tokens)


def main() -> None:
    """Write both nights of each task, the second one with every system."""
    parser = benchmark_parser(__doc__, "data", "threads")
    parser.add_argument("--models", type=Path, required=True, nargs="+", help="folders that have the models' folders")
    arguments = parser.parse_args()
    begin(arguments.threads)
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    beginnings, rows = [], []
    for name in (READERS_MODEL, VIEWERS_MODEL):
        folders = [folder / name for folder in arguments.models if (folder / name / "model.safetensors").is_file()]
        if not folders:
            print(f"{name} is not there: its tasks are left out", file=sys.stderr)
            continue
        engine = Engine.from_pretrained(folders[0], DecodingSettings(model=str(folders[0]), batch_size=BATCH), "cpu")
        here = measure_step_cost(engine, None, SOURCES[:3], COST_BATCHES)
        rounds = scale.viewer_rounds if name == VIEWERS_MODEL else scale.num_rounds
        for task in tasks_of(name, engine.tokenizer, arguments.data, scale):
            with tempfile.TemporaryDirectory() as folder:
                writer = Writer(engine, task)
                night = night_of(writer, Path(folder) / "pool")
                beginning, own = measure(writer, night, {HERE: here, THERE: h200_cost()}, rounds)
            logger.info("%s\n%s", jsonable(beginning), table(own, COLUMNS))
            beginnings.append(beginning)
            rows += own
    tables = [table(beginnings, BEGINNING_COLUMNS), table(rows, COLUMNS)]
    finish(arguments.json, list(figures_of(rows)), tables, {"beginnings": beginnings, "rows": rows})


if __name__ == "__main__":
    main()
