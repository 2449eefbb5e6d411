"""FuxiCTR's own DIN on exported features: copy it, and change what your columns are.

    laserbatch features export exported --format fuxictr --workspace workspace
    python docs/fuxictr_din.py exported tables 2025-03-01

In an environment of FuxiCTR's (`pip install fuxictr==2.3.10 torch`); nothing of laserbatch is imported. AUC is better
if the vectors in `exported` are reduced to their 32 principal components first.

Trains on ratings up to the date (4 and more are positives), stops by the first 30 % of what follows, prints the AUC of
the rest: the rows of `laserbatch ctr compare`. `--without` leaves the texts' columns out.
"""

import argparse
import datetime
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import torch
import yaml
from fuxictr.preprocess import FeatureProcessor
from fuxictr.pytorch.torch_utils import seed_everything
from model_zoo.LongCTR.DIN.DIN import DIN
from torch.utils.data import DataLoader

TEXT_DIM = 32  # of an id with its text
MAX_HISTORY, VALIDATION_SHARE = 20, 0.3
SIZES = {"embedding_dim": 8, "dnn_hidden_units": [64, 32], "attention_hidden_units": [32, 16]}
TRAINING = {"dnn_activations": "Dice", "attention_hidden_activations": "PReLU", "net_dropout": 0.3,
            "learning_rate": 3e-3, "embedding_regularizer": 1e-3, "net_regularizer": 1e-3, "optimizer": "adam",
            "loss": "binary_crossentropy", "task": "binary_classification", "metrics": ["AUC", "logloss"],
            "monitor": "AUC", "verbose": 0}  # fmt: skip


def entities(tables: Path, exported: Path, side: str) -> pd.DataFrame:
    """A side's table with the codes of its texts; columns of few distinct texts are features, a path's levels are."""
    table = pd.read_parquet(tables / f"{side}s.parquet")
    for name in [name for name in table if any(isinstance(value, np.ndarray) for value in table[name])]:
        lists = [[] if value is None else list(value) for value in table[name]]
        levels = pd.DataFrame(lists, index=table.index).add_prefix(f"{name}_")
        table = table.drop(columns=name).join(levels)
    id_name = f"{side}_id"
    is_text = {name: pd.api.types.is_string_dtype(table[name]) for name in table}
    categorical = [name for name in table if is_text[name] and table[name].nunique() < len(table) / 2]
    texts = pd.read_parquet(exported / f"{id_name}.parquet")
    nothing = np.zeros(len(texts["value"][0]), np.float32)  # for a row without a text
    table = table[[id_name, *(name for name in categorical if name != id_name)]].fillna("")
    table = table.merge(texts, "left", left_on=id_name, right_on="key").drop(columns="key")
    table["value"] = table["value"].map(lambda value: value if isinstance(value, np.ndarray) else nothing)
    table = table.fillna(dict.fromkeys(texts.columns[2:], -1))
    return table.rename(columns={name: f"{side}_{name.removeprefix(f'{side}_')}" for name in table})


def parts_of(times: pd.Series, end: pd.Timestamp) -> tuple[int, int, int]:
    """Where the rows end that train, those that stop the training, and those that judge; a moment's stay together."""
    first = int(times.searchsorted(end))
    middle = int(times.searchsorted(times[first + round((len(times) - first) * VALIDATION_SHARE)]))
    return first, middle, len(times)


def add_statistics(log: pd.DataFrame, num_train: int) -> list[str]:
    """Add how often and how well liked the item and the user were before a row's moment; returns these columns."""
    prior, statistics = log["label"][:num_train].mean(), []
    for id_name in ("item_id", "user_id"):
        of_id = [log[id_name], log["timestamp"]]
        count = log.groupby(id_name).cumcount().groupby(of_id).transform("first")
        num_liked = (log.groupby(id_name)["label"].cumsum() - log["label"]).groupby(of_id).transform("first")
        log[f"{id_name}_count"] = np.log1p(count) / 4
        log[f"{id_name}_rate"] = ((num_liked + 5 * prior) / (count + 5) - prior) * 4
        statistics += [f"{id_name}_count", f"{id_name}_rate"]
    log["seq_len"] = num_liked.astype(int)
    return statistics


def histories_of(log: pd.DataFrame, rows: pd.DataFrame) -> np.ndarray:
    """Each row's newest liked items, the newest last, with zeros before them: int64[num_rows, MAX_HISTORY]."""
    history = np.zeros((len(rows), MAX_HISTORY), np.int64)
    liked = log[log["label"] > 0].groupby("user_id")["item_index"].agg(list).to_dict()
    for number, (user, length) in enumerate(zip(rows["user_id"], rows["seq_len"], strict=True)):
        if length:
            newest = liked[user][max(length - MAX_HISTORY, 0) : length]
            history[number, -len(newest) :] = newest
    return history


