"""Texts for `drafting.py`: the pool's texts, the texts for tuning, and the held-out texts to measure on.

Held-out texts share neither prompt nor wording with a pool.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from common import SEED
from tasks import GOODREADS_PROMPT, chat_ids

from laserbatch.pipeline.sides import Side


@dataclass(frozen=True)
class CorpusSize:
    """The numbers of texts: held out, for tuning (these are in the pool too), and in the pool at most."""

    num_held_out: int
    num_tuning: int
    max_pool: int


@dataclass(frozen=True)
class Document:
    """A text and the chat prompt that it answers: int32 token ids, without the end token."""

    prompt_ids: np.ndarray
    text_ids: np.ndarray


@dataclass(frozen=True)
class Corpus:
    """One kind of text.

    Parameters
    ----------
    name : the corpus' name in the rows.
    side : the side of the pool that is built from it.
    pool : the texts that drafters are built from, int32[n] each.
    tuning : documents that are in the pool too; while a drafter is tuned on them, it drafts from `pool_without_tuning`.
    held_out : documents that are not in the pool.
    answer_mark : int32[m], the last tokens of every prompt: the chat template's beginning of an answer.
    """

    name: str
    side: Side
    pool: tuple[np.ndarray, ...]
    tuning: tuple[Document, ...]
    held_out: tuple[Document, ...]
    answer_mark: np.ndarray

    @property
    def pool_without_tuning(self) -> tuple[np.ndarray, ...]:
        """The pool without the documents of `tuning`, which are its first texts."""
        return self.pool[len(self.tuning) :]

    @property
    def num_pool_tokens(self) -> int:
        """The number of tokens of all texts in the pool."""
        return sum(map(len, self.pool))


def reki_corpus(tokenizer, data: Path, size: CorpusSize) -> Corpus:
    """Long answers about groups of movies or books."""
    rows = pq.read_table(data / "reki" / "knowledge.parquet", columns=["prompt", "text"]).to_pylist()
    return _corpus("reki", "user", [(row["prompt"], row["text"]) for row in rows], tokenizer, size)


def goodreads_corpus(tokenizer, data: Path, size: CorpusSize) -> Corpus:
    """Descriptions of books, one or two sentences."""
    titles = pq.read_table(data / "goodreads" / "items.parquet", columns=["item_id", "title"]).to_pydict()
    titles = dict(zip(titles["item_id"], titles["title"], strict=True))
    rows = pq.read_table(data / "goodreads" / "item_knowledge.parquet", columns=["item_id", "text"]).to_pylist()
    pairs = [(GOODREADS_PROMPT.format(title=titles[row["item_id"]]), row["text"]) for row in rows]
    return _corpus("goodreads", "item", pairs, tokenizer, size)


def _corpus(name: str, side: Side, pairs: list[tuple[str, str]], tokenizer, size: CorpusSize) -> Corpus:
    pairs = _all_different(pairs)
    num_chosen = size.num_held_out + size.num_tuning
    if len(pairs) <= num_chosen:
        raise SystemExit(f"{name}: {len(pairs)} different texts; more than {num_chosen} are needed")
    random.Random(SEED).shuffle(pairs)
    pairs = pairs[: size.num_held_out + size.max_pool]
    texts = [
        np.asarray(ids, np.int32) for ids in tokenizer([text for _, text in pairs], add_special_tokens=False).input_ids
    ]
    documents = [
        Document(chat_ids(tokenizer, prompt), text)
        for (prompt, _), text in zip(pairs[:num_chosen], texts[:num_chosen], strict=True)
    ]
    return Corpus(
        name=name,
        side=side,
        pool=tuple(texts[size.num_held_out :]),
        tuning=tuple(documents[size.num_held_out :]),
        held_out=tuple(documents[: size.num_held_out]),
        answer_mark=_common_ending([document.prompt_ids for document in documents], _num_mark_tokens(tokenizer)),
    )


def _all_different(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs without those whose prompt or text an earlier pair has, sorted by prompt."""
    prompts: set[str] = set()
    texts: set[str] = set()
    different = []
    for prompt, text in pairs:
        text = text.strip()
        if text and prompt not in prompts and text not in texts:
            different.append((prompt, text))
            prompts.add(prompt)
            texts.add(text)
    return sorted(different)


def _num_mark_tokens(tokenizer) -> int:
    """The number of tokens that the chat template adds to begin an answer."""
    message = [{"role": "user", "content": "a"}]
    with_mark, without = (
        tokenizer.apply_chat_template(message, add_generation_prompt=mark, tokenize=True, return_dict=False)
        for mark in (True, False)
    )
    return len(with_mark) - len(without)


def _common_ending(prompts: Sequence[np.ndarray], num_tokens: int) -> np.ndarray:
    ending = prompts[0][len(prompts[0]) - num_tokens :]
    assert num_tokens > 0 and all(np.array_equal(prompt[-num_tokens:], ending) for prompt in prompts)
    return ending
