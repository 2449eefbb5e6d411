"""A worker of nightly lists, with a recommender and tonight's catalogue as a trie; it takes one shard after another."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from laserbatch.pipeline.planning.plan import Shard
from laserbatch.pipeline.storage.figures import ModelFigures, ShardInfo, ShardRecord
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.quarantine import QuarantineRow
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.research.recommending.beams import BeamDrafter, BeamResult, ListedItems, ModelBeams, search
from laserbatch.research.recommending.code_trees import CodeTrees
from laserbatch.research.recommending.item_trie import ItemTrie
from laserbatch.research.recommending.lists import CATALOGUE_PATH, ListRow, lists_schema, lists_table, read_catalogue
from laserbatch.research.recommending.models import Recommender, load_recommender
from laserbatch.research.recommending.settings import ListSpec

TRIED_BATCHES = 4  # number of batches of users in a trial, spread over all shards
TRIED_SHARES = (1.5, 4.0)  # tried budgets (listed items, or beams of a small model), as multiples of a list's length
MIN_GAIN = 1.03  # drafts are used if they are this much faster than plain beam search


class ListWorker:
    """Lists items for the users of shards. Raises ModelError or TableError if model or codes cannot be used."""

    def __init__(self, spec: ListSpec) -> None:
        torch.set_num_threads(spec.num_threads)
        options = spec.options
        self._target = load_recommender(spec.model_dir, spec.device)
        self._small = None if options.draft_model is None else load_recommender(options.draft_model, spec.device)
        self._catalogue = read_catalogue(spec.run_dir / CATALOGUE_PATH, self._target.card.sizes)
        self._trie = ItemTrie.of(self._catalogue)
        model = self._target.model
        self._figures = ModelFigures(self._target.model_id, "float32", str(model.device), model.num_parameters())
        self._num_forwards, self._costliest_step_s, self._num_lists = 0, 0.0, 0
        self.reconfigure(spec)

    def reconfigure(self, spec: ListSpec) -> None:
        """Use another specification of the same model and catalogue."""
        self._spec = spec

    def progress(self) -> tuple[int, float, int]:
        """The forwards so far, the seconds of the slowest batch, and the finished lists."""
        return self._num_forwards, self._costliest_step_s, self._num_lists

    def warm_up(self) -> None:
        """Make a list that is not stored, so that code is loaded before the first shard."""
        self._search([ListRow("", np.zeros(1, np.int64), np.zeros(0, np.int64), "")], 1)

    def run(self, shard: Shard, budget: int = 0) -> ShardRecord:
        """Make the lists of a shard's users and write its files; `budget` is the number of drafted paths."""
        start_s, size = time.perf_counter(), self._spec.options.batch_size
        rows = self._read(shard)
        parts = (rows[start : start + size] for start in range(0, len(rows), size))
        results = [result for part in parts for result in self._search(part, budget)]
        good, quarantined = [], []
        for row, result in zip(rows, results, strict=True):
            if result.is_sound:
                good.append((row, result))
            else:
                message = "not-finite: the model's numbers for the user's history are not finite"
                quarantined.append(QuarantineRow.of(row.user_id, shard.side, message, row.fingerprint))
        schema = lists_schema(pa.array([row.user_id for row in rows]).type, self._catalogue.item_ids.type)
        table = lists_table(good, self._catalogue.item_ids, schema, self._spec.run_id, self._target.model_id)
        num_accepted = sum(result.num_accepted for result in results)
        num_tokens = self._trie.num_levels * len(results)
        stats = DecodingStats(
            num_texts=len(results), num_tokens=num_tokens, num_steps=num_tokens - num_accepted,
            num_accepted=num_accepted, wall_s=time.perf_counter() - start_s,
        )  # fmt: skip
        info = ShardInfo(shard.sha256, shard.group, stats, self._figures, self._spec.num_workers)
        return RunFolder(self._spec.run_dir).shards(shard.side).write(shard.name, table, quarantined, info)

    def tried_drafts(self, shards: Sequence[Shard]) -> dict[int, float]:
        """Time some batches; the seconds by number of drafted paths. 0 is plain beam search."""
        options = self._spec.options
        chosen = [shards[place] for place in np.linspace(0, len(shards) - 1, TRIED_BATCHES).astype(int).tolist()]
        batches = [self._read(shard)[: options.batch_size] for shard in chosen]
        return tried_seconds(batches, options.num_items, self._search)

    def _read(self, shard: Shard) -> list[ListRow]:
        return ListRow.of_table(read_parquet(self._spec.run_dir / shard.path))

    def _search(self, rows: Sequence[ListRow], budget: int) -> list[BeamResult]:
        start_s, size, codes = time.perf_counter(), self._spec.options.num_items, self._catalogue.codes

        def trees_of(model: Recommender) -> CodeTrees:
            prompts = [model.card.prompt(codes[row.history]) for row in rows]
            return CodeTrees(model.model, self._trie, model.card.first_tokens, prompts)

        trees, drafter = trees_of(self._target), BeamDrafter()
        if budget and self._small is not None:
            drafter = ModelBeams(trees_of(self._small), self._trie, len(rows), max(budget, size))
        elif budget:
            drafter = ListedItems([list(map(tuple, codes[row.drafts].tolist())) for row in rows], self._trie, budget)
        left_out = None
        if not self._spec.options.list_again:  # a user who has had nearly all items gets a shorter list
            left_out = [self._trie.emptied_by(codes[np.unique(row.history)]) for row in rows]
        results = search(trees, self._trie, len(rows), size, drafter, left_out)
        self._num_forwards += trees.num_forwards
        self._costliest_step_s = max(self._costliest_step_s, time.perf_counter() - start_s)
        self._num_lists += len(rows)
        return results


def tried_seconds(batches: Sequence[Any], num_items: int, run: Callable[[Any, int], object]) -> dict[int, float]:
    """Time batches of users; the seconds by draft budget. 0 is plain beam search.

    `run` makes the lists of a batch, of `num_items` items each, with a budget.
    """
    budgets = [0, *(round(share * num_items) for share in TRIED_SHARES)]
    seconds = dict.fromkeys(budgets, 0.0)
    for number, batch in enumerate([batches[-1], *batches]):  # the first one warms up
        for place in range(len(budgets)):
            budget = budgets[(number + place) % len(budgets)]
            start_s = time.perf_counter()
            run(batch, budget)
            seconds[budget] += (time.perf_counter() - start_s) * (number > 0)
    return seconds


def fastest(seconds: dict[int, float]) -> tuple[int, float]:
    """The budget to draft with (0 below MIN_GAIN), and the speed-up of the fastest budget over plain beam search."""
    best = min(seconds, key=lambda budget: seconds[budget])
    gain = seconds[0] / seconds[best]
    return best if gain >= MIN_GAIN else 0, gain
