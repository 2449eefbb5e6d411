"""Which settings a simulation recommends, for all sides at once, as a configuration has them.

One thing is changed after the other, each to the best value for what is chosen so far. Half of the texts choose, the
other half judges: the best of many trials on the texts that chose it looks better than it is. What is best is what is
fastest at a step cost: an option that merely drafts more also accepts more. Knows no table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from retrieval_pools.estimates import Bootstrap, Estimate, Tally
from retrieval_pools.simulate import DraftSetting, Simulator
from retrieval_pools.studies import BUDGET_STUDIES, GROUPING, NUM_GROUPS, OPTION_VALUES, Trial

OPTIONS = tuple(option for option in OPTION_VALUES if option != "min_support")  # that is a question of privacy
NOTABLE_GAIN = 1.01  # less is not worth another setting, were it real


Speed = Callable[[Tally], np.ndarray]


def tokens_per_step(sums: Tally) -> np.ndarray:
    """Tokens per step, bonus included."""
    return sums.tokens_per_step


@dataclass(frozen=True)
class Recommendation:
    """The best values together.

    Attributes
    ----------
    changes : trials whose values differ from the configuration; none where nothing was better by more than noise.
    setting : the configured one with all changes.
    gain : speed over that of the configuration, on the half of the texts that did not choose.
    gains : the same of each side alone.
    drafted_ratio : draft tokens of a step over those of the configuration: a step may cost more, too.
    """

    changes: tuple[Trial, ...]
    setting: DraftSetting
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
    base: DraftSetting,
    seed: int = 0,
    speed: Speed = tokens_per_step,
) -> Recommendation:
    """What to change of budgets, groups and pools, but for `min_support`.

    Parameters
    ----------
    simulators : of each side.
    plans : the trials of each side; what one side cannot try is not recommended.
    base : the configured setting.
    speed : what is to be large, from sums over texts; by default tokens per step, whatever a step costs.
    """
    judge = _Judge(simulators, seed, speed)
    setting, changes = base, []
    budgets = () if speed is tokens_per_step else (BUDGET_STUDIES,)  # were drafts free, the widest would be the best
    for studies in (*budgets, (GROUPING, NUM_GROUPS), *((option,) for option in OPTIONS)):
        tried = {trial: _changed(setting, trial) for trial in _common(plans) if trial.study in studies}
        gains = {trial: judge.gain(changed, setting, half=0) for trial, changed in tried.items()}
        notable = [trial for trial in tried if gains[trial].is_above_one and gains[trial].value >= NOTABLE_GAIN]
        if notable:
            best = max(notable, key=lambda trial: gains[trial].value)
            setting = tried[best]
            changes.append(best)
    sides = [_Judge([simulator], seed, speed).gain(setting, base, half=1) for simulator in simulators]
    return Recommendation(
        tuple(changes),
        setting,
        judge.gain(setting, base, half=1),
        tuple(sides),
        judge.mean_drafted(setting, half=1) / max(judge.mean_drafted(base, half=1), 1e-9),
    )


class _Judge:
    """Compares settings on half of the texts of all sides, none given its previous text.

    A side's steps cost what they cost there: sides are put together by the time that their tokens take.
    """

    def __init__(self, simulators: Sequence[Simulator], seed: int, speed: Speed) -> None:
        self._simulators, self._seed, self._speed = simulators, seed, speed
        self._bootstraps: dict[int, Bootstrap] = {}

    def gain(self, setting: DraftSetting, base: DraftSetting, half: int) -> Estimate:
        """On every other text: half 0 chooses, half 1 judges."""
        return Estimate.of(self._joint_speed(setting, half) / self._joint_speed(base, half))

    def mean_drafted(self, setting: DraftSetting, half: int) -> float:
        """Draft tokens of a step."""
        tallies = self._tallies(setting, half)
        return float(
            sum(tally.num_drafted.sum() for tally in tallies) / sum(tally.num_steps.sum() for tally in tallies)
        )

    def _joint_speed(self, setting: DraftSetting, half: int) -> np.ndarray:
        num_tokens, time = np.zeros(1), np.zeros(1)
        for tally in self._tallies(setting, half):
            sums = self._bootstraps.setdefault(len(tally), Bootstrap(len(tally), self._seed)).sums(tally)
            num_tokens = num_tokens + sums.num_steps + sums.num_accepted
            time = time + (sums.num_steps + sums.num_accepted) / self._speed(sums)
        return num_tokens / time

    def _tallies(self, setting: DraftSetting, half: int) -> list[Tally]:
        return [simulator.replay(setting).where(slice(half, None, 2)) for simulator in self._simulators]


def _common(plans: Sequence[Sequence[Trial]]) -> list[Trial]:
    """Trials without previous texts that every side has."""
    others = [set(plan) for plan in plans[1:]]
    return [trial for trial in plans[0] if not trial.with_previous and all(trial in plan for plan in others)]


def _changed(setting: DraftSetting, trial: Trial) -> DraftSetting:
    """A setting with what a trial changes: the budget, the groups, or an option of the pool."""
    if trial.study in BUDGET_STUDIES:
        budget = trial.setting
        return replace(setting, max_draft_tokens=budget.max_draft_tokens, min_acceptance=budget.min_acceptance)
    if trial.study in (GROUPING, NUM_GROUPS):
        return replace(setting, grouping=trial.setting.grouping).with_pool(scope=trial.setting.pool.scope)
    return setting.with_pool(**{trial.study: getattr(trial.setting.pool, trial.study)})
