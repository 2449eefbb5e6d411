"""The folder of a trained model: everything that scoring needs, in files that run no code when they are read.

    model.safetensors | model.txt    weights of a network, or LightGBM's text format
    model.json                       model, settings, seed, date, encoders, provenance, checksums
    vocabularies/<side>.<column>.parquet    values in the order of their codes; in names `/` is %2F and `%` is %25;
                                            of a very long name, its SHA-256
    basis.safetensors                the basis that reduces knowledge vectors; missing without knowledge
    metrics.json                     metrics of the test rows

The folder holds no vectors of entities: they come from the features of any run with the same encoder.
"""

import datetime
import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_model, save_model

from laserbatch.ctr.dataset import rows_before
from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.feature_set import SIDES, Basis, FeatureSet
from laserbatch.ctr.fields import Encoder
from laserbatch.ctr.gbdt import GbdtColumns, load_gbdt, predict_gbdt
from laserbatch.ctr.knowledge import Knowledge, align_sides
from laserbatch.ctr.log import EntityTables, Log
from laserbatch.ctr.loop import predict
from laserbatch.ctr.metrics import Metrics
from laserbatch.ctr.settings import CtrSettings, ModelName
from laserbatch.ctr.training import Training, build_network
from laserbatch.retrieval_pools.atomic import copy_mode, sha256_file

FORMAT_VERSION = 4
MAX_NAME_BYTES = 200  # file systems take 255
TRAIN_AGAIN = "train again into a new folder"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelCard:
    """The facts about a model besides its weights."""

    model: ModelName
    settings: CtrSettings
    seed: int
    as_of: datetime.date  # training ends with this day
    prior: float
    encoders: dict[str, list[Encoder]]
    basis: Basis | None
    provenance: dict[str, Any]  # run ids, hashes, and the paths of features and tables

    def write(self, folder: Path, training: Training, metrics: Metrics) -> None:
        """Write everything into an existing, empty folder."""
        if self.model == "gbdt":
            training.model.save_model(folder / "model.txt", num_iteration=training.best_epoch)
        else:
            save_model(training.model.cpu(), str(folder / "model.safetensors"))
        if self.basis is not None:
            save_file(dict(vars(self.basis)), folder / "basis.safetensors")
        (folder / "vocabularies").mkdir()
        encoders: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for side in SIDES:
            for encoder in self.encoders[side]:
                encoders[side].append({name: of for name, of in vars(encoder).items() if name != "vocabulary"})
                if encoder.vocabulary is not None:
                    table = pa.table({"value": encoder.vocabulary})
                    pq.write_table(table, _vocabulary_path(folder, side, encoder.name))
        judged = asdict(metrics) | {"validation_auc": training.validation_auc, "num_test": len(training.scores)}
        (folder / "metrics.json").write_text(json.dumps(judged, indent=2) + "\n", encoding="utf-8")
        card = {
            "format_version": FORMAT_VERSION,
            "model": self.model,
            "seed": self.seed,
            "as_of": str(self.as_of),
            "prior": self.prior,
            "best_epoch": training.best_epoch,
            "num_threads": torch.get_num_threads(),  # of din; other numbers of threads add in another order
            "settings": self.settings.model_dump(mode="json"),
            "encoders": encoders,
            "provenance": self.provenance,
            "files": {str(path.relative_to(folder)): sha256_file(path) for path in sorted(folder.rglob("*.*"))},
        }
        card["sha256"] = _digest(card)
        (folder / "model.json").write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for path in folder.glob("*.safetensors"):
            copy_mode(folder / "model.json", path)  # the library ignores the umask

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a folder. Raises CtrError if it is damaged, or not a model folder of this version."""
        try:
            card = json.loads((folder / "model.json").read_text(encoding="utf-8"))
            if card["format_version"] != FORMAT_VERSION:
                raise CtrError(
                    f"{folder} is a model of format {card['format_version']}; expected {FORMAT_VERSION}: {TRAIN_AGAIN}"
                )
            if card.pop("sha256") != _digest(card):
                raise CtrError(f"{folder / 'model.json'} was changed or is damaged; restore it, or {TRAIN_AGAIN}")
            for name, sha256 in card["files"].items():
                if sha256_file(folder / name) != sha256:
                    raise CtrError(f"{folder / name} is damaged, or of another model; restore it, or {TRAIN_AGAIN}")
            path = folder / "basis.safetensors"
            basis = Basis(**load_file(path)) if path.is_file() else None
            return cls(
                card["model"],
                CtrSettings.model_validate(card["settings"]),
                card["seed"],
                datetime.date.fromisoformat(card["as_of"]),
                card["prior"],
                {side: [_encoder(folder, side, of) for of in card["encoders"][side]] for side in SIDES},
                basis,
                card["provenance"],
            )
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException, SafetensorError) as error:
            raise CtrError(
                f"{folder} is not a model of `laserbatch ctr train`, or is damaged: {error}; {TRAIN_AGAIN}"
            ) from None


def _digest(card: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()


def _vocabulary_path(folder: Path, side: str, column: str) -> Path:
    name = column.replace("%", "%25").replace("/", "%2F")
    if len(name.encode()) > MAX_NAME_BYTES:
        name = hashlib.sha256(column.encode()).hexdigest()
    return folder / "vocabularies" / f"{side}.{name}.parquet"


def _encoder(folder: Path, side: str, card: dict[str, Any]) -> Encoder:
    path = _vocabulary_path(folder, side, card["name"])
    vocabulary = None if card["kind"] == "bins" else pq.read_table(path)["value"].combine_chunks()
    return Encoder(**card | {"vocabulary": vocabulary, "edges": tuple(card["edges"])})


def score(
    folder: Path,
    card: ModelCard,
    tables: EntityTables,
    features: FeatureSet | None,
    log: Log,
    users: np.ndarray,
    items: np.ndarray,
    times_us: np.ndarray,
) -> np.ndarray:
    """Predict probabilities of pairs, float64 (n,), from the log before their moments.

    `users` and `items`, int32 (n,), are rows of the entity tables; `times_us` is int64 (n,). Raises CtrError if the
    features do not fit the model.
    """
    knowledge = None
    if card.basis is not None:
        if features is None:
            raise CtrError(f"{folder} was trained with features of texts: give the run whose features it reads")
        knowledge = Knowledge(**card.basis.reduce(align_sides(tables, features)), basis=card.basis)
        for side, numbers in (("user", users), ("item", items)):
            if num_without := int((~getattr(knowledge, side).vectors.any(axis=1))[numbers].sum()):
                logger.warning(
                    "%d of %d rows have %ss without features in the run; they are scored with a learned default",
                    num_without, len(numbers), side,
                )  # fmt: skip
    max_history = card.settings.max_history
    rows = rows_before(tables, card.encoders, log, users, items, times_us, max_history, card.prior)
    if card.model == "gbdt":
        columns = GbdtColumns(rows, knowledge)
        return predict_gbdt(load_gbdt(folder / "model.txt"), columns, np.arange(len(users)))
    network = build_network(card.model, rows, knowledge, card.settings, card.seed)
    load_model(network, str(folder / "model.safetensors"))
    return predict(network, rows, np.arange(len(users)))
