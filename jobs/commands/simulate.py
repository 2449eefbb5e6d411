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
from laserbatch.jobs.stages.budgets import known_step_cost
from laserbatch.jobs.stages.night import Night, open_run
from laserbatch.jobs.stages.pool_texts import (
    RunTexts,
    draft_options,
    form_tokens,
    planned_rows,
    read_run_texts,
    replay_text,
)
from laserbatch.pipeline.budget.choice import known_batch_size, side_budget
from laserbatch.pipeline.errors import ConfigError, WorkspaceError
from laserbatch.pipeline.planning.planner import side_routes
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.scratch import ScratchFolder
from laserbatch.retrieval_pools.calibration.calibrate import (
    NUM_CALIBRATION_TEXTS,
    calibrate,
    num_held_back,
    with_budgets,
)
from laserbatch.retrieval_pools.calibration.replay import ReplayText, Tally, replay
from laserbatch.retrieval_pools.index.build import build_pool
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.routing.router import Routes, fit_routers
from laserbatch.retrieval_pools.settings import RoutingSettings
from laserbatch.retrieval_pools.step_cost import StepCost

SCHEMES = ("router", "collaborative", "attribute", "global", "random")
TREE_SIZES = (4, 16, 64)
POOL_SHARES = (0.5, 0.25)
NOTABLE_GAIN = 1.01  # a smaller gain is not worth another setting
MIN_TEXTS = 5  # fewer texts held back of a side say nothing
MAX_HELD_BACK_SHARE = 0.25
MAX_POOL_TEXTS = 20_000  # pools are built from a sample of at most this many texts
NUM_RESAMPLES = 2000
RoutesOf = Callable[[Side, str], Routes]  # of the entities of a side's table, under a scheme


@dataclass(frozen=True)
class SideTexts:
    """The texts of a side; pools of the simulation hold only those that are neither measured nor used to calibrate.

    Measured and calibrated with are texts that the run wrote itself, so that as many of their entities have an earlier
    text as on a night; each with the row of its entity in the table, without its group.
    """

    side: Side
    texts: RunTexts  # all of the run
    measured: list[tuple[int, ReplayText]]
    calibration: list[tuple[int, ReplayText]]
    held_back: list  # ids of entities
    others: list  # likewise, in random order

    @property
    def num_pool_texts(self) -> int:
        return min(len(self.others), MAX_POOL_TEXTS)

    @property
    def share_changed(self) -> float:
        """Of the measured texts, the share whose entity has an earlier one."""
        return sum(text.previous_ids is not None for _, text in self.measured) / len(self.measured)


@dataclass(frozen=True)
class Outcome:
    """The predicted speed after a change of the configuration, or with a share of the pool's texts, in full batches.

    Prefill is not counted. `over_configured` is tokens per second over those of the configuration on the same texts,
    `low` to `high` its 95 % bootstrap interval; whole texts are resampled, since steps of one text are alike. Bonus
    tokens are counted.
    """

    change: Mapping[str, Any]
    pool_share: float
    max_draft_tokens: int
    min_acceptance: float
    mean_drafted: float
    tokens_per_step: float
    speed_up: float  # over plain decoding
    over_configured: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """The change as a configuration has it."""
        if self.pool_share < 1:
            return f"a pool of {percent(self.pool_share)} of the texts"
        changes = (f"{key}: {'null' if value is None else value}" for key, value in self.change.items())
        return ", ".join(changes) or "as configured"

    @property
    def gain(self) -> str:
        return f"{decimal(self.over_configured)} ({decimal(self.low)} to {decimal(self.high)})"


