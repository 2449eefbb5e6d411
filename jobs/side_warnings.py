"""What a side's figures warn of, in sentences: for the summary of a command and for the head of the report."""

from laserbatch.jobs.formatting import percent, ratio
from laserbatch.pipeline.storage.manifest import SideFigures

MOST_CUT = 0.05  # share of a side's texts that may end at the limit before it is said
MOST_MISSING = 0.2  # share of the accepted tokens that replays forecast that may be missing
MIN_STEPS = 200  # of fewer steps nothing can be said of them


def side_warnings(side: SideFigures) -> list[str]:
    """Texts that end at their limit, and drafts that are not accepted as forecast."""
    cut = ratio(side.stats.finish_reasons.get("length"), side.stats.num_texts) or 0.0
    warnings = []
    if cut > MOST_CUT:
        warnings.append(
            f"{percent(cut, 1)} of the texts end at the token limit, in the middle of what they say: raise "
            "decoding.max_new_tokens, or have the template ask for less"
        )
    budget = side.budget or {}
    forecast = ((budget.get("forecast") or {}).get("tokens_per_step") or 1) - 1  # the bonus token not counted
    if budget.get("max_draft_tokens") and forecast > 0 and side.stats.num_steps >= MIN_STEPS:
        realised = side.stats.acceptance_length
        missing = 1 - realised / forecast
        if missing > MOST_MISSING:
            warnings.append(
                f"drafts were accepted {realised:.2f} tokens a step, {missing:.0%} less than the {forecast:.2f} that "
                f"its budget was chosen for (up to {MOST_MISSING:.0%} is usual): the texts have changed since. The "
                "next night drafts by replays of these, if pools are built from them (`laserbatch pools rebuild`)"
            )
    return warnings
