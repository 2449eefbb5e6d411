"""Which settings a simulation tries around the configured one, and what it makes of them.

A study changes one thing and leaves the rest as configured; every trial is compared with the configured setting on the
same texts. Knows no table and no terminal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from retrieval_pools.estimates import Bootstrap, Estimate
from retrieval_pools.pool import DEFAULT_POOL_ESCAPE
from retrieval_pools.settings import MAX_CONTEXT_LENGTHS, MAX_MATCH_TOKENS
from retrieval_pools.simulate import SOURCES, DraftSetting, Simulator
from retrieval_pools.step_cost import StepCost

DRAFT_TOKENS = (4, 8, 16, 32, 64)
MIN_ACCEPTANCES = (0.01, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7)
FULL_TREES = 0.001  # low enough that the number of draft tokens alone bounds a tree
POOL_SIZES = (50, 100, 200, 500, 1000, 2000, 3000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
GROUP_COUNTS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
MAX_GROUP_COUNTS = 5
MIN_TEXTS_A_GROUP = 4
OPTION_VALUES: dict[str, tuple[float, ...]] = {  # of the pool; the configured value is tried too
    "group_weight": (1.0, 3.0, 10.0),
    "min_support": (1, 2, 3, 5),
    "max_match_tokens": (4, 8, 16, MAX_MATCH_TOKENS),
    "num_context_lengths": (1, 2, 4, MAX_CONTEXT_LENGTHS),
    "pool_escape_per_token": (0.25, 0.5, 1.0, 2.0, 4.0),
}
SOURCES_STUDY = "sources"
MIN_WITH_PREVIOUS = 10  # held-back texts with a previous one; of fewer nothing can be said
BUDGET_STUDIES = ("draft tokens", "min_acceptance")
CONFIGURED, GROUPING, NUM_GROUPS = "configured", "grouping", "number of groups"


@dataclass(frozen=True)
class Trial:
    """One setting of one study.

    Attributes
    ----------
    study : what is changed; `value` : to what, in words.
    with_previous : see `Simulator.replay`.
    position : the same as a number, where it is one, to draw it.
    """

    study: str
    value: str
    setting: DraftSetting
    with_previous: bool = False
    position: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What a trial gave.

    Attributes
    ----------
    mean_accepted : AAL, the bonus token not counted; `tokens_per_step` : with it.
    mean_drafted : draft tokens of a step; `precision` : the accepted share of them.
    gain : tokens per step over those of the configured setting on the same texts.
    is_configured : whether it is that setting itself.
    """

    trial: Trial
    num_texts: int
    mean_accepted: Estimate
    tokens_per_step: Estimate
    mean_drafted: float
    precision: float
    gain: Estimate
    is_configured: bool

    @property
    def verdict(self) -> str:
        """Against the configured setting: "configured", "better", "worse", or "within noise"."""
        if self.is_configured:
            return "configured"
        return "better" if self.gain.is_above_one else "worse" if self.gain.is_below_one else "within noise"


@dataclass(frozen=True)
class BudgetSpeed:
    """Predicted speed of one draft budget at one batch size.

    Attributes
    ----------
    speed_up : tokens per second over plain decoding, prompts not counted.
    over_configured : tokens per second over those of the configured budget.
    """

    batch_size: int
    study: str
    value: str
    with_previous: bool
    tokens_per_s: float
    speed_up: Estimate
    over_configured: Estimate

    @property
    def budget(self) -> str:
        """The budget in words."""
        return self.value if self.study == CONFIGURED else f"{self.study} {self.value}"


def plan_trials(base: DraftSetting, simulator: Simulator) -> list[Trial]:
    """The trials of all studies.

    Parameters
    ----------
    base : the configured setting.
    simulator : its groupings named "<scheme>" go to the study "grouping", "<scheme>/<n>" to "number of groups".
    """
    scenarios = [False, True] if simulator.num_with_previous >= MIN_WITH_PREVIOUS else [False]
    trials = [Trial(CONFIGURED, "as configured", base, scenario) for scenario in scenarios]
    for scenario in scenarios:
        trials += _budget_trials(base, scenario)
        trials += _source_trials(base, scenario)
    trials += _grouping_trials(base, simulator)
    trials += _size_trials(base, len(simulator.corpus))
    return trials + _option_trials(base)


def group_counts(num_texts: int) -> tuple[int, ...]:
    """Numbers of groups to try for so many texts in the pool: at most `MAX_GROUP_COUNTS`, evenly spread."""
    possible = [count for count in GROUP_COUNTS if count * MIN_TEXTS_A_GROUP <= num_texts]
    if len(possible) <= MAX_GROUP_COUNTS:
        return tuple(possible)
    places = np.linspace(0, len(possible) - 1, MAX_GROUP_COUNTS).round().astype(int)
    return tuple(possible[place] for place in places)


def _budget_trials(base: DraftSetting, with_previous: bool) -> list[Trial]:
    by_tokens = [
        Trial(
            "draft tokens",
            str(k),
            replace(base, max_draft_tokens=k, min_acceptance=FULL_TREES),
            with_previous,
            k,
        )
        for k in DRAFT_TOKENS
    ]
    by_acceptance = [
        Trial(
            "min_acceptance",
            f"{least:g}",
            replace(base, max_draft_tokens=max(DRAFT_TOKENS), min_acceptance=least),
            with_previous,
            least,
        )
        for least in MIN_ACCEPTANCES
    ]
    return by_tokens + by_acceptance


