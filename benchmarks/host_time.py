"""What a step takes on the host, the device's part left out, beside the least time that a GPU needs for that part.

    python benchmarks/host_time.py --quick --json host_time.json

While the host commits, drafts and packs, a GPU is idle. The engine goes a GPU's way here (single-token cache, ragged
steps, padded buffers), but its forward computes nothing: the target's choice is what a held-out REKI text says at that
place, so that drafts from a real pool are accepted as they would be. Times are medians of turns; launches, and what the
device does of verification (`judge_rows`), are not counted: they queue behind the forward.

The GPU's least time is a roofline: weights and cache read, products computed, at the rates that its maker gives. A real
step takes longer, so the host's share of it is smaller than the one given, on a processor like this one.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers
from command import add_data, add_model, benchmark_parser, finish, scale_of
from common import Figure, Spread
from drafting_corpora import Corpus, CorpusSize, reki_corpus
from night_pools import build
from step_profile import engine_of, profile
from step_spans import HOST_PARTS
from widen_weights import GEOMETRIES, Geometry

from pipeline.decoding import acceptance
from pipeline.decoding.drafters import NoDrafter, RetrievalDrafter
from pipeline.decoding.engine import Engine
from pipeline.decoding.forward.packed_forward import PackedForward
from pipeline.decoding.forward.step_buffers import PackedStep
from pipeline.decoding.loading.load import LoadedModel, load_model
from pipeline.decoding.row_verdicts import RowVerdicts
from retrieval_pools.pool import Pool

SEED = 0
MOST_HOST_SHARE = 0.15  # of a step at JUDGED_BATCH with the geometry JUDGED
JUDGED, JUDGED_BATCH = "7b-mha", 64
GPU, BYTES_PER_S, FLOPS_PER_S = "H200", 4.8e12, 989e12  # as its maker gives them; bfloat16, dense
BYTES_PER_NUMBER = 2
LEAST_REST = 120  # tokens of a text that are still to be written when it begins


@dataclass(frozen=True)
class Scale:
    """How much is measured: batch sizes, draft sizes, turns, steps in each, and the pool's texts."""

    batches: tuple[int, ...]
    draft_sizes: tuple[int, ...]
    num_turns: int
    num_steps: int
    num_pool_texts: int


FULL = Scale((1, 32, 64, 256), (0, 4, 8, 16, 32), num_turns=9, num_steps=20, num_pool_texts=10_000)
QUICK = Scale((1, 64, 256), (0, 8, 16), num_turns=5, num_steps=15, num_pool_texts=2_000)
SMOKE = Scale((2,), (0, 4), num_turns=1, num_steps=3, num_pool_texts=50)


@dataclass(frozen=True)
class Scripted:
    """What stands where a step's logits would: `choices` int64[n], what is written after each wanted token."""

    choices: np.ndarray
    device = torch.device("meta")  # not the CPU, where drafts are judged in rounds

    @property
    def num_rows(self) -> int:
        return len(self.choices)


def judge_scripted(verifier, rows: Scripted, wanted: np.ndarray, parents: np.ndarray, token_ids) -> RowVerdicts:
    """`judge_rows` of what is written anyway, verified greedily."""
    choices = rows.choices[wanted]
    return RowVerdicts(choices, np.ones(len(wanted), bool), token_ids == choices[parents], np.zeros(len(parents)))


class ScriptedForward(PackedForward):
    """Fills a GPU's buffers, and computes nothing.

    Parameters
    ----------
    texts : of each row of the store the whole text, prompt included.
    """

    def __init__(self, engine: Engine, texts: Sequence[np.ndarray]) -> None:
        super().__init__(
            engine.loaded.model, engine.store, engine.device, None, selects_logits=True, pads=True, captures=False
        )
        self._script = np.zeros((len(texts), 2 * max(map(len, texts)) + 1024), np.int64)
        for row, text in zip(self._script, texts, strict=True):
            row[: len(text)] = text

    def run(self, step: PackedStep) -> Scripted:
        """What follows each token that is wanted, by its place in its row's text."""
        self._run(step)
        ragged = step.ragged
        row_of = np.repeat(np.arange(step.num_sequences), np.diff(ragged.query_starts))
        return Scripted(self._script[row_of[step.keep], ragged.node_positions[step.keep] + 1])

    def _forward(self, buffers, shape) -> None:
        return None


