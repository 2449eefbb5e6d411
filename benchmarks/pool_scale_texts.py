"""Texts for `pool_scale.py`, any number of them, in a file: the sample world's grammar, recombined line by line.

Some thousand users' texts are written by the grammar that the sample model learned from. Each text here takes its first
line from one of them, its second from another, and so on: as many texts as wanted, few alike, their phrases as frequent
as in the real ones. Knows no pool.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import SAMPLE_MODEL

from laserbatch.models.sample_texts import write_user_text
from laserbatch.pipeline.knowledge.entities import iter_entities
from laserbatch.pipeline.sample.world import LAST_DATE, write_sample_world
from laserbatch.pipeline.tables.read import read_tables
from laserbatch.retrieval_pools.index.array_files import ArrayWriter, map_array

SEED = 20250301
MAX_HISTORY = 24
MAX_LINES = 6  # of a text's eight: about a hundred tokens


@dataclass(frozen=True)
class TextFile:
    """Texts on disk: `tokens.npy` end to end, and `lengths.npy`."""

    folder: Path

    def __iter__(self) -> Iterator[np.ndarray]:
        """Token ids of one text after another, int32, mapped."""
        tokens, place = map_array(self.folder / "tokens.npy"), 0
        for length in np.load(self.folder / "lengths.npy").tolist():
            yield tokens[place : place + length]
            place += length

    @classmethod
    def write(cls, folder: Path, texts: Iterator[np.ndarray]) -> "TextFile":
        """Texts into a new folder, one in memory at a time."""
        folder.mkdir(parents=True)
        lengths = []
        with ArrayWriter(folder / "tokens.npy", np.int32) as writer:
            for text in texts:
                writer.write(text)
                lengths.append(len(text))
        np.save(folder / "lengths.npy", np.array(lengths, np.int32))
        return cls(folder)


def grammar_lines(num_users: int) -> list[list[np.ndarray]]:
    """Token ids of every line of the users' texts: `lines[k]` has the k-th line of each."""
    from transformers import AutoTokenizer  # who only reads texts is not to hold it in memory

    tokenizer = AutoTokenizer.from_pretrained(SAMPLE_MODEL)
    rng = np.random.default_rng(SEED)
    with tempfile.TemporaryDirectory() as folder:
        write_sample_world(folder, num_users=num_users, num_items=1_000, future_days=0, seed=SEED)
        users = list(iter_entities(read_tables(Path(folder), LAST_DATE), "user"))
    texts = [write_user_text(user, user.history[-MAX_HISTORY:], rng).split("\n")[:MAX_LINES] for user in users]
    return [
        [np.asarray(ids, np.int32) for ids in tokenizer([text[k] + "\n" for text in texts]).input_ids]
        for k in range(MAX_LINES)
    ]


def recombined(
    lines: list[list[np.ndarray]], num_texts: int, seed: int, changed_every: int = 0
) -> Iterator[np.ndarray]:
    """So many texts; with `changed_every` each so many-th is another than without, and the others are the same."""
    chosen, others = np.random.default_rng([SEED, seed, 0]), np.random.default_rng([SEED, seed, 1])
    for number in range(num_texts):
        picks = chosen.integers(len(lines[0]), size=len(lines))
        if changed_every and number % changed_every == 0:
            picks = others.integers(len(lines[0]), size=len(lines))
        yield np.concatenate([of_place[pick] for of_place, pick in zip(lines, picks.tolist(), strict=True)])
