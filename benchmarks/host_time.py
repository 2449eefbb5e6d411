"""What a step takes on the host, the device's part left out, beside the least time that a GPU needs for that part.

    python benchmarks/host_time.py --quick --json host_time.json

While the host commits, drafts and packs, a GPU is idle. The engine goes a GPU's way here (single-token cache, ragged
steps, padded buffers), but its forward computes nothing: the target's choice is what a held-out text says at that
place, so that drafts from a real pool are accepted as they would be. Times are medians of turns; launches, and what the
device does of verification (`judge_rows`), are not counted: they queue behind the forward.

Measured twice: steps of a full batch, by part; and whole streams of texts, which come and end, long ones (REKI) and
short ones (goodreads). Of a stream's step the results of finished texts are told apart: they are decoded and handed
over while the device computes the next step.

The GPU's least time is a roofline: weights and cache read, products computed, at the rates that its maker gives. A real
step takes longer, so the host's share of it is smaller than the one given, on a processor like this one.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from common import Figure, Spread, begin, benchmark_parser, finish, scale_of, turns
from corpora import Corpus, CorpusSize, goodreads_corpus, reki_corpus
from step_profile import engine_of, profile
from step_spans import HOST_PARTS
from tasks import build
from widen import GEOMETRIES, Geometry

from laserbatch.pipeline.decoding import acceptance
from laserbatch.pipeline.decoding.acceptance import RowVerdicts
from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata
from laserbatch.pipeline.decoding.batch import Batch
from laserbatch.pipeline.decoding.drafters import Drafter, NoDrafter, RetrievalDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.cuda_graphs import BufferedForward
from laserbatch.pipeline.decoding.model.load import LoadedModel, load_model
from laserbatch.pipeline.decoding.sequence import GenerationRequest
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.verifiers import Greedy
from laserbatch.retrieval_pools.index.pool import Pool

SEED = 0
MAX_HOST_SHARE = 0.15  # of a step, at JUDGED_BATCH with the geometry JUDGED
JUDGED, JUDGED_BATCH = "7b-mha", 64
GPU, BYTES_PER_S, FLOPS_PER_S = "H200", 4.8e12, 989e12  # as its maker gives them; bfloat16, dense
BYTES_PER_NUMBER = 2
LONG, SHORT = "reki", "goodreads-items"
DRAFT_THREADS = 2  # that draft side by side
MIN_TOKENS_LEFT = 120  # a text must still have this many tokens to write when its measurement begins


@dataclass(frozen=True)
class Scale:
    """How much is measured: batch sizes, draft sizes, turns, steps in each, and the pool's texts.

    Streams have so many batches of texts, and so many turns.
    """

    batches: tuple[int, ...]
    draft_sizes: tuple[int, ...]
    num_turns: int
    num_steps: int
    num_pool_texts: int
    stream_batches: int
    num_stream_turns: int


FULL = Scale((1, 32, 64, 256), (0, 4, 8, 16, 32), 9, 20, 10_000, stream_batches=6, num_stream_turns=3)
QUICK = Scale((1, 64, 256), (0, 8, 16), 5, 15, 2_000, stream_batches=3, num_stream_turns=1)
SMOKE = Scale((2,), (0, 4), 1, 3, 50, stream_batches=2, num_stream_turns=1)


@dataclass(frozen=True)
class Scripted:
    """What stands where a step's logits would: `choices` int64[n], what is written after each wanted token."""

    choices: np.ndarray
    device = torch.device("meta")  # not the CPU, where drafts are judged in rounds

    @property
    def num_rows(self) -> int:
        return len(self.choices)


def judge_scripted(verifier, rows: Scripted, wanted: np.ndarray, parents, token_ids, sources) -> RowVerdicts:
    """`judge_rows` of what is written anyway, verified greedily."""
    choices = rows.choices[wanted]
    return RowVerdicts(choices, np.ones(len(wanted), bool), token_ids == choices[parents], np.zeros(len(parents)))