def texts_of(corpus: Corpus, num_texts: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Held-out texts with their prompts, and of each what is there when it begins: the prompt and a part of it."""
    rng = np.random.default_rng(SEED)
    documents = [one for one in corpus.held_out if len(one.text_ids) > LEAST_REST]
    whole, begun = [], []
    for number in range(num_texts):
        document = documents[number % len(documents)]
        whole.append(np.concatenate((document.prompt_ids, document.text_ids)))
        num_written = int(rng.integers(1, len(document.text_ids) - LEAST_REST + 1))
        begun.append(whole[-1][: len(document.prompt_ids) + num_written])
    return whole, begun


def host_parts(
    loaded: LoadedModel, corpus: Corpus, pool: Pool, batch: int, draft_size: int, scale: Scale, num_threads: int
) -> dict:
    """One turn: mean milliseconds of each part of a step; what a text's step drafts and writes; all cached tokens."""
    engine = engine_of(loaded, batch, draft_size, kv_cache="tokens", max_cache_tokens=1 << 20)
    whole, begun = texts_of(corpus, batch)
    engine.runner.packed = ScriptedForward(engine, whole)
    drafter = NoDrafter()
    if draft_size:
        drafter = RetrievalDrafter(pool, ("prompt", "output", "pool"), draft_size, 0.0, num_threads)
    with mock.patch.object(acceptance, "judge_rows", judge_scripted):
        row = profile(engine, drafter, begun, scale.num_steps, is_plain=True)
    parts = {part: row["parts_ms"][part] for part in HOST_PARTS}
    parts["packing"] += row["parts_ms"]["other model"]  # buffers, as nothing else is left of the model
    return {
        "parts_ms": parts,
        "drafted_tokens_a_text": row["drafted_tokens_a_text"],
        "tokens_a_step": row["tokens_a_step"],
        "num_cached": sum(map(len, begun)),
    }


def least_ms(geometry: Geometry, num_tokens: int, num_cached: int) -> float:
    """Milliseconds of a forward over so many tokens and a cache of so many, all of them with logits."""
    heads, kv_heads = geometry.num_heads * geometry.head_size, geometry.num_kv_heads * geometry.head_size
    layer = geometry.hidden_size * (2 * heads + 2 * kv_heads + 3 * geometry.intermediate_size)
    num_weights = geometry.num_layers * layer + geometry.hidden_size * geometry.vocab_size
    num_bytes = BYTES_PER_NUMBER * (num_weights + num_cached * 2 * geometry.num_layers * kv_heads)
    return 1e3 * max(num_bytes / BYTES_PER_S, 2 * num_tokens * num_weights / FLOPS_PER_S)


def measure(loaded: LoadedModel, corpus: Corpus, pool: Pool, scale: Scale, num_threads: int) -> list[dict]:
    """Rows of each batch size and draft size; turns of all draft sizes follow each other."""
    rows = []
    for batch in scale.batches:
        turns: dict[int, list[dict]] = {size: [] for size in scale.draft_sizes}
        for _ in range(scale.num_turns + 1):
            for size, found in turns.items():
                found.append(host_parts(loaded, corpus, pool, batch, size, scale, num_threads))
        for size, (_, *found) in turns.items():  # the first turn compiles
            host = Spread.of([sum(one["parts_ms"].values()) for one in found])
            num_tokens = round(batch * (1 + found[0]["drafted_tokens_a_text"]))
            least = {name: least_ms(GEOMETRIES[name], num_tokens, found[0]["num_cached"]) for name in GEOMETRIES}
            row = {
                "batch": batch,
                "draft_size": size,
                **{name: found[0][name] for name in ("drafted_tokens_a_text", "tokens_a_step", "num_cached")},
                "host_ms": host,
                "parts_ms": {p: float(np.median([one["parts_ms"][p] for one in found])) for p in HOST_PARTS},
                "least_ms": least,
                "host_share": {name: host.median / (host.median + ms) for name, ms in least.items()},
            }
            rows.append(row)
            print(describe_row(row), flush=True)
    return rows


def describe_row(row: dict) -> str:
    """A line for a terminal."""
    parts = ", ".join(f"{part} {ms:.2f}" for part, ms in row["parts_ms"].items())
    shares = ", ".join(f"{name} {100 * row['host_share'][name]:.0f} %" for name in (JUDGED, "8b-gqa"))
    return f"batch {row['batch']:3}, drafts of {row['draft_size']:2}: host ms {row['host_ms']}: {parts}; {shares}"


def figures_of(rows: Sequence[dict]) -> list[Figure]:
    """What was asked for."""
    return [
        Figure.at_most(
            f"{JUDGED}, batch {row['batch']}, drafts of {row['draft_size']}: host's share beside {GPU}'s least time",
            row["host_share"][JUDGED],
            MOST_HOST_SHARE,
        )
        for row in rows
        if row["batch"] == JUDGED_BATCH
    ]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(
        __doc__,
        quick="fewer sizes and turns: under 5 minutes on 2 cores",
        smoke="a handful of steps: does it run at all",
        writes="rows",
    )
    add_data(parser, holds="reki/")
    add_model(parser, "model folder, for its tokens")
    parser.add_argument("--draft-threads", type=int, default=2, help="threads that draft side by side")
    return parser.parse_args(words)


def main() -> None:
    """Measure, print, and write the JSON."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    loaded = load_model(arguments.model, "float32", "cpu")
    corpus = reki_corpus(loaded.tokenizer, arguments.data, CorpusSize(128, 0, scale.num_pool_texts))
    with tempfile.TemporaryDirectory() as folder:
        pool = build(corpus.pool, Path(folder) / "pool", loaded, corpus.side)
        rows = measure(loaded, corpus, pool, scale, arguments.draft_threads)
    rates = {"gpu": GPU, "bytes_per_s": BYTES_PER_S, "flops_per_s": FLOPS_PER_S}
    content = {"rates": rates, "draft_threads": arguments.draft_threads, "rows": rows}
    finish(arguments.json, figures_of(rows), [], content)


if __name__ == "__main__":
    main()
