"""`laserbatch pools simulate`: what drafting will gain, from texts that a night wrote, before a GPU hour is spent.

Some of a finished run's texts are held back and replayed against pools of the others; no model runs. The pool as
configured is calibrated as that of a night is, on further texts, and its budget chosen by a night's rule; every other
setting that is tried changes one thing and is compared with it text by text. A replay counts what greedy verification
accepts: a relaxed night accepts more.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import typer
from rich.table import Table

from laserbatch.jobs.budgets import side_budget
from laserbatch.jobs.calibrate_pools import draft_options
from laserbatch.jobs.console import progress, stdout, summary, text_table
from laserbatch.jobs.formatting import counted, decimal, percent
from laserbatch.jobs.night import Night, open_run
from laserbatch.jobs.settings import WORKSPACE, Settings, load_settings
from laserbatch.jobs.simulate_texts import GroupOf, SideTexts, divided_texts, grouped, groups, pool_texts
from laserbatch.pipeline.budget.choice import known_batch_size
from laserbatch.pipeline.budget.step_cost import StepCost, read_step_cost
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.errors import ConfigError, WorkspaceError
from laserbatch.pipeline.sides import SIDES
from laserbatch.retrieval_pools.calibration.budget_replay import with_budgets
from laserbatch.retrieval_pools.calibration.calibrate import calibrate
from laserbatch.retrieval_pools.calibration.estimates import Bootstrap, Estimate, Tally
from laserbatch.retrieval_pools.calibration.replay import replay
from laserbatch.retrieval_pools.index.build import build_pool
from laserbatch.retrieval_pools.index.calibration_record import Calibration
from laserbatch.retrieval_pools.index.pool import Pool

SCHEMES = ("router", "collaborative", "attribute", "global", "random")
TREE_SIZES = (4, 16, 64)
POOL_SHARES = (0.5, 0.25)
NOTABLE_GAIN = 1.01  # less is not worth another setting, were it real


class Pace(NamedTuple):
    """What steps cost, and at which batch size."""

    step_cost: StepCost
    batch_size: int


@dataclass(frozen=True)
class Trial:
    """What is tried: keys of the configuration with other values, or a share of the pool's texts."""

    change: Mapping[str, Any]
    pool_share: float = 1.0

    @property
    def words(self) -> str:
        """The change as a configuration has it."""
        if self.pool_share < 1:
            return f"a pool of {percent(self.pool_share)} of the texts"
        return ", ".join(f"{key}: {'null' if value is None else value}" for key, value in self.change.items())

    def settings(self, settings: Settings) -> Settings:
        """Settings with the change."""
        for key, value in self.change.items():
            section, _, name = key.partition(".")
            changed = getattr(settings, section).model_copy(update={name: value})
            settings = settings.model_copy(update={section: changed})
        return settings


@dataclass(frozen=True)
class Outcome:
    """What a trial gave, bonus tokens included, of full batches whose prompts are there.

    `over_configured` is tokens per second over those of the configuration on the same texts.
    """

    trial: Trial
    max_draft_tokens: int
    min_acceptance: float
    mean_drafted: float
    tokens_per_step: Estimate
    speed_up: Estimate
    over_configured: Estimate


