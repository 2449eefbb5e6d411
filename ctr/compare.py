"""The CTR table: every model, with every variant of knowledge, from every seed, judged on interactions after the date.

The same seed gives models of plain texts and of the run's own texts the same initial weights and row order, and both
share one basis. The effect of a seed thus cancels in their difference, which `equivalence` judges.
"""

import datetime
import logging
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from laserbatch.ctr.dataset import CtrData, build_dataset
from laserbatch.ctr.equivalence import compare_paired, pair
from laserbatch.ctr.feature_set import FeatureSet, Side
from laserbatch.ctr.knowledge import FeatureVersions, Knowledge, build_knowledge, join_as_of
from laserbatch.ctr.log import EntityTables
from laserbatch.ctr.metrics import measure
from laserbatch.ctr.settings import CtrSettings
from laserbatch.ctr.training import MODEL_TITLES, train_model
from laserbatch.pipeline.storage.figures import CtrFigures, CtrScores, CtrVerdict

logger = logging.getLogger(__name__)

REFERENCES = ("none", "plain")  # variants that a run's own texts are compared with
ITEM_RATE = "Item rate"  # the baseline that any model must beat: each item's share of positives in training
RATE_PRIOR = 5  # this many rows of the mean rate are added to an item's rows

Scores = dict[str, np.ndarray]  # by title of the model: float32 (num_seeds, num_test)


@dataclass(frozen=True)
class CtrRow:
    """One training, judged on the test part."""

    model: str  # title of the model ("DIN")
    variant: str  # the knowledge: "none", "plain", or the verifier of the run's own texts ("relaxed")
    seed: int
    best_epoch: int  # epoch (of trees: round) that validation chose
    train_s: float
    validation_auc: float
    auc: float
    logloss: float  # mean binary cross-entropy, nats
    gauc: float | None  # mean AUC within users, weighted by rows
    calibration: float  # mean prediction minus share of positives
    auc_cold: float | None  # AUC of cold users; None if they have too few rows, or rows of only one label


def train_ctr(
    tables: EntityTables,
    features: Mapping[str, FeatureSet | None],
    as_of: datetime.date,
    settings: CtrSettings = CtrSettings(),
    on_fit: Callable[[CtrRow], object] = lambda row: None,
    versions: Mapping[str, Mapping[Side, FeatureVersions]] | None = None,
) -> CtrFigures:
    """Train and judge every model with every variant of knowledge.

    Raises CtrError if nothing follows the date, a label is missing, or features are of a later date (a leak).

    `tables` include interactions after `as_of`, the date of the run that made the features. `features` are
    `{"none": None, "plain": ..., "relaxed": ...}`; the run's own have the name of its verifier. `versions`, for
    `history: asof`, has the versions of features by variant and side. `on_fit` is called after each training.
    """
    data = build_dataset(tables, as_of, settings)
    with_knowledge = {variant: of_variant for variant, of_variant in features.items() if of_variant is not None}
    knowledge = build_knowledge(tables, data, with_knowledge, as_of, settings)
    rows: list[CtrRow] = []
    scores: dict[str, Scores] = {}  # by variant
    for variant in features:
        seen, of_variant = data, knowledge.get(variant)
        if settings.history == "asof" and of_variant is not None and versions is not None:
            seen, of_variant = join_as_of(tables, data, of_variant, versions[variant])
        fitted, scores[variant] = train_models(variant, data, seen, of_variant, settings, on_fit)
        rows += fitted
    own, plain = next((scores[name] for name in scores if name not in REFERENCES), None), scores.get("plain")
    return CtrFigures(
        split=describe_split(data),
        rows=[item_rate(data), *summarise(rows)],
        equivalence={} if own is None or plain is None else verdicts(data, own, plain, settings),
        seeds=[asdict(row) for row in rows],
    )


def describe_split(data: CtrData) -> dict[str, int]:
    """The number of rows of each part, and of test rows of some users: cold, without training rows, of one label."""
    split = {name: len(getattr(data, name)) for name in ("train", "validation", "test")}
    split["test_cold"] = int(data.is_cold[data.test].sum())
    split["test_unseen"] = int((~np.isin(data.users[data.test], data.users[data.train])).sum())
    rows = np.bincount(data.users[data.test])
    positives = np.bincount(data.users[data.test], data.labels[data.test])
    split["test_one_label"] = int(rows[(positives == 0) | (positives == rows)].sum())
    return split


def train_models(
    variant: str,
    data: CtrData,
    seen: CtrData,
    knowledge: Knowledge | None,
    settings: CtrSettings,
    on_fit: Callable[[CtrRow], object] = lambda row: None,
) -> tuple[list[CtrRow], Scores]:
    """Train every model from every seed; returns a row of metrics per training, and the scores of the test rows."""
    rows, scores = [], {}
    for model, seed in product(settings.models, range(settings.seed, settings.seed + settings.num_seeds)):
        trained = train_model(model, seen, knowledge, settings, seed)
        title, judged = MODEL_TITLES[model], _judged(data, trained.scores)
        row = CtrRow(title, variant, seed, trained.best_epoch, trained.train_s, trained.validation_auc, **judged)
        rows.append(row)
        scores.setdefault(title, []).append(trained.scores)
        logger.info("%s %s seed %d: AUC %.4f in %.1f s", title, variant, seed, row.auc, row.train_s)
        on_fit(row)
    return rows, {title: np.stack(of_seeds) for title, of_seeds in scores.items()}


def verdicts(data: CtrData, scores: Scores, others: Scores, settings: CtrSettings) -> dict[str, CtrVerdict]:
    """The verdict whether texts are as good as other texts, for each model and for all models together."""
    labels, users = data.labels[data.test], data.users[data.test]
    pairs = {model: pair(labels, users, scores[model], others[model]) for model in scores}
    return compare_paired(pairs, len(labels), settings.equivalence_margin, settings.confidence)


def item_rate(data: CtrData) -> CtrScores:
    """The metrics of a baseline that predicts each item's smoothed share of positives in training."""
    items, labels = data.items[data.train], data.labels[data.train]
    counts = np.bincount(items, minlength=data.num_items)
    rates = (np.bincount(items, labels, data.num_items) + RATE_PRIOR * labels.mean()) / (counts + RATE_PRIOR)
    return CtrScores(ITEM_RATE, "none", 1, **_judged(data, rates[data.items[data.test]]))


def _judged(data: CtrData, scores: np.ndarray) -> dict[str, Any]:
    """The metrics of predictions for the test rows, by field name of `CtrRow`."""
    labels, users, is_cold = (of_row[data.test] for of_row in (data.labels, data.users, data.is_cold))
    figures = asdict(measure(labels, scores, users, is_cold))
    return figures | {"calibration": figures.pop("mean_prediction") - figures.pop("base_rate")}


def summarise(rows: list[CtrRow]) -> list[CtrScores]:
    """A row for each model and variant: means, and sample standard deviations over seeds (None with one seed)."""
    grouped: dict[tuple[str, str], list[CtrRow]] = {}
    for row in rows:
        grouped.setdefault((row.model, row.variant), []).append(row)
    summary = []
    for (model, variant), of_both in grouped.items():
        scores: dict[str, float | None] = {}
        for name in ("auc", "logloss", "gauc", "calibration", "auc_cold"):
            values = [getattr(row, name) for row in of_both if getattr(row, name) is not None]  # of all seeds or none
            scores[name] = statistics.fmean(values) if values else None
            if name not in ("gauc", "calibration"):
                scores[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else None
        summary.append(CtrScores(model, variant, len(of_both), **scores))
    return summary
