"""The inputs of a night's lists: the catalogue with its codes, the histories, and the most popular items."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.jobs.console import say
from laserbatch.jobs.settings import Settings
from laserbatch.pipeline.encoding.schema import vectors_of
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.knowledge.histories import Histories
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.read import Tables
from laserbatch.research.recommending.card import KnownRecommender, codes_of_recommender, known_recommender
from laserbatch.research.recommending.codes import ItemCodes, with_new_items
from laserbatch.research.recommending.lists import lists_schema
from laserbatch.research.recommending.planned import list_fingerprints
from laserbatch.research.recommending.settings import RecommendingSettings


def known_models(options: RecommendingSettings) -> tuple[KnownRecommender, ItemCodes]:
    """The configured recommender and its codes; weights are not loaded.

    Raises ConfigError if none is configured, and ModelError or TableError if a folder holds no recommender or codes, or
    the draft model has other codes.
    """
    target = known_recommender(options.required_model)
    codes = codes_of_recommender(options.required_model, target)
    if options.draft_model is not None:
        known_recommender(options.draft_model).require_drafts_for(target)
    return target, codes


def known_histories(tables: Tables, codes: ItemCodes) -> list[np.ndarray]:
    """The history of each user, oldest first, as rows of `codes`; items without codes are left out."""
    by_user = Histories(tables)
    places, starts = by_user.newest(np.arange(tables.users.num_rows), tables.interactions.num_rows)
    rows = codes.rows_of(tables.items["item_id"].combine_chunks())[by_user.items[places]]
    histories = [rows[start:stop] for start, stop in pairwise(starts)]
    return [history[history >= 0] for history in histories]


@dataclass
class Lists:
    """The inputs of a night's lists. Items are rows of `catalogue`, which has only items with codes."""

    settings: Settings
    tables: Tables
    target: KnownRecommender
    codes: ItemCodes
    catalogue: ItemCodes = field(init=False)

    @property
    def options(self) -> RecommendingSettings:
        return self.settings.extension("recommending")

    def __post_init__(self) -> None:
        item_ids = self.tables.items["item_id"].combine_chunks()
        codes, num_items = self.codes, self.options.num_items
        num_new = len(item_ids) - len(codes.of_catalogue(item_ids))
        if num_new:
            codes = self._with_new_items(item_ids)
        self.catalogue = codes.of_catalogue(item_ids)
        if num_new:
            num_without = len(item_ids) - len(self.catalogue)
            say(
                f"the recommender has no codes for {num_new} items: {num_new - num_without} get the codes of the most "
                f"similar item with a new last code, {num_without} have no vector or no free code and are not listed"
            )
        if num_items > len(self.catalogue):
            raise ConfigError(
                f"extensions.recommending.num_items is {num_items}, but only {len(self.catalogue)} items of the "
                "catalogue have codes: lower it"
            )

    def _with_new_items(self, item_ids: pa.Array) -> ItemCodes:
        """The codes, extended to new items that have vectors in the published run of texts."""
        if not self.settings.workspace.is_dir():
            return self.codes
        run = Workspace.open(self.settings.workspace, create=False).publication.run()
        if run is None or not run.features_path("item").exists():
            return self.codes
        features = read_parquet(run.features_path("item"), ["item_id", "vector"])
        if features["item_id"].type != item_ids.type:
            return self.codes
        features = features.filter(pc.is_in(features["item_id"], value_set=item_ids))
        return with_new_items(self.codes, features["item_id"].combine_chunks(), vectors_of(features))

    @cached_property
    def user_ids(self) -> pa.Array:
        return self.tables.users["user_id"].combine_chunks()

    @property
    def schema(self) -> pa.Schema:
        return lists_schema(self.user_ids.type, self.catalogue.item_ids.type)

    @cached_property
    def histories(self) -> list[np.ndarray]:
        return known_histories(self.tables, self.catalogue)

    @cached_property
    def popular(self) -> tuple[np.ndarray, np.ndarray]:
        """The items that the most histories hold, the most popular first, and the number of histories of each."""
        listed = np.concatenate([np.empty(0, np.int64), *(np.unique(history) for history in self.histories)])
        counts = np.bincount(listed, minlength=len(self.catalogue))
        rows = np.argsort(-counts, kind="stable")[: self.options.num_items]
        return rows, counts[rows].astype(float)

    @cached_property
    def fingerprints(self) -> pa.Array:
        options = self.options
        request = f"{self.target.model_id} {options.num_items} {options.list_again or 'never'}"
        return list_fingerprints(self.catalogue, self.histories, request, self.popular[0])

    def popular_lists(self, users: np.ndarray, run_id: str) -> pa.Table:
        """The lists of users without a history."""
        rows, counts = self.popular
        user_ids = self.user_ids.take(pa.array(users))
        shared = {
            "items": self.catalogue.item_ids.take(pa.array(rows)).to_pylist(), "scores": counts.tolist(),
            "route": "popular", "last_item": None, "run_id": run_id, "model_id": self.target.model_id,
            "is_stale": False,
        }  # fmt: skip
        of_users = {"entity_id": user_ids, "fingerprint": self.fingerprints.take(pa.array(users))}
        columns = [
            of_users.get(field.name, pa.array([shared.get(field.name)] * len(users), field.type))
            for field in self.schema
        ]
        return pa.table(columns, schema=self.schema)
