"""How fast, against the previous night, plain decoding and the forecast of the budget."""

from laserbatch.jobs.formatting import MISSING, count, counted, decimal, percent, rate, ratio, seconds, times
from laserbatch.jobs.report.blocks import PLAIN, PREVIOUS_NIGHT, TONIGHT, Block, Note, Section, Series, Table, bars
from laserbatch.jobs.report.sides import SideReport
from laserbatch.pipeline.storage.manifest import RunManifest
from laserbatch.pipeline.storage.stats import DecodingStats

PASSES = (
    ("plain", "plain decoding", PLAIN),
    ("previous_night", "previous night", PREVIOUS_NIGHT),
    ("tonight", "tonight", TONIGHT),
)


def speed_section(manifest: RunManifest, sides: list[SideReport]) -> Section:
    """The section "Speed"."""
    sides = [side for side in sides if side.tonight]
    if not sides:
        return Section("speed", "Speed", [Note("No text was generated tonight, so there is no speed to show.")])
    passes = [one for one in PASSES if any(getattr(side, one[0]) for side in sides)]
    a_second, a_step = (
        [
            Series(name, [getattr(getattr(side, key), measured, None) for side in sides], colour)
            for key, name, colour in passes
        ]
        for measured in ("tokens_per_s", "tokens_per_step")
    )
    labels, workers = [side.label for side in sides], manifest.generation.workers
    caption = "Tokens written, divided by the seconds of writing"
    if workers is not None:
        threads = counted(workers.num_threads, "thread")
        caption += f" by {counted(workers.num_workers, 'worker')}, {threads} each"
    step_caption = "Accepted draft tokens per step, and the bonus token that each step adds."
    blocks: list[Block] = [
        bars("Tokens per second", labels, a_second, "tokens per second", rate, f"{caption}."),
        bars("Tokens per step", labels, a_step, "tokens per verification step", decimal, step_caption),
    ]
    present = {key for key, _, _ in passes}
    if "previous_night" not in present:
        blocks.append(Note("This is the first night of the workspace: there is no earlier one to compare with."))
    if "plain" not in present:
        blocks.append(
            Note("Nothing was decoded plainly in this run, so there is no speed-up over plain decoding to show.")
        )
    verifier = manifest.origin.settings.get("decoding", {}).get("verifier")
    blocks.append(_numbers(sides, f"tonight ({verifier})"))
    if any(side.figures.budget for side in sides):
        blocks.append(_forecast(sides))
    lead = ""
    if rewritten := sum(side.figures.stats.num_rewritten for side in sides):
        lead = (
            f"{counted(rewritten, 'text')} had run on to their limit under relaxed verification, and were written "
            "again as plain decoding writes them."
        )
    return Section("speed", "Speed", blocks, lead)


def _numbers(sides: list[SideReport], tonight_name: str) -> Table:
    shown = [(side, key, name) for side in sides for key, name, _ in reversed(PASSES) if getattr(side, key)]
    return Table(
        "Speed, in numbers",
        [
            _pass_row(side, tonight_name if key == "tonight" else name, getattr(side, key), key != "plain")
            for side, key, name in shown
        ],
        ("Side", "Pass"),
        "Acceptance length: mean accepted draft tokens per step, the bonus token not counted. "
        "Tokens per step: acceptance length + 1, the bonus token counted. "
        "“vs plain” is the factor of tokens per second. Cut: texts that ended at the token limit.",
        [number for number, (_, key, _) in enumerate(shown) if key == "tonight"],
    )


def _pass_row(side: SideReport, name: str, stats: DecodingStats, is_compared: bool) -> dict[str, str]:
    faster = ratio(stats.tokens_per_s, side.plain.tokens_per_s) if side.plain and is_compared else None
    return {
        "Side": side.label,
        "Pass": name,
        "Texts": count(stats.num_texts),
        "Tokens": count(stats.num_tokens),
        "Steps": count(stats.num_steps),
        "Tokens/text": decimal(ratio(stats.num_tokens, stats.num_texts), 0),
        "Cut": percent(ratio(stats.finish_reasons.get("length", 0), stats.num_texts), 1),
        "Time": seconds(stats.wall_s),
        "Tokens/s": rate(stats.tokens_per_s),
        "Acceptance length": decimal(stats.acceptance_length),
        "Tokens/step": decimal(stats.tokens_per_step),
        "vs plain": times(faster),
    }


def _forecast(sides: list[SideReport]) -> Table:
    """The budgets and why they were chosen, with the forecasts beside the measured values."""
    rows = []
    for side in sides:
        stats, budget = side.figures.stats, side.figures.budget
        if budget is None:
            continue
        forecast = budget.forecast
        rows.append(
            {
                "Side": side.label,
                "Largest tree": count(budget.max_draft_tokens),
                "Threshold": decimal(budget.min_acceptance) if budget.max_draft_tokens else MISSING,
                "Drafted/step (forecast)": _beside(stats.drafted_per_step, forecast.mean_drafted),
                "Tokens/step (forecast)": _beside(stats.tokens_per_step, forecast.tokens_per_step),
                "vs plain, full batches": times(forecast.speed_up) if budget.max_draft_tokens else MISSING,
                "Why": forecast.reason,
            }
        )
    return Table(
        "How much was drafted, and what was forecast of it",
        rows,
        ("Side", "Why"),
        "Threshold: a token whose path was estimated less likely to be accepted was not drafted. Forecasts are of "
        "replays of the texts that the pool was calibrated with; where these were not written with relaxed drafts "
        "from it, a relaxed verifier accepts more. Full batches: prompts, and the ends of shards, are not counted.",
    )


def _beside(realised: float | None, forecast: float | None) -> str:
    return f"{decimal(realised)} ({decimal(forecast)})"
