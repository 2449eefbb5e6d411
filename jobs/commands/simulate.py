"""`laserbatch pools simulate`: what drafting will gain, from texts that a night wrote, before a GPU hour is spent.

Some of a finished run's texts are held back and replayed against pools of the others; no model runs. The pool as
configured is calibrated as that of a night is, on further texts, and its budget chosen by a night's rule; every other
setting that is tried changes one thing and is compared with it text by text. A replay counts what greedy verification
accepts: a relaxed night accepts more.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import typer

from laserbatch.jobs.console import print_table, progress, say, stdout, summary
from laserbatch.jobs.formatting import counted, decimal, percent
from laserbatch.jobs.report.blocks import Table
from laserbatch.jobs.settings import JSON, WORKSPACE, Settings, load_settings
from laserbatch.jobs.stages.budgets import side_budget
from laserbatch.jobs.stages.night import Night, open_run
from laserbatch.jobs.stages.pool_texts import draft_options, planned_rows, read_run_texts
from laserbatch.pipeline.budget.choice import known_batch_size
from laserbatch.pipeline.budget.step_cost import StepCost, read_step_cost
from laserbatch.pipeline.errors import ConfigError, WorkspaceError
from laserbatch.pipeline.planning.planner import side_routes
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.retrieval_pools.calibration.calibrate import calibrate, num_held_back, with_budgets
from laserbatch.retrieval_pools.calibration.replay import ReplayText, Tally, replay
from laserbatch.retrieval_pools.index.build import build_pool
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.index.texts import PoolText
from laserbatch.retrieval_pools.routing.router import fit_routers
from laserbatch.retrieval_pools.settings import PoolSettings

SCHEMES = ("router", "collaborative", "attribute", "global", "random")
TREE_SIZES = (4, 16, 64)
POOL_SHARES = (0.5, 0.25)
NOTABLE_GAIN = 1.01  # less is not worth another setting, were it real
MIN_TEXTS = 5  # held back of a side; of fewer nothing can be said
MAX_HELD_BACK_SHARE = 0.25
MAX_POOL_TEXTS = 20_000  # of more a sample makes the pools
NUM_RESAMPLES = 2000
GroupOf = Callable[[Side, str], Mapping[object, str]]  # groups by entity of a side, under a scheme


@dataclass(frozen=True)
class SideTexts:
    """The texts of a side. What is measured or calibrated with is held back: pools see the rest alone.

    Attributes
    ----------
    num_texts : all that the run has.
    measured, calibration : of those that the run wrote itself, so that earlier texts of their entities are known in the
        share that a night knows them; by entity, without groups.
    pool : int32[n] token ids by entity, in random order.
    entity_ids : of all of these.
    """

    side: Side
    num_texts: int
    measured: Mapping[object, ReplayText]
    calibration: Mapping[object, ReplayText]
    pool: Mapping[object, np.ndarray]
    entity_ids: frozenset

    @property
    def share_changed(self) -> float:
        """Of the measured texts, the share whose entity has an earlier one."""
        return sum(text.previous_ids is not None for text in self.measured.values()) / len(self.measured)


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
class Estimate:
    """A quantity with its 95 % bootstrap interval over texts: steps of a text are alike, so texts are resampled."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: np.ndarray) -> "Estimate":
        """Of float64[1 + n]: what was measured, then what n resamples gave."""
        low, high = np.quantile(samples[1:], [0.025, 0.975])
        return cls(float(samples[0]), float(low), float(high))

    def __str__(self) -> str:
        return f"{decimal(self.value)} ({decimal(self.low)} to {decimal(self.high)})"


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
    as_json: bool = JSON,
) -> None:
    """Predict from a night's texts what drafting will gain: budgets, groups, pool sizes. Runs no model.

    Example: `laserbatch pools simulate --config laserbatch.yaml --step-cost h200.yaml --batch-size 64`
    """
    given = load_settings(config, {"workspace": workspace})
    night = open_run(given, run)
    settings = night.settings if config is None else given
    cost, batch_size = _pace(night, settings, step_cost, batch_size)
    divided = [divided_texts(night, settings, side, num_texts) for side in SIDES]
    texts = [one for one in divided if one is not None]
    if not texts:
        raise WorkspaceError(
            f"run {night.run.run_id} wrote too few texts on either side to hold some back; run a night over more "
            "entities, or name another run with --run"
        )
    group_of = groups(night, settings, texts)
    found = [_outcomes(settings, one, group_of, cost, batch_size) for one in texts]
    best = _best(found)
    if as_json:
        sides = {
            one.side: {
                "num_texts": one.num_texts,
                **{f"num_{name}_texts": len(getattr(one, name)) for name in ("measured", "calibration", "pool")},
                "share_changed": one.share_changed,
                "outcomes": list(map(asdict, outcomes)),
            }
            for one, outcomes in zip(texts, found, strict=True)
        }
        data = {"run_id": night.run.run_id, "step_cost": cost.name, "batch_size": batch_size, "sides": sides}
        summary(data | {"recommendation": best and best[0].trial.change}, as_json=True)
        return
    for one, outcomes in zip(texts, found, strict=True):
        print_table(_table(one, outcomes, f"batch {batch_size:,}, step cost: {cost.name}"))
        stdout.print()
    where = f"at batch {batch_size:,} and this step cost"
    said = f"Keep the configuration {where}: nothing that was tried is faster by more than noise."
    if best is not None:
        gains = ", ".join(f"{one.over_configured} of {side.side}s" for one, side in zip(best, texts, strict=True))
        said = f"Recommended {where}: {best[0].trial.words}; times the configured tokens per second: {gains}."
    stdout.print(said, markup=False, soft_wrap=True)


