"""Which settings a simulation recommends, for all sides at once, as a configuration has them.

One thing is changed after the other, each to the best value for what is chosen so far. Half of the texts choose, the
other half judges: the best of many trials on the texts that chose it looks better than it is. What is best is what is
fastest at a step cost: an option that merely drafts more also accepts more. Knows no table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from laserbatch.retrieval_pools.calibration.estimates import Bootstrap, Estimate, Tally
from laserbatch.retrieval_pools.simulating.simulate import DraftSetting, Simulator
from laserbatch.retrieval_pools.simulating.studies import GROUPING, NUM_GROUPS, OPTION_VALUES, Trial

OPTIONS = tuple(option for option in OPTION_VALUES if option != "min_support")  # that is a question of privacy
NOTABLE_GAIN = 1.01  # less is not worth another setting, were it real
BUDGET = "budget"
STUDIES = ((GROUPING, NUM_GROUPS), *((option,) for option in OPTIONS))  # one decided after the other


Speed = Callable[[Tally], np.ndarray]


def tokens_per_step(sums: Tally) -> np.ndarray:
    """Tokens per step, bonus included."""
    return sums.tokens_per_step


@dataclass(frozen=True)
class Recommendation:
    """The best values together.

    Attributes
    ----------
    changes : trials whose values differ from the configuration; none where nothing was better by more than noise. One
        of the study BUDGET: each side's budget is left to be chosen.
    settings : the configured one of each side with all changes.
    gain : speed over that of the configuration, on the half of the texts that did not choose.
    gains : the same of each side alone.
    drafted_ratio : draft tokens of a step over those of the configuration: a step may cost more, too.
    """

    changes: tuple[Trial, ...]
    settings: tuple[DraftSetting, ...]
    gain: Estimate
    gains: tuple[Estimate, ...]
    drafted_ratio: float

    @property
    def holds(self) -> bool:
        """Whether the gain is more than noise on texts that did not choose it."""
        return bool(self.changes) and self.gain.is_above_one


def recommend(
    simulators: Sequence[Simulator],
    plans: Sequence[Sequence[Trial]],
    bases: Sequence[DraftSetting],
    chosen: Sequence[DraftSetting] | None = None,
    seed: int = 0,
    speed: Speed = tokens_per_step,
) -> Recommendation:
    """What to change of budgets, groups and pools, but for `min_support`.

    Parameters
    ----------
    simulators : of each side.
    plans : the trials of each side; what one side cannot try is not recommended.
    bases : the configured setting of each side.
    chosen : the same with the budget that a night chooses; None: the budgets are not asked about.
    speed : what is to be large, from sums over texts; by default tokens per step, whatever a step costs.
    """
    judge = _Judge(simulators, seed, speed)
    bases = settings = tuple(bases)
    changes: list[Trial] = []
    studies = [[trial for trial in _common(plans) if trial.study in one] for one in STUDIES]
    if chosen is not None and tuple(chosen) != bases:
        studies.insert(0, [Trial(BUDGET, "chosen by the night", chosen[0])])
    for trials in studies:
        tried = {
            trial: tuple(chosen) if trial.study == BUDGET else tuple(_changed(setting, trial) for setting in settings)
            for trial in trials
        }
        gains = {trial: judge.gain(changed, settings, half=0) for trial, changed in tried.items()}
        notable = [trial for trial in tried if gains[trial].is_above_one and gains[trial].value >= NOTABLE_GAIN]
        if notable:
            best = max(notable, key=lambda trial: gains[trial].value)
            settings = tried[best]
            changes.append(best)
    sides = [
        _Judge([simulator], seed, speed).gain([setting], [base], half=1)
        for simulator, setting, base in zip(simulators, settings, bases, strict=True)
    ]
    return Recommendation(
        tuple(changes),
        settings,
        judge.gain(settings, bases, half=1),
        tuple(sides),
        judge.mean_drafted(settings, half=1) / max(judge.mean_drafted(bases, half=1), 1e-9),
    )


class _Judge:
    """Compares settings, one a side, on half of the texts of all sides, as a night mixes them.

    A side's steps cost what they cost there: sides are put together by the time that their tokens take.
    """

    def __init__(self, simulators: Sequence[Simulator], seed: int, speed: Speed) -> None:
        self._simulators, self._seed, self._speed = simulators, seed, speed
        self._bootstraps: dict[int, Bootstrap] = {}

    def gain(self, settings: Sequence[DraftSetting], bases: Sequence[DraftSetting], half: int) -> Estimate:
        """On every other text: half 0 chooses, half 1 judges."""
        return Estimate.of(self._joint_speed(settings, half) / self._joint_speed(bases, half))

    def mean_drafted(self, settings: Sequence[DraftSetting], half: int) -> float:
        """Draft tokens of a step."""
        tallies = self._tallies(settings, half)
        return float(
            sum(tally.num_drafted.sum() for tally in tallies) / sum(tally.num_steps.sum() for tally in tallies)
        )

    def _joint_speed(self, settings: Sequence[DraftSetting], half: int) -> np.ndarray:
        num_tokens, time = np.zeros(1), np.zeros(1)
        for tally in self._tallies(settings, half):
            sums = self._bootstraps.setdefault(len(tally), Bootstrap(len(tally), self._seed)).sums(tally)
            num_tokens = num_tokens + sums.num_steps + sums.num_accepted
            time = time + (sums.num_steps + sums.num_accepted) / self._speed(sums)
        return num_tokens / time

    def _tallies(self, settings: Sequence[DraftSetting], half: int) -> list[Tally]:
        pairs = zip(self._simulators, settings, strict=True)
        return [simulator.replay(one, simulator.kinds[-1]).where(slice(half, None, 2)) for simulator, one in pairs]


def _common(plans: Sequence[Sequence[Trial]]) -> list[Trial]:
    """Trials that every side has; their settings are those of the first, whose budget may be another."""
    others = [{(trial.study, trial.value) for trial in plan} for plan in plans[1:]]
    return [trial for trial in plans[0] if all((trial.study, trial.value) in plan for plan in others)]


def _changed(setting: DraftSetting, trial: Trial) -> DraftSetting:
    """A setting with what a trial changes: the groups, or an option of the pool."""
    if trial.study in (GROUPING, NUM_GROUPS):
        return replace(setting, grouping=trial.setting.grouping).with_pool(scope=trial.setting.pool.scope)
    return setting.with_pool(**{trial.study: getattr(trial.setting.pool, trial.study)})
