"""What a side's figures warn of, in sentences: for the summary of a command and for the head of the report.

Draws nothing; reads a side of a manifest that may lack anything.
"""

from collections.abc import Mapping

from laserbatch.jobs.drift import drift_of
from laserbatch.jobs.formatting import percent, ratio

MOST_CUT = 0.05  # share of a side's texts that may end at the limit before it is said


def side_warnings(side_data: Mapping) -> list[str]:
    """Texts that end at their limit, and drafts that are no longer accepted as forecast."""
    stats = side_data.get("stats") or {}
    cut = ratio((stats.get("finish_reasons") or {}).get("length"), stats.get("num_texts")) or 0.0
    warnings = []
    if cut > MOST_CUT:
        warnings.append(
            f"{percent(cut, 1)} of the texts end at the token limit, in the middle of what they say: raise "
            "decoding.max_new_tokens, or have the template ask for less"
        )
    drift = drift_of(side_data)
    return [*warnings, drift.sentence] if drift is not None and drift.is_notable else warnings
