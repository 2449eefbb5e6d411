"""Cuts texts into spans by the source of their tokens, and picks the few texts that a report shows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from laserbatch.jobs.stages.night import Night
from laserbatch.pipeline.planning.plan import SidePlan, read_shard
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.figures import SampleSpan, SampleText
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.retrieval_pools.sources import SOURCE_NAMES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_SAMPLES = 3  # texts of each side in the report, which a person reads
UNFINISHED = "\ufffd"  # written by decoders for bytes that do not make a character (yet)


def report_samples(night: Night, folder: RunFolder, side: Side, plan: SidePlan) -> list[SampleText]:
    """Sample texts of a side: the first text of a few shards, spread evenly over the plan."""
    stride, samples = max(1, len(plan.shards) // NUM_SAMPLES), []
    for shard in plan.shards[::stride][:NUM_SAMPLES]:
        path = folder.knowledge_folder(side) / f"{shard.name}.parquet"
        for record in read_parquet(path).slice(0, 1).to_pylist() if path.exists() else []:
            planned = next(row for row in read_shard(folder.root / shard.path) if row.entity_id == record["entity_id"])
            rendered = night.render(side, planned.shown)
            samples.append(
                SampleText(
                    entity_id=record["entity_id"],
                    group=record["pool_group"],
                    prompt=decoded(night.tokenizer, rendered.token_ids.tolist(), skip_special_tokens=False),
                    text=record["text"],
                    spans=text_spans(night.tokenizer, record["token_ids"], record["token_sources"]),
                    tokens_per_step=1 + record["num_accepted"] / record["num_steps"] if record["num_steps"] else None,
                )
            )
    return samples


def text_spans(
    tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int] | np.ndarray, sources: Sequence[int] | np.ndarray
) -> list[SampleSpan]:
    """Cut the text of a generated sequence where the source changes; neighbours differ in source, and none is empty.

    A character whose bytes are spread over several tokens belongs to the token that completes it. The joined spans are
    the decoded sequence: since the text of a token can depend on the tokens before it, a span ends where the decoded
    text of all tokens up to its last one ends. `sources` has the SOURCE_* code of each token.
    """
    ids, names = [int(token) for token in token_ids], [SOURCE_NAMES[code] for code in sources]
    whole, spans, start = decoded(tokenizer, ids), [], 0
    for stop, source in enumerate(names, start=1):
        if stop < len(ids) and names[stop] == source:
            continue
        end = len(decoded(tokenizer, ids[:stop]).rstrip(UNFINISHED)) if stop < len(ids) else len(whole)
        if end > start:
            before = spans.pop().text if spans and spans[-1].source == source else ""
            spans.append(SampleSpan(before + whole[start:end], source))
            start = end
    return spans


def decoded(tokenizer: "PreTrainedTokenizerBase", ids: list[int], skip_special_tokens: bool = True) -> str:
    """Decode tokens without any clean-up of spaces."""
    text = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return cast("str", text)
