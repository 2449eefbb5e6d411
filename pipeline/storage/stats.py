"""Counts of decoding, which add up over texts, shards and sides and have the same names from engine to report."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from laserbatch.retrieval_pools.sources import SOURCE_NAMES

# Counts that the engine's results have under the same names.
_COUNTS_OF_RESULTS = ("num_steps", "num_drafted", "num_accepted", "num_invented", "num_thought_tokens",
                      "num_prompt_reused")  # fmt: skip


@dataclass(frozen=True)
class DecodingStats:
    """The counts of finished texts."""

    num_texts: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0  # draft tokens
    num_rewritten: int = 0  # texts that ran on and were written again; only the second attempt is counted
    wall_s: float = 0.0  # of a worker; for a run, the sum over shards, each divided by the number of parallel workers
    drafted_by_source: dict[str, int] = field(default_factory=dict)  # draft tokens
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    repairs: dict[str, int] = field(default_factory=dict)  # texts by the repair that they needed to be parsed
    graph_counts: dict[str, int] = field(default_factory=dict)  # CUDA: captures, failed ones, replayed and eager steps
    role_marks: dict[str, int] = field(default_factory=dict)  # texts by the role mark that ended them, not an end token
    num_invented: int = 0  # tokens that were written after such a mark and cut
    num_thinking: int = 0  # texts with thoughts before the answer
    num_thought_tokens: int = 0  # tokens of these thoughts, which were cut
    num_prompt_tokens: int = 0
    num_prompt_reused: int = 0  # prompt tokens that another prompt had left in the KV cache

    @classmethod
    def of(
        cls,
        results: Sequence[Any],
        wall_s: float,
        num_rewritten: int = 0,
        repairs: dict[str, int] | None = None,
        graph_counts: dict[str, int] | None = None,
    ) -> "DecodingStats":
        """The counts of the engine's results for the texts of one shard."""

        def by_source(name: str) -> dict[str, int]:
            counts = sum((getattr(result, name) for result in results), np.zeros(len(SOURCE_NAMES), np.int64))
            return dict(zip(SOURCE_NAMES, counts.tolist(), strict=True))

        return cls(
            num_texts=len(results),
            num_tokens=sum(len(result.token_ids) for result in results),
            num_rewritten=num_rewritten,
            wall_s=wall_s,
            drafted_by_source=by_source("drafted_by_source"),
            accepted_by_source=by_source("accepted_by_source"),
            finish_reasons=dict(Counter(result.finish_reason for result in results)),
            repairs=repairs or {},
            graph_counts=graph_counts or {},
            role_marks=dict(Counter(result.role_mark for result in results if result.role_mark)),
            num_thinking=sum(result.num_thought_tokens > 0 for result in results),
            num_prompt_tokens=sum(result.num_prompt for result in results),
            **{name: sum(getattr(result, name) for result in results) for name in _COUNTS_OF_RESULTS},
        )

    @classmethod
    def total(cls, parts: Iterable["DecodingStats"]) -> "DecodingStats":
        """The sum of several counts."""
        parts, totals = [cls(), *parts], {}
        for name, none in vars(cls()).items():
            values = [getattr(part, name) for part in parts]
            if isinstance(none, dict):
                counts = Counter()
                for value in values:
                    counts.update(value)
                totals[name] = dict(counts)
            else:
                totals[name] = sum(values)
        return cls(**totals)

    @property
    def has_guesses(self) -> bool:
        """Whether tokens were drafted that the model might have rejected; tokens that a form forces do not count."""
        return self.num_drafted > self.drafted_by_source.get("form", 0)

    @property
    def acceptance_length(self) -> float | None:
        """Accepted draft tokens per step, without the bonus token; None without a step."""
        return self.num_accepted / self.num_steps if self.num_steps else None

    @property
    def tokens_per_step(self) -> float | None:
        """Accepted draft tokens and the bonus token per step; None without a step."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of finished texts per second; None if no time was spent."""
        return self.num_tokens / self.wall_s if self.wall_s else None

    @property
    def drafted_per_step(self) -> float | None:
        """Draft tokens per step, without those that an answer's form forces; None without a step."""
        num_offered = self.num_drafted - self.drafted_by_source.get("form", 0)
        return num_offered / self.num_steps if self.num_steps else None