def simulate(
    config: Path | None = typer.Option(
        None, "--config", show_default="that of the run", help="Configuration to simulate."
    ),
    workspace: Path | None = WORKSPACE,
    run: str | None = typer.Option(None, "--run", show_default="the published run", help="Run whose texts are used."),
    num_texts: int = typer.Option(
        200, min=1, help="Number of texts of each side to hold back; at most a quarter of them."
    ),
    step_cost: Path | None = typer.Option(
        None,
        show_default="that of the configuration, or the newest that a night measured",
        help="YAML or JSON with measured steps: {steps: [{batch_size, num_tokens, seconds}, ...]}.",
    ),
    batch_size: int | None = typer.Option(
        None, min=1, show_default="decoding.batch_size", help="Batch size to predict for."
    ),
    as_json: bool = JSON,
) -> None:
    """Predict from a night's texts what drafting will gain: budgets, groups, pool sizes. Runs no model.

    Example: `laserbatch pools simulate --config laserbatch.yaml --step-cost h200.yaml --batch-size 64`
    """
    configured = load_settings(config, {"workspace": workspace})
    night = open_run(configured, run)
    settings = night.settings if config is None else configured
    cost, batch_size = _pace(night, settings, step_cost, batch_size)
    with ScratchFolder("simulation") as folder:
        divided = [divided_texts(night, settings, side, num_texts, Path(folder)) for side in SIDES]
        texts = [part for part in divided if part is not None]
        if not texts:
            raise WorkspaceError(
                f"run {night.run.run_id} wrote too few texts on either side to hold some back; run a night over more "
                "entities, or name another run with --run"
            )
        routes_of = routing(night, settings)
        by_side = [_outcomes(night, settings, part, routes_of, cost, batch_size, Path(folder)) for part in texts]
    best = _best(by_side)
    if as_json:
        sides = {
            side_texts.side: {
                "num_texts": len(side_texts.texts),
                "num_measured_texts": len(side_texts.measured),
                "num_calibration_texts": len(side_texts.calibration),
                "num_pool_texts": side_texts.num_pool_texts,
                "share_changed": side_texts.share_changed,
                "outcomes": list(map(asdict, outcomes)),
            }
            for side_texts, outcomes in zip(texts, by_side, strict=True)
        }
        data = {"run_id": night.run.run_id, "step_cost": cost.name, "batch_size": batch_size, "sides": sides}
        summary(data | {"recommendation": best and best[0].change}, as_json=True)
        return
    where = f"at batch {batch_size:,} and this step cost"
    for side_texts, outcomes in zip(texts, by_side, strict=True):
        print_table(_table(side_texts, outcomes, f"batch {batch_size:,}, step cost: {cost.name}"))
    advice = f"Keep the configuration {where}: nothing that was tried is faster by more than noise."
    if best is not None:
        gains = ", ".join(f"{outcome.gain} of {side.side}s" for outcome, side in zip(best, texts, strict=True))
        advice = f"Recommended {where}: {best[0].words}; times the configured tokens per second: {gains}."
    stdout.print(advice, markup=False, soft_wrap=True)


def _pace(night: Night, settings: Settings, path: Path | None, batch_size: int | None) -> tuple[StepCost, int]:
    """The step cost of `path`, the configuration or the newest measurement of a night; and the batch size."""
    size = batch_size or settings.decoding.batch_size
    step_cost = known_step_cost(night.workspace, settings.decoding, path)
    if step_cost is None:
        raise ConfigError("no night has measured what a step costs here; give one with --step-cost FILE")
    if batch_size is not None:
        step_cost.plain_seconds(batch_size)  # refuses one that was not measured
    return step_cost, known_batch_size(step_cost, size)


