"""`ctr.history`: the texts that a training row sees."""

import dataclasses
import datetime

import numpy as np
import pyarrow as pa
import pytest
from ctr_world import AS_OF, DAY_US, DIM, make_features

from laserbatch.ctr.compare import train_ctr
from laserbatch.ctr.dataset import build_dataset
from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.knowledge import build_knowledge, join_as_of
from laserbatch.ctr.settings import CtrSettings


@dataclasses.dataclass
class Planted:
    """Versions of all entities of a table but the first, each valid from a day on: rows by entity, then by day."""

    ids: pa.Array
    from_days: np.ndarray
    vectors: np.ndarray
    codes: np.ndarray

    @property
    def rows(self):
        return np.arange(len(self.vectors))

    def of(self, ids, days):
        entities = np.array([self.ids.index(entity_id).as_py() for entity_id in ids])
        newest = np.searchsorted(self.from_days, days, side="right") - 1
        return np.where((newest < 0) | (entities == 0), -1, entities * len(self.from_days) + newest)


def planted(table, side, days):
    ids = table[f"{side}_id"].combine_chunks()
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(len(ids) * len(days), DIM)).astype(np.float32)
    codes = rng.integers(-1, 8, (len(vectors), 2)).astype(np.int32)
    return Planted(ids, np.array(days), vectors, codes)


def test_training_rows_see_what_is_older_than_they_and_the_others_the_runs_own(world):
    settings = CtrSettings(history="asof")
    data = build_dataset(world, AS_OF, settings)
    own = build_knowledge(world, data, {"relaxed": make_features(world)}, AS_OF, settings)["relaxed"]
    last = (AS_OF - datetime.date(1970, 1, 1)).days
    versions = {side: planted(getattr(world, f"{side}s"), side, [last - 20, last - 9]) for side in ("user", "item")}
    seen, knowledge = join_as_of(world, data, own, versions)
    reduced = knowledge.basis.reduce(
        {
            side: dataclasses.replace(getattr(own, side), vectors=of.vectors, codes=1 + of.codes)
            for side, of in versions.items()
        }
    )
    days = data.times_us[data.train] // DAY_US
    for side, before, now in (("user", data.users, seen.users), ("item", data.items, seen.items)):
        of_side = getattr(knowledge, side)
        rows = versions[side].of(versions[side].ids.take(before[data.train]), days)
        expected = np.where((rows < 0)[:, None], 0, reduced[side].vectors[rows])
        assert np.array_equal(of_side.vectors[now[data.train]], expected) and 0 < (rows < 0).sum() < len(rows)
        assert np.array_equal(
            of_side.codes[now[data.train]], np.where((rows < 0)[:, None], 0, reduced[side].codes[rows])
        )
        later = np.concatenate([data.validation, data.test])
        assert np.array_equal(now[later], before[later])
        for old_field, field in zip(getattr(data, f"{side}_fields"), getattr(seen, f"{side}_fields"), strict=True):
            assert np.array_equal(field.codes[now], old_field.codes[before])
    assert np.array_equal(of_side.vectors[data.liked], own.item.vectors[data.liked])  # histories use the run's own
    for model in ("din", "gbdt"):
        chosen = settings.model_copy(update={"models": (model,), "num_seeds": 1, "max_epochs": 1})
        figures = train_ctr(world, {"relaxed": make_features(world)}, AS_OF, chosen, versions={"relaxed": versions})
        assert figures.rows[1].auc > 0.5
    none = {side: planted(getattr(world, f"{side}s"), side, [last + 1]) for side in ("user", "item")}
    with pytest.raises(CtrError, match="no training row has features that are older"):
        join_as_of(world, data, own, none)


def test_a_split_trains_on_what_follows_the_date_and_judges_what_follows_that(world):
    whole, data = (build_dataset(world, AS_OF, CtrSettings(history=name)) for name in ("latest", "split"))
    assert whole.train[-1] + 1 == data.train[0] and data.test[-1] == len(data.labels) - 1
    num_after = len(data.labels) - len(whole.train)
    assert [len(part) / num_after for part in (data.train, data.validation, data.test)] == pytest.approx(
        [0.5, 0.15, 0.35], abs=0.02
    )
    assert (data.starts[data.train] < data.ends[data.train]).any()  # interactions before the date are history
