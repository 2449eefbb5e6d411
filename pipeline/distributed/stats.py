"""Counts of a decoding pass: summed over results, over shards, over sides; the same names from engine to report."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from laserbatch.retrieval_pools.sources import SOURCE_NAMES

if TYPE_CHECKING:
    from laserbatch.pipeline.decoding.engine import GenerationResult

MOST_LENGTH_BINS = 256  # of a histogram of lengths: a manifest holds no line a text
_SUMS = ("num_texts", "num_tokens", "num_steps", "num_drafted", "num_accepted", "wall_s")
_BY_NAME = ("drafted_by_source", "accepted_by_source", "finish_reasons")
_BY_DEPTH = ("drafted_by_depth", "accepted_by_depth")


def decoding_stats(results: Sequence["GenerationResult"], wall_s: float, num_rewritten: int = 0) -> dict[str, Any]:
    """Statistics of finished texts.

    Parameters
    ----------
    results : finished texts of one shard.
    wall_s : seconds that the worker spent on them.
    num_rewritten : how many of them were written again, since they had run on; what came before is not counted.

    Returns
    -------
    dict
        JSON-ready: `num_*` sums, counts by source and by depth (index 0 = first drafted token), finish reasons, and
        `lengths`, the histogram of the texts' numbers of tokens.
    """
    reasons: dict[str, int] = {}
    for result in results:
        reasons[result.finish_reason] = reasons.get(result.finish_reason, 0) + 1
    return {
        "num_texts": len(results),
        "num_tokens": sum(len(result.token_ids) for result in results),
        "num_steps": sum(result.num_steps for result in results),
        "num_drafted": sum(result.num_drafted for result in results),
        "num_accepted": sum(result.num_accepted for result in results),
        "wall_s": wall_s,
        "num_rewritten": num_rewritten,
        "drafted_by_source": _named(sum_arrays(result.drafted_by_source for result in results)),
        "accepted_by_source": _named(sum_arrays(result.accepted_by_source for result in results)),
        "drafted_by_depth": sum_arrays(result.drafted_by_depth for result in results),
        "accepted_by_depth": sum_arrays(result.accepted_by_depth for result in results),
        "finish_reasons": reasons,
        "lengths": length_histogram([len(result.token_ids) for result in results]),
    }


def merge_stats(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Add up the statistics of several shards or sides. `wall_s` becomes worker-seconds."""
    parts = list(parts)
    merged: dict[str, Any] = {name: sum(part[name] for part in parts) for name in _SUMS}
    merged["num_rewritten"] = sum(part.get("num_rewritten", 0) for part in parts)  # shards from before have none
    for name in _BY_NAME:
        keys = dict.fromkeys(key for part in parts for key in part[name])
        merged[name] = {key: sum(part[name].get(key, 0) for part in parts) for key in keys}
    for name in _BY_DEPTH:
        merged[name] = sum_arrays(np.asarray(part[name]) for part in parts)
    merged["lengths"] = merge_lengths(part["lengths"] for part in parts)
    return merged


def length_histogram(lengths: Sequence[int]) -> dict[str, Any]:
    """`counts` of lengths, each of `bin_width` tokens, from 0; the width is the least power of two for few enough."""
    width = 1
    while max(lengths, default=0) >= width * MOST_LENGTH_BINS:
        width *= 2
    return {"bin_width": width, "counts": np.bincount(np.asarray(lengths, np.int64) // width).tolist()}


def merge_lengths(histograms: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The histogram of several passes' texts together: the same as of all their lengths at once."""
    histograms = list(histograms)
    width = max((part["bin_width"] for part in histograms), default=1)
    return {"bin_width": width, "counts": sum_arrays(_widened(part, width) for part in histograms)}


def _widened(part: dict[str, Any], width: int) -> np.ndarray:
    counts = np.asarray(part["counts"], np.int64)
    starts = np.arange(0, len(counts), width // part["bin_width"])
    return np.add.reduceat(counts, starts) if len(counts) else counts


def tokens_per_step(stats: dict[str, Any]) -> float | None:
    """Accepted draft tokens and the bonus token, per step; None without a step."""
    return 1 + stats["num_accepted"] / stats["num_steps"] if stats["num_steps"] else None


def tokens_per_s(stats: dict[str, Any]) -> float | None:
    """Tokens of finished texts per second; None when no time was spent."""
    return stats["num_tokens"] / stats["wall_s"] if stats["wall_s"] else None


def sum_arrays(arrays: Iterable[np.ndarray]) -> list[int]:
    """Element-wise sum of count arrays of any lengths, without trailing zeros."""
    total = np.zeros(0, np.int64)
    for array in arrays:
        if len(array) > len(total):
            total = np.pad(total, (0, len(array) - len(total)))
        total[: len(array)] += np.asarray(array, np.int64)
    return np.trim_zeros(total, "b").tolist()


def _named(counts: list[int]) -> dict[str, int]:
    return {name: (counts[code] if code < len(counts) else 0) for code, name in enumerate(SOURCE_NAMES)}
