"""What a pool of 15,000 descriptions costs: seconds to build, microseconds a draft. No model runs here."""

import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from common import Figure, Spread
from night_pools import build
from night_systems import MAX_DRAFT_TOKENS
from night_tasks import GOODREADS_PROMPT, chat_ids

from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.retrieval_pools.calibration.replay import DraftOptions, ReplayText, replay

NUM_TEXTS = 15_000
NUM_HELD_OUT = 150
MIN_PROBABILITY = 1e-3  # low enough for full trees; a run cuts earlier and drafts faster


def measure_big_pool(engine: Engine, data: Path) -> tuple[dict, list[Figure]]:
    """Build time of the pool, and draft times for descriptions left out of it.

    Texts are those published with goodreads, in the tokens of the engine's model. Drafting is a replay: each draft is
    compared with the real continuation, and the text advances by what a greedy verifier would accept, plus one.
    Compilation is done before.
    """
    knowledge = pq.read_table(data / "goodreads" / "item_knowledge.parquet").to_pylist()[: NUM_TEXTS + NUM_HELD_OUT]
    titles = pq.read_table(data / "goodreads" / "items.parquet").to_pydict()
    titles = dict(zip(titles["item_id"], titles["title"], strict=True))
    tokenizer = engine.tokenizer
    texts = [np.asarray(tokenizer(row["text"], add_special_tokens=False).input_ids, np.int32) for row in knowledge]
    held_out = [
        ReplayText(chat_ids(tokenizer, GOODREADS_PROMPT.format(title=titles[row["item_id"]])), text)
        for row, text in zip(knowledge[NUM_TEXTS:], texts[NUM_TEXTS:], strict=True)
    ]
    options = DraftOptions(max_nodes=MAX_DRAFT_TOKENS, min_probability=MIN_PROBABILITY)
    with tempfile.TemporaryDirectory() as folder:
        replay(build(texts[:50], Path(folder) / "warm-up", engine, "item"), held_out[:1], options)
        start_s = time.perf_counter()
        pool = build(texts[:NUM_TEXTS], Path(folder) / "pool", engine, "item")
        build_s = time.perf_counter() - start_s
        replayed = replay(pool, held_out, options)
    draft_us = Spread.of(replayed.draft_us)
    measured = {
        "num_texts": NUM_TEXTS,
        "num_tokens": sum(map(len, texts[:NUM_TEXTS])),
        "build_s": build_s,
        "max_draft_tokens": MAX_DRAFT_TOKENS,
        "num_drafts": replayed.num_steps,
        "draft_us": draft_us,
        "mean_num_drafted": float(np.mean(replayed.num_drafted)),
        "mean_num_accepted": replayed.mean_accepted,
    }
    figures = [
        Figure.under(f"pool of {NUM_TEXTS:,} descriptions, build, seconds", build_s, 5.0),
        Figure.under(f"draft of {MAX_DRAFT_TOKENS} tokens from it, median, microseconds", draft_us.median, 60.0),
    ]
    return measured, figures
