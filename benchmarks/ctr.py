"""Gains of CTR models from texts in the sample world; our DIN and DCNv2 compared with FuxiCTR's on MovieLens 100K.

    python benchmarks/ctr.py --quick --json OUT --fuxictr VENV/lib/python3.11/site-packages

Rows with `features` and with `history` come from `ctr_nights.py`. Rows with `library` use the same data rows, codes,
sizes and batches, in one process. FuxiCTR is not among our requirements: in a separate environment, run
`pip install fuxictr==2.3.10 pandas polars h5py` and name its package folder by `--fuxictr`, or only ours is measured.
FuxiCTR is timed twice: with a data loader like its own, which collates rows one by one (`loader: rows`), and on batches
that were collated before (`loader: none`), which is impossible with shuffling; ours gathers batches while it is timed.
Samples per second are training steps by processor time: medians over epochs, which take turns. These networks get no
counts and rates, because FuxiCTR's have none.
"""

import contextlib
import dataclasses
import datetime
import io
import json
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from common import begin, benchmark_parser, jsonable, scale_of, write_json
from ctr_nights import mean_and_std, sample_rows
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import default_collate

from laserbatch.ctr.dataset import CtrData, build_dataset
from laserbatch.ctr.loop import RowTensors, _optimizers, _step, default_batch_size
from laserbatch.ctr.metrics import measure
from laserbatch.ctr.settings import CtrSettings, ModelName
from laserbatch.ctr.training import build_network, train_model
from laserbatch.pipeline.tables.read import Tables

TRAIN_ROWS = 80_000
MODELS: tuple[ModelName, ...] = ("din", "dcnv2")


def movielens(folder: Path, num_rows: int | None) -> tuple[Tables, datetime.date]:
    """The tables of MovieLens 100K with one genre per item, and the last day of training."""
    users, items, log = (pq.read_table(folder / f"{name}.parquet") for name in ("users", "items", "interactions"))

    def text(column: pa.ChunkedArray) -> pa.ChunkedArray:
        return column.cast(pa.string())

    is_year = pc.match_substring_regex(items["year"], "^[0-9]+$")
    tables = Tables(
        users=pa.table({
            "user_id": text(users["user_id"]), "age": users["age"].cast(pa.int64()),
            "gender": text(users["gender"]), "occupation": text(users["occupation"]),
        }),
        items=pa.table({
            "item_id": text(items["item_id"]), "year": pc.if_else(is_year, items["year"], None).cast(pa.int64()),
            "genre": pc.list_element(pc.split_pattern(text(items["genres"]), " "), 0),
        }),
        interactions=pa.table({
            "user_id": text(log["user_id"]), "item_id": text(log["item_id"]), "rating": log["rating"],
            "timestamp": log["timestamp"].cast(pa.timestamp("s", "UTC")),
        }).sort_by("timestamp").slice(0, num_rows),
    )  # fmt: skip
    last = tables.interactions["timestamp"][int(len(tables.interactions) * TRAIN_ROWS / 100_000)].as_py()
    return tables, last.date()


