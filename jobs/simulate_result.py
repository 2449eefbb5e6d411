"""What `laserbatch pools simulate` found, as plain values: for the page, the terminal and `--json`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jobs.simulate_check import Check
from pipeline.knowledge.records import Side
from retrieval_pools.estimates import Estimate
from retrieval_pools.recommendation import Recommendation
from retrieval_pools.studies import BUDGET_STUDIES, CONFIGURED, GROUPING, NUM_GROUPS, BudgetSpeed, Outcome, Trial

KINDS = {False: "new", True: "changed"}  # tomorrow's entities: without and with a text of the night before


@dataclass(frozen=True)
class SideSimulation:
    """One side.

    Attributes
    ----------
    num_texts : of the run; `num_pool_texts` : that pools were built from; `num_calibration_texts` :
        that these were calibrated with, which are in none of them.
    outcomes : of every trial, the configured setting first.
    speeds : of every draft budget at every batch size.
    full_pool : tokens per step as configured, extrapolated to a pool of all texts, by whether previous texts are given;
        without a key where it would be a guess.
    """

    side: Side
    num_texts: int
    num_pool_texts: int
    num_calibration_texts: int
    outcomes: Sequence[Outcome]
    speeds: Sequence[BudgetSpeed]
    full_pool: Mapping[bool, Estimate]

    def of(self, study: str, with_previous: bool = False) -> list[Outcome]:
        """The outcomes of one study."""
        trials = [(outcome.trial.study, outcome.trial.with_previous) for outcome in self.outcomes]
        return [one for one, found in zip(self.outcomes, trials, strict=True) if found == (study, with_previous)]

    @property
    def configured(self) -> dict[bool, Outcome]:
        """The configured setting by whether previous texts are given; without True where too few texts have one."""
        found = [outcome for outcome in self.outcomes if outcome.trial.study == CONFIGURED]
        return {outcome.trial.with_previous: outcome for outcome in found}

    def configured_speed(self, batch_size: int, with_previous: bool) -> BudgetSpeed:
        """The configured budget's."""
        wanted = CONFIGURED, batch_size, with_previous
        return next(one for one in self.speeds if (one.study, one.batch_size, one.with_previous) == wanted)


@dataclass(frozen=True)
class Simulation:
    """All of it.

    Attributes
    ----------
    step_cost : names what was measured or computed.
    verifier : the configuration's.
    recommended_batch_size : at which the recommendation is the fastest at this step cost.
    """

    run_id: str
    date: str
    step_cost: str
    batch_sizes: Sequence[int]
    verifier: str
    sides: Sequence[SideSimulation]
    recommendation: Recommendation
    recommended_batch_size: int
    check: Check

    def data(self) -> dict[str, Any]:
        """Everything, for `--json`."""
        return {
            "run_id": self.run_id,
            "date": self.date,
            "step_cost": self.step_cost,
            "verifier": self.verifier,
            "sides": {side.side: _side_data(side) for side in self.sides},
            "recommendation": self._recommendation_data(),
            "checks": [asdict(check) | {"error": check.error} for check in self.check.predictions],
            "check_refused": self.check.refused,
        }

    def _recommendation_data(self) -> dict[str, Any]:
        found = self.recommendation
        return {
            "changes": changed_options(found),
            "batch_size": self.recommended_batch_size,
            "gain": asdict(found.gain),
            "gain_by_side": {s.side: asdict(gain) for s, gain in zip(self.sides, found.gains, strict=True)},
            "drafted_ratio": found.drafted_ratio,
            "holds": found.holds,
        }


def changed_option(trial: Trial) -> dict[str, Any]:
    """What a trial of a budget, a grouping or a pool's option changes, as keys of the configuration."""
    if trial.study in BUDGET_STUDIES:
        budget = trial.setting
        return {
            "decoding.max_draft_tokens": budget.max_draft_tokens,
            "decoding.min_acceptance": budget.min_acceptance,
        }
    if trial.study not in (GROUPING, NUM_GROUPS):
        return {f"pools.{trial.study}": getattr(trial.setting.pool, trial.study)}
    name, _, count = trial.setting.grouping.partition("/")
    scheme = {"whole": "global", "leaves": "attribute"}.get(name, name)
    keys: dict[str, Any] = {"routing.scheme": scheme}
    if name in ("attribute", "leaves"):
        keys["routing.attribute_grouping"] = "leaves" if name == "leaves" else "path"
    if count:
        keys["routing.num_groups"] = int(count)
    return keys | {"pools.scope": trial.setting.pool.scope}


def changed_options(recommendation: Recommendation) -> dict[str, Any]:
    """All that a recommendation changes, as keys of the configuration."""
    keys: dict[str, Any] = {}
    for trial in recommendation.changes:
        keys |= changed_option(trial)
    return keys


def _side_data(side: SideSimulation) -> dict[str, Any]:
    return {
        "num_texts": side.num_texts,
        "num_pool_texts": side.num_pool_texts,
        "num_calibration_texts": side.num_calibration_texts,
        "outcomes": [_outcome_data(outcome) for outcome in side.outcomes],
        "speeds": [asdict(speed) for speed in side.speeds],
        "full_pool_tokens_per_step": {KINDS[kind]: asdict(estimate) for kind, estimate in side.full_pool.items()},
    }


def _outcome_data(outcome: Outcome) -> dict[str, Any]:
    return {
        "study": outcome.trial.study,
        "value": outcome.trial.value,
        "with_previous": outcome.trial.with_previous,
        "num_texts": outcome.num_texts,
        "aal": asdict(outcome.mean_accepted),
        "tokens_per_step": asdict(outcome.tokens_per_step),
        "mean_drafted": outcome.mean_drafted,
        "precision": outcome.precision,
        "gain": asdict(outcome.gain),
        "verdict": outcome.verdict,
    }
