"""How long the drafts of one engine step take: one call for many sequences, on one thread or more."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from common import Spread
from drafting_corpora import Document
from drafting_peers import MIN_PROBABILITY

from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.query import draft_batch

NUM_SEQUENCES = 64
NUM_THREADS = (1, 2)


@dataclass(frozen=True)
class LiveSequence:
    """A text that is being written: int32[n] tokens so far, the prompt among them."""

    context: np.ndarray
    num_prompt: int


def live_sequences(documents: Sequence[Document], seed: int) -> list[LiveSequence]:
    """Held-out texts, each cut anywhere; taken again, cut elsewhere, where there are fewer than a step needs."""
    generator = np.random.default_rng(seed)
    sequences = []
    for number in range(NUM_SEQUENCES):
        document = documents[number % len(documents)]
        num_written = int(generator.integers(len(document.text_ids)))
        context = np.concatenate([document.prompt_ids, document.text_ids[:num_written]])
        sequences.append(LiveSequence(context, len(document.prompt_ids)))
    return sequences


def measure_steps(
    pool: Pool, sequences: Sequence[LiveSequence], max_nodes: int, num_repetitions: int
) -> dict[int, Spread]:
    """Milliseconds of a step, one call for all sequences, by number of threads, which take turns."""
    contexts = [one.context for one in sequences]
    num_prompts = [one.num_prompt for one in sequences]
    times: dict[int, list[float]] = {num_threads: [] for num_threads in NUM_THREADS}
    for _ in range(num_repetitions):
        for num_threads, found in times.items():
            start_s = time.perf_counter()
            draft_batch(
                pool,
                contexts,
                num_prompts,
                max_nodes=max_nodes,
                min_probability=MIN_PROBABILITY,
                use_previous=False,
                num_threads=num_threads,
            )
            found.append((time.perf_counter() - start_s) * 1e3)
    return {num_threads: Spread.of(found) for num_threads, found in times.items()}
