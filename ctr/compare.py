"""The CTR table: every model, with every variant of knowledge, from every seed, judged on what came after the date."""

import datetime
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch

from laserbatch.ctr.dataset import CtrData, EntityTables, Knowledge, build_dataset, build_knowledge
from laserbatch.ctr.feature_set import FeatureSet
from laserbatch.ctr.gbdt import fit_gbdt, gbdt_matrix
from laserbatch.ctr.judging import Equivalence, compare_paired, measure
from laserbatch.ctr.networks import DIN, DCNv2
from laserbatch.ctr.settings import CtrError, CtrSettings
from laserbatch.ctr.train import fit, predict

logger = logging.getLogger(__name__)

MODEL_TITLES = {"din": "DIN", "dcnv2": "DCNv2", "gbdt": "LightGBM"}
NETWORKS = {"din": DIN, "dcnv2": DCNv2}
REFERENCES = ("none", "plain")  # variants that a run's own is compared with
SUMMARISED = ("auc", "logloss", "auc_cold")


@dataclass(frozen=True)
class CtrRow:
    """One training, judged on the test part.

    Attributes
    ----------
    model : as people read it ("DIN").
    variant : which knowledge: "none", "plain", or, of the run's own, its verifier ("relaxed").
    best_epoch : epoch (of trees: round) that validation chose.
    auc, logloss, auc_cold : see `judging.Metrics`.
    """

    model: str
    variant: str
    seed: int
    best_epoch: int
    train_s: float
    validation_auc: float
    auc: float
    logloss: float
    auc_cold: float | None


@dataclass(frozen=True)
class CtrComparison:
    """The whole table.

    Attributes
    ----------
    rows : one a training.
    split : rows of each part, and of the test part those of cold users.
    equivalence : the run's own texts against plain ones, for each model and for "all" together; empty without both.
    """

    rows: tuple[CtrRow, ...]
    split: dict[str, int]
    equivalence: dict[str, Equivalence]

    def summary(self) -> list[dict]:
        """A row for each model and variant: means, and sample standard deviations over seeds (None with one seed)."""
        grouped: dict[tuple[str, str], list[CtrRow]] = {}
        for row in self.rows:
            grouped.setdefault((row.model, row.variant), []).append(row)
        return [_summarised(model, variant, rows) for (model, variant), rows in grouped.items()]

    def to_manifest(self) -> dict:
        """Plain values: the `ctr` section of a run's manifest."""
        return {
            "skipped": None,
            "split": self.split,
            "rows": self.summary(),
            "seeds": [asdict(row) for row in self.rows],
            "equivalence": {name: asdict(verdict) for name, verdict in self.equivalence.items()},
        }


def train_ctr(
    tables: EntityTables,
    features: Mapping[str, FeatureSet | None],
    as_of: datetime.date,
    settings: CtrSettings | None = None,
    on_fit: Callable[[CtrRow], None] | None = None,
) -> CtrComparison:
    """Train and judge every model with every variant of knowledge.

    Parameters
    ----------
    tables : users, items and interactions, those after `as_of` too.
    features : `{"none": None, "plain": ..., "relaxed": ...}`; variants are compared in this order. The run's own
        has the name of its verifier.
    as_of : the date of the run that made the features.
    on_fit : called after each training.

    Raises
    ------
    CtrError
        Nothing follows the date, one label is missing, or features are of a later date (a leak).
    """
    settings = settings or CtrSettings()
    data = build_dataset(tables, as_of, settings)
    rows = []
    for variant, feature_set in features.items():
        knowledge = build_knowledge(tables, data, feature_set, as_of, settings)
        for model in settings.models:
            for row in _train_seeds(model, variant, data, knowledge, settings):
                rows.append(row)
                logger.info("%s %s seed %d: AUC %.4f in %.1f s", row.model, variant, row.seed, row.auc, row.train_s)
                if on_fit is not None:
                    on_fit(row)
    split = {name: len(getattr(data, name)) for name in ("train", "validation", "test")}
    split["test_cold"] = int(data.is_cold[data.test].sum())
    return CtrComparison(tuple(rows), split, _equivalence(rows, settings))


def _train_seeds(model: str, variant: str, data: CtrData, knowledge: Knowledge, settings: CtrSettings):
    matrix, categorical = gbdt_matrix(data, knowledge) if model == "gbdt" else (None, None)
    for seed in range(settings.seed, settings.seed + settings.num_seeds):
        start_s = time.perf_counter()
        if model == "gbdt":
            booster = fit_gbdt(matrix, categorical, data, settings, seed)
            best_epoch, scores = booster.best_iteration, booster.predict(matrix[data.test])
            validation_auc = float(booster.best_score["valid_0"]["auc"])
        else:
            network = build_network(model, data, knowledge, settings, seed)
            fitted = fit(network, data, settings, seed)
            best_epoch, validation_auc = fitted.best_epoch, fitted.validation_auc
            scores = predict(network, data, data.test)
        judged = measure(data.labels[data.test], scores, data.is_cold[data.test])
        train_s = time.perf_counter() - start_s
        yield CtrRow(MODEL_TITLES[model], variant, seed, best_epoch, train_s, validation_auc, **asdict(judged))


def build_network(model: str, data: CtrData, knowledge: Knowledge, settings: CtrSettings, seed: int) -> torch.nn.Module:
    """A network with seeded weights, on the device that the settings name."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = NETWORKS[model](data, knowledge, settings)
    return network.to(_device(settings.device))


def _device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name not in ("auto", "cpu", "cuda") or (name == "cuda" and not has_cuda):
        raise CtrError(
            f"ctr.device is {name!r}; expected auto or cpu" + (", or cuda" if has_cuda else ": no CUDA device")
        )
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def _equivalence(rows: list[CtrRow], settings: CtrSettings) -> dict[str, Equivalence]:
    auc_of = {(row.model, row.seed, row.variant): row.auc for row in rows}
    pairs: dict[str, list[tuple[float, float]]] = {}
    for (model, seed, variant), auc in auc_of.items():
        if variant not in REFERENCES and (model, seed, "plain") in auc_of:
            pair = auc_of[model, seed, "plain"], auc
            pairs.setdefault(model, []).append(pair)
            pairs.setdefault("all", []).append(pair)
    compared = {name: np.array(of_model) for name, of_model in pairs.items()}
    return {
        name: compare_paired(array[:, 0], array[:, 1], settings.equivalence_margin, settings.confidence)
        for name, array in compared.items()
    }


def _summarised(model: str, variant: str, rows: list[CtrRow]) -> dict:
    summary: dict = {"model": model, "variant": variant, "num_seeds": len(rows)}
    for name in SUMMARISED:
        values = [getattr(row, name) for row in rows if getattr(row, name) is not None]  # of all seeds, or of none
        summary[name] = statistics.fmean(values) if values else None
        summary[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else None
    return summary