def simulate(
    config: Path | None = typer.Option(None, "--config", help="Configuration to simulate; without it that of the run."),
    workspace: Path | None = WORKSPACE,
    run: str | None = typer.Option(None, "--run", help="Run whose texts are used; without it the published one."),
    num_texts: int = typer.Option(200, min=1, help="Texts a side that are held back; at most a quarter of them."),
    step_cost: Path | None = typer.Option(
        None,
        help="YAML or JSON with measured steps: {steps: [{batch_size, num_tokens, seconds}, ...]}; without it that of "
        "the configuration, or the newest that a night measured.",
    ),
    batch_size: int | None = typer.Option(None, min=1, help="Batch size to predict for; else the configured one."),
    as_json: bool = typer.Option(False, "--json", help="Print every figure as JSON."),
) -> None:
    """Predict from a night's texts what drafting will gain: budgets, groups, pool sizes. Runs no model.

    Example: `laserbatch pools simulate --config laserbatch.yaml --step-cost h200.yaml --batch-size 64`
    """
    given = load_settings(config, {"workspace": workspace})
    night = open_run(given, run)
    settings = night.settings if config is None else given
    pace = _pace(night, settings, step_cost, batch_size)
    divided = [divided_texts(night, settings, side, num_texts) for side in SIDES]
    texts = [one for one in divided if one is not None]
    if not texts:
        raise WorkspaceError(
            f"run {night.run.run_id} wrote too few texts on either side to hold some back; run a night over more "
            "entities, or name another run with --run"
        )
    group_of = groups(night, settings, texts)
    found = [_SideSimulation(settings, one, group_of, pace).outcomes() for one in texts]
    best = _best(found)
    if as_json:
        data = {"run_id": night.run.run_id, "step_cost": pace.step_cost.name, "batch_size": pace.batch_size}
        sides = {
            one.side: one.counts | {"outcomes": list(map(asdict, outcomes))}
            for one, outcomes in zip(texts, found, strict=True)
        }
        summary(data | {"sides": sides, "recommendation": best and best[0].trial.change}, as_json=True)
        return
    for one, outcomes in zip(texts, found, strict=True):
        stdout.print(_table(one, outcomes, pace), "")
    stdout.print(_recommendation(best, texts, pace), markup=False, soft_wrap=True)


def _trials(settings: Settings) -> list[Trial]:
    decoding = settings.decoding
    is_given = (decoding.max_draft_tokens, decoding.min_acceptance) != (None, None)
    sizes = (None, *TREE_SIZES) if is_given else TREE_SIZES  # None: the night's own choice
    changes: list[dict[str, Any]] = [{}]
    changes += [{"decoding.max_draft_tokens": size, "decoding.min_acceptance": None} for size in sizes]
    changes += [{"routing.scheme": scheme} for scheme in SCHEMES if scheme != settings.routing.scheme]
    changes.append({"pools.scope": "side" if settings.pools.scope == "group" else "group"})
    return [Trial(change) for change in changes] + [Trial({}, share) for share in POOL_SHARES]


class _SideSimulation:
    """The pools of a side, each built once, and what replays against them give."""

    def __init__(self, settings: Settings, texts: SideTexts, group_of: GroupOf, pace: Pace) -> None:
        self._settings, self._texts, self._group_of, self._pace = settings, texts, group_of, pace
        self._pools: dict[tuple, Pool] = {}
        self._calibration: Calibration | None = None
        self._bootstrap = Bootstrap(len(texts.measured), settings.seed)

    def outcomes(self) -> list[Outcome]:
        """What every trial gives, the configuration first."""
        trials, settings, outcomes = _trials(self._settings), self._settings, []
        with tempfile.TemporaryDirectory(prefix="laserbatch-simulation-") as folder:
            self._folder = Path(folder)
            pool, texts = self._pool(trials[0]), self._grouped(self._texts.calibration, settings)
            if len(texts) > 1:
                options = draft_options(settings.decoding)
                self._calibration = with_budgets(calibrate(pool, texts, options), pool, texts, options)
            with progress(f"simulate {self._texts.side}s", len(trials)) as bar:
                configured = self._speeds(self._tally(trials[0]))
                for trial in trials:
                    outcomes.append(self._outcome(trial, configured))
                    bar.advance(1, trial.words)
        return outcomes

    def _outcome(self, trial: Trial, configured: np.ndarray) -> Outcome:
        sums = self._tally(trial)
        speeds, plain = self._speeds(sums), self._pace.step_cost.plain_tokens_per_s(self._pace.batch_size)
        estimates = (Estimate.of(one) for one in (sums.tokens_per_step, speeds / plain, speeds / configured))
        budget = self._budget(trial)
        return Outcome(trial, budget.max_draft_tokens, budget.min_acceptance, float(sums.mean_drafted[0]), *estimates)

    def _speeds(self, sums: Tally) -> np.ndarray:
        return self._pace.step_cost.tokens_per_s(self._pace.batch_size, sums)

    def _budget(self, trial: Trial) -> Budget:
        """What a night of these settings would draft, by the calibration of the configured pool."""
        decoding = trial.settings(self._settings).decoding.model_copy(update={"batch_size": self._pace.batch_size})
        pool = self._pool(Trial({})).with_calibration(self._calibration)
        return side_budget(decoding, pool, self._pace.step_cost, self._texts.share_changed).budget

    def _tally(self, trial: Trial) -> Tally:
        """Sums over the measured texts, and over resamples of them."""
        settings, budget = trial.settings(self._settings), self._budget(trial)
        texts = self._grouped(self._texts.measured, settings)
        if budget.max_draft_tokens:
            pool = self._pool(trial).with_calibration(self._calibration)
            pool = pool if "pool" in settings.decoding.drafters else None
            options = draft_options(settings.decoding, budget)
            tally = Tally.of([replay(pool, [text], options) for text in texts])
        else:
            num_steps = np.array([len(text.text_ids) + 1.0 for text in texts])  # the last one ends the text
            tally = Tally(num_steps, np.zeros(len(texts)), np.zeros(len(texts)))
        return self._bootstrap.sums(tally)

    def _grouped(self, texts: Mapping, settings: Settings) -> list:
        return grouped(texts, self._group_of(self._texts.side, settings.routing.scheme))

    def _pool(self, trial: Trial) -> Pool:
        settings = trial.settings(self._settings)
        key = settings.routing.scheme, settings.pools, trial.pool_share
        if key not in self._pools:
            groups = self._group_of(self._texts.side, settings.routing.scheme)
            self._pools[key] = build_pool(
                pool_texts(self._texts, groups, trial.pool_share),
                self._folder / str(len(self._pools)),
                side=self._texts.side,
                tokenizer_hash="simulation",  # these pools live as long as the simulation
                model_id="simulation",
                settings=settings.pools,
            )
        return self._pools[key]


