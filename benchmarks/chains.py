"""What chains cost and gain beside a tree's first branch: the library's call for a step of 64 texts; no model runs.

    python benchmarks/chains.py --quick --json chains.json

Texts that an LLM wrote are followed by both, drafted from the same calibrated pool of others. The fastest of several
instalments counts: other tenants of a machine only ever add to a time. The exit code is 0 whether figures are met or
not.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from common import Figure, Spread, benchmark_parser, finish, scale_of, show_progress
from corpora import Corpus, CorpusSize, goodreads_corpus, reki_corpus
from drafters import Ours
from drafting import ALL, NUM_SEQUENCES, SAMPLE_MODEL, live_sequences
from transformers import AutoTokenizer

from laserbatch.retrieval_pools.calibration.replay import steps_along
from laserbatch.retrieval_pools.drafting.state import MAX_NODES
from laserbatch.retrieval_pools.library import DraftBudget, OpenPool

MAX_TOKENS = (4, 8)
MIN_ACCEPTANCE = 0.05
MOST_STEP_MS = 1.0  # of MAX_TOKENS[-1] with the texts of `goodreads`, 15,000
NUM_INSTALMENTS = 5
FORMS = ("chain", "first branch")


def drafted(pools: OpenPool, request, form: str, max_tokens: int) -> np.ndarray:
    """The tokens of a text's draft. A full tree's first branch is what an engine had that verifies no trees."""
    if form == "chain":
        return pools.draft([request], DraftBudget(max_tokens, MIN_ACCEPTANCE, "chain"))[0].token_ids
    return first_branch(pools.draft([request], DraftBudget(MAX_NODES, MIN_ACCEPTANCE, "tree"))[0])[:max_tokens]


def first_branch(tree) -> np.ndarray:
    """Of a tree the likeliest token, the likeliest behind it, and so on."""
    node, path = -1, []
    for place, parent in enumerate(tree.parents.tolist()):
        if parent == node:
            path.append(place)
            node = place
    return tree.token_ids[path]


def step_row(corpus: Corpus, pools: OpenPool, form: str, max_tokens: int, num_steps: int) -> dict:
    """Milliseconds of a step on one thread, of the instalment with the least median."""
    instalments = []
    for _ in range(NUM_INSTALMENTS):
        times = []
        for _ in range(num_steps):
            start_s = time.perf_counter()
            pools.draft(range(NUM_SEQUENCES), DraftBudget(max_tokens, MIN_ACCEPTANCE, form))
            times.append((time.perf_counter() - start_s) * 1e3)
        instalments.append(Spread.of(times))
    fastest = min(instalments, key=lambda one: one.median)
    return {"corpus": corpus.name, "num_docs": len(corpus.pool), "form": form, "k": max_tokens, "step_ms": fastest}


def gain_row(corpus: Corpus, pools: OpenPool, max_tokens: int) -> dict:
    """Tokens that a held-out text grows by in a step, bonus token included, by form."""
    row = {"corpus": corpus.name, "k": max_tokens}
    for form in FORMS:
        num_written = num_steps = 0
        for number, document in enumerate(corpus.held_out):
            name, at = (form, number), 0
            pools.start(name, document.prompt_ids)

            def draft_after(position: int, form=form, name=name, document=document):
                nonlocal at
                pools.accept(name, document.text_ids[at:position])
                at = position
                return Chain(drafted(pools, name, form, max_tokens))

            for step in steps_along(document.text_ids, draft_after):
                num_written, num_steps = num_written + len(step.path) + 1, num_steps + 1
            pools.finish(name)
        row[form] = num_written / num_steps
    return row


class Chain:
    """Tokens that follow each other, as a replay takes a tree."""

    def __init__(self, token_ids: np.ndarray) -> None:
        self.token_ids, self.parents = token_ids.tolist(), range(-1, len(token_ids) - 1)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; of the model only the tokenizer is used, where it is absent the sample model's."""
    arguments = benchmark_parser(__doc__, "data", "model").parse_args(words)
    arguments.model = arguments.model if arguments.model.is_dir() else SAMPLE_MODEL
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    """Measure both kinds of text."""
    arguments = parse_arguments(words)
    show_progress()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
    reki, goodreads, num_steps = scale_of(
        arguments,
        (CorpusSize(150, 140, ALL), CorpusSize(500, 400, ALL), 300),
        (CorpusSize(40, 140, ALL), CorpusSize(150, 150, 15_000), 100),
        (CorpusSize(2, 2, 10), CorpusSize(3, 2, 20), 2),
    )
    corpora = [
        reki_corpus(tokenizer, arguments.data, reki),
        goodreads_corpus(tokenizer, arguments.data, goodreads),
    ]
    steps, gains = [], []
    with tempfile.TemporaryDirectory() as folder:
        for corpus in corpora:
            pools = OpenPool(Ours(corpus, Path(folder) / corpus.name, [16]).pools[16])
            for name, (context, num_prompt) in enumerate(zip(*live_sequences(corpus.held_out), strict=True)):
                pools.start(name, context[:num_prompt])
                pools.accept(name, context[num_prompt:])
            pools.draft(range(NUM_SEQUENCES))  # compiles
            steps += [step_row(corpus, pools, form, k, num_steps) for k in MAX_TOKENS for form in ("chain", "tree")]
            gains += [gain_row(corpus, pools, k) for k in MAX_TOKENS]
    figures = [
        Figure.under(
            f"{row['corpus']}, {row['num_docs']:,} texts: milliseconds for {NUM_SEQUENCES} chains of up to {row['k']}",
            row["step_ms"].median, MOST_STEP_MS,
        )
        for row in steps
        if row["form"] == "chain" and row["k"] == MAX_TOKENS[-1]
    ] + [
        Figure.at_least(
            f"{row['corpus']}, up to {row['k']}: tokens a step of the best chain over a tree's first branch",
            row["chain"] / row["first branch"], 1.0,
        )
        for row in gains
    ]  # fmt: skip
    table = [f"{row['corpus']:10} {row['form']:6} of {row['k']}: {row['step_ms']} ms a step" for row in steps]
    table += [
        f"{row['corpus']:10} up to {row['k']}: chain {row['chain']:.3f}, first branch {row['first branch']:.3f}"
        for row in gains
    ]
    finish(arguments.json, figures, ["\n".join(table)], {"steps": steps, "gains": gains})


if __name__ == "__main__":
    main()
