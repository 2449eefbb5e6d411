"""Host time of a step, without the device's part, compared with the least time that a GPU needs for the device's part.

    python benchmarks/host_time.py --quick --json host_time.json

While the host commits, drafts and packs, a GPU is idle. Here the engine takes a GPU's code path (single-token cache,
ragged steps, padded buffers), but its forward computes nothing: the target's choice is the next token of a held-out
text, so that drafts from a real pool are accepted as they would be. Times are medians over turns. Launches and the
device's part of verification (`judge_rows`) are not counted: they queue behind the forward.

There are two measurements: steps of a full batch, by part; and whole streams in which texts begin and end, long ones
(REKI) and short ones (goodreads). In a stream the time for the results of finished texts is separate: they are decoded
and handed over while the device computes the next step.

The GPU's least time is a roofline: reading weights and cache and computing products, at the rates that its maker gives.
A real step takes longer, so the real share of the host is smaller than the reported one, on a processor like this one.
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
from systems import in_order
from tasks import build
from widen import GEOMETRIES, Geometry

from laserbatch.pipeline.decoding import acceptance
from laserbatch.pipeline.decoding.acceptance import RowVerdicts
from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata
from laserbatch.pipeline.decoding.batch import Batch
from laserbatch.pipeline.decoding.drafters import Drafter, NoDrafter, RetrievalDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.kv_cache import RowLease
from laserbatch.pipeline.decoding.model.cuda_graphs import BufferedForward
from laserbatch.pipeline.decoding.model.load import LoadedModel, load_model
from laserbatch.pipeline.decoding.sequence import GenerationRequest
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.verifiers import Greedy
from laserbatch.retrieval_pools.index.pool import Pool

SEED = 0
MAX_HOST_SHARE = 0.15  # the host's share of a step, at JUDGED_BATCH in the geometry JUDGED
JUDGED, JUDGED_BATCH = "7b-mha", 64
GPU, BYTES_PER_S, FLOPS_PER_S = "H200", 4.8e12, 989e12  # the maker's rates; bfloat16, dense
BYTES_PER_NUMBER = 2
LONG, SHORT = "reki", "goodreads-items"
DRAFT_THREADS = 2  # threads that draft in parallel
MIN_TOKENS_LEFT = 120  # a text must still have this many tokens to write when its measurement begins


@dataclass(frozen=True)
class Scale:
    """The amount of work: batch sizes, draft sizes, turns, steps per turn, and texts in the pool.

    A stream has `stream_batches` batches of texts.
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
    """Stands in for a step's logits: `choices`, int64[n], is the token that follows each wanted token in its text."""

    choices: np.ndarray
    device = torch.device("meta")  # not "cpu", where drafts are judged in rounds

    @property
    def num_rows(self) -> int:
        return len(self.choices)


def judge_scripted(verifier, rows: Scripted, wanted: np.ndarray, parents, token_ids, sources) -> RowVerdicts:
    """Replaces `judge_rows`: greedy verification against the scripted texts."""
    choices = rows.choices[wanted]
    return RowVerdicts(choices, np.ones(len(wanted), bool), token_ids == choices[parents], np.zeros(len(parents)))


class ScriptedForward(BufferedForward):
    """Fills a GPU's buffers and computes nothing; permanently replaces an engine's forward.

    Parameters
    ----------
    texts : whole texts with their prompts, by the bytes of the tokens that are known at admission. The model's end
        token follows each text.

    Attributes
    ----------
    steps : for each forward so far, the number of its tokens and the number of cached tokens.
    """

    def __init__(self, engine: Engine, texts: dict[bytes, np.ndarray], end_id: int) -> None:
        super().__init__(engine.runner.head, engine.cache, engine.device, None)  # pyright: ignore[reportArgumentType]
        self.steps: list[tuple[int, int]] = []
        self._script = np.full((engine.cache.max_rows, 2 * max(map(len, texts.values())) + 1024), end_id, np.int64)
        self._rows: list[int] = []  # cache rows of the step's sequences
        acquire, forward = engine.cache.acquire, engine.runner.forward

        def scripted_acquire(token_ids: np.ndarray, num_expected: int, shares: bool = True) -> RowLease | None:
            lease = acquire(token_ids, num_expected, shares)
            if lease is not None:
                text = texts[token_ids.tobytes()]
                self._script[lease.row] = end_id
                self._script[lease.row, : len(text)] = text
            return lease

        def scripted_forward(feeds, trees=None):
            self._rows = [feed.row for feed in feeds]
            return forward(feeds, trees)

        engine.cache.acquire, engine.runner.forward, engine.runner.buffered = scripted_acquire, scripted_forward, self

    def run(self, batch: Batch, metadata: AttentionMetadata) -> Scripted:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The scripted token that follows each wanted token."""
        self._run(batch, metadata)
        self.steps.append((len(batch), int(batch.num_committed.sum())))
        row_of = np.repeat(self._rows, batch.sizes)
        return Scripted(self._script[row_of[batch.logit_indices], batch.positions[batch.logit_indices] + 1])

    def _forward(self, buffers, shape) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None


def texts_of(corpus: Corpus, num_texts: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Held-out texts with their prompts, and the beginning of each: the prompt and a part of the text."""
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
    """One turn: mean milliseconds of each part of a step, a text's drafted and written tokens, all cached tokens."""
    engine = engine_of(loaded, batch, draft_size, max_cache_tokens=1 << 20)
    whole, begun = texts_of(corpus, batch)
    ScriptedForward(engine, {start.tobytes(): text for start, text in zip(begun, whole, strict=True)}, end_id=0)
    drafter = drafter_of(pool, draft_size, num_threads)
    with mock.patch.object(acceptance, "judge_rows", judge_scripted):
        row = profile(engine, drafter, begun, scale.num_steps, Greedy())
    parts = {part: row["parts_ms"][part] for part in HOST_PARTS}
    parts["packing"] += row["parts_ms"]["other model"]  # only the buffers: the model computes nothing
    return {
        "parts_ms": parts,
        "drafted_tokens_a_text": row["drafted_tokens_a_text"],
        "tokens_a_step": row["tokens_a_step"],
        "num_cached": sum(map(len, begun)),
    }


