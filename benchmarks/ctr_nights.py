"""Gains of CTR models from texts, and which texts training rows should see, on nights of the sample world.

The bundled model writes the nights in this process. They are weeks apart, so that each rewrites most texts.
"""

import dataclasses
import datetime
import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from chaos_nights import write_here
from sklearn.metrics import log_loss, roc_auc_score

from laserbatch.ctr.dataset import CtrData, build_dataset
from laserbatch.ctr.feature_set import read_feature_set
from laserbatch.ctr.gbdt import GbdtColumns, predict_gbdt
from laserbatch.ctr.knowledge import Knowledge, build_knowledge, join_as_of
from laserbatch.ctr.loop import predict
from laserbatch.ctr.networks import ADAPTORS
from laserbatch.ctr.settings import CtrSettings, ModelName
from laserbatch.ctr.training import MODEL_TITLES, NETWORKS, train_model
from laserbatch.jobs.settings import PACKAGE_ROOT, Settings, load_settings
from laserbatch.jobs.stages.compare_ctr import compare_ctr
from laserbatch.jobs.stages.night import Night
from laserbatch.jobs.stages.run_night import run_night
from laserbatch.pipeline.encoding.versions import feature_versions
from laserbatch.pipeline.sample.world import LAST_DATE, write_sample_world
from laserbatch.pipeline.tables.streamed import OpenTables, open_tables

WORLD_SEED = 7  # nothing was trained or chosen on this world
NUM_ASKED = 40  # ratings that each user is asked for, to evaluate models
VERIFIER = "relaxed"


def sample_rows(num_users: int, days_before: Sequence[int], num_seeds: int) -> list[dict]:
    """The rows of `features`, `history` and `adaptor`, after nights that lie `days_before` days before the last one."""
    with tempfile.TemporaryDirectory() as folder:
        night = write_nights(Path(folder), num_users, days_before)
        tables = open_tables(Path(folder) / "tables")
        judged = (feature_rows, history_rows, adaptor_rows)
        return [row for rows_of in judged for row in rows_of(night, tables, num_seeds)]


def write_nights(folder: Path, num_users: int, days_before: Sequence[int]) -> Night:
    """Run the nights in a workspace; return the last one, which also has plainly decoded texts."""
    settings_of = sample_nights(folder, num_users, WORLD_SEED)
    options: dict[str, object] = {"decoding.max_draft_tokens": 16, "decoding.min_acceptance": 0.07}
    options |= {"decoding.verifier": VERIFIER, "night.train_ctr": False, "night.compare_with_plain": False}
    for days in days_before:
        run_night(settings_of(options), LAST_DATE - datetime.timedelta(days=days))
    return run_night(settings_of(options | {"night.compare_with_plain": True}), LAST_DATE)


