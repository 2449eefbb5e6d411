"""The tasks of models: held-out prompts to measure on, and other prompts whose answers by the model fill pools.

A pool has the model's own texts on the pool prompts, never a text on a held-out prompt: the two lists have no prompt in
common. Texts are generated once and kept on disk by model. Measures nothing.
"""

import datetime
import hashlib
import itertools
import logging
import random
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from common import SAMPLE_MODEL, SEED
from entities import iter_entities, render_prompt
from systems import generate

from laserbatch.pipeline.decoding.drafters import NoDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.verifiers import Greedy
from laserbatch.pipeline.knowledge.domains import of_domain
from laserbatch.pipeline.knowledge.templates import KnowledgeSettings
from laserbatch.pipeline.sample.world import LAST_DATE, write_sample_world
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.tables.read import Tables, read_tables
from laserbatch.retrieval_pools.index.build import HeldBack, PoolText, build_pool
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.settings import PoolSettings

logger = logging.getLogger("benchmarks")

MAX_PROMPT_TOKENS = 768  # limit of prompts about viewers and films
GOODREADS_PROMPT = 'Describe the book "{title}" in one or two sentences.'


@dataclass(frozen=True)
class TaskSize:
    """The numbers of prompts: measured ones, those of the pool, additional measured ones, and earlier ones.

    `num_more` prompts are measured too; they come after the pool's prompts, so that they do not change the pool. Then
    come `num_earlier` prompts, whose texts only calibrate relaxed pools.
    """

    num_held_out: int
    num_pool: int
    num_more: int = 0
    num_earlier: int = 0

    @property
    def total(self) -> int:
        return self.num_held_out + self.num_pool + self.num_more + self.num_earlier


@dataclass(frozen=True)
class Task:
    """One kind of text.

    `held_out`, `pool_prompts` and `earlier_prompts` are rendered prompts, int32 token ids each; `side` is the pool's
    side. `is_long` marks texts of hundreds of tokens, of which fewer are measured.
    """

    name: str
    side: Side
    held_out: tuple[np.ndarray, ...]
    pool_prompts: tuple[np.ndarray, ...]
    max_new_tokens: int
    is_long: bool
    earlier_prompts: tuple[np.ndarray, ...] = ()


def chat_ids(tokenizer, text: str) -> np.ndarray:
    """A user turn in the model's chat template, int32[n]. The data has no control tokens; nights guard against them."""
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return np.asarray(ids, np.int32)


def tasks_of(model_dir: Path, data: Path, tokenizer, long: TaskSize, short: TaskSize) -> list[Task]:
    """The tasks that a model was trained for: those of the sample model, or of the public data."""
    if model_dir.resolve() == SAMPLE_MODEL:
        return sample_tasks(tokenizer, replace(short, num_pool=long.num_pool))
    return [reki_task(tokenizer, data, long), goodreads_items_task(tokenizer, data, short)]


def reki_task(tokenizer, data: Path, size: TaskSize) -> Task:
    """REKI's published prompts: long answers about groups of movies or books."""
    questions = sorted(set(pq.read_table(data / "reki" / "knowledge.parquet")["prompt"].to_pylist()))
    prompts = [chat_ids(tokenizer, question) for question in _chosen("reki", questions, size)]
    return _task("reki", "user", prompts, size, max_new_tokens=512, is_long=True)


def goodreads_items_task(tokenizer, data: Path, size: TaskSize) -> Task:
    """Short descriptions of books by title."""
    titles = sorted(set(pq.read_table(data / "goodreads" / "items.parquet")["title"].to_pylist()))
    chosen = _chosen("goodreads-items", titles, size)
    prompts = [chat_ids(tokenizer, GOODREADS_PROMPT.format(title=title)) for title in chosen]
    return _task("goodreads-items", "item", prompts, size, max_new_tokens=128)


def sample_tasks(tokenizer, size: TaskSize) -> list[Task]:
    """Preferences of users and descriptions of items of a sample world, from the project's prompt templates.

    The sample model was not trained on this world.
    """
    settings = of_domain(KnowledgeSettings(), "sample")
    num_entities = 20 + 2 * size.total  # some prompts are equal; a world has at least 20 items
    with tempfile.TemporaryDirectory() as folder:
        write_sample_world(folder, num_users=num_entities, num_items=num_entities, seed=SEED)
        tables = read_tables(folder, as_of=LAST_DATE)
        tasks = []
        for side in SIDES:
            template = settings.template(side)
            prompts = [
                render_prompt(template, entity, tokenizer, settings.max_prompt_tokens).token_ids
                for entity in iter_entities(tables, side)
            ]
            different = list({prompt.tobytes(): prompt for prompt in prompts}.values())
            name = f"sample-{side}s"
            tasks.append(_task(name, side, _chosen(name, different, size), size, max_new_tokens=320))
    return tasks