def drafter_of(pool: Pool, draft_size: int, num_threads: int) -> Drafter:
    """A drafter of full trees, however unlikely their tokens are; NoDrafter for size 0."""
    if draft_size == 0:
        return NoDrafter()
    return RetrievalDrafter(pool, ("prompt", "output", "pool"), draft_size, 0.0, num_threads)


def stream_turn(
    loaded: LoadedModel, corpus: Corpus, pool: Pool, batch: int, draft_size: int, num_texts: int, num_threads: int
) -> dict:
    """One stream of whole texts at a batch size: the host's time per step, and the GPU's least time per step.

    `results_ms` is the time to decode and hand over results; `host_ms` excludes it. Both are means over steps.
    """
    end_id = loaded.end_ids[0]
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
    drafter, result_of = drafter_of(pool, draft_size, num_threads), engine.result
    results_s = 0.0

    def timed_result(sequence, outcome):
        nonlocal results_s
        start = time.perf_counter()
        result = result_of(sequence, outcome)
        results_s += time.perf_counter() - start
        return result

    engine.result = timed_result
    with mock.patch.object(acceptance, "judge_rows", judge_scripted):
        start = time.perf_counter()
        written = in_order(engine.generate(requests, drafter, Greedy()))
        took = time.perf_counter() - start
    for result, document in zip(written, documents, strict=True):
        assert np.array_equal(result.token_ids, document.text_ids), "a text is not the scripted one"
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
    """Least milliseconds of a forward over `num_tokens` tokens, all with logits, and `num_cached` cached tokens."""
    heads, kv_heads = geometry.num_heads * geometry.head_size, geometry.num_kv_heads * geometry.head_size
    layer = geometry.hidden_size * (2 * heads + 2 * kv_heads + 3 * geometry.intermediate_size)
    num_weights = geometry.num_layers * layer + geometry.hidden_size * geometry.vocab_size
    num_bytes = BYTES_PER_NUMBER * (num_weights + num_cached * 2 * geometry.num_layers * kv_heads)
    return 1e3 * max(num_bytes / BYTES_PER_S, 2 * num_tokens * num_weights / FLOPS_PER_S)


def in_turns(draft_sizes: Sequence[int], num_turns: int, run: Callable[[int], dict]) -> dict[int, list[dict]]:
    """The results of `run` for each draft size, one per turn; each turn runs all sizes."""
    runs: dict[int, list[dict]] = {size: [] for size in draft_sizes}
    for _, order in zip(range(num_turns), turns(draft_sizes), strict=False):
        for size in order:
            runs[size].append(run(size))
    return runs


def measure(loaded: LoadedModel, corpus: Corpus, pool: Pool, scale: Scale, num_threads: int) -> list[dict]:
    """The rows of full batches, for each batch size and draft size."""
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
    """The rows of streams, for each task, batch size and draft size."""
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
    """The row with the host's share of a step in every geometry."""
    host_ms = row["host_ms"].median
    return row | {"host_share": {name: host_ms / (host_ms + ms) for name, ms in row["least_ms"].items()}}


def describe_row(row: dict) -> str:
    """A line for a terminal."""
    parts = ", ".join(f"{part} {ms:.2f}" for part, ms in row.get("parts_ms", {}).items())
    if "task" in row:
        parts = f"{row['num_texts']} texts, results {row['results_ms'].median:.2f}"
    shares = ", ".join(f"{name} {100 * row['host_share'][name]:.0f} %" for name in (JUDGED, "8b-gqa"))
    where = f"{_measured(row)}, batch {row['batch']:3}, drafts of {row['draft_size']:2}"
    return f"{where}: host ms per step {row['host_ms']}: {parts}; {shares}"


def figures_of(rows: Sequence[dict]) -> list[Figure]:
    """The figures: the host's share at JUDGED_BATCH."""
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
