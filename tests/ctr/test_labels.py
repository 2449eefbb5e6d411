"""The label rule: its positives, the data that it refuses; and negatives that no user has met."""

import numpy as np
import pyarrow as pa
import pytest
from ctr_world import AS_OF
from pydantic import ValidationError

from laserbatch.ctr.compare import describe_split
from laserbatch.ctr.dataset import build_dataset
from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.labels import LabelRule, sample_negatives
from laserbatch.ctr.log import read_log
from laserbatch.ctr.settings import CtrSettings
from laserbatch.jobs.report.ctr_table import ctr_lead
from laserbatch.pipeline.storage.figures import CtrFigures, CtrScores


@pytest.mark.parametrize(
    ("rule", "values", "labels"),
    [
        ("rating >= 4", [5.0, 4.0, 3.5, None], [True, True, False, None]),
        ("rating>3.5", [5, 3, None], [True, False, None]),
        ("paid >= 5", [10**18 + 1, 3], [True, False]),
        ("paid", [10**18 + 1, 0], [True, False]),
        ("clicked", [True, False, None], [True, False, None]),
        ("clicked", [2, 0], [True, False]),
        ("clicked == true", [True, False], [True, False]),
        ("geöffnet.am_tag", [1, 0], [True, False]),
        ("event == 'buy'", ["buy", "view", None], [True, False, None]),
        ('event != "view"', ["buy", "view"], [True, False]),
        ("rating is not null", [1.0, None], [True, False]),
    ],
)
def test_rules_say_which_rows_are_positives_and_what_is_null_is_unknown(rule, values, labels):
    assert LabelRule.parse(rule).labels(pa.array(values)).to_pylist() == labels


@pytest.mark.parametrize(
    "rule",
    [
        "",
        "rating >=",
        "rating >= four",
        "rating >= 4 or clicked",
        "__import__('os').system('x')",
        "f(rating)",
        "code == 9007199254740993",  # 2**53 + 1, which no float is
    ],
)
def test_what_is_no_rule_is_refused_where_settings_are_read(rule):
    with pytest.raises(ValidationError, match=r"Value error, ['\"]"):
        CtrSettings(label=rule)
    with pytest.raises(CtrError, match=r"^ctr\.label: "):
        LabelRule.parse(rule)


def test_rows_without_a_label_are_left_out_unless_the_rule_asks_for_them(world, caplog):
    ratings = world.interactions["rating"].to_pylist()
    mixed = world.interactions.set_column(3, "rating", pa.array([None, *ratings[1:-1], None], pa.float64()))
    tables = type("Tables", (), {"users": world.users, "items": world.items, "interactions": mixed})
    assert len(read_log(tables, "rating >= 4").users) == len(ratings) - 2
    assert "2 of 5000 interactions have no rating" in caplog.text
    log = read_log(tables, "rating is not null")
    assert len(log.users) == len(ratings) and log.labels.sum() == len(ratings) - 2
    words = pa.array(["buy", *["Buy "] * (len(ratings) - 2), "view"])
    tables.interactions = mixed.append_column("event", words)
    assert read_log(tables, "event == 'buy'").labels.sum() == 1
    assert "takes only one of the values ['buy', 'Buy '] of event" in caplog.text


def test_sampled_negatives_are_items_not_met_and_those_of_training_know_nothing_of_later_rows():
    rng = np.random.default_rng(0)
    users, items = rng.integers(400, size=2000, dtype=np.int32), rng.geometric(0.05, size=2000).astype(np.int32) % 60
    items[:1000] %= 40  # twenty items appear only after training
    rows, drawn = sample_negatives(users, items, 1000, 61, 3, seed=0)
    met = set(zip(users.tolist(), items.tolist(), strict=True))
    is_later = rows >= 1000
    assert not met & set(zip(users[rows[is_later]].tolist(), drawn[is_later].tolist(), strict=True))
    _, of_training = sample_negatives(users[:1000], items[:1000], 1000, 61, 3, seed=0)
    assert np.array_equal(drawn[~is_later], of_training)
    assert drawn[rows < 1000].max() < 40 <= drawn[rows >= 1000].max() < 60
    assert len(rows) == 6000
    counts, negatives = np.bincount(items[:1000], minlength=61), np.bincount(drawn[rows < 1000], minlength=61)
    rarest, commonest = np.argsort(counts[:40])[:10], np.argsort(counts[:40])[-10:]
    ratio = negatives[rarest].sum() / negatives[commonest].sum()
    assert ratio > 1


def test_views_alone_train_with_the_rate_that_is_asked_for(world):
    views = world.interactions.drop_columns(["rating"])
    tables = type("Tables", (), {"users": world.users, "items": world.items, "interactions": views})
    data = build_dataset(tables, AS_OF, CtrSettings(label="all", negatives_per_positive=2))
    assert data.labels.mean() == pytest.approx(1 / 3, abs=0.01) and len(data.labels) == pytest.approx(15_000, rel=0.01)
    again = build_dataset(tables, AS_OF, CtrSettings(label="all", negatives_per_positive=2))
    assert np.array_equal(data.items, again.items)


def test_users_who_met_every_item_are_named_since_they_raise_auc_but_not_gauc(world, caplog):
    first = world.items["item_id"][:40]
    keen = pa.table({"user_id": ["u3"] * 40, "item_id": first, "timestamp": world.interactions["timestamp"][-40:]})
    views = pa.concat_tables([world.interactions.drop_columns(["rating"]), keen])
    tables = type("Tables", (), {"users": world.users, "items": world.items.slice(0, 40), "interactions": views})
    split = describe_split(build_dataset(tables, AS_OF, CtrSettings(label="all", negatives_per_positive=1)))
    assert "which raises AUC, since a model need only know the users. Judge by GAUC instead" in caplog.text
    assert 40 <= split["test_one_label"] < split["test"]
    lead = ctr_lead(CtrFigures(split=split, rows=[CtrScores("DIN", "none", 1, None, None, None)]))
    assert "of users with only positives or only negatives, whom AUC counts and GAUC does not" in lead