def _pace(night: Night, settings: Settings, path: Path | None, batch_size: int | None) -> tuple[StepCost, int]:
    """The cost of the given file, or the configured one, or the newest that a night measured; at which batch size."""
    wanted = batch_size or settings.decoding.batch_size
    measured = sorted(night.workspace.step_costs_folder.glob("*.json"), key=lambda kept: kept.stat().st_mtime)
    path = path or settings.decoding.step_cost or (measured[-1] if measured else None)
    if path is None:
        raise ConfigError("no night has measured what a step costs here; give one with --step-cost FILE")
    step_cost = read_step_cost(Path(path))
    if batch_size is not None:
        step_cost.plain_tokens_per_s(batch_size)  # refuses one that was not measured
    return step_cost, known_batch_size(step_cost, wanted)


def divided_texts(night: Night, settings: Settings, side: Side, num_texts: int) -> SideTexts | None:
    """Hold back `num_texts` of a side, at most a quarter, the same for the same seed; None where there are too few."""
    generator = np.random.default_rng(settings.seed)
    with tempfile.TemporaryDirectory(prefix="laserbatch-texts-") as folder:
        run_texts = read_run_texts(night.run, side, Path(folder))
        num_all = 0 if run_texts is None else len(run_texts)
        num_measured = min(num_texts, int(MAX_HELD_BACK_SHARE * num_all))
        num_calibration = num_held_back(num_all, settings.pools.calibration_texts)
        rows = planned_rows(night, side, num_measured + num_calibration)
        if len(rows) < num_measured + num_calibration:  # most was carried over
            num_measured = len(rows) // 2 if num_calibration else len(rows)
        if num_measured < MIN_TEXTS:
            say(f"no simulation of {side}s: the run {night.run.run_id} has {num_all} texts and wrote {len(rows)} anew")
            return None
        others = set(run_texts.entity_ids.to_pylist()).difference(row.entity_id for row in rows)
        others = sorted(others, key=str)
        chosen = [others[place] for place in generator.permutation(len(others))[:MAX_POOL_TEXTS]]
        token_ids = run_texts.of_entities([*(row.entity_id for row in rows), *chosen])
        known = frozenset(night.tables.entities(side)[f"{side}_id"].to_pylist()).intersection(token_ids)
        token_ids = {entity_id: np.array(token_ids[entity_id]) for entity_id in known}
    if len(chosen) < len(others):
        say(f"{side}s: pools are built from {len(chosen):,} of {num_all:,} texts")
    rows = [rows[place] for place in generator.permutation(len(rows)) if rows[place].entity_id in known]
    texts = [(row.entity_id, ReplayText(row.prompt_ids, token_ids[row.entity_id], row.previous_ids)) for row in rows]
    pool = {entity_id: token_ids[entity_id] for entity_id in chosen if entity_id in known}
    return SideTexts(side, num_all, dict(texts[:num_measured]), dict(texts[num_measured:]), pool, known)


def groups(night: Night, settings: Settings, texts: Sequence[SideTexts]) -> GroupOf:
    """The group of each entity, under any scheme of routing.

    Raises
    ------
    PoolError
        The entities cannot be grouped as the configuration says.
    """
    tables, sides = night.tables, {one.side: one for one in texts}
    routing = settings.routing.model_copy(update={"scheme": "router"})  # it knows all that the others do
    routers = fit_routers(tables.users, tables.items, tables.interactions, routing, settings.seed)

    @cache
    def group_of(side: Side, scheme: str) -> dict[object, str]:
        router = replace(routers[side], settings=routing.model_copy(update={"scheme": scheme}))
        routed = side_routes(router, tables, side).groups.to_pylist()
        ids = tables.entities(side)[f"{side}_id"].to_pylist()
        return {key: group for key, group in zip(ids, routed, strict=True) if key in sides[side].entity_ids}

    return group_of


def _trials(settings: Settings) -> list[Trial]:
    decoding = settings.decoding
    is_given = (decoding.max_draft_tokens, decoding.min_acceptance) != (None, None)
    sizes = (None, *TREE_SIZES) if is_given else TREE_SIZES  # None: the night's own choice
    changes: list[dict[str, Any]] = [{}]
    changes += [{"decoding.max_draft_tokens": size, "decoding.min_acceptance": None} for size in sizes]
    changes += [{"routing.scheme": scheme} for scheme in SCHEMES if scheme != settings.routing.scheme]
    changes.append({"pools.scope": "side" if settings.pools.scope == "group" else "group"})
    return [Trial(change) for change in changes] + [Trial({}, share) for share in POOL_SHARES]


