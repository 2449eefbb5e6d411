"""Drafts from pools inside vLLM: a proposer for its `custom_class`.

    speculative_config={"method": "custom_class", "num_speculative_tokens": 8,
                        "model": "laserbatch.retrieval_pools.integrations.vllm.PoolProposer"}

vLLM passes the tokens of a batch without request ids: a text is recognised by its tokens, its group and previous text
are found by its prompt. vLLM verifies; greedily, its texts are the same as without drafts. See docs/vllm.md.
"""

import json
import logging
import os
import sys
from collections.abc import Hashable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.manifest import tokenizer_hash
from laserbatch.retrieval_pools.library import DraftBudget, OpenPool, open_pool
from laserbatch.retrieval_pools.routing.route_table import RouteTable
from laserbatch.retrieval_pools.step_cost import StepCost

logger = logging.getLogger(__name__)

SETTINGS_VARIABLE = "LASERBATCH_DRAFTS"
MEASURE = "laserbatch.retrieval_pools.integrations.vllm_steps"
EVIDENCE = 64.0  # number of expected tokens that count as verified at the start
UNCHECKED_TRUST = 0.5  # initial trust in the estimates of a pool that was never calibrated


def _fault(error: Exception) -> str:
    """Describe what is wrong with a file; a wrong key by its name and value."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    shown = "" if first["type"] in ("missing", "json_invalid") else f" (found {str(first['input'])[:60]})"
    return f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}{shown}".removeprefix(": ")


def read_step_cost(path: Path) -> StepCost:
    """Read the step cost that `vllm_steps` wrote.

    Raises PoolError if the file is missing or holds something else; the message names the key and its value.
    """
    try:
        return StepCost.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise PoolError(f"{path} is not a step cost ({_fault(error)}); python -m {MEASURE} measures one") from None


class ProposerSettings(BaseModel, frozen=True, extra="forbid"):
    """The JSON object in the file that LASERBATCH_DRAFTS names; its paths are relative to the file.

    The file may have a list of them for several pools: a prompt uses the one whose routes know it, or the first. All
    must have the same `step_cost` and `min_acceptance`.
    """

    pools: Path  # a workspace's `pools` folder
    side: Literal["user", "item"]
    version: str | None = None  # None: the current version
    routes: Path | None = None  # `routing.route_table`; None: all texts count the same, and there are no previous texts
    step_cost: Path | None = None  # as `vllm_steps` measures it; None: every token that is likely enough is drafted
    min_acceptance: float = Field(default=0.05, ge=0, le=1)  # tokens with a lower estimate of their path are left out

    @classmethod
    def read(cls) -> "tuple[ProposerSettings, ...]":
        """Read the file that LASERBATCH_DRAFTS names. Raises PoolError, which names a wrong key and its value."""
        if SETTINGS_VARIABLE not in os.environ:
            raise PoolError(f"{SETTINGS_VARIABLE} is not set; set it to the JSON file that says what to draft from")
        path = Path(os.environ[SETTINGS_VARIABLE])
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            raw = raw if isinstance(raw, list) and raw else [raw]
            entries = TypeAdapter(tuple[ProposerSettings, ...]).validate_python(raw)
        except (OSError, ValueError) as error:
            raise PoolError(f"{path} does not say what to draft from: {_fault(error)}") from None
        for name in ("step_cost", "min_acceptance"):
            for number, entry in enumerate(entries):
                if (value := getattr(entry, name)) != (first := getattr(entries[0], name)):
                    raise PoolError(
                        f"{path}: {name} is {value} in entry {number} and {first} in entry 0; all pools share one. "
                        "Give all entries the same."
                    )
        return tuple(entry._beside(path.parent) for entry in entries)

    def _beside(self, folder: Path) -> "ProposerSettings":
        paths = {name: getattr(self, name) for name in ("pools", "routes", "step_cost")}
        return self.model_copy(update={name: folder / path for name, path in paths.items() if path is not None})

    def open(self, model: Path | str) -> tuple[OpenPool, RouteTable | None, StepCost | None]:
        """Open the named files. Raises PoolError if one is missing, or the pool has another tokenizer."""
        expected = tokenizer_hash(Path(model))
        pools = open_pool(self.pools, self.side, self.version, tokenizer_hash=expected)
        routes = None if self.routes is None else RouteTable(self.routes)
        return pools, routes, None if self.step_cost is None else read_step_cost(self.step_cost)


def started(name: Hashable, prompt: np.ndarray, opened: Sequence[tuple[OpenPool, RouteTable | None]]) -> OpenPool:
    """Start a text in the pool whose routes know its prompt, int[n], otherwise in the first; returns that pool."""
    chosen, route = opened[0][0], (None, None)
    for pools, routes in opened:
        if routes is not None and (match := routes.find(prompt)) is not None:
            chosen, route = pools, match
            break
    chosen.start(name, prompt, *route)
    return chosen


def worth_drafting(acceptance: np.ndarray, text_of: np.ndarray, num_texts: int, cost: StepCost) -> np.ndarray:
    """The number of tokens of each chain to draft, for the most tokens per second; all 0 is a plain step.

    `acceptance`, float64[n], is the probability that the path to each token is accepted, chain after chain. It never
    rises along a chain, so the k likeliest tokens of a step always form beginnings of chains. `text_of`, int64[n], is
    the text of each token's chain.
    """
    likeliest = np.argsort(-acceptance, kind="stable")
    num_written = num_texts + np.append(0.0, np.cumsum(acceptance[likeliest]))
    speed = num_written / cost.seconds_between(num_texts, np.arange(len(acceptance) + 1))
    return np.bincount(text_of[likeliest[: int(np.argmax(speed))]], minlength=num_texts)


class PoolProposer:
    """Proposes chains from a pool. Made and called by vLLM.

    A failed draft counts as empty, is counted (`num_failed`) and logged once; it does not stop the batch. Estimates are
    scaled by the ratio of accepted to expected tokens so far, if that is below 1.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Raises PoolError if a pool has another tokenizer, or a file that the settings name is missing."""
        settings, model = ProposerSettings.read(), vllm_config.model_config
        entries = [entry.open(model.tokenizer or model.model) for entry in settings]
        self._opened = [entry[:2] for entry in entries]
        self._pools = [pools for pools, _ in self._opened]
        self._cost = entries[0][2]
        self._max_model_len = model.max_model_len
        max_tokens = vllm_config.speculative_config.num_speculative_tokens
        self._budget = DraftBudget(max_tokens, settings[0].min_acceptance, "chain")
        self._pool_of: dict[int, OpenPool] = {}  # by text
        self._at_row: dict[int, int] = {}  # the last text of each row of the batch
        self._recent: dict[int, None] = {}  # texts, the latest last: one that left the batch may come back
        self._max_recent = 2 * vllm_config.scheduler_config.max_num_seqs
        self._drafted: dict[int, tuple[int, float]] = {}  # tokens under verification, and how many should be accepted
        self.num_started = self.num_failed = self.num_drafted = self.num_accepted = 0
        are_calibrated = (opened.pool is not None and opened.pool.is_calibrated for opened in self._pools)
        prior = 1.0 if all(are_calibrated) else UNCHECKED_TRUST
        self._num_right, self._num_expected = prior * EVIDENCE, EVIDENCE
        first = self._pools[0]
        first.start(-1, np.zeros(1, np.int32))
        first.draft([-1], self._budget)  # compiles
        first.finish(-1)

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """Does nothing: there is no model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for each row of the batch.

        Parameters
        ----------
        sampled_token_ids : the tokens that the last step added to each row; empty while a prompt is still being read.
        num_tokens_no_spec : int[rows], number of tokens of each row, including those of the last step.
        token_ids_cpu : int32[rows or more, max_model_len], all tokens of each row.

        Returns
        -------
        For each row at most `num_speculative_tokens` tokens; none where drafting does not pay.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        try:
            rows, names = [], []
            for row, sampled in enumerate(sampled_token_ids):
                length = int(num_tokens_no_spec[row])
                if len(sampled) and length < self._max_model_len:
                    rows.append(row)
                    names.append(self._text_of(row, token_ids_cpu[row, :length], len(sampled)))
            for row, draft in zip(rows, self._drafts_of(names), strict=True):
                drafts[row] = draft[: self._max_model_len - int(num_tokens_no_spec[row])]
            while len(self._recent) > self._max_recent:
                del self._recent[name := next(iter(self._recent))]
                self._drafted.pop(name, None)
                self._pool_of.pop(name).finish(name)
        except Exception:  # vLLM goes on without a draft, so a fault of ours does not lose a batch
            self.num_failed += 1
            if self.num_failed == 1:
                logger.exception("a draft failed: the step runs without it, and later failures are not logged")
        return drafts

    def _text_of(self, row: int, tokens: np.ndarray, num_sampled: int) -> int:
        """The name of the text with these tokens: a known text that had all but the sampled ones, or a new text."""
        before = tokens[: len(tokens) - num_sampled]
        candidates = (name for name in (self._at_row.get(row), *reversed(self._recent)) if name in self._recent)
        name = next((name for name in candidates if np.array_equal(self._pool_of[name].context(name), before)), None)
        if name is None:
            name = self.num_started
            self._pool_of[name] = started(name, before, self._opened)
            self.num_started += 1
        self._recent.pop(name, None)
        self._recent[name] = None
        self._at_row[row] = name
        self._pool_of[name].accept(name, tokens[len(before) :])
        num_drafted, num_expected = self._drafted.pop(name, (0, 0.0))
        num_accepted = min(num_sampled - 1, num_drafted)
        self.num_drafted, self.num_accepted = self.num_drafted + num_drafted, self.num_accepted + num_accepted
        self._num_expected, self._num_right = self._num_expected + num_expected, self._num_right + num_accepted
        return name

    def _drafts_of(self, requested: list[int]) -> list[list[int]]:
        if not requested:
            return []
        names = sorted(requested, key=lambda name: self._pools.index(self._pool_of[name]))  # together by pool
        drafted = [list(pool_names) for _, pool_names in groupby(names, self._pool_of.get)]
        drafted = [self._pool_of[pool_names[0]].draft(pool_names, self._budget).joined() for pool_names in drafted]
        num_tokens, token_ids, _, log_acceptance, _ = (np.concatenate(parts) for parts in zip(*drafted, strict=True))
        acceptance = np.exp(log_acceptance, dtype=np.float64)
        lengths, begins = num_tokens, np.cumsum(num_tokens) - num_tokens
        if self._cost is not None:
            trusted = acceptance * min(1.0, self._num_right / self._num_expected)
            lengths = worth_drafting(trusted, np.repeat(np.arange(len(names)), num_tokens), len(names), self._cost)
        drafts = {}
        for name, begin, number in zip(names, begins.tolist(), lengths.tolist(), strict=True):
            drafts[name] = token_ids[begin : begin + number].tolist()
            self._drafted[name] = number, float(acceptance[begin : begin + number].sum())
        return [drafts[name] for name in requested]


def main() -> None:
    """Check that all that the proposer needs for a model is there: `python -m ...integrations.vllm MODEL`."""
    try:
        for settings in ProposerSettings.read():
            settings.open(sys.argv[1])
    except PoolError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
