"""Deciding which texts are worth writing tonight, by rules and a token budget, over columns.

Candidates are entities without a text, or with a changed prompt. This module knows no tables and no files.
"""

from dataclasses import dataclass

import numpy as np
from pydantic import Field

from laserbatch.pipeline.validation import Strict

NOT_DUE, BUDGET, EVIDENCE = "not-due", "budget", "evidence"  # reasons why an entity gets no new text tonight
DAYS_OF_A_POINT = 7  # days of waiting that add one to a score, as twice the interactions do


class RefreshSettings(Strict):
    """The rules by which a text is written again if its prompt has changed, and the token limit of a night."""

    min_interactions: int = Field(
        default=0,
        ge=0,
        description="A user with fewer interactions gets no new text and loses an existing one, since there is too "
        "little to write from.",
    )
    min_new_interactions: int = Field(
        default=0,
        ge=0,
        description="A user whose history alone changed is rewritten once this many interactions were added or "
        "removed. 0: after any change.",
    )
    max_age_days: int | None = Field(
        default=None,
        ge=1,
        description="A text of an earlier prompt is rewritten once it is this many days old, even if too little "
        "changed. null: its age does not matter.",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="A night writes at most about this many tokens, the most valuable texts first; the others wait "
        "for a later night. null: no limit.",
    )


@dataclass(frozen=True)
class Candidates:
    """Columns of the entities that could get a new text, each of length n."""

    has_text: np.ndarray  # bool
    is_changed_beyond_history: np.ndarray  # bool; template, model, decoding or attributes differ
    num_interactions: np.ndarray  # int, the interactions tonight
    num_seen: np.ndarray  # int, the interactions when the text was written
    age_days: np.ndarray  # float, days since the text was written; without a text, since the entity began to wait
    num_tokens: np.ndarray  # float, expected tokens of the new text

    def scores(self) -> np.ndarray:
        """The value of a new text, float64[n]: log2(2 + interactions) x share of new interactions + days / 7.

        The share is 1 without a text, or if more than the history changed. Days grow without bound, so no entity waits
        for ever.
        """
        most = np.maximum(np.maximum(self.num_interactions, self.num_seen), 1)
        novelty = np.abs(self.num_interactions - self.num_seen) / most
        novelty = np.where(self.has_text & ~self.is_changed_beyond_history, novelty, 1.0)
        return np.log2(2 + self.num_interactions) * novelty + self.age_days / DAYS_OF_A_POINT


@dataclass(frozen=True)
class Decision:
    """Arrays of length n, one value per candidate."""

    is_written: np.ndarray  # bool
    is_over_budget: np.ndarray  # bool; due, but not written because the budget is used up
    scores: np.ndarray  # float64


def decide(candidates: Candidates, settings: RefreshSettings, max_tokens: float | None = None) -> Decision:
    """Decide which candidates get a new text tonight.

    A candidate is due if it has no text, if more than its history changed, if its text is `max_age_days` old, or if at
    least `min_new_interactions` interactions were added or removed since its text. The due candidates with the highest
    scores (among equal scores the first ones) are written while tokens of `max_tokens`, the side's limit, are left.
    """
    is_other = np.abs(candidates.num_interactions - candidates.num_seen) >= settings.min_new_interactions
    is_due = ~candidates.has_text | candidates.is_changed_beyond_history | is_other
    if settings.max_age_days is not None:
        is_due |= candidates.age_days >= settings.max_age_days
    scores = candidates.scores()
    is_written = is_due.copy()
    if max_tokens is not None:
        due = np.flatnonzero(is_due)
        best = due[np.argsort(-scores[due], kind="stable")]
        before = np.cumsum(candidates.num_tokens[best]) - candidates.num_tokens[best]
        is_written[best[before >= max_tokens]] = False
    return Decision(is_written, is_due & ~is_written, scores)
