"""The CTR table: every model, with every variant of knowledge, from every seed, judged on what came after the date.

Whether the run's own texts are as good as plain ones is told by paired differences over seeds, an interval, and a
verdict. The same seed gives both the same row order, so that what a seed does to both cancels in the difference. An
interval that is wider than the margin proves nothing either way, and the verdict says so.
"""

import datetime
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from scipy import stats

from laserbatch.ctr.dataset import CtrData, EntityTables, Knowledge, build_dataset, build_knowledge
from laserbatch.ctr.feature_set import FeatureSet
from laserbatch.ctr.metrics import measure
from laserbatch.ctr.settings import CtrSettings, ModelName
from laserbatch.ctr.training import MODEL_TITLES, train_model
from laserbatch.pipeline.storage.manifest import CtrFigures, CtrScores, CtrVerdict

logger = logging.getLogger(__name__)

REFERENCES = ("none", "plain")  # variants that a run's own is compared with


@dataclass(frozen=True)
class CtrRow:
    """One training, judged on the test part."""

    model: str  # as people read it ("DIN")
    variant: str  # which knowledge: "none", "plain", or, of the run's own, its verifier ("relaxed")
    seed: int
    best_epoch: int  # epoch (of trees: round) that validation chose
    train_s: float
    validation_auc: float
    auc: float
    logloss: float  # mean binary cross-entropy, nats
    auc_cold: float | None  # of cold users; None when there are too few of them, or they lack a label


def train_ctr(
    tables: EntityTables,
    features: Mapping[str, FeatureSet | None],
    as_of: datetime.date,
    settings: CtrSettings | None = None,
    on_fit: Callable[[CtrRow], None] | None = None,
) -> CtrFigures:
    """Train and judge every model with every variant of knowledge.

    Raises CtrError where nothing follows the date, one label is missing, or features are of a later date (a leak).

    Parameters
    ----------
    tables : users, items and interactions, those after `as_of` too.
    features : `{"none": None, "plain": ..., "relaxed": ...}`; the run's own has the name of its verifier.
    as_of : the date of the run that made the features.
    on_fit : called after each training.
    """
    settings = settings or CtrSettings()
    data = build_dataset(tables, as_of, settings)
    rows = []
    for variant, of_variant in features.items():
        knowledge = None if of_variant is None else build_knowledge(tables, data, of_variant, as_of, settings)
        for model in settings.models:
            for row in _train_seeds(model, variant, data, knowledge, settings):
                rows.append(row)
                logger.info("%s %s seed %d: AUC %.4f in %.1f s", row.model, variant, row.seed, row.auc, row.train_s)
                if on_fit is not None:
                    on_fit(row)
    split = {name: len(getattr(data, name)) for name in ("train", "validation", "test")}
    split["test_cold"] = int(data.is_cold[data.test].sum())
    return CtrFigures(
        split=split,
        rows=_summary(rows),
        equivalence=_equivalence(rows, settings),
        seeds=[asdict(row) for row in rows],
    )


def _train_seeds(
    model: ModelName, variant: str, data: CtrData, knowledge: Knowledge | None, settings: CtrSettings
) -> Iterator[CtrRow]:
    users, labels, is_cold = (of_row[data.test] for of_row in (data.users, data.labels, data.is_cold))
    for seed in range(settings.seed, settings.seed + settings.num_seeds):
        found = train_model(model, data, knowledge, settings, seed)
        judged = measure(labels, found.scores, users, is_cold)
        yield CtrRow(
            MODEL_TITLES[model],
            variant,
            seed,
            found.best_epoch,
            found.train_s,
            found.validation_auc,
            judged.auc,
            judged.logloss,
            judged.auc_cold,
        )


def compare_paired(differences: np.ndarray, margin: float = 0.002, confidence: float = 0.95) -> CtrVerdict:
    """A verdict on paired measurements, higher being better: "equivalent", "worse", "better" or "undecided".

    `differences` (num_pairs,) are a candidate's minus the reference's of the same model and seed; one up to `margin`
    does not matter. The interval is Student's t over pairs; there is none of a single pair.
    """
    mean, verdict = float(np.mean(differences)), "undecided"
    low = high = None
    if len(differences) >= 2:
        standard_error = np.std(differences, ddof=1) / math.sqrt(len(differences))
        half_width = float(stats.t.ppf((1 + confidence) / 2, len(differences) - 1) * standard_error)
        low, high = mean - half_width, mean + half_width
        if -margin <= low and high <= margin:
            verdict = "equivalent"
        elif high < -margin:
            verdict = "worse"
        elif low > margin:
            verdict = "better"
    return CtrVerdict(len(differences), mean, low, high, margin, confidence, verdict)


def _equivalence(rows: list[CtrRow], settings: CtrSettings) -> dict[str, CtrVerdict]:
    """The run's own texts against plain ones, for each model and for "all" together; empty without both."""
    plain = {(row.model, row.seed): row.auc for row in rows if row.variant == "plain"}
    differences: dict[str, list[float]] = {}
    for row in rows:
        if row.variant not in REFERENCES and (row.model, row.seed) in plain:
            for name in (row.model, "all"):
                differences.setdefault(name, []).append(row.auc - plain[row.model, row.seed])
    return {
        name: compare_paired(np.array(of_model), settings.equivalence_margin, settings.confidence)
        for name, of_model in differences.items()
    }


def _summary(rows: list[CtrRow]) -> list[CtrScores]:
    """A row for each model and variant: means, and sample standard deviations over seeds (None with one seed)."""
    grouped: dict[tuple[str, str], list[CtrRow]] = {}
    for row in rows:
        grouped.setdefault((row.model, row.variant), []).append(row)
    summary = []
    for (model, variant), of_both in grouped.items():
        scores: dict[str, float | None] = {}
        for name in ("auc", "logloss", "auc_cold"):
            values = [getattr(row, name) for row in of_both if getattr(row, name) is not None]  # of all seeds, or none
            scores[name] = statistics.fmean(values) if values else None
            scores[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else None
        summary.append(CtrScores(model, variant, len(of_both), **scores))
    return summary