def sample_nights(folder: Path, num_users: int, seed: int) -> Callable[[dict[str, object]], Settings]:
    """Write a sample world whose nights this process writes; return a function from changed options to settings."""
    write_sample_world(folder / "tables", num_users, num_users * 3 // 4, seed=seed, num_asked=NUM_ASKED)
    write_here()
    places = {"workspace": str(folder / "workspace"), "tables.path": str(folder / "tables")}
    return lambda options: load_settings(PACKAGE_ROOT / "configs" / "demo.yaml", places | options)


def mean_and_std(aucs: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard deviation of AUC over seeds; the deviation of a single seed is None."""
    return {"auc_mean": statistics.fmean(aucs), "auc_std": statistics.stdev(aucs) if len(aucs) > 1 else None}


def feature_rows(night: Night, tables: OpenTables, num_seeds: int) -> list[dict]:
    """AUC without and with texts. Greedy texts share the row of plain texts: the engine's tests show their equality."""
    settings = CtrSettings(num_seeds=num_seeds)
    names = {title: name for name, title in MODEL_TITLES.items()}
    rows = []
    for result in compare_ctr(night.run.root, tables, night.date, VERIFIER, settings).rows:
        if result.model not in names:
            continue
        row = {"model": names[result.model], "features": result.variant, "dataset": "sample world"}
        row |= {"auc_mean": result.auc, "auc_std": result.auc_std, "logloss_mean": result.logloss, "seeds": num_seeds}
        rows.append(row)
        if result.variant == "plain":
            rows.append(row | {"features": "greedy", "same_as": "plain"})
    return rows


def history_rows(night: Night, tables: OpenTables, num_seeds: int) -> list[dict]:
    """AUC by `ctr.history`, on the same test rows for all settings; and on training rows, where labels leak.

    `trained_on` "all" trains on the rows that the setting takes. With "older text", latest and asof train only on rows
    whose user and item have an older text, so that they differ only in the text that they see.
    """
    settings = CtrSettings(history="split")
    features = {VERIFIER: read_feature_set(night.run.features_path("user").parent)}
    judged = build_dataset(tables, night.date, settings).test
    rows, has_older = [], None
    for history in ("asof", "latest", "split"):
        settings = settings.model_copy(update={"history": history})
        data = build_dataset(tables, night.date, settings)
        knowledge = build_knowledge(tables, data, features, night.date, settings)[VERIFIER]
        seen = data
        if history == "asof":
            with feature_versions(night.workspace.runs_up_to(night.run)) as versions:
                seen, knowledge = join_as_of(tables, data, knowledge, versions)
            texts = knowledge.user.vectors[seen.users[data.train]], knowledge.item.vectors[seen.items[data.train]]
            has_older = (texts[0] != 0).any(axis=1) & (texts[1] != 0).any(axis=1)
        parts = {"all": seen.train}
        if history != "split":
            parts["older text"] = seen.train[has_older]
        for model, (trained_on, train) in itertools.product(settings.models, parts.items()):
            data = dataclasses.replace(seen, train=train, test=judged)
            by_seed = [_judged(model, data, knowledge, settings, seed) for seed in range(num_seeds)]
            aucs, losses, of_training = zip(*by_seed, strict=True)
            row = {"model": model, "history": history, "trained_on": trained_on, "features": VERIFIER}
            row |= {"dataset": "sample world"} | mean_and_std(aucs)
            row |= {"logloss_mean": statistics.fmean(losses), "train_auc_mean": statistics.fmean(of_training)}
            rows.append(row | {"train_rows": len(data.train), "test_rows": len(judged), "seeds": num_seeds})
    return rows


def adaptor_rows(night: Night, tables: OpenTables, num_seeds: int) -> list[dict]:
    """AUC by `ctr.adaptor`, of validation rows (they chose the default adaptor) and of test rows."""
    features = {VERIFIER: read_feature_set(night.run.features_path("user").parent)}
    data = build_dataset(tables, night.date, CtrSettings())
    knowledge = build_knowledge(tables, data, features, night.date, CtrSettings())[VERIFIER]
    rows = []
    for model, adaptor in itertools.product(NETWORKS, ADAPTORS):
        settings = CtrSettings(adaptor=adaptor)
        trained = [train_model(model, data, knowledge, settings, seed) for seed in range(num_seeds)]
        row = {"model": model, "adaptor": adaptor, "features": VERIFIER, "dataset": "sample world"}
        row |= {"validation_auc_mean": statistics.fmean(training.validation_auc for training in trained)}
        aucs = [float(roc_auc_score(data.labels[data.test], training.scores)) for training in trained]
        train_s = statistics.median(training.train_s for training in trained)
        rows.append(row | mean_and_std(aucs) | {"train_s": train_s, "seeds": num_seeds})
    return rows


def _judged(
    model: ModelName, data: CtrData, knowledge: Knowledge, settings: CtrSettings, seed: int
) -> tuple[float, float, float]:
    """AUC and LogLoss of the test rows, AUC of the training rows."""
    trained = train_model(model, data, knowledge, settings, seed)
    if model == "gbdt":
        of_training = predict_gbdt(trained.model, GbdtColumns(data, knowledge), data.train)
    else:
        of_training = predict(trained.model, data, data.train)
    labels, scores = data.labels[data.test], np.clip(trained.scores.astype(float), 1e-7, 1 - 1e-7)
    auc, of_training = roc_auc_score(labels, scores), roc_auc_score(data.labels[data.train], of_training)
    return float(auc), float(log_loss(labels, scores)), float(of_training)