def divided_texts(night: Night, settings: Settings, side: Side, num_texts: int, scratch: Path) -> SideTexts | None:
    """Hold back `num_texts` of a side, at most a quarter, the same for the same seed; None if there are too few."""
    run_texts = read_run_texts(night.run, side, Path(tempfile.mkdtemp(dir=scratch)))
    num_all = len(run_texts) if run_texts else 0
    num_measured = min(num_texts, int(MAX_HELD_BACK_SHARE * num_all))
    num_calibration = num_held_back(num_all, NUM_CALIBRATION_TEXTS)
    rows = planned_rows(night, side, num_measured + num_calibration)
    if len(rows) < num_measured + num_calibration:  # most was carried over
        num_measured = len(rows) // 2
    if run_texts is None or num_measured < MIN_TEXTS:
        say(f"no simulation of {side}s: the run {night.run.run_id} has {num_all} texts and wrote {len(rows)} anew")
        return None
    generator, held_back = np.random.default_rng(settings.seed), [row.entity_id for row in rows]
    others = sorted(set(run_texts.entity_ids.to_pylist()).difference(held_back), key=str)
    others = [others[number] for number in generator.permutation(len(others))]
    token_ids, entity_ids = run_texts.of_entities(held_back), night.tables.entities(side)[f"{side}_id"].to_pylist()
    place_of = {entity_id: place for place, entity_id in enumerate(entity_ids) if entity_id in token_ids}
    is_form = form_tokens(night, side, token_ids)
    texts = [
        (place_of[row.entity_id], replay_text(row, token_ids[row.entity_id], None, is_form))
        for row in (rows[number] for number in generator.permutation(len(rows)))
        if row.entity_id in place_of
    ]
    return SideTexts(side, run_texts, texts[:num_measured], texts[num_measured:], held_back, others)


def routing(night: Night, settings: Settings) -> RoutesOf:
    """The group of each entity, under any scheme. Raises PoolError: the configuration asks for what cannot be."""
    tables = night.tables
    options = RoutingSettings.of(settings.routing)
    options = options.model_copy(update={"scheme": "router"})  # it knows all that the others do
    routers = fit_routers(tables.users, tables.items, tables.interactions, options, settings.seed)

    @cache
    def routes_of(side: Side, scheme: str) -> Routes:
        router = replace(routers[side], settings=options.model_copy(update={"scheme": scheme}))
        return side_routes(router, tables, side)

    return routes_of


def _trials(settings: Settings) -> list[tuple[dict[str, Any], float]]:
    """Keys with other values, and shares of the pool's texts; the configuration first."""
    decoding = settings.decoding
    is_configured = (decoding.max_draft_tokens, decoding.min_acceptance) != (None, None)
    sizes = (None, *TREE_SIZES) if is_configured else TREE_SIZES  # None: the night's own choice
    changes: list[dict[str, Any]] = [{}]
    changes += [{"decoding.max_draft_tokens": size, "decoding.min_acceptance": None} for size in sizes]
    changes += [{"routing.scheme": scheme} for scheme in SCHEMES if scheme != settings.routing.scheme]
    changes.append({"pools.scope": "side" if settings.pools.scope == "group" else "group"})
    return [(change, 1.0) for change in changes] + [({}, share) for share in POOL_SHARES]


def _changed(settings: Settings, change: Mapping[str, Any]) -> Settings:
    for key, value in change.items():
        section, _, name = key.partition(".")
        changed = getattr(settings, section).model_copy(update={name: value})
        settings = settings.model_copy(update={section: changed})
    return settings