def movielens_tables(data: Path, folder: Path) -> Tables:
    """The whole MovieLens 100K as a night reads it; its files are written to `folder`."""
    for name in ("users", "items", "interactions"):
        table = pq.read_table(data / "ml-100k" / f"{name}.parquet")
        for column in (name for name in table.column_names if name.endswith("_id")):
            place = table.column_names.index(column)
            table = table.set_column(place, column, table[column].cast(pa.string()))
        if name == "interactions":
            moments = pc.cast(pc.multiply(table["timestamp"], 1_000_000), pa.timestamp("us", "UTC"))
            table = table.set_column(table.column_names.index("timestamp"), "timestamp", moments)
        else:
            table = table.drop_columns([name for name in ("zip_code",) if name in table.column_names])
        pq.write_table(table, folder / f"{name}.parquet")
    last = pc.max(pq.read_table(folder / "interactions.parquet")["timestamp"]).as_py().date()
    return read_tables(folder, as_of=last + datetime.timedelta(days=1))


def movielens_settings(framework: str = "kar") -> KnowledgeSettings:
    """The settings of a framework's questions about viewers and films, with the project's templates and words."""
    settings = KnowledgeSettings(
        user_template=f"{framework}_user", item_template=f"{framework}_item", max_prompt_tokens=MAX_PROMPT_TOKENS
    )
    return of_domain(settings, "films")


def movielens_tasks(tokenizer, data: Path, size: TaskSize, max_new_tokens: int, framework: str = "kar") -> list[Task]:
    """A framework's questions about viewers and films of MovieLens 100K."""
    settings = movielens_settings(framework)
    with tempfile.TemporaryDirectory() as folder:
        tables = movielens_tables(data, Path(folder))
        tasks = []
        for side in SIDES:
            ids = _chosen(f"movielens-{side}s", sorted(tables.entities(side)[f"{side}_id"].to_pylist()), size)
            by_id = {
                entity.entity_id: render_prompt(settings.template(side), entity, tokenizer, MAX_PROMPT_TOKENS).token_ids
                for entity in iter_entities(tables, side, ids)
            }
            prompts = [by_id[entity_id] for entity_id in ids]
            tasks.append(_task(f"movielens-{side}s", side, prompts, size, max_new_tokens=max_new_tokens))
    return tasks


def _chosen(name: str, candidates: list, size: TaskSize) -> list:
    """As many candidates as the task needs, in random order; the first ones are measured."""
    if len(candidates) < size.total:
        raise SystemExit(f"{name}: {len(candidates)} different prompts, {size.total} are needed")
    return random.Random(SEED).sample(candidates, len(candidates))[: size.total]


def _task(
    name: str, side: Side, prompts: list[np.ndarray], size: TaskSize, *, max_new_tokens: int, is_long: bool = False
) -> Task:
    parts = (size.num_held_out, size.num_pool, size.num_more, size.num_earlier)
    ends = [sum(parts[:number]) for number in range(len(parts) + 1)]
    measured, pool, more, earlier = (tuple(prompts[start:end]) for start, end in itertools.pairwise(ends))
    return Task(name, side, measured + more, pool, max_new_tokens, is_long, earlier)


def own_texts(engine: Engine, task: Task, cache: Path) -> list[np.ndarray]:
    """The model's plain greedy texts on the task's pool prompts, int32 token ids each.

    They are read from `cache` if the same model has answered the same prompts before.
    """
    digest = hashlib.sha256(b"".join(prompt.tobytes() + b"|" for prompt in task.pool_prompts))
    digest.update(str(task.max_new_tokens).encode())
    path = cache / engine.model_id / f"{task.name}-{digest.hexdigest()[:12]}.parquet"
    if path.exists():
        return [np.asarray(ids.values, np.int32) for ids in pq.read_table(path)["token_ids"]]
    logger.info("%s: writing %d pool texts (kept for later runs)", task.name, len(task.pool_prompts))
    texts = plain_texts(engine, task.pool_prompts, task.max_new_tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"token_ids": pa.array(texts, pa.list_(pa.int32()))}), path)
    return texts


def plain_texts(engine: Engine, prompts: Sequence[np.ndarray], max_new_tokens: int) -> list[np.ndarray]:
    """The model's plain greedy texts, int32 token ids each, in the order of the prompts."""
    return [result.token_ids for result in generate(engine, prompts, max_new_tokens, NoDrafter(), Greedy())]


def build(
    texts: Iterable[np.ndarray],
    folder: Path,
    side: Side,
    groups: Sequence[str] | None = None,
    settings: PoolSettings | None = None,
    calibration: HeldBack | None = None,
) -> Pool:
    """Build a pool of texts in `folder`; without `groups`, which names each text's group, it has one group."""
    return build_pool(
        (PoolText(text, groups[number] if groups else "all") for number, text in enumerate(texts)),
        folder,
        side=side,
        tokenizer_hash="benchmark",
        model_id="benchmark",
        settings=settings,
        calibration=calibration,
    )
