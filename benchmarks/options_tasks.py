"""What the model is asked in `options.py`: texts of a first night for pools, texts of a second one to measure.

Goodreads readers come on two nights, as `real_input.py` has them: the second night's histories are longer by one book,
and each reader's text of the first night is the previous text. Descriptions and long answers have one night: some
prompts fill the pool, others are measured. Knows no pool and measures nothing.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from night_tasks import Task, TaskSize, chat_ids, goodreads_items_task, reki_task, sample_tasks
from real_tables import NIGHT_1, NIGHT_2, write_goodreads

from laserbatch.pipeline.knowledge.entities import Entity, iter_entities
from laserbatch.pipeline.knowledge.prompts import load_template, render_prompt
from laserbatch.pipeline.tables.read import Tables, read_tables
from laserbatch.retrieval_pools.routing.router import Router
from laserbatch.retrieval_pools.routing.settings import RoutingSettings

PROMPTS = Path(__file__).resolve().parent / "settings" / "prompts"
MAX_PROMPT_TOKENS = 1024


@dataclass(frozen=True)
class NightTask:
    """One kind of text over two nights.

    Parameters
    ----------
    first : what the first night asks; its `pool_prompts` make the pool, its `held_out` are empty.
    prompts : what is measured, int32 token ids each.
    previous : of each prompt, the number of the same entity's prompt in the first night; None where it is new.
    pool_groups, groups : names of the groups of the first night's prompts and of those measured.
    """

    first: Task
    prompts: tuple[np.ndarray, ...]
    previous: tuple[int | None, ...]
    pool_groups: tuple[str, ...]
    groups: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.first.name

    def cut(self, num_measured: int) -> "NightTask":
        """The same with fewer measured texts: the first of them."""
        first = slice(num_measured)
        return replace(self, prompts=self.prompts[first], previous=self.previous[first], groups=self.groups[first])


def readers_task(tokenizer, data: Path, num_readers: int, num_measured: int) -> NightTask:
    """Readers' interests: the first night's histories lack the last book; measured are the first of the readers.

    Groups are those that the router makes of the first night's interactions.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_goodreads(data, Path(folder), num_items=2 * num_readers, num_users=num_readers)
        nights = [read_tables(Path(folder), as_of=date) for date in (NIGHT_1, NIGHT_2)]
    template = load_template("goodreads_user", PROMPTS)
    first, second = (_rendered(tables, template, tokenizer) for tables in nights)
    router = Router.fit("user", nights[0].users, nights[0].interactions, RoutingSettings(scheme="collaborative"))
    group_of = _groups(router)
    groups = tuple(group_of(entity) for entity in iter_entities(nights[0], "user"))
    ids = list(first)
    measured = [reader for reader in ids if not np.array_equal(first[reader], second[reader])][:num_measured]
    numbers = tuple(ids.index(reader) for reader in measured)
    night_1 = Task("goodreads-readers", "user", (), tuple(first.values()), max_new_tokens=128, is_long=False)
    return NightTask(
        night_1, tuple(second[reader] for reader in measured), numbers, groups, tuple(groups[n] for n in numbers)
    )


def one_night_tasks(tokenizer, data: Path, long: TaskSize, short: TaskSize) -> tuple[NightTask, NightTask]:
    """Long answers, whose groups are the data sets and sides that they are about, and descriptions, of one group."""
    rows = pq.read_table(data / "reki" / "knowledge.parquet", columns=["dataset", "side", "prompt"]).to_pylist()
    kind_of = {chat_ids(tokenizer, row["prompt"]).tobytes(): f"{row['dataset']} {row['side']}" for row in rows}
    reki = reki_task(tokenizer, data, long)
    return (
        _one_night(reki, lambda prompt: kind_of[prompt.tobytes()]),
        _one_night(goodreads_items_task(tokenizer, data, short), lambda prompt: "all"),
    )


def sample_night_tasks(tokenizer, size: TaskSize) -> list[NightTask]:
    """The sample model's own tasks, for where there is no measuring model."""
    return [_one_night(task, lambda prompt: "all") for task in sample_tasks(tokenizer, size)]


def _one_night(task: Task, group_of: Callable[[np.ndarray], str]) -> NightTask:
    return NightTask(
        task,
        task.held_out,
        (None,) * len(task.held_out),
        tuple(group_of(prompt) for prompt in task.pool_prompts),
        tuple(group_of(prompt) for prompt in task.held_out),
    )


def _rendered(tables: Tables, template, tokenizer) -> dict[object, np.ndarray]:
    """Prompt of every reader, by id, in the order of the table."""
    return {
        entity.entity_id: render_prompt(template, entity, tokenizer, MAX_PROMPT_TOKENS).token_ids
        for entity in iter_entities(tables, "user")
    }


def _groups(router: Router) -> Callable[[Entity], str]:
    return lambda entity: router.route(entity.entity_id, entity.attributes, len(entity.history)).group
