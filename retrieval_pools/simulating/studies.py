"""Which settings a simulation tries around the configured one, and what it makes of them.

A study changes one thing and leaves the rest as configured; every trial is compared with the configured setting on the
same texts. Knows no table and no terminal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from laserbatch.retrieval_pools.calibration.estimates import Bootstrap, Estimate
from laserbatch.retrieval_pools.index.pool import DEFAULT_POOL_ESCAPE
from laserbatch.retrieval_pools.settings import MAX_CONTEXT_LENGTHS, MAX_MATCH_TOKENS
from laserbatch.retrieval_pools.simulating.simulate import SOURCES, DraftSetting, Kind, Simulator

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
CONFIGURED, GROUPING, NUM_GROUPS = "configured", "grouping", "number of groups"


@dataclass(frozen=True)
class Trial:
    """One setting of one study.

    Attributes
    ----------
    study : what is changed; `value` : to what, in words.
    kind : see `Simulator.replay`.
    position : the same as a number, where it is one, to draw it.
    """

    study: str
    value: str
    setting: DraftSetting
    kind: Kind = "new"
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


def plan_trials(base: DraftSetting, simulator: Simulator) -> list[Trial]:
    """The trials of all studies, with previous texts in the share that a night gives them, where there are any.

    Parameters
    ----------
    base : the configured setting.
    simulator : its groupings named "<scheme>" go to the study "grouping", "<scheme>/<n>" to "number of groups".
    """
    trials = [Trial(CONFIGURED, "as configured", base, kind) for kind in simulator.kinds]
    for kind in simulator.kinds[:2]:
        trials += _source_trials(base, kind)
    studies = [
        *_grouping_trials(base, simulator),
        *_size_trials(base, len(simulator.corpus)),
        *_option_trials(base),
    ]
    return trials + [replace(trial, kind=simulator.kinds[-1]) for trial in studies]


def group_counts(num_texts: int) -> tuple[int, ...]:
    """Numbers of groups to try for so many texts in the pool: at most `MAX_GROUP_COUNTS`, evenly spread."""
    possible = [count for count in GROUP_COUNTS if count * MIN_TEXTS_A_GROUP <= num_texts]
    if len(possible) <= MAX_GROUP_COUNTS:
        return tuple(possible)
    places = np.linspace(0, len(possible) - 1, MAX_GROUP_COUNTS).round().astype(int)
    return tuple(possible[place] for place in places)


def _source_trials(base: DraftSetting, kind: Kind) -> list[Trial]:
    trials = []
    for source in SOURCES if kind == "changed" else SOURCES[1:]:
        on = source in base.sources
        sources = tuple(name for name in SOURCES if (name in base.sources) != (name == source))
        value = f"without {source}" if on else f"with {source} too"
        trials.append(Trial(SOURCES_STUDY, value, replace(base, sources=sources), kind))
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
    trials = [Trial("pool size", f"{size:,}", replace(base, num_pool_texts=size), position=size) for size in sizes]
    return [*trials, Trial("pool size", f"all {num_texts:,}", base, position=num_texts)]


def _option_trials(base: DraftSetting) -> list[Trial]:
    return [
        Trial(option, f"{value:g}", base.with_pool(**{option: value}), position=value)
        for option, tried in OPTION_VALUES.items()
        for value in sorted({*tried, getattr(base.pool, option) or DEFAULT_POOL_ESCAPE})
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

    def of(self, study: str, kind: Kind = "new") -> list[Outcome]:
        """The outcomes of one study."""
        return [found for found in self.outcomes if (found.trial.study, found.trial.kind) == (study, kind)]

    def with_all_texts(self, kind: Kind, num_texts: int) -> Estimate | None:
        """The configured setting with a pool of `num_texts` texts; see `Simulator.full_pool_tokens_per_step`."""
        bootstrap = self._bootstrap(len(self.simulator.replay(self.base, kind)))
        return self.simulator.full_pool_tokens_per_step(self.base, num_texts, bootstrap, kind)

    def _outcome(self, trial: Trial) -> Outcome:
        tally = self.simulator.replay(trial.setting, trial.kind)
        base = self.simulator.replay(self.base, trial.kind)
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

    def _bootstrap(self, num_texts: int) -> Bootstrap:
        if num_texts not in self._bootstraps:
            self._bootstraps[num_texts] = Bootstrap(num_texts, self._seed)
        return self._bootstraps[num_texts]
