"""Trains a CTR model into a folder that records its provenance, resumes after a kill, and scores with such folders."""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from safetensors import SafetensorError

from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.feature_set import FeatureSet, check_provenance, read_feature_set
from laserbatch.ctr.log import ids_of, labelled_log, numbers_of, split_by_time
from laserbatch.ctr.settings import CtrSettings, ModelName
from laserbatch.jobs.console import progress, say
from laserbatch.jobs.stages.night import Night
from laserbatch.pipeline.encoding.versions import feature_versions
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.storage.atomic import atomic_folder, atomic_path, sha256_file
from laserbatch.pipeline.storage.parquet import parquet_files, write_parquet
from laserbatch.pipeline.storage.uris import is_uri
from laserbatch.pipeline.tables.read import describe, end_of_day
from laserbatch.pipeline.tables.schema import plain_ids
from laserbatch.pipeline.tables.streamed import iter_log, log_times, log_unit, open_tables

FeatureName = Literal["own", "plain", "none"]
CHECKPOINT = "checkpoint.safetensors"

logger = logging.getLogger(__name__)


def train_to_folder(
    night: Night, model: ModelName, features: FeatureName, seed: int, tables: str, settings: CtrSettings, out: Path
) -> dict[str, Any]:
    """Train a model on the features of a run; return its metrics. A killed training goes on after its last epoch.

    The folder appears complete at the end; until then a hidden folder next to it holds the last checkpoint. Raises
    CtrError, and leaves no files, if there is nothing to train on or judge by; also if another process trains into the
    folder.
    """
    from laserbatch.ctr.dataset import build_dataset
    from laserbatch.ctr.folder import ModelCard
    from laserbatch.ctr.knowledge import build_knowledge, join_as_of
    from laserbatch.ctr.loop import Progress
    from laserbatch.ctr.metrics import measure
    from laserbatch.ctr.training import train_model

    history = night.workspace.runs_up_to(night.run) if settings.history == "asof" and features != "none" else []
    provenance = _provenance(night, features, tables) | {"history": [run.run_id for run in history]}
    spec = {"model": model, "seed": seed, "settings": settings.model_dump(mode="json"), "provenance": provenance}
    spec_hash = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
    provenance["asked"] = spec_hash
    with _only_training(out) as work:
        if (out / "model.json").is_file() and ModelCard.read(out).provenance.get("asked") == spec_hash:
            say(f"{out} already holds this model")
            return json.loads((out / "metrics.json").read_text(encoding="utf-8"))
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CtrError(f"{out} exists already, but not from this training; give another folder, or remove it")
        opened = open_tables(tables, night.settings.tables.keep_duplicates)
        data = build_dataset(opened, night.date, settings)
        feature_set = features_of(night, features)
        variants = {} if feature_set is None else {features: feature_set}
        knowledge = build_knowledge(opened, data, variants, night.date, settings).get(features)
        seen = data
        if history and knowledge is not None:
            with feature_versions(history, of_plain=features == "plain") as versions:
                seen, knowledge = join_as_of(opened, data, knowledge, versions)
        start = _checkpoint(work / CHECKPOINT, spec_hash)
        with progress("train", settings.max_epochs if model != "gbdt" else None) as bar:

            def on_epoch(now: Progress) -> None:
                _keep(work / CHECKPOINT, spec_hash, now)
                bar.advance(1, f"epoch {now.epoch}, best validation AUC {now.best_auc:.4f}")

            training = train_model(model, seen, knowledge, settings, seed, start, on_epoch)
        rows = data.test
        metrics = measure(data.labels[rows], training.scores, data.users[rows], data.is_cold[rows])
        basis = None if knowledge is None else knowledge.basis
        card = ModelCard(model, settings, seed, night.date, data.prior, data.encoders, basis, provenance)
        with atomic_folder(out) as folder:
            card.write(folder, training, metrics)
    return json.loads((out / "metrics.json").read_text(encoding="utf-8"))


@contextmanager
def _only_training(out: Path) -> Iterator[Path]:
    """Lock the folder of a training's checkpoint, next to `out`, for this process until the block ends.

    A checkpoint stays if the block ends with an error.
    """
    if Path.cwd().is_relative_to(out.resolve()):
        raise CtrError(f"{out} is the current folder, or contains it. Give another folder.")
    work = out.with_name(f".{out.name}.unfinished")
    work.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # for as long as this process lives
    except BlockingIOError:
        os.close(descriptor)
        raise CtrError(f"another process trains into {out}; wait for it to end, or give another folder") from None
    except OSError:
        logger.warning("%s cannot be locked: start no second training into %s meanwhile", work, out)
    try:
        yield work
        shutil.rmtree(work, ignore_errors=True)
    except SafetensorError as error:  # only its text tells a full disk
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), str(error), str(out)) from error
        raise
    finally:
        with suppress(OSError):
            work.rmdir()
        os.close(descriptor)


def features_of(night: Night, features: FeatureName) -> FeatureSet | None:
    """The features of a run, its own or the plain ones. Raises CtrError if it has no plain features."""
    if features == "none":
        return None
    if features == "own":
        night.run.require_features(night.manifest.features, compare_bytes=True)
        return read_feature_set(night.run.features_path("user").parent)
    if not (folder := night.run.plain.features_path("user").parent).is_dir():
        raise CtrError(
            f"{folder} is missing: run {night.run.run_id} has no features of plain texts. Give a run of a night with "
            "`night.compare_with_plain: true`, or --features own"
        )
    night.run.plain.require_features(night.manifest.plain_features, compare_bytes=True)
    return read_feature_set(folder)


