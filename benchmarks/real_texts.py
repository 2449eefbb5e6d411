"""Gains of CTR models from texts of a large language model: books of Goodreads, described by GPT-3.5.

    python benchmarks/real_texts.py --quick --json real_texts.json

The texts of books were written from their titles, so they contain nothing about readers. Texts of readers are left out:
they were written from the lists of books that are to be predicted. The lists have an order but no times: here the books
of a list are about ten days apart, and the last one is at the end of the log. So models are trained on all but the last
books of each reader and tested on these, each with 4 random negative books. Vectors are the bundled encoder's.
Adaptors are those of `ctr.adaptor`; trees take the vectors directly. `gain` is over the same model without texts, with
the same seeds.
"""

import datetime
import statistics

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import SEED, Figure, begin, benchmark_parser, finish, scale_of, table

from laserbatch.ctr.dataset import build_dataset
from laserbatch.ctr.feature_set import FeatureSet
from laserbatch.ctr.knowledge import build_knowledge
from laserbatch.ctr.metrics import measure
from laserbatch.ctr.networks import ADAPTORS
from laserbatch.ctr.settings import CtrSettings
from laserbatch.ctr.training import MODEL_TITLES, train_model
from laserbatch.pipeline.encoding.codebook import fit_codebook
from laserbatch.pipeline.encoding.codebook_file import CLUSTER_SEED
from laserbatch.pipeline.encoding.encoder import TextEncoder
from laserbatch.pipeline.encoding.schema import LEVELS, days_valid, feature_schema, moments, vector_column
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.tables.read import Tables

LAST_DAY = datetime.date(2025, 6, 30)
AS_OF = LAST_DAY - datetime.timedelta(days=13)  # after it come the last book of each reader, and some earlier ones
DAYS_BETWEEN, MAX_DAYS_OFF = 10, 5
RUN_ID = f"{AS_OF}-goodreads"
MIN_GAIN = 0.02
COLUMNS = {
    "model": "{title}", "adaptor": "{adaptor}", "validation AUC": "{validation_auc:.4f}", "AUC": "{auc:.4f}",
    "within users": "{gauc:.4f}", "gain": "{gain:+.4f}",
}  # fmt: skip


def goodreads(folder, num_users: int) -> tuple[Tables, dict[str, str]]:
    """The tables of `num_users` readers and their books, and the texts by book."""
    rng = np.random.default_rng(SEED)
    titles = dict(zip(*pq.read_table(folder / "items.parquet").to_pydict().values(), strict=True))
    lists = pq.read_table(folder / "users.parquet").to_pylist()
    lists = [lists[row] for row in rng.permutation(len(lists))[:num_users]]
    end_s = datetime.datetime.combine(LAST_DAY, datetime.time(12), datetime.UTC).timestamp()
    events = [
        (reader["user_id"], book, int(end_s - 86_400 * (DAYS_BETWEEN * place + MAX_DAYS_OFF * rng.random())))
        for reader in lists
        for place, book in enumerate(reversed([book for book in reader["history"] if book in titles]))
    ]
    users, books, times_s = (list(column) for column in zip(*sorted(events, key=lambda event: event[2]), strict=True))
    there = sorted(set(books))
    tables = Tables(
        users=pa.table({"user_id": sorted(set(users))}),
        items=pa.table({"item_id": there}),
        interactions=pa.table(
            {"user_id": users, "item_id": books, "timestamp": pa.array(times_s, pa.timestamp("s", "UTC"))}
        ),
    )
    texts = dict(zip(*pq.read_table(folder / "item_knowledge.parquet").to_pydict().values(), strict=True))
    return tables, {book: texts[book] for book in there if book in texts}


def features_of(texts: dict[str, str]) -> FeatureSet:
    """Features of items as a night writes them, and none for users."""
    settings = EncodingSettings()
    vectors = TextEncoder.load(settings).encode(list(texts.values())).vectors
    codes = fit_codebook(vectors, settings.num_clusters, CLUSTER_SEED).codes(vectors)
    run_ids = pa.array([RUN_ID] * len(texts))
    item = [pa.array(list(texts)), vector_column(vectors), *(pa.array(codes[:, level]) for level in range(len(LEVELS)))]
    schemas = [feature_schema(side, pa.string(), vectors.shape[1]) for side in ("user", "item")]
    return {
        "user": schemas[0].empty_table(),
        "item": pa.table([*item, run_ids, run_ids, moments(days_valid(run_ids))], schemas[1]),
    }


def main() -> None:
    """Train every model without texts, and with texts by every adaptor."""
    arguments = benchmark_parser(__doc__, "data", "threads").parse_args()
    begin(arguments.threads)
    num_users, num_seeds, adaptors = scale_of(
        arguments, (8000, 3, list(ADAPTORS)), (3000, 2, ["linear", "kar", "once"]), (300, 1, ["linear"])
    )
    tables, texts = goodreads(arguments.data / "goodreads", num_users)
    settings = CtrSettings(label="all")
    data = build_dataset(tables, AS_OF, settings)
    knowledge = build_knowledge(tables, data, {"own": features_of(texts)}, AS_OF, settings)["own"]

    def row(model, adaptor: str) -> dict:
        judged = []
        for seed in range(num_seeds):
            of_adaptor = settings if adaptor in ("none", "–") else settings.model_copy(update={"adaptor": adaptor})
            trained = train_model(model, data, None if adaptor == "none" else knowledge, of_adaptor, seed)
            metrics = measure(data.labels[data.test], trained.scores, data.users[data.test], data.is_cold[data.test])
            judged.append({"validation_auc": trained.validation_auc, "auc": metrics.auc, "gauc": metrics.gauc})
        means = {name: statistics.fmean(of_seed[name] for of_seed in judged) for name in judged[0]}
        return {"model": model, "title": MODEL_TITLES[model], "adaptor": adaptor, **means, "seeds": judged}

    rows = []
    for model in settings.models:
        without = row(model, "none")
        rows.append(without | {"gain": 0.0})
        for adaptor in ["–"] if model == "gbdt" else adaptors:
            with_texts = row(model, adaptor)
            rows.append(with_texts | {"gain": with_texts["auc"] - without["auc"]})
    figures = [
        Figure.at_least(f"{of['title']}: AUC that texts add by the default", of["gain"], MIN_GAIN)
        for of in rows
        if of["adaptor"] in (settings.adaptor, "–")
    ]
    parts = {name: len(getattr(data, name)) for name in ("train", "validation", "test")}
    finish(
        arguments.json, figures, [table(rows, COLUMNS)], {"rows_of_parts": parts, "num_texts": len(texts), "rows": rows}
    )


if __name__ == "__main__":
    main()
