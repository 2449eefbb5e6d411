"""`laserbatch recommend` and `laserbatch recommender ...`: make nightly lists of items, and train their models."""

from pathlib import Path

import typer

from laserbatch.jobs.console import TO_FOLDER, say, summary
from laserbatch.jobs.settings import CONFIG, JSON, WORKSPACE, load_settings
from laserbatch.jobs.stages.night import parse_date, parse_night
from laserbatch.pipeline.errors import ConfigError
from laserbatch.research.recommending.settings import CodeMaker, DraftLoss

app = typer.Typer(no_args_is_help=True, add_completion=False)


def recommend(
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    date: str = typer.Option(..., help="Date of the lists; they use what was known at the end of this day."),
    force: bool = typer.Option(
        False, help="Also make new lists for unchanged users, in a new run; also accept a date after tomorrow."
    ),
    as_json: bool = JSON,
) -> None:
    """List the best items of every user, and publish them as Parquet: user_id, rank, item_id, score.

    The same command finishes a run that was killed. `recommendations/published.json` names the published run.

    Example: `laserbatch recommend --config laserbatch.yaml --date 2025-03-01`
    """
    from laserbatch.research.recommending.nightly import recommend

    settings = load_settings(config, {"workspace": workspace})
    manifest = recommend(settings, parse_night(date, force), force)
    figures, folder = manifest.generation.sides["user"], manifest.path.parent
    names = ("entities", "generated", "carried_over", "quarantined")
    result = {
        "run_id": manifest.run_id, "users": {name: getattr(figures, f"num_{name}") for name in names},
        "without_a_history": figures.routes.get("popular", 0),
        "shorter_lists": int(manifest.judgement.extension_figures["num_shorter"]),
        "forwards_saved": figures.stats.num_accepted, "seconds": figures.stats.wall_s,
        "lists": str(folder / "lists.parquet"), "report": str(folder / "report.html"),
    }  # fmt: skip
    summary(result, as_json)


@app.command()
def train(
    out: Path = typer.Option(..., help="Folder to write.", **TO_FOLDER),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    codes: Path | None = typer.Option(
        None,
        show_default="made from the item vectors of the published run",
        help="Parquet file with the columns item_id and codes.",
    ),
    code_maker: CodeMaker = typer.Option("kmeans", help="Method that makes codes from vectors."),
    draft_for: Path | None = typer.Option(None, help="Train a small model to draft for this folder's recommender."),
    loss: DraftLoss = typer.Option("wordkd", help="Loss of the small model, with --draft-for; docs/recommend.md."),
    base: Path | None = typer.Option(
        None,
        show_default="a small model, trained from nothing",
        help="Folder of a language model: its vocabulary is extended by the codes, and a LoRA adapts it.",
    ),
    date: str | None = typer.Option(
        None, show_default="all interactions", help="Train on interactions up to the end of this day."
    ),
    epochs: int | None = typer.Option(
        None, min=1, show_default="15, of a small model 5", help="Passes over the histories; the best epoch is kept."
    ),
    as_json: bool = JSON,
) -> None:
    """Train a recommender on the interactions of the tables, or a small model that drafts for one.

    Set `extensions.recommending.model` or `extensions.recommending.draft_model` to its folder. The same command
    continues a killed training.

    Example: `laserbatch recommender train --out recommender --config laserbatch.yaml`
    """
    from laserbatch.research.recommending.train_on_tables import train_on_tables

    if codes is not None and draft_for is not None:
        raise ConfigError("--codes and --draft-for: a small model has the codes of its target, so leave --codes out")
    settings = load_settings(config, {"workspace": workspace})
    day = None if date is None else parse_date(date)
    if base is not None and draft_for is not None:
        raise ConfigError("--base and --draft-for: a small model is trained from scratch, so leave --base out")
    for option, read in (("--draft-for", draft_for), ("--base", base)):
        if read is not None and out.resolve() == read.resolve():
            raise ConfigError(f"--out and {option} are both {out}, so its model would be lost: give --out a new folder")
    card = train_on_tables(settings, out, codes, draft_for, loss, day, epochs, code_maker, base)
    result: dict = {"folder": str(out), "histories": card.num_histories, "training_seconds": card.training_seconds}
    rankings = {"": card.held_back, "_of_neighbours": card.neighbours, "_of_popular_items": card.popular}
    recalls = {of: ranking.recall_10 for of, ranking in rankings.items() if ranking is not None}
    if recalls:
        result["epoch_kept"] = card.epoch
        result["of_held_back_items"] = {f"recall_10{of}": round(recall, 4) for of, recall in recalls.items()}
    summary(result, as_json)
    if recalls and recalls[""] < max(recalls.values()):
        say(
            "a baseline (most popular items, or neighbours of the user's items) has a higher recall@10 than this "
            "recommender: train longer, on more interactions or with other codes before nights use it"
        )
    if not as_json:
        key = "model" if draft_for is None else "draft_model"
        say(f"to use it in nights, set `extensions: {{recommending: {{{key}: {out}}}}}`")