def _provenance(night: Night, features: FeatureName, tables: str) -> dict[str, Any]:
    provenance: dict[str, Any] = {"run_id": night.run.run_id, "features": features}
    provenance["tables"] = tables if is_uri(tables) else str(Path(tables).resolve())  # for other folders
    provenance["keep_duplicates"] = night.settings.tables.keep_duplicates
    provenance["inputs"] = {name: of["sha256"] for name, of in describe(tables).items()}
    if features != "none":
        run = night.run.plain if features == "plain" else night.run
        sums = {side: list(map(sha256_file, parquet_files(run.features_path(side)))) for side in SIDES}
        provenance["feature_files"] = {side: of_side for side, of_side in sums.items() if of_side}
        provenance["encoders"] = {side: of.encoder for side, of in night.manifest.features.items()}
    return provenance


def _keep(path: Path, spec_hash: str, now) -> None:
    from safetensors.torch import save_file

    metadata = {"asked": spec_hash, "epoch": str(now.epoch), "best_epoch": str(now.best_epoch)}
    tensors = {name: value.contiguous().clone() for name, value in now.tensors.items()}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata | {"best_auc": repr(now.best_auc)})


def _checkpoint(path: Path, spec_hash: str):
    """The progress of a killed training with the same specification, or None."""
    from safetensors import safe_open

    from laserbatch.ctr.loop import Progress

    with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
        metadata = file.metadata()
        if metadata["asked"] == spec_hash:
            say(f"continuing after epoch {metadata['epoch']}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return Progress(int(metadata["epoch"]), int(metadata["best_epoch"]), float(metadata["best_auc"]), tensors)
    return None


def trained_on(model: Path) -> dict[str, Any]:
    """The provenance of a model: `run_id`, `tables` and hashes. Raises CtrError if the folder holds no model."""
    from laserbatch.ctr.folder import ModelCard

    return ModelCard.read(model).provenance


def evaluate_folder(model: Path, night: Night, tables: str) -> dict[str, Any]:
    """Judge a model on the rows of tables after its date that are not validation rows."""
    from laserbatch.ctr.folder import ModelCard, score
    from laserbatch.ctr.metrics import measure

    card = ModelCard.read(model)
    features, opened = _opened(card, night, tables)
    if features is not None:
        check_provenance(features, card.as_of)
    log = labelled_log(opened, card.as_of, card.settings)
    parts = split_by_time(log, card.as_of, card.settings)
    test, train = parts["test"], parts["train"]
    users, items, times_us = log.users[test], log.items[test], log.times_us[test]
    scores = score(model, card, opened, features, log, users, items, times_us)
    seen = np.bincount(log.users[train], minlength=opened.users.num_rows)[users]
    metrics = measure(log.labels[test], scores.astype(np.float32), users, seen < card.settings.cold_max_interactions)
    return vars(metrics) | {"num_test": len(test)}


def predict_pairs(model: Path, night: Night, tables: str, pairs: Path, out: Path) -> int:
    """Score a Parquet file of `user_id`, `item_id` and perhaps `timestamp`; write its columns and `score` to `out`.

    Without timestamps, pairs are scored as of just after the last labelled interaction. Returns the number of pairs.
    """
    from laserbatch.ctr.folder import ModelCard, score

    card = ModelCard.read(model)
    features, opened = _opened(card, night, tables)
    pair_table = pa.Table.from_batches(iter_log(pairs, "pairs", needs_time=False))
    if "score" in pair_table.column_names:
        raise CtrError(f"{pairs} already has a column 'score', which this command adds. Rename or drop it.")
    known = {side: (plain_ids(pair_table[f"{side}_id"].combine_chunks()), ids) for side, ids in ids_of(opened).items()}
    users, items = (numbers_of(*both, side, str(pairs)) for side, both in known.items())
    log = labelled_log(opened, card.as_of, card.settings)
    if not len(log.users):
        raise CtrError(f"no interaction of {tables} has a label ({card.settings.label}); scoring needs some that have")
    times_us = np.full(len(pair_table), log.times_us[-1] + 1)
    if "timestamp" in pair_table.column_names:
        unit = log_unit(pairs, lambda finding: say(str(finding)))
        times = log_times(pair_table["timestamp"].combine_chunks(), unit, pairs)
        if times.null_count:
            row = pc.index(times.is_null(), True).as_py()
            raise CtrError(f"{pairs}, column timestamp, row {row}: found null; expected a time in every row")
        times_us = times.cast(pa.int64()).to_numpy()
        num_early = pc.sum(pc.less(times, end_of_day(night.date))).as_py()
        if features is not None and num_early:
            logger.warning(
                "%d of %d pairs have times up to the end of %s, which the texts of run %s may know about: their scores "
                "do not show how good the model is", num_early, len(times), night.date, night.run.run_id,
            )  # fmt: skip
    scores = score(model, card, opened, features, log, users, items, times_us)
    write_parquet(pair_table.append_column("score", pa.array(scores.astype(np.float32))), out)
    return len(pair_table)


def _opened(card, night: Night, tables: str):
    """The features of a run that the model reads, and the opened tables."""
    features, encoders = card.provenance["features"], card.provenance.get("encoders", {})
    for side, of_side in night.manifest.features.items():
        if encoders.get(side, of_side.encoder) != of_side.encoder:
            raise CtrError(
                f"the {side} features of run {night.run.run_id} come from the encoder {of_side.encoder}, but the model "
                f"was trained with {encoders[side]}; give a run with that encoder"
            )
    return features_of(night, features), open_tables(tables, card.provenance.get("keep_duplicates", False))
