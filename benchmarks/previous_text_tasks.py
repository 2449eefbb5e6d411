"""The tasks of `previous_text.py`: changed entities with prompts for two nights. Measures nothing."""

import random
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from common import SEED
from entities import Entity, iter_entities, render_prompt
from tasks import MAX_PROMPT_TOKENS, chat_ids, movielens_tables

from laserbatch.pipeline.knowledge.domains import of_domain
from laserbatch.pipeline.knowledge.forms import grammar_of
from laserbatch.pipeline.knowledge.templates import KnowledgeSettings
from laserbatch.pipeline.sides import Side

MAX_NEW_EVENTS = 4  # per night
READERS_PROMPT = "A reader finished these books:\n{books}\nList the reader's interests as JSON."
SET_OF_FILMS = re.compile(r"(Given a set of movies consisting of )(.*?\(\d{4}\)), {1,2}(please describe .*)", re.DOTALL)
LAST_FILM = re.compile(r"(?<=\(\d{4}\)), (?:(?!\(\d{4}\), ).)*\(\d{4}\)$")


@dataclass(frozen=True)
class Change:
    """The prompts of one entity on two nights: int32[num_tokens] each."""

    before: np.ndarray
    now: np.ndarray


@dataclass(frozen=True)
class ChangeTask:
    """The prompts of changed entities, and earlier prompts of other entities, whose answers fill the pool.

    `grammar` : the grammar of answers, as in `GenerationRequest`; None: any text.
    """

    name: str
    side: Side
    changes: tuple[Change, ...]
    pool_prompts: tuple[np.ndarray, ...]
    max_new_tokens: int
    grammar: str | None = None


@dataclass(frozen=True)
class ChangeSize:
    """The number of changed entities to measure, and of other entities that fill the pool."""

    num_changes: int
    num_pool: int


def viewer_task(tokenizer, data: Path, size: ChangeSize, max_new_tokens: int) -> ChangeTask:
    """KAR's questions about viewers of MovieLens 100K, guided by the template's form as in a night."""
    settings = of_domain(KnowledgeSettings(max_prompt_tokens=MAX_PROMPT_TOKENS), "films")
    template = settings.template("user")

    def prompt(entity: Entity) -> np.ndarray:
        return render_prompt(template, entity, tokenizer, MAX_PROMPT_TOKENS).token_ids

    with tempfile.TemporaryDirectory() as folder:
        tables = movielens_tables(data, Path(folder))
        drawn = random.Random(SEED)
        ids = drawn.sample(sorted(tables.users["user_id"].to_pylist()), size.num_changes + size.num_pool)
        viewers = {entity.entity_id: entity for entity in iter_entities(tables, "user", ids)}
    changes = []
    for viewer in (viewers[viewer_id] for viewer_id in ids):
        before = viewer.history[: -drawn.randint(1, MAX_NEW_EVENTS)]
        changes.append(Change(prompt(replace(viewer, history=before)), prompt(viewer)))
    return _task("viewers", changes, size, max_new_tokens, grammar_of(template, max_new_tokens))


def reader_task(tokenizer, data: Path, size: ChangeSize) -> ChangeTask:
    """Readers of Goodreads, asked for a list of interests; one to four books are new, at most half of all."""
    items = pq.read_table(data / "goodreads" / "items.parquet")
    titles = dict(zip(items["item_id"].to_pylist(), items["title"].to_pylist(), strict=True))
    histories = pq.read_table(data / "goodreads" / "users.parquet")["history"].to_pylist()
    histories = [books for books in histories if len(books) > 1 and all(book in titles for book in books)]
    drawn = random.Random(SEED)

    def prompt(books: Sequence[str]) -> np.ndarray:
        lines = "\n".join(f"({number}) {titles[book]}" for number, book in enumerate(books, 1))
        return chat_ids(tokenizer, READERS_PROMPT.format(books=lines))

    changes = []
    for books in drawn.sample(histories, size.num_changes + size.num_pool):
        num_new = drawn.randint(1, min(MAX_NEW_EVENTS, len(books) // 2))
        changes.append(Change(prompt(books[:-num_new]), prompt(books)))
    return _task("readers", changes, size, max_new_tokens=128)


def set_task(tokenizer, data: Path, size: ChangeSize, max_new_tokens: int) -> ChangeTask:
    """REKI's questions about sets of films, with one new film."""
    questions = sorted(set(pq.read_table(data / "reki" / "knowledge.parquet")["prompt"].to_pylist()))
    film_sets = [(match[1], match[2], match[3]) for match in map(SET_OF_FILMS.fullmatch, questions) if match]
    drawn = random.Random(SEED).sample(film_sets, size.num_changes + size.num_pool)
    changes = [
        Change(*(chat_ids(tokenizer, f"{head}{films},  {tail}") for films in (LAST_FILM.sub("", films), films)))
        for head, films, tail in drawn
    ]
    return _task("sets of films", changes, size, max_new_tokens)


def _task(
    name: str, changes: Sequence[Change], size: ChangeSize, max_new_tokens: int, grammar: str | None = None
) -> ChangeTask:
    """The task that measures the first entities and fills the pool with the others' earlier prompts."""
    measured, others = changes[: size.num_changes], changes[size.num_changes :]
    return ChangeTask(name, "user", tuple(measured), tuple(change.before for change in others), max_new_tokens, grammar)