def _outcomes(
    settings: Settings, texts: SideTexts, group_of: GroupOf, step_cost: StepCost, batch_size: int
) -> list[Outcome]:
    """What every trial gives on a side, the configuration first."""
    num_texts = len(texts.measured)
    draws = np.random.default_rng(settings.seed).multinomial(
        num_texts, np.full(num_texts, 1 / num_texts), NUM_RESAMPLES
    )
    weights = np.vstack([np.ones(num_texts), draws])  # (1 + NUM_RESAMPLES, num_texts), the same for all trials
    trials, outcomes, configured = _trials(settings), [], None
    with tempfile.TemporaryDirectory(prefix="laserbatch-simulation-") as folder:

        @cache
        def pool_of(scheme: str, pools: PoolSettings, share: float) -> Pool:
            return build_pool(
                pool_texts(texts, group_of(texts.side, scheme), share),
                Path(tempfile.mkdtemp(dir=folder), "pool"),
                side=texts.side,
                tokenizer_hash="simulation",  # these pools live as long as the simulation
                model_id="simulation",
                settings=pools,
            )

        pool, calibration = pool_of(settings.routing.scheme, settings.pools, 1.0), None
        replayed = grouped(texts.calibration, group_of(texts.side, settings.routing.scheme))
        if len(replayed) > 1:
            options = draft_options(settings.decoding)
            calibration = with_budgets(calibrate(pool, replayed, options), pool, replayed, options)
        pool = pool.with_calibration(calibration)
        with progress(f"simulate {texts.side}s", len(trials)) as bar:
            for trial in trials:
                changed = trial.settings(settings)
                decoding = changed.decoding.model_copy(update={"batch_size": batch_size})
                budget = side_budget(decoding, pool, step_cost, texts.share_changed).budget
                measured = grouped(texts.measured, group_of(texts.side, changed.routing.scheme))
                if budget.max_draft_tokens:
                    tried = pool_of(changed.routing.scheme, changed.pools, trial.pool_share)
                    tried = tried.with_calibration(calibration) if "pool" in decoding.drafters else None
                    tally = replay(tried, measured, draft_options(decoding, budget))
                else:
                    num_steps = np.array([len(text.text_ids) + 1.0 for text in measured])  # the last one ends the text
                    tally = Tally(num_steps, np.zeros(num_texts), np.zeros(num_texts))
                sums = Tally(*(weights @ counts for counts in vars(tally).values()))
                speeds = step_cost.tokens_per_s(batch_size, sums)
                configured = speeds if configured is None else configured
                plain = step_cost.plain_tokens_per_s(batch_size)
                estimates = map(Estimate.of, (sums.tokens_per_step, speeds / plain, speeds / configured))
                drafted = float(sums.mean_drafted[0])
                outcomes.append(Outcome(trial, budget.max_draft_tokens, budget.min_acceptance, drafted, *estimates))
                bar.advance(1, trial.words)
    return outcomes


def pool_texts(texts: SideTexts, group_of: Mapping[object, str], share: float) -> list[PoolText]:
    """The texts of a pool, or of a smaller one that is part of it."""
    kept = list(texts.pool)[: max(1, round(share * len(texts.pool)))]
    return [PoolText(texts.pool[entity_id], group_of[entity_id], entity_id) for entity_id in kept]


def grouped(texts: Mapping[object, ReplayText], group_of: Mapping[object, str]) -> list[ReplayText]:
    """Texts to replay, with their groups."""
    return [replace(text, group=group_of[entity_id] or None) for entity_id, text in texts.items()]


def _best(sides: Sequence[list[Outcome]]) -> tuple[Outcome, ...] | None:
    """What the trial gives on each side that gains on all of them by more than noise, most where it gains least."""
    trials = [outcomes for outcomes in zip(*sides, strict=True) if outcomes[0].trial.change]
    gains = [min(one.over_configured.low for one in outcomes) for outcomes in trials]
    return trials[int(np.argmax(gains))] if max(gains) >= NOTABLE_GAIN else None


def _table(texts: SideTexts, outcomes: list[Outcome], where: str) -> Table:
    title = (
        f"{texts.side}s: {counted(len(texts.measured), 'text')} held back, {percent(texts.share_changed)} with a text "
        f"of the night before; {len(texts.pool):,} in the pool, {len(texts.calibration):,} to calibrate with\n{where}"
    )
    rows = [
        {
            "setting": one.trial.words or "as configured",
            "draft tokens": f"{one.max_draft_tokens} above {one.min_acceptance:g}" if one.max_draft_tokens else "none",
            "tokens/step": str(one.tokens_per_step),
            "drafted/step": decimal(one.mean_drafted, 1),
            "times plain": str(one.speed_up),
            "times configured": str(one.over_configured),
        }
        for one in outcomes
    ]
    return Table(title, rows, ("setting",))
