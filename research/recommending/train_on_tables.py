"""Trains recommenders on the interactions of tables, and small models that draft for them."""

import datetime
from pathlib import Path

import torch

from laserbatch.jobs.console import progress, say
from laserbatch.jobs.settings import Settings
from laserbatch.pipeline.distributed.settings import usable_cores
from laserbatch.pipeline.encoding.schema import vectors_of
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.read import read_tables
from laserbatch.research.recommending.card import CODES_NAME, RecommenderCard, codes_of_recommender
from laserbatch.research.recommending.codes import made_codes, read_codes
from laserbatch.research.recommending.listed import known_histories
from laserbatch.research.recommending.lists import write_catalogue
from laserbatch.research.recommending.models import load_recommender
from laserbatch.research.recommending.settings import CodeMaker, DraftLoss
from laserbatch.research.recommending.training import RecommenderOptions, train_draft, train_recommender


def train_on_tables(
    settings: Settings,
    out: Path,
    codes_file: Path | None,
    draft_for: Path | None,
    loss: DraftLoss,
    date: datetime.date | None,
    epochs: int | None,
    code_maker: CodeMaker = "kmeans",
    base: Path | None = None,
) -> RecommenderCard:
    """Train a recommender into a folder, with its codes; `draft_for` is the folder of a small model's target, and
    `base` the folder of a language model to extend."""
    torch.set_num_threads(usable_cores())
    tables = read_tables(settings.tables.required_path, as_of=date, keep_duplicates=settings.tables.keep_duplicates)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = None if draft_for is None else load_recommender(draft_for, device)
    if draft_for is not None and target is not None:
        codes = codes_of_recommender(draft_for, target)
    elif codes_file is not None:
        codes = read_codes(codes_file)
    else:
        run = Workspace.open(settings.workspace, create=False).chosen_run(None)
        table = read_parquet(run.features_path("item"), ["item_id", "vector"])
        say(f"codes are made from the {table.num_rows} item vectors of run {run.run_id}")
        codes = made_codes(table["item_id"].combine_chunks(), vectors_of(table), settings.seed, code_maker)
    item_ids, histories = tables.items["item_id"].combine_chunks(), known_histories(tables, codes)
    if num_unknown := len(item_ids) - len(codes.of_catalogue(item_ids)):
        unless = "not listed, unless the published run of texts has vectors of them"
        say(f"{num_unknown} of {len(item_ids)} items have no codes: they are not learned, and {unless}")
    with progress("train recommender") as bar:

        def on_progress(step: int, num_steps: int, value: float) -> None:
            bar.reach(step, f"of {num_steps}, loss {value:.3f}")

        if target is None:
            options = RecommenderOptions(epochs=epochs or 15, seed=settings.seed)
            card = train_recommender(codes, histories, out, options, on_progress, base)
        else:
            options = RecommenderOptions(hidden_size=64, num_layers=1, epochs=epochs or 5, seed=settings.seed)
            card = train_draft(loss, target, codes, histories, out, options, on_progress)
    write_catalogue(codes, out / CODES_NAME)
    return card