def _source_trials(base: DraftSetting, with_previous: bool) -> list[Trial]:
    trials = []
    for source in SOURCES if with_previous else SOURCES[1:]:
        on = source in base.sources
        sources = tuple(name for name in SOURCES if (name in base.sources) != (name == source))
        value = f"without {source}" if on else f"with {source} too"
        trials.append(Trial(SOURCES_STUDY, value, replace(base, sources=sources), with_previous))
    return trials


def _grouping_trials(base: DraftSetting, simulator: Simulator) -> list[Trial]:
    trials = []
    for name, grouping in simulator.groupings.items():
        scheme, _, count = name.partition("/")
        study = NUM_GROUPS if count else GROUPING
        for scope in ("side", "group") if grouping.num_groups > 1 else ("side",):
            setting = replace(base, grouping=name).with_pool(scope=scope)
            value = f"{scheme}, {count} groups" if count else scheme
            if grouping.num_groups > 1:
                value += ", walls" if scope == "group" else ", preferred"
            trials.append(Trial(study, value, setting, position=float(count) if count else None))
    return trials


def _size_trials(base: DraftSetting, num_texts: int) -> list[Trial]:
    sizes = [size for size in POOL_SIZES if size < num_texts]
    trials = [Trial("pool size", f"{size:,}", replace(base, num_pool_texts=size), False, size) for size in sizes]
    return [*trials, Trial("pool size", f"all {num_texts:,}", base, False, num_texts)]


def _option_trials(base: DraftSetting) -> list[Trial]:
    return [
        Trial(option, f"{value:g}", base.with_pool(**{option: value}), False, value)
        for option, tried in OPTION_VALUES.items()
        for value in sorted({*tried, getattr(base.pool, option) or DEFAULT_POOL_ESCAPE})
        if not (base.pool.alternatives and option == "min_support" and value > 1)  # they exclude each other
    ]


class Findings:
    """The outcomes of a simulation's trials.

    Parameters
    ----------
    simulator, trials : from `plan_trials`; the first is the configured setting.
    seed : of the bootstrap.
    on_trial : called after each.
    """

    def __init__(
        self,
        simulator: Simulator,
        trials: Sequence[Trial],
        seed: int = 0,
        on_trial: Callable[[Trial], None] = lambda trial: None,
    ) -> None:
        self.simulator, self.trials, self.base = simulator, trials, trials[0].setting
        self._seed = seed
        self._bootstraps: dict[int, Bootstrap] = {}
        self.outcomes: list[Outcome] = []
        for trial in trials:
            self.outcomes.append(self._outcome(trial))
            on_trial(trial)

    def of(self, study: str, with_previous: bool = False) -> list[Outcome]:
        """The outcomes of one study."""
        return [
            found
            for found in self.outcomes
            if found.trial.study == study and found.trial.with_previous == with_previous
        ]

    def with_all_texts(self, with_previous: bool, num_texts: int) -> Estimate | None:
        """The configured setting with a pool of `num_texts` texts; see `Simulator.full_pool_tokens_per_step`."""
        bootstrap = self._bootstrap(len(self.simulator.replay(self.base, with_previous)))
        return self.simulator.full_pool_tokens_per_step(self.base, num_texts, bootstrap, with_previous)

    def speeds(self, cost: StepCost, batch_sizes: Sequence[int]) -> list[BudgetSpeed]:
        """Every draft budget at every batch size."""
        budgets = [t for t in self.trials if t.study in (CONFIGURED, *BUDGET_STUDIES)]
        return [self._speed(trial, cost, batch_size) for batch_size in batch_sizes for trial in budgets]

    def _outcome(self, trial: Trial) -> Outcome:
        tally = self.simulator.replay(trial.setting, trial.with_previous)
        base = self.simulator.replay(self.base, trial.with_previous)
        bootstrap = self._bootstrap(len(tally))
        drafted, accepted = tally.num_drafted.sum(), tally.num_accepted.sum()
        return Outcome(
            trial,
            len(tally),
            bootstrap.mean_accepted(tally),
            bootstrap.tokens_per_step(tally),
            float(drafted / tally.num_steps.sum()),
            float(accepted / drafted) if drafted else 0.0,
            bootstrap.gain(tally, base),
            trial.setting == self.base,
        )

    def _speed(self, trial: Trial, cost: StepCost, batch_size: int) -> BudgetSpeed:
        tally = self.simulator.replay(trial.setting, trial.with_previous)
        bootstrap = self._bootstrap(len(tally))
        base = bootstrap.sums(self.simulator.replay(self.base, trial.with_previous))
        speeds = cost.tokens_per_s(batch_size, bootstrap.sums(tally))
        return BudgetSpeed(
            batch_size,
            trial.study,
            trial.value,
            trial.with_previous,
            float(speeds[0]),
            Estimate.of(speeds / cost.plain_tokens_per_s(batch_size)),
            Estimate.of(speeds / cost.tokens_per_s(batch_size, base)),
        )

    def _bootstrap(self, num_texts: int) -> Bootstrap:
        if num_texts not in self._bootstraps:
            self._bootstraps[num_texts] = Bootstrap(num_texts, self._seed)
        return self._bootstraps[num_texts]


def best_speed(speeds: Sequence[BudgetSpeed], batch_size: int, with_previous: bool = False) -> BudgetSpeed:
    """The budget with the most predicted tokens per second at a batch size."""
    there = [one for one in speeds if one.batch_size == batch_size and one.with_previous == with_previous]
    return max(there, key=lambda one: one.tokens_per_s)
