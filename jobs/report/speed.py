"""The section about speed, compared with the previous night, plain decoding and the forecast of the budget."""

from laserbatch.jobs.formatting import MISSING, count, counted, decimal, percent, rate, ratio, seconds, times
from laserbatch.jobs.report.blocks import Block, Note, Section, Table
from laserbatch.jobs.report.sides import SideReport
from laserbatch.pipeline.decoding.plugins import rule_sentence
from laserbatch.pipeline.storage.manifest import RunManifest
from laserbatch.pipeline.storage.stats import DecodingStats

PASSES = {"tonight": "tonight", "previous_night": "previous night", "plain": "plain decoding"}
SPEED_CAPTION = (
    "Tokens per second: tokens written, divided by the seconds of writing{}. "
    "Acceptance length: mean accepted draft tokens per step, the bonus token not counted. "
    "Tokens per step: acceptance length + 1, the bonus token counted. "
    "vs plain: tokens per second divided by those of plain decoding. Cut: texts that ended at the token limit. "
    "Prompt reused: prompt tokens whose keys and values were in the cache already, from another prompt."
)


def speed_section(manifest: RunManifest, sides: list[SideReport]) -> Section:
    sides = [side for side in sides if side.tonight]
    if not sides:
        return Section("speed", "Speed", [Note("No text was generated tonight, so there is no speed to show.")])
    workers = ""
    if (of_run := manifest.generation.workers) is not None:
        workers = f" by {counted(of_run.num_workers, 'worker')}, {counted(of_run.num_threads, 'thread')} each"
    verifier = manifest.origin.settings.get("decoding", {}).get("verifier")
    passes = PASSES | {"tonight": f"tonight ({verifier})"}
    shown = [(side, key) for side in sides for key in passes if getattr(side, key)]
    rows = [_pass_row(side, passes[key], getattr(side, key), key != "plain") for side, key in shown]
    strong = [number for number, (_, key) in enumerate(shown) if key == "tonight"]
    blocks: list[Block] = [Table("Speed", rows, ("Side", "Pass"), SPEED_CAPTION.format(workers), strong)]
    if not any(side.previous_night for side in sides):
        blocks.append(Note("There is no previous night with written texts to compare with."))
    if not any(side.plain for side in sides):
        blocks.append(
            Note("Nothing was decoded plainly in this run, so there is no speed-up over plain decoding to show.")
        )
    if any(side.figures.budget for side in sides):
        blocks.append(_forecast(sides))
    lead = rule_sentence(str(verifier))
    if rewritten := sum(side.figures.stats.num_rewritten for side in sides):
        lead += (
            f" {counted(rewritten, 'text')} reached the token limit under relaxed verification and were written again "
            "as plain decoding writes them."
        )
    return Section("speed", "Speed", blocks, lead)


def _pass_row(side: SideReport, name: str, stats: DecodingStats, is_compared: bool) -> dict[str, str]:
    faster = ratio(stats.tokens_per_s, side.plain.tokens_per_s) if side.plain and is_compared else None
    row = {
        "Side": side.label,
        "Pass": name,
        "Texts": count(stats.num_texts),
        "Tokens": count(stats.num_tokens),
        "Steps": count(stats.num_steps),
        "Tokens/text": decimal(ratio(stats.num_tokens, stats.num_texts), 0),
        "Prompt reused": percent(ratio(stats.num_prompt_reused, stats.num_prompt_tokens)),
        "Cut": percent(ratio(stats.finish_reasons.get("length", 0), stats.num_texts), 1),
        "Time": seconds(stats.wall_s),
        "Tokens/s": rate(stats.tokens_per_s),
        "Acceptance length": decimal(stats.acceptance_length),
        "Tokens/step": decimal(stats.tokens_per_step),
    }
    return row | {"vs plain": times(faster)}


def _forecast(sides: list[SideReport]) -> Table:
    """A table of the budgets and why they were chosen, with measured values and forecasts."""
    rows = []
    for side in sides:
        if (budget := side.figures.budget) is None:
            continue
        stats, forecast, drafts = side.figures.stats, budget.forecast, budget.max_draft_tokens > 0
        row = {"Side": side.label, "Largest tree": count(budget.max_draft_tokens)}
        row["Threshold"] = decimal(budget.min_acceptance) if drafts else MISSING
        row["Drafted/step (forecast)"] = _beside(stats.drafted_per_step, forecast.mean_drafted)
        row["Tokens/step (forecast)"] = _beside(stats.tokens_per_step, forecast.tokens_per_step)
        row["vs plain, full batches"] = times(forecast.speed_up) if drafts else MISSING
        rows.append(row | {"Why": forecast.reason})
    return Table(
        "Draft budgets: result and forecast",
        rows,
        ("Side", "Why"),
        "Threshold: a token is drafted only if its path is estimated at least this likely to be accepted. Forecasts "
        "come from replays of the texts that the pool was calibrated with; if these were not written with relaxed "
        "drafts from it, a relaxed verifier accepts more. Full batches: without prompts and the ends of shards.",
    )


def _beside(realised: float | None, forecast: float | None) -> str:
    return f"{decimal(realised)} ({decimal(forecast)})"