def _pace(night: Night, settings: Settings, path: Path | None, batch_size: int | None) -> Pace:
    """The cost of the given file, or the configured one, or the newest that a night measured."""
    wanted = batch_size or settings.decoding.batch_size
    measured = sorted(night.workspace.step_costs_folder.glob("*.json"), key=lambda kept: kept.stat().st_mtime)
    path = path or settings.decoding.step_cost or (measured[-1] if measured else None)
    if path is None:
        raise ConfigError("no night has measured what a step costs here; give one with --step-cost FILE")
    step_cost = read_step_cost(Path(path))
    if batch_size is not None:
        step_cost.plain_tokens_per_s(batch_size)  # refuses one that was not measured
    return Pace(step_cost, known_batch_size(step_cost, wanted))


def _best(sides: Sequence[list[Outcome]]) -> tuple[Outcome, ...] | None:
    """What the trial gives on each side that gains on all of them by more than noise, most where it gains least."""
    trials = [outcomes for outcomes in zip(*sides, strict=True) if outcomes[0].trial.change]
    gains = [min(one.over_configured.low for one in outcomes) for outcomes in trials]
    return trials[int(np.argmax(gains))] if max(gains) >= NOTABLE_GAIN else None


def _table(texts: SideTexts, outcomes: list[Outcome], pace: Pace) -> Table:
    title = (
        f"{texts.side}s: {counted(len(texts.measured), 'text')} held back, {percent(texts.share_changed)} with a text "
        f"of the night before; {len(texts.pool):,} in the pool, {len(texts.calibration):,} to calibrate with\n"
        f"batch {pace.batch_size:,}, step cost: {pace.step_cost.name}"
    )
    numbers = ("draft tokens", "tokens/step", "drafted/step", "times plain", "times configured")
    table = text_table(("setting",), numbers, title)
    for one in outcomes:
        table.add_row(
            one.trial.words or "as configured",
            f"{one.max_draft_tokens} above {one.min_acceptance:g}" if one.max_draft_tokens else "none",
            _interval(one.tokens_per_step),
            decimal(one.mean_drafted, 1),
            _interval(one.speed_up),
            _interval(one.over_configured),
        )
    return table


def _recommendation(best: tuple[Outcome, ...] | None, texts: Sequence[SideTexts], pace: Pace) -> str:
    where = f"at batch {pace.batch_size:,} and this step cost"
    if best is None:
        return f"Keep the configuration {where}: nothing that was tried is faster by more than noise."
    gains = [f"{_interval(one.over_configured)} of {side.side}s" for one, side in zip(best, texts, strict=True)]
    return f"Recommended {where}: {best[0].trial.words}; times the configured tokens per second: {', '.join(gains)}."


def _interval(estimate: Estimate) -> str:
    return f"{decimal(estimate.value)} ({decimal(estimate.low)} to {decimal(estimate.high)})"
