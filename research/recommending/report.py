"""The page of a run of lists, drawn from its manifest."""

from pathlib import Path

from markupsafe import Markup

from laserbatch.jobs.formatting import count, decimal, rate, ratio, seconds
from laserbatch.jobs.report.blocks import Note, Section, Table
from laserbatch.jobs.report.page import KeyFigure, log_warnings, render
from laserbatch.jobs.report.work import gates_section, provenance_section
from laserbatch.pipeline.storage.atomic import write_text
from laserbatch.pipeline.storage.figures import SideFigures
from laserbatch.pipeline.storage.manifest import RunManifest

NUM_LAST = 5  # number of titles of a history that are shown


def write_lists_report(manifest: RunManifest, path: Path) -> None:
    figures = manifest.generation.sides["user"]
    stats = figures.stats
    forwards = ratio(stats.num_steps, stats.num_steps + stats.num_accepted)
    levels = None if not stats.num_texts else stats.num_tokens / stats.num_texts
    num_shorter = int(manifest.judgement.extension_figures["num_shorter"])
    key_figures = [
        KeyFigure("users listed", count(figures.num_generated), [f"of {count(figures.num_entities)}; "
                  f"{count(figures.num_carried_over)} carried over", f"{count(figures.num_quarantined)} quarantined"]),
        KeyFigure("users per second", rate(ratio(stats.num_texts, stats.wall_s)), [seconds(stats.wall_s)]),
        KeyFigure("forwards a user", decimal(None if levels is None or forwards is None else levels * forwards),
                  [f"of {decimal(levels, 0)} levels"]),
        KeyFigure("without a history", count(figures.routes.get("popular", 0)), ["they get the most popular items"]),
        KeyFigure("shorter lists", count(num_shorter), ["their users had all other items"]),
    ]  # fmt: skip
    rows = [{"Reason": reason, "Users": count(number)} for reason, number in figures.quarantine_reasons.items()]
    failed = Table("Users in quarantine", rows, ("Reason",)) if rows else Note("Nobody is in quarantine.")
    samples = [
        {"User": str(sample.entity_id), "Last of the history": ", ".join(sample.prompt.splitlines()[-NUM_LAST:]),
         "List, the best first": sample.text}
        for sample in figures.samples
    ]  # fmt: skip
    words = ("User", "Last of the history", "List, the best first")
    shown = Table("Lists", samples, words) if samples else Note("No user with a history is listed.")
    done = [Note(quality_of(manifest)), Note(drafts_of(figures)), failed]
    sections = [
        Section("work", "Work", done), gates_section(manifest), Section("lists", "Some lists", [shown]),
        provenance_section(manifest),
    ]  # fmt: skip
    headline = Markup("<strong>{}</strong> of {} users got a new list").format(
        count(figures.num_generated), count(figures.num_entities)
    )
    title = f"Lists of {manifest.date.day} {manifest.date:%B %Y}"
    write_text(render(manifest, title, headline, key_figures, sections, log_warnings(manifest)), path)


def quality_of(manifest: RunManifest) -> str:
    """A sentence on the quality of the recommender's lists, as measured after its training."""
    card = manifest.origin.settings.get("recommender", {})
    if not card.get("held_back"):
        return "The quality of the recommender's lists was not measured when it was trained."
    shares = {
        name: f"{card[key]['recall_10']:.1%}"
        for name, key in (("its own", "held_back"), ("the neighbours of a user's items", "neighbours"),
                          ("the most popular items", "popular"))
        if card.get(key)
    }  # fmt: skip
    held = ", ".join(f"{name} {share}" for name, share in shares.items())
    number = count(card["held_back"]["num_histories"])
    return f"Of {number} items that were held back in training, lists of ten contained: {held}."


def drafts_of(figures: SideFigures) -> str:
    """A sentence on the number of drafts per user, and the reason for it."""
    if figures.budget is None:
        return "The model made no list, so nothing was drafted."
    forecast, most = figures.budget.forecast, figures.budget.max_draft_tokens
    best = "the best was {} times as fast as plain beams"
    gain = "" if forecast.speed_up is None else f"; {best.format(decimal(forecast.speed_up))}"
    return f"Drafted paths for each user: {count(most) if most else 'none'} ({forecast.reason}{gain})."