def _outcomes(
    night: Night,
    settings: Settings,
    texts: SideTexts,
    routes_of: RoutesOf,
    step_cost: StepCost,
    batch_size: int,
    folder: Path,
) -> list[Outcome]:
    """The outcomes of all trials on a side, the configuration first."""
    num_texts = len(texts.measured)
    num_written = sum(len(text.text_ids) + 1 for _, text in texts.measured)  # the end is written too
    plain_pace = num_written / (num_written - sum(text.num_form for _, text in texts.measured))
    plain = batch_size * plain_pace / step_cost.plain_seconds(batch_size)
    draws = np.random.default_rng(settings.seed).multinomial(
        num_texts, np.full(num_texts, 1 / num_texts), NUM_RESAMPLES
    )
    weights = np.vstack([np.ones(num_texts), draws])  # (1 + NUM_RESAMPLES, num_texts), the same for all trials

    @cache
    def pool_of(scheme: str, scope: str, share: float) -> Pool:
        left_out = [*texts.held_back, *texts.others[max(1, round(share * texts.num_pool_texts)) :]]
        return build_pool(
            texts.texts.pool_texts(night.tables, texts.side, routes_of(texts.side, scheme), left_out),
            Path(tempfile.mkdtemp(dir=folder), "pool"),
            side=texts.side,
            tokenizer_hash="simulation",  # these pools live as long as the simulation
            model_id="simulation",
            settings=settings.pools.model_copy(update={"scope": scope}),
        )

    def grouped(placed: list[tuple[int, ReplayText]], scheme: str) -> list[ReplayText]:
        routes = routes_of(texts.side, scheme)
        return [replace(text, group=routes.of(row).group or None) for row, text in placed]

    pool, calibration = pool_of(settings.routing.scheme, settings.pools.scope, 1.0), None
    replayed = grouped(texts.calibration, settings.routing.scheme)
    if len(replayed) > 1:
        options = draft_options(settings.decoding)
        calibration = with_budgets(calibrate(pool, replayed, options), pool, replayed, options)
    pool = pool.with_calibration(calibration)
    trials, outcomes, configured = _trials(settings), [], None
    with progress(f"simulate {texts.side}s", len(trials)) as bar:
        for change, share in trials:
            changed = _changed(settings, change)
            decoding = changed.decoding.model_copy(update={"batch_size": batch_size})
            budget = side_budget(decoding, pool, step_cost, texts.share_changed).budget
            measured = grouped(texts.measured, changed.routing.scheme)
            if budget.max_draft_tokens:
                tried = pool_of(changed.routing.scheme, changed.pools.scope, share)
                tried = tried.with_calibration(calibration) if "pool" in decoding.drafters else None
                tally = replay(tried, measured, draft_options(decoding, budget))
            else:
                num_form = np.array([text.num_form for text in measured], float)
                num_steps = np.array([len(text.text_ids) + 1.0 for text in measured]) - num_form  # the last: its end
                tally = Tally(num_steps, np.zeros(num_texts), num_form)
            sums = Tally(*(weights @ counts for counts in vars(tally).values()))
            speeds = step_cost.tokens_per_s(batch_size, sums)
            configured = speeds if configured is None else configured
            over = speeds / configured
            figures = sums.mean_drafted[0], sums.tokens_per_step[0], speeds[0] / plain, over[0]
            figures = map(float, (*figures, *np.quantile(over[1:], [0.025, 0.975])))
            outcomes.append(Outcome(change, share, budget.max_draft_tokens, budget.min_acceptance, *figures))
            bar.advance(1, outcomes[-1].words)
    return outcomes


def _best(sides: Sequence[list[Outcome]]) -> tuple[Outcome, ...] | None:
    """The outcomes, by side, of the trial whose smallest gain is the largest; None if that is within noise."""
    trials = [outcomes for outcomes in zip(*sides, strict=True) if outcomes[0].change]
    gains = [min(outcome.low for outcome in outcomes) for outcomes in trials]
    return trials[int(np.argmax(gains))] if max(gains) >= NOTABLE_GAIN else None


def _table(texts: SideTexts, outcomes: list[Outcome], where: str) -> Table:
    title = (
        f"{texts.side}s: {counted(len(texts.measured), 'text')} held back, {percent(texts.share_changed)} with a text "
        f"of the night before; {texts.num_pool_texts:,} in the pool, {len(texts.calibration):,} to calibrate with\n"
        f"{where}"
    )
    rows = [
        {
            "setting": row.words,
            "draft tokens": f"{row.max_draft_tokens} above {row.min_acceptance:g}" if row.max_draft_tokens else "none",
            "tokens/step": decimal(row.tokens_per_step),
            "drafted/step": decimal(row.mean_drafted, 1),
            "times plain": decimal(row.speed_up),
            "times configured": row.gain,
        }
        for row in outcomes
    ]
    return Table(title, rows, ("setting",))