def feature_columns(exported: Path, sides: dict, statistics: list[str], without: bool) -> list[dict]:
    """FuxiCTR's description of the columns: `exported` describes those of the texts."""
    exported_columns = yaml.safe_load((exported / "settings.yaml").read_text(encoding="utf-8"))["feature_cols"]
    of_texts = {column["name"]: column | {"embedding_dim": TEXT_DIM} if "pretrained_emb" in column else column
                for column in exported_columns}  # fmt: skip
    plain = {"active": True, "dtype": "str", "type": "categorical"}
    columns = []
    for side, table in sides.items():
        for name in table:
            if name in of_texts and without and name != f"{side}_id":
                continue
            column = of_texts[name] if name in of_texts and not without else plain | {"name": name}
            columns.append(column | ({"min_categr_count": 3} if name == f"{side}_id" else {}) | {"source": side})
    return columns + [{"name": name, "active": True, "dtype": "float", "type": "numeric", "source": "user"}
                      for name in statistics]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exported", type=Path)
    parser.add_argument("tables", type=Path)
    parser.add_argument("date", type=datetime.date.fromisoformat)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", action="store_true", help="train without the texts")
    options = parser.parse_args()
    seed_everything(options.seed)

    sides = {side: entities(options.tables, options.exported, side) for side in ("user", "item")}
    log = pd.read_parquet(options.tables / "interactions.parquet").sort_values(["timestamp", "user_id", "item_id"])
    is_known = [log[f"{side}_id"].isin(table[f"{side}_id"]) for side, table in sides.items()]
    log = log[np.all([log["rating"].notna(), *is_known], axis=0)].reset_index(drop=True)  # as `ctr compare` does
    log["label"] = (log["rating"] >= 4).astype(int)
    log["item_index"] = pd.Index(sides["item"]["item_id"]).get_indexer(log["item_id"]) + 1  # 0 is padding
    ends = parts_of(log["timestamp"], pd.Timestamp(options.date, tz="UTC") + pd.Timedelta(days=1))
    statistics = add_statistics(log, ends[0])
    rows = log.merge(sides["user"], "left", on="user_id").merge(sides["item"], "left", on="item_id")
    # A small network does not learn to multiply: DIN has the products of target and history, and is given these.
    rows["user_times_item"] = list(np.stack(rows["user_value"]) * np.stack(rows["item_value"]))
    sides = {side: table.drop(columns=f"{side}_value") for side, table in sides.items()}
    history = histories_of(log, rows)
    columns = feature_columns(options.exported, sides, statistics, options.without)
    if not options.without:
        dim = len(rows["user_times_item"][0])
        product = {"type": "embedding", "dtype": "list", "pretrain_dim": dim, "embedding_dim": TEXT_DIM}
        columns.append({"name": "user_times_item", "active": True, "source": "user"} | product)

    with tempfile.TemporaryDirectory() as folder:
        processor = FeatureProcessor(columns, {"name": "label", "dtype": "int"}, dataset_id="din", data_root=folder)
        processor.fit(processor.preprocess(pl.from_pandas(rows[: ends[0]])).lazy())
        features = processor.feature_map
        features.default_emb_dim = SIZES["embedding_dim"]

        def coded(table: pd.DataFrame, side: str) -> dict[str, np.ndarray]:
            names = [name for name, spec in features.features.items() if spec["source"] == side]
            codes = processor.transform({name: table[name].to_numpy() for name in names})
            return {name: np.stack(list(of_column)) for name, of_column in codes.items()}

        users = coded(rows, "user")
        items = {name: np.append(0, codes) for name, codes in coded(sides["item"], "item").items()}
        labels, targets = rows["label"].to_numpy(), rows["item_index"].to_numpy()

        def loader(first: int, end: int, shuffle: bool = False) -> DataLoader:
            def collate(numbers: list[int]) -> tuple[dict, dict, torch.Tensor]:
                """User and label; features of history and target, one behind the other; which places are filled."""
                seen = np.column_stack([history[numbers], targets[numbers]])
                of_rows = {name: torch.as_tensor(codes[numbers]) for name, codes in users.items()}
                of_items = {name: torch.as_tensor(codes[seen.reshape(-1)]) for name, codes in items.items()}
                of_rows["label"] = torch.as_tensor(labels[numbers])
                return of_rows, of_items, torch.as_tensor(seen[:, :-1] > 0)

            return DataLoader(range(first, end), 512, shuffle, collate_fn=collate)

        model = DIN(features, **SIZES, **TRAINING, model_root=folder, model_id="DIN")
        model.fit(loader(0, ends[0], shuffle=True), epochs=15, validation_data=loader(*ends[:2]))
        metrics = model.evaluate(loader(*ends[1:]))
    print({"train": ends[0], "validation": ends[1] - ends[0], "test": ends[2] - ends[1], **metrics})


if __name__ == "__main__":
    main()
