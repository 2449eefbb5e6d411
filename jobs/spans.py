"""Texts cut into spans by the source of their tokens, and the few such texts that a report shows.

Works with any tokenizer of transformers, by decoding growing windows of ids: what a token means can depend on the one
before it (a leading space, the rest of a character).
"""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from laserbatch.jobs.night import Night
from laserbatch.pipeline.decoding.model.folder import load_tokenizer
from laserbatch.pipeline.planning.plan import SidePlan, read_shard
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.manifest import SampleSpan, SampleText
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.retrieval_pools.sources import SOURCE_NAMES

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no character (yet)


def report_samples(night: Night, folder: RunFolder, side: Side, plan: SidePlan) -> list[SampleText]:
    """Sample texts of a side: evenly spread over the plan's shards, the first row of each."""
    wanted = night.settings.night.num_report_samples
    if not plan.shards or not wanted:
        return []
    tokenizer = load_tokenizer(night.settings.model_dir)
    stride = max(1, len(plan.shards) // wanted)
    samples = []
    for shard in plan.shards[::stride][:wanted]:
        path = folder.knowledge_folder(side) / f"{shard.name}.parquet"
        if not path.exists():
            continue
        table = read_parquet(path)
        if not table.num_rows:
            continue
        record = table.slice(0, 1).to_pylist()[0]
        planned = next(row for row in read_shard(folder.root / shard.path) if row.entity_id == record["entity_id"])
        spans = text_spans(tokenizer, record["token_ids"], record["token_sources"])
        samples.append(
            SampleText(
                entity_id=record["entity_id"],
                group=record["pool_group"],
                prompt=tokenizer.decode(planned.prompt_ids.tolist(), skip_special_tokens=False),
                text=record["text"],
                spans=spans,
                tokens_per_step=1 + record["num_accepted"] / record["num_steps"] if record["num_steps"] else None,
            )
        )
    return samples


def text_spans(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int] | np.ndarray, sources: Sequence[int] | np.ndarray
) -> list[SampleSpan]:
    """Text of a generated sequence, cut where the source changes.

    A character whose bytes are spread over several tokens belongs to the token that completes it. Texts of the spans,
    joined, are `tokenizer.decode(token_ids, skip_special_tokens=True)`.

    Parameters
    ----------
    tokenizer : of transformers.
    token_ids : int32 (n,).
    sources : uint8 (n,), SOURCE_* of each token.

    Returns
    -------
    list of SampleSpan
        Neighbours differ in source; none is empty.

    Raises
    ------
    ValueError
        The two arrays differ in length, or a source code is not one.
    """
    ids, codes = [int(token) for token in token_ids], [int(code) for code in sources]
    if len(ids) != len(codes):
        raise ValueError(f"{len(ids)} token ids with {len(codes)} sources; expected one source a token")
    if unknown := {code for code in codes if not 0 <= code < len(SOURCE_NAMES)}:
        raise ValueError(f"source codes {sorted(unknown)} are unknown; expected 0 to {len(SOURCE_NAMES) - 1}")
    joined: list[SampleSpan] = []
    for text, code in zip(_token_texts(tokenizer, ids), codes, strict=True):
        source = SOURCE_NAMES[code]
        if joined and joined[-1].source == source:
            joined[-1] = SampleSpan(joined[-1].text + text, source)
        elif text:
            joined.append(SampleSpan(text, source))
    return joined


def _token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The characters that each token completes.

    `[start, read)` is the context: ids whose text is written already, kept so that the next ones decode as they do
    within the whole. The window moves on only where a character ends, so it stays a few tokens long.
    """
    texts: list[str] = []
    start = read = 0
    written = 0  # characters of the window [start, ...) already given out
    for index in range(len(ids)):
        window = _decode(tokenizer, ids[start : index + 1])
        whole = window if index == len(ids) - 1 else window.rstrip(UNFINISHED)
        texts.append(whole[written:])
        written = max(written, len(whole))
        if not window.endswith(UNFINISHED):
            context = _decode(tokenizer, ids[read : index + 1])
            if context:  # a context without text (a control token) would lose the leading space of what follows
                start, written = read, len(context)
            read = index + 1
    return texts


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
