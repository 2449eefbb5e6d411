"""What `laserbatch pools simulate` found, as plain values: for the page, the terminal and `--json`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from laserbatch.jobs.simulate_budgets import SideBudgets
from laserbatch.jobs.simulate_check import Check
from laserbatch.pipeline.sides import Side
from laserbatch.retrieval_pools.calibration.estimates import Estimate
from laserbatch.retrieval_pools.simulating.recommendation import BUDGET, Recommendation
from laserbatch.retrieval_pools.simulating.simulate import Kind
from laserbatch.retrieval_pools.simulating.studies import CONFIGURED, GROUPING, NUM_GROUPS, Outcome, Trial
from laserbatch.retrieval_pools.step_cost import StepCost


@dataclass(frozen=True)
class SideSimulation:
    """One side.

    Attributes
    ----------
    num_texts : of the run; `num_written` : that it wrote itself; `share_changed` : of these, with a text of the night
        before; `num_pool_texts` : that pools were built from; `num_calibration_texts` : that these were calibrated
        with, which are in none of them.
    outcomes : of every trial, the configured setting first, of every kind.
    budgets : at every batch size.
    full_pool : tokens per step as configured, extrapolated to a pool of all texts, by kind; without a key where it
        would be a guess.
    """

    side: Side
    num_texts: int
    num_written: int
    share_changed: float
    num_pool_texts: int
    num_calibration_texts: int
    outcomes: Sequence[Outcome]
    budgets: SideBudgets
    full_pool: Mapping[Kind, Estimate]

    def of(self, study: str, kind: Kind | None = None) -> list[Outcome]:
        """The outcomes of one study; None: of the kind of a night, as groups, sizes and options are studied."""
        kind = kind or self.night_kind
        return [one for one in self.outcomes if (one.trial.study, one.trial.kind) == (study, kind)]

    @property
    def configured(self) -> dict[Kind, Outcome]:
        """The configured setting by kind; "new" alone where too few texts have a previous one."""
        return {one.trial.kind: one for one in self.outcomes if one.trial.study == CONFIGURED}

    @property
    def night_kind(self) -> Kind:
        """The kind of a night."""
        return list(self.configured)[-1]


@dataclass(frozen=True)
class Simulation:
    """All of it.

    Attributes
    ----------
    step_cost : measured or computed.
    verifier : the configuration's.
    recommended_batch_size : at which the recommendation is the fastest at this step cost.
    """

    run_id: str
    date: str
    step_cost: StepCost
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
            "step_cost": self.step_cost.name,
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
    if trial.study == BUDGET:
        return {"decoding.max_draft_tokens": None, "decoding.min_acceptance": None}  # the night's own choice
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
    curve = side.budgets.curve
    return {
        "num_texts": side.num_texts,
        "num_written": side.num_written,
        "share_changed": side.share_changed,
        "num_pool_texts": side.num_pool_texts,
        "num_calibration_texts": side.num_calibration_texts,
        "outcomes": [_outcome_data(outcome) for outcome in side.outcomes],
        "budgets": {
            "replayed": None if curve is None else curve.model_dump(mode="json"),
            "configured": [asdict(one) for one in side.budgets.configured.values()],
            "chosen": [asdict(one) for one in side.budgets.chosen.values()],
        },
        "full_pool_tokens_per_step": {kind: asdict(estimate) for kind, estimate in side.full_pool.items()},
    }


def _outcome_data(outcome: Outcome) -> dict[str, Any]:
    return {
        "study": outcome.trial.study,
        "value": outcome.trial.value,
        "kind": outcome.trial.kind,
        "num_texts": outcome.num_texts,
        "aal": asdict(outcome.mean_accepted),
        "tokens_per_step": asdict(outcome.tokens_per_step),
        "mean_drafted": outcome.mean_drafted,
        "precision": outcome.precision,
        "gain": asdict(outcome.gain),
        "verdict": outcome.verdict,
    }