class FuxiCtr:
    """A network of FuxiCTR over our codes, with batches like those of FuxiCTR's loaders."""

    def __init__(self, name: ModelName, data: CtrData, settings: CtrSettings, seed: int) -> None:
        from fuxictr.features import FeatureMap  # pyright: ignore[reportMissingImports]
        from model_zoo.LongCTR.DCNv2.DCNv2 import DCNv2  # pyright: ignore[reportMissingImports]
        from model_zoo.LongCTR.DIN.DIN import DIN  # pyright: ignore[reportMissingImports]

        self.data, self.max_history = data, settings.max_history
        features = FeatureMap("movielens", "")
        for source, fields in (("user", data.user_fields), ("item", data.item_fields)):
            for field in fields:
                spec = {"type": "categorical", "source": source, "vocab_size": field.num_codes, "padding_idx": 0}
                features.features[f"{source}_{field.name}"] = spec
        features.labels, features.default_emb_dim = ["label"], settings.embedding_dim
        features.num_fields = features.get_num_fields()
        torch.manual_seed(seed)
        shared = {
            "embedding_dim": settings.embedding_dim, "learning_rate": settings.learning_rate, "optimizer": "adam",
            "loss": "binary_crossentropy", "task": "binary_classification", "metrics": ["AUC"], "monitor": "AUC",
            "net_dropout": settings.dropout, "verbose": 0, "model_root": f"{tempfile.gettempdir()}/fuxictr/",
        }  # fmt: skip
        hidden = list(settings.hidden_sizes)
        with contextlib.redirect_stdout(io.StringIO()):
            if name == "din":
                attention = {"attention_hidden_units": [32, 16], "attention_hidden_activations": "PReLU"}
                self.model = DIN(features, dnn_hidden_units=hidden, dnn_activations="Dice", **attention, **shared)
            else:
                structure = {"model_structure": "parallel", "num_cross_layers": 2}
                self.model = DCNv2(features, parallel_dnn_hidden_units=hidden, **structure, **shared)
        self.model.optimizer = torch.optim.Adam(
            self.model.parameters(), settings.learning_rate, weight_decay=settings.weight_decay
        )
        self.model._max_gradient_norm, self.model._batch_index = 10.0, 0
        lengths = data.ends - data.starts
        history = np.full((len(data.users), settings.max_history), data.num_items)  # the last, of zeros, is padding
        for row in range(len(history)):
            history[row, settings.max_history - lengths[row] :] = data.liked[data.starts[row] : data.ends[row]]
        user_codes = np.hstack([field.codes for field in data.user_fields])[data.users]
        self.rows = np.column_stack([user_codes, history, data.items, data.labels]).astype(np.float64)
        self.item_codes = [np.append(field.codes[:, 0], 0).astype(np.int64) for field in data.item_fields]

    def collate(self, rows: list[np.ndarray]) -> tuple:
        """A batch for LongCTR's models: user features and label, features of history and target, mask."""
        batch = default_collate(rows)
        num_users = len(self.data.user_fields)
        users = {f"user_{field.name}": batch[:, place] for place, field in enumerate(self.data.user_fields)}
        items = batch[:, num_users : num_users + self.max_history + 1].long().numpy()
        mask = torch.from_numpy((items[:, :-1] < self.data.num_items).astype(np.float32))
        codes = {
            f"item_{field.name}": torch.from_numpy(of_field[items.reshape(-1)])
            for field, of_field in zip(self.data.item_fields, self.item_codes, strict=True)
        }
        return users | {"label": batch[:, -1]}, codes, mask

    def loader(self, rows: np.ndarray, batch_size: int, shuffle: bool) -> DataLoader:
        """A loader that collates rows one by one, like FuxiCTR's NpzDataLoader."""
        rows = self.rows[rows]
        return DataLoader(rows, batch_size, shuffle=shuffle, collate_fn=self.collate)  # pyright: ignore[reportArgumentType]

    def epoch(self, batches) -> float:
        """Processor seconds of an epoch of training steps, including the time to make batches."""
        start_s = time.process_time()
        self.model.train()
        for batch in batches:
            self.model.train_step(batch)
        return time.process_time() - start_s

    @torch.no_grad()
    def scores(self, rows: np.ndarray) -> np.ndarray:
        """The predicted probabilities of rows."""
        self.model.eval()
        parts = [self.model(batch)["y_pred"].flatten() for batch in self.loader(rows, 4096, False)]
        return torch.cat(parts).numpy()

    def fit(self, settings: CtrSettings, batch_size: int) -> np.ndarray:
        """Train; return the scores of the test rows after the epoch with the best validation AUC."""
        data, best, best_auc, since = self.data, np.empty(0), 0.0, 0
        for _ in range(settings.max_epochs):
            self.epoch(self.loader(data.train, batch_size, True))
            auc = roc_auc_score(data.labels[data.validation], self.scores(data.validation))
            since += 1
            if auc > best_auc:
                best, best_auc, since = self.scores(data.test), auc, 0
            if since == settings.patience:
                break
        return best


def our_epoch(network: torch.nn.Module, data: CtrData, settings: CtrSettings, state: list) -> float:
    """Processor seconds of an epoch of our training steps."""
    if not state:
        state += [RowTensors(data, torch.device("cpu")), torch.from_numpy(data.labels), _optimizers(network, settings)]
    rows, labels, optimizers = state
    start_s = time.process_time()
    network.train()
    for numbers in torch.randperm(len(data.train)).split(default_batch_size(len(data.train))):
        index = torch.from_numpy(data.train[numbers]).long()
        _step(network, rows.batch(index), labels[index], optimizers, settings.weight_decay)
    return time.process_time() - start_s