class ScriptedForward(BufferedForward):
    """Fills a GPU's buffers, and computes nothing. An engine has one for good.

    Parameters
    ----------
    texts : whole texts, prompts included, by what of them is there when they are admitted, as bytes. What would come
        after them is the model's end token.

    Attributes
    ----------
    steps : of each forward so far its tokens, and those that were cached before.
    """

    def __init__(self, engine: Engine, texts: dict[bytes, np.ndarray], end_id: int) -> None:
        super().__init__(engine.runner.head, engine.cache, engine.device, None)
        self.steps: list[tuple[int, int]] = []
        self._script = np.full((engine.cache.max_rows, 2 * max(map(len, texts.values())) + 1024), end_id, np.int64)
        self._rows: list[int] = []  # of the step's sequences
        acquire, forward = engine.cache.acquire, engine.runner.forward

        def scripted_acquire(token_ids, *limits):
            lease = acquire(token_ids, *limits)
            if lease is not None:
                text = texts[token_ids.tobytes()]
                self._script[lease.row] = end_id
                self._script[lease.row, : len(text)] = text
            return lease

        def scripted_forward(feeds, trees):
            self._rows = [feed.row for feed in feeds]
            return forward(feeds, trees)

        engine.cache.acquire, engine.runner.forward, engine.runner.buffered = scripted_acquire, scripted_forward, self

    def run(self, batch: Batch, metadata: AttentionMetadata) -> Scripted:
        """What follows each token that is wanted, by its place in its row's text."""
        self._run(batch, metadata)
        self.steps.append((len(batch), int(batch.num_committed.sum())))
        row_of = np.repeat(self._rows, batch.sizes)
        return Scripted(self._script[row_of[batch.logit_indices], batch.positions[batch.logit_indices] + 1])

    def _forward(self, buffers, shape) -> None:
        return None


