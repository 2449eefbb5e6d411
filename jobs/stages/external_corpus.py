"""Uploads the texts of the night before as a corpus that an SGLang server drafts tonight's texts from."""

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import numpy as np
import pyarrow.compute as pc

from laserbatch.jobs.console import say
from laserbatch.jobs.stages.night import Night
from laserbatch.pipeline.decoding.model.folder import served_identity
from laserbatch.pipeline.engines.external_corpora import CorpusError, ExternalCorpora
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.figures import ExternalCorpusFigures
from laserbatch.pipeline.storage.run_folder import RunFolder


@contextmanager
def external_corpus(night: Night, sides: Collection[Side]) -> Iterator[None]:
    """Let the server draft from earlier texts of some sides while the block runs, if it accepts external corpora.

    A failure is a warning, recorded in the manifest. The corpus that a killed process left is replaced, since all
    nights of a workspace use one id.
    """
    server, generation = night.settings.decoding.endpoint, night.manifest.generation
    assert server is not None
    generation.external_corpus = None
    corpora, corpus_id, room = ExternalCorpora(server), corpus_id_of(night), None
    try:
        room = None if night.previous is None else corpora.room(corpus_id)
    except CorpusError as error:
        _record_problem(night, f"the server drafts from no earlier texts: {error}")
    if night.previous is None or room is None:
        yield
        return
    try:
        _upload(night, night.previous, sides, corpora, room)
        yield
    finally:
        try:
            corpora.remove(corpus_id)
        except CorpusError as error:
            _record_problem(night, f"the corpus {corpus_id} may still be on the server: {error}")


def corpus_id_of(night: Night) -> str:
    """The id of the corpus, the same in all nights of a workspace."""
    return "laserbatch-" + hashlib.sha256(str(night.workspace.root.resolve()).encode()).hexdigest()[:12]


def _upload(night: Night, previous: RunFolder, sides: Collection[Side], corpora: ExternalCorpora, room: int) -> None:
    if (least := night.settings.pools.min_support) > 1:
        return _record_problem(night, f"nothing was uploaded: a corpus cannot respect pools.min_support {least}")
    lengths = _lengths(night, previous, sides)
    chosen = chosen_texts(lengths, room, night.settings.seed)
    if not len(chosen):
        return _record_problem(night, f"nothing was uploaded: none of the {len(lengths)} texts fits into {room} tokens")
    try:
        num_tokens = corpora.replace(corpus_id_of(night), list(_documents(night, previous, sides, chosen)))
    except CorpusError as error:
        return _record_problem(night, f"the server drafts from no earlier texts: {error}")
    figures = ExternalCorpusFigures(len(chosen), len(lengths) - len(chosen), num_tokens)
    night.manifest.generation.external_corpus = figures
    say(f"the server drafts from {figures.num_texts:,} texts of {previous.run_id}, {num_tokens:,} tokens")


def _lengths(night: Night, previous: RunFolder, sides: Collection[Side]) -> np.ndarray:
    """The number of tokens of each text, int64[num_texts]; 0 for another model's text, whose token ids may differ."""
    settings = night.settings
    model_id, parts = served_identity(settings.model_dir, settings.decoding), [np.empty(0, np.int64)]
    for side in sorted(sides):
        for batch in previous.iter_knowledge(side, ("model_id", "token_ids")):
            is_same = pc.equal(batch["model_id"], model_id).to_numpy(zero_copy_only=False)
            parts.append(is_same * pc.list_value_length(batch["token_ids"]).to_numpy(zero_copy_only=False))
    return np.concatenate(parts)


def _documents(night: Night, previous: RunFolder, sides: Collection[Side], chosen: np.ndarray) -> Iterator[str]:
    """Yield the texts numbered `chosen`, thoughts included, as the server reads them."""
    start = 0
    for side in sorted(sides):
        for batch in previous.iter_knowledge(side, ("token_ids",)):
            first, last = np.searchsorted(chosen, [start, start + batch.num_rows])
            for ids in batch["token_ids"].take(chosen[first:last] - start).to_pylist():
                yield cast("str", night.tokenizer.decode(ids))
            start += batch.num_rows


def chosen_texts(lengths: np.ndarray, room: int, seed: int) -> np.ndarray:
    """The numbers of the texts to upload, ascending: all texts, or a random sample that fits into `room` tokens.

    A text takes its tokens (`lengths`, int64[num_texts]) and a separator; a text without tokens is left out.
    """
    order = np.random.default_rng(seed).permutation(np.flatnonzero(lengths))
    return np.sort(order[np.cumsum(lengths[order] + 1) <= room])


def _record_problem(night: Night, problem: str) -> None:
    figures = night.manifest.generation.external_corpus or ExternalCorpusFigures(0, 0, 0)
    problems = "; ".join(filter(None, (figures.problem, problem)))
    night.manifest.generation.external_corpus = replace(figures, problem=problems)
    say(f"WARNING: {problem}")