def speeds(name: ModelName, data: CtrData, settings: CtrSettings, num_turns: int, with_peer: bool) -> dict[str, float]:
    """Samples per second of each library; the libraries take turns."""
    network, state = build_network(name, data, None, settings, 0), []
    peer = FuxiCtr(name, data, settings, 0) if with_peer else None
    batch_size = default_batch_size(len(data.train))
    collated = list(peer.loader(data.train, batch_size, True)) if peer else []
    durations: dict[str, list[float]] = {}
    for turn in range(num_turns + 1):
        of_turn = {"ours": our_epoch(network, data, settings, state)}
        if peer:
            of_turn["fuxictr rows"] = peer.epoch(peer.loader(data.train, batch_size, True))
            of_turn["fuxictr none"] = peer.epoch(collated)
        for system, seconds in of_turn.items() if turn else ():
            durations.setdefault(system, []).append(seconds)
    return {system: len(data.train) / statistics.median(seconds) for system, seconds in durations.items()}


def run(folder: Path, size: str) -> list[dict]:
    """The rows of both libraries, and the rows of our models with counts and rates."""
    tables, as_of = movielens(folder, {"smoke": 10_000, "quick": 25_000, "full": None}[size])
    settings = CtrSettings(max_epochs=1 if size == "smoke" else 15)
    num_seeds = {"smoke": 1, "quick": 2, "full": 5}[size]
    with_past = build_dataset(tables, as_of, settings)
    data = dataclasses.replace(with_past, past=np.zeros((len(with_past.users), 0), np.float32))
    labels, users = data.labels[data.test], data.users[data.test]
    is_cold, rows = data.is_cold[data.test], []
    with_peer = find_spec("fuxictr") is not None
    if not with_peer:
        print("fuxictr is not installed here: only our models are measured", file=sys.stderr)
    for name in MODELS:
        aucs: dict[str, list[float]] = {}
        for seed in range(num_seeds):
            ours = train_model(name, data, None, settings, seed).scores
            aucs.setdefault("ours", []).append(measure(labels, ours, users, is_cold).auc)
            if with_peer:
                theirs = FuxiCtr(name, data, settings, seed).fit(settings, default_batch_size(len(data.train)))
                aucs.setdefault("fuxictr", []).append(measure(labels, theirs, users, is_cold).auc)
        for system, samples in speeds(name, data, settings, 1 if size == "smoke" else 5, with_peer).items():
            library, _, loader = system.partition(" ")
            row = {"model": name, "library": library, "loader": loader or "index", "samples_per_s": round(samples)}
            rows.append(row | {"auc_mean": statistics.fmean(aucs[library]), "seeds": num_seeds})
    for name in (*MODELS, "gbdt"):
        all_scores = [train_model(name, with_past, None, settings, seed).scores for seed in range(num_seeds)]
        judged = [measure(labels, scores, users, is_cold) for scores in all_scores]
        rows.append({
            "model": name, "features": "none", "dataset": "ml-100k", **mean_and_std([each.auc for each in judged]),
            "logloss_mean": statistics.fmean(each.logloss for each in judged), "seeds": num_seeds,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__, "data", "threads")
    parser.add_argument("--fuxictr", type=Path, help="package folder with fuxictr, if our environment lacks it")
    options = parser.parse_args()
    if options.fuxictr is not None:
        sys.path.append(str(options.fuxictr))  # after our own packages
    begin(options.threads)
    scale = scale_of(options, full=(400, (40, 30, 20, 10), 5), quick=(200, (30, 15), 2), smoke=(40, (10,), 1))
    rows = sample_rows(*scale)
    if (options.data / "ml-100k").is_dir():
        rows += run(options.data / "ml-100k", options.size)
    else:
        print(f"{options.data / 'ml-100k'} is not there: nothing is compared with FuxiCTR", file=sys.stderr)
    for row in rows:
        print(json.dumps(jsonable(row)))
    if options.json:
        write_json(options.json, {"size": options.size, "threads": options.threads, "rows": rows})


if __name__ == "__main__":
    main()