def texts_of(corpus: Corpus, num_texts: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Held-out texts with their prompts, and of each what is there when it begins: the prompt and a part of it."""
    rng = np.random.default_rng(SEED)
    documents = [document for document in corpus.held_out if len(document.text_ids) > MIN_TOKENS_LEFT]
    whole, begun = [], []
    for number in range(num_texts):
        document = documents[number % len(documents)]
        whole.append(np.concatenate((document.prompt_ids, document.text_ids)))
        num_written = int(rng.integers(1, len(document.text_ids) - MIN_TOKENS_LEFT + 1))
        begun.append(whole[-1][: len(document.prompt_ids) + num_written])
    return whole, begun


def host_parts(
    loaded: LoadedModel, corpus: Corpus, pool: Pool, batch: int, draft_size: int, scale: Scale, num_threads: int
) -> dict:
    """One turn: mean milliseconds of each part of a step; what a text's step drafts and writes; all cached tokens."""
    engine = engine_of(loaded, batch, draft_size, max_cache_tokens=1 << 20)
    whole, begun = texts_of(corpus, batch)
    ScriptedForward(engine, {start.tobytes(): text for start, text in zip(begun, whole, strict=True)}, end_id=0)
    drafter = drafter_of(pool, draft_size, num_threads)
    with mock.patch.object(acceptance, "judge_rows", judge_scripted):
        row = profile(engine, drafter, begun, scale.num_steps, Greedy())
    parts = {part: row["parts_ms"][part] for part in HOST_PARTS}
    parts["packing"] += row["parts_ms"]["other model"]  # buffers, as nothing else is left of the model
    return {
        "parts_ms": parts,
        "drafted_tokens_a_text": row["drafted_tokens_a_text"],
        "tokens_a_step": row["tokens_a_step"],
        "num_cached": sum(map(len, begun)),
    }


def drafter_of(pool: Pool, draft_size: int, num_threads: int) -> Drafter:
    """Full trees, however unlikely."""
    if draft_size == 0:
        return NoDrafter()
    return RetrievalDrafter(pool, ("prompt", "output", "pool"), draft_size, 0.0, num_threads)


def stream_turn(
    loaded: LoadedModel, corpus: Corpus, pool: Pool, batch: int, draft_size: int, num_texts: int, num_threads: int
) -> dict:
    """One stream of whole texts, as many at once as the batch holds: what its steps take on the host, and would take.

    `host_ms` without `results_ms`, which decoding and handing over take; both are means of steps.
    """
    end_id = int(loaded.tokenizer.eos_token_id)
    documents = [corpus.held_out[number % len(corpus.held_out)] for number in range(num_texts)]
    settings = DecodingSettings(
        batch_size=batch, max_draft_tokens=draft_size, min_acceptance=0.0, max_cache_tokens=1 << 20
    )
    engine = Engine(replace(loaded, end_ids=(end_id,)), settings)
    texts = {each.prompt_ids.tobytes(): np.concatenate((each.prompt_ids, each.text_ids)) for each in documents}
    forward = ScriptedForward(engine, texts, end_id)
    requests = [
        GenerationRequest(str(number), document.prompt_ids, max_new_tokens=len(document.text_ids) + 1)
        for number, document in enumerate(documents)
    ]
    drafter, results = drafter_of(pool, draft_size, num_threads), engine._results
    results_s = 0.0

    def timed_results(ended):
        nonlocal results_s
        start = time.perf_counter()
        ended_results = list(results(ended))
        results_s += time.perf_counter() - start
        yield from ended_results

    engine._results = timed_results
    with mock.patch.object(acceptance, "judge_rows", judge_scripted):
        start = time.perf_counter()
        written = list(engine.generate(requests, drafter, Greedy()))
        took = time.perf_counter() - start
    for result in written:
        scripted = documents[int(result.request_id)].text_ids
        assert np.array_equal(result.token_ids, scripted), "a text is not the scripted one"
    num_steps = len(forward.steps)
    return {
        "host_ms": 1e3 * (took - results_s) / num_steps,
        "results_ms": 1e3 * results_s / num_steps,
        "num_steps": num_steps,
        "num_texts": num_texts,
        "least_ms": {
            name: sum(least_ms(geometry, *step) for step in forward.steps) / num_steps
            for name, geometry in GEOMETRIES.items()
        },
    }


def least_ms(geometry: Geometry, num_tokens: int, num_cached: int) -> float:
    """Milliseconds of a forward over so many tokens and a cache of so many, all of them with logits."""
    heads, kv_heads = geometry.num_heads * geometry.head_size, geometry.num_kv_heads * geometry.head_size
    layer = geometry.hidden_size * (2 * heads + 2 * kv_heads + 3 * geometry.intermediate_size)
    num_weights = geometry.num_layers * layer + geometry.hidden_size * geometry.vocab_size
    num_bytes = BYTES_PER_NUMBER * (num_weights + num_cached * 2 * geometry.num_layers * kv_heads)
    return 1e3 * max(num_bytes / BYTES_PER_S, 2 * num_tokens * num_weights / FLOPS_PER_S)


def in_turns(draft_sizes: Sequence[int], num_turns: int, run: Callable[[int], dict]) -> dict[int, list[dict]]:
    """What runs of each draft size found; those of one turn follow each other."""
    runs: dict[int, list[dict]] = {size: [] for size in draft_sizes}
    for _, order in zip(range(num_turns), turns(draft_sizes), strict=False):
        for size in order:
            runs[size].append(run(size))
    return runs


def measure(loaded: LoadedModel, corpus: Corpus, pool: Pool, scale: Scale, num_threads: int) -> list[dict]:
    """Rows of full batches: each batch size and draft size."""
    rows = []
    for batch in scale.batches:

        def run(size: int, batch: int = batch) -> dict:
            return host_parts(loaded, corpus, pool, batch, size, scale, num_threads)

        # the first turn compiles
        for size, (_, *turns_of_size) in in_turns(scale.draft_sizes, 1 + scale.num_turns, run).items():
            first = turns_of_size[0]
            num_tokens = round(batch * (1 + first["drafted_tokens_a_text"]))
            row = {
                "batch": batch,
                "draft_size": size,
                **{name: first[name] for name in ("drafted_tokens_a_text", "tokens_a_step", "num_cached")},
                "host_ms": Spread.of([sum(turn["parts_ms"].values()) for turn in turns_of_size]),
                "parts_ms": {p: float(np.median([turn["parts_ms"][p] for turn in turns_of_size])) for p in HOST_PARTS},
                "least_ms": {name: least_ms(of, num_tokens, first["num_cached"]) for name, of in GEOMETRIES.items()},
            }
            rows.append(with_share(row))
            print(describe_row(rows[-1]), flush=True)
    return rows


def measure_streams(
    loaded: LoadedModel, corpora: dict[str, Corpus], pools: dict[str, Pool], scale: Scale, num_threads: int
) -> list[dict]:
    """Rows of streams: each task, batch size and draft size."""
    rows = []
    for task, batch in itertools.product(corpora, scale.batches):

        def run(size: int, task: str = task, batch: int = batch) -> dict:
            num_texts = batch * scale.stream_batches
            return stream_turn(loaded, corpora[task], pools[task], batch, size, num_texts, num_threads)

        for size, turns_of_size in in_turns(scale.draft_sizes, scale.num_stream_turns, run).items():
            row = {"task": task, "batch": batch, "draft_size": size}
            row |= {name: Spread.of([turn[name] for turn in turns_of_size]) for name in ("host_ms", "results_ms")}
            row |= {name: turns_of_size[0][name] for name in ("num_steps", "num_texts", "least_ms")}
            rows.append(with_share(row))
            print(describe_row(rows[-1]), flush=True)
    return rows


def with_share(row: dict) -> dict:
    """The row, and the host's share of a step in every geometry."""
    host_ms = row["host_ms"].median
    return row | {"host_share": {name: host_ms / (host_ms + ms) for name, ms in row["least_ms"].items()}}


def describe_row(row: dict) -> str:
    """A line for a terminal."""
    parts = ", ".join(f"{part} {ms:.2f}" for part, ms in row.get("parts_ms", {}).items())
    if "task" in row:
        parts = f"{row['num_texts']} texts, results {row['results_ms'].median:.2f}"
    shares = ", ".join(f"{name} {100 * row['host_share'][name]:.0f} %" for name in (JUDGED, "8b-gqa"))
    where = f"{_measured(row)}, batch {row['batch']:3}, drafts of {row['draft_size']:2}"
    return f"{where}: host ms a step {row['host_ms']}: {parts}; {shares}"


def figures_of(rows: Sequence[dict]) -> list[Figure]:
    """What was asked for."""
    return [
        Figure.at_most(
            f"{_measured(row)}, {JUDGED}, batch {row['batch']}, drafts of {row['draft_size']}: host's share beside "
            f"{GPU}'s least time",
            row["host_share"][JUDGED],
            MAX_HOST_SHARE,
        )
        for row in rows
        if row["batch"] == JUDGED_BATCH
    ]


def _measured(row: dict) -> str:
    return f"{row['task']}, a stream" if "task" in row else "full batches"


def main() -> None:
    """Measure, print, and write the JSON."""
    arguments = benchmark_parser(__doc__, "data", "model").parse_args()
    begin(num_threads=1)
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    loaded = load_model(arguments.model, "float32", "cpu")
    corpora = {
        LONG: reki_corpus(loaded.tokenizer, arguments.data, CorpusSize(256, 0, scale.num_pool_texts)),
        SHORT: goodreads_corpus(loaded.tokenizer, arguments.data, CorpusSize(1024, 0, scale.num_pool_texts)),
    }
    with tempfile.TemporaryDirectory() as folder:
        pools = {task: build(corpus.pool, Path(folder) / task, corpus.side) for task, corpus in corpora.items()}
        rows = measure(loaded, corpora[LONG], pools[LONG], scale, DRAFT_THREADS)
        streams = measure_streams(loaded, corpora, pools, scale, DRAFT_THREADS)
    rates = {"gpu": GPU, "bytes_per_s": BYTES_PER_S, "flops_per_s": FLOPS_PER_S}
    content = {"rates": rates, "draft_threads": DRAFT_THREADS, "rows": rows, "streams": streams}
    finish(arguments.json, [*figures_of(rows), *figures_of(streams)], [], content)


if __name__ == "__main__":
    main()
