"""Drift of relaxed texts over twelve nights of a real language model, each drafted from the texts of the night before.

    python benchmarks/drift.py --models DIR --quick --json drift.json

DIR has the folder `smollm2-135m-instruct`; without it nothing is measured. Viewers of MovieLens 100K go on rating: each
night, every viewer has one to four more films in the history and gets a new text, guided by the template's form. Each
chain of nights has one verification rule. It drafts up to 8 tokens from the viewer's text of the night before, the
prompt, the output and a pool of the chain's texts of the night before. The chain of plain texts is verified greedily,
which gives the texts of plain decoding. `rule_quality.py` explains the columns. Cosines are to the plain text of the
same viewer and night, and `as plain` is the share of texts that are equal to it. A text that reached the limit counts
like any other, although a night would write it again.
"""

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from common import SEED, SMOLLM2, Figure, begun_with_smollm2, finish, scale_of, table
from entities import Entity, iter_entities, render_prompt
from rule_quality import MAX_DRAFT_TOKENS, MIN_ACCEPTANCE, RULES, Writer, quality
from tasks import MAX_PROMPT_TOKENS, build, movielens_settings, movielens_tables

from laserbatch.pipeline.decoding.drafters import RetrievalDrafter
from laserbatch.pipeline.decoding.sequence import GenerationResult
from laserbatch.pipeline.encoding.encoder import TextEncoder
from laserbatch.pipeline.knowledge.templates import PromptTemplate

CHAINS = {name: RULES[name] for name in ("greedy", "relaxed, top 2 above 0.1", "relaxed, top 2 above 0.2")}
PLAIN = "greedy"
MAX_NEW_EVENTS = 4  # per viewer and night
COLUMNS = {
    "night": "{night}", "rule": "{rule}", "tokens per step": "{tokens_per_step:.2f}", "as plain": "{as_plain:.2f}",
    "repeated": "{repeated:.2f}", "tokens": "{length:.0f}",
    "cosine": "{cosine:.3f}", "kept": "{kept:.2f}",
}  # fmt: skip
MAX_ADDED_REPEATED, MAX_LOST_COSINE = 0.05, 0.05  # between the first drafted nights and the last


@dataclass(frozen=True)
class Scale:
    """The numbers of nights and viewers, and the longest text."""

    num_nights: int
    num_viewers: int
    max_new_tokens: int


FULL, QUICK, SMOKE = Scale(12, 32, 160), Scale(4, 16, 120), Scale(3, 3, 12)


def nights_of(tokenizer, template: PromptTemplate, data: Path, scale: Scale) -> list[list[np.ndarray]]:
    """The prompts of all viewers, int32[num_tokens] each, by night; those of the last night have the whole history."""
    with tempfile.TemporaryDirectory() as folder:
        tables = movielens_tables(data, Path(folder))
        entities = sorted(iter_entities(tables, "user"), key=lambda entity: entity.entity_id)
    drawn = random.Random(SEED)
    long_enough = [viewer for viewer in entities if len(viewer.history) > MAX_NEW_EVENTS * scale.num_nights]
    viewers = drawn.sample(long_enough, scale.num_viewers)
    cuts = {viewer.entity_id: 0 for viewer in viewers}

    def prompt(viewer: Entity) -> np.ndarray:
        history = viewer.history[: len(viewer.history) - cuts[viewer.entity_id]]
        return render_prompt(template, replace(viewer, history=history), tokenizer, MAX_PROMPT_TOKENS).token_ids

    backwards = []
    for _ in range(scale.num_nights):
        backwards.append([prompt(viewer) for viewer in viewers])
        cuts = {name: cut + drawn.randint(1, MAX_NEW_EVENTS) for name, cut in cuts.items()}
    return backwards[::-1]


def chain(writer: Writer, nights: Sequence[Sequence[np.ndarray]], rule: dict) -> Iterator[list[GenerationResult]]:
    """The texts of each night under one rule; the first night has no earlier texts to draft from."""
    previous: list[np.ndarray] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for number, prompts in enumerate(nights):
            pool = None if previous is None else build(previous, Path(folder) / str(number), "user")
            sources = ("prompt", "output") if pool is None else ("previous", "prompt", "output", "pool")
            drafter = RetrievalDrafter(pool, sources, MAX_DRAFT_TOKENS, MIN_ACCEPTANCE)
            texts, _ = writer.write(prompts, drafter, rule, previous)
            previous = [text.token_ids for text in texts]
            yield texts


def measure(writer: Writer, nights: Sequence[Sequence[np.ndarray]], template: PromptTemplate) -> Iterator[dict]:
    """Yield a row for each night and chain."""
    encoder = TextEncoder.load()
    chains = {name: chain(writer, nights, rule) for name, rule in CHAINS.items()}
    for number, prompts in enumerate(nights, 1):
        written = {name: next(texts) for name, texts in chains.items()}
        plain = written[PLAIN]
        for name, texts in written.items():
            row = quality(texts, plain, prompts, template, encoder)
            yield {"night": number, "rule": name, "as_plain": row["num_as_plain"] / len(texts), **row}


def figures_of(rows: Sequence[dict], num_nights: int) -> Iterator[Figure]:
    """The change from the first third of the drafted nights to the last third, by rule."""
    third = max(1, (num_nights - 1) // 3)
    for rule in list(CHAINS)[1:]:
        own = sorted((row for row in rows if row["rule"] == rule), key=lambda row: row["night"])[1:]
        change = {
            name: float(np.mean([row[name] for row in own[-third:]]) - np.mean([row[name] for row in own[:third]]))
            for name in ("repeated", "cosine")
        }
        yield Figure.at_most(f"{rule}: share of repeated 8-grams, added", change["repeated"], MAX_ADDED_REPEATED)
        yield Figure.at_most(f"{rule}: cosine to plain, lost", -change["cosine"], MAX_LOST_COSINE)


def main() -> None:
    """Write and measure the nights of every chain."""
    arguments, model_dir = begun_with_smollm2(__doc__)
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    template = movielens_settings().template("user")
    writer = Writer(model_dir, template, scale.max_new_tokens)
    nights = nights_of(writer.engine.tokenizer, template, arguments.data, scale)
    rows: list[dict] = []
    for row in measure(writer, nights, template):
        print(", ".join(form.format(**row) for form in COLUMNS.values()), flush=True)
        rows.append(row)
    in_order = sorted(rows, key=lambda row: (row["rule"], row["night"]))
    figures = list(figures_of(rows, scale.num_nights))
    finish(arguments.json, figures, [table(in_order, COLUMNS)], {"model": SMOLLM2, "rows": rows})


if __name__ == "__main__":
    main()
