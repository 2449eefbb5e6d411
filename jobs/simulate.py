"""`laserbatch pools simulate`: what drafting will gain, from texts that a night wrote, before a GPU hour is spent.

Reads a finished run and writes one HTML page; no model runs. What is tried is in `simulating/studies.py` of
`retrieval_pools`, which texts are held back in `simulate_world.py`; the page is `report/simulation.py`.
"""

import tempfile
from importlib.metadata import version
from pathlib import Path

import typer

from laserbatch.jobs.console import progress, stdout, summary
from laserbatch.jobs.night import Night, open_run
from laserbatch.jobs.report.page import render_page
from laserbatch.jobs.report.simulation import simulation_page
from laserbatch.jobs.settings import WORKSPACE, Settings, load_settings
from laserbatch.jobs.simulate_budgets import BudgetChoice, Costs
from laserbatch.jobs.simulate_check import checked_nights
from laserbatch.jobs.simulate_result import SideSimulation, Simulation
from laserbatch.jobs.simulate_view import print_simulation
from laserbatch.jobs.simulate_world import (
    SideTexts,
    SimulationSize,
    calibrated_setting,
    divided_texts,
    require_something,
    simulator_of,
    trained_embeddings,
)
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.storage.atomic import write_text
from laserbatch.retrieval_pools.simulating.recommendation import recommend
from laserbatch.retrieval_pools.simulating.simulate import DraftSetting, Simulator
from laserbatch.retrieval_pools.simulating.studies import Findings, Trial, plan_trials


def simulate(
    config: Path | None = typer.Option(None, "--config", help="Configuration to simulate; without it that of the run."),
    workspace: Path | None = WORKSPACE,
    run: str | None = typer.Option(None, "--run", help="Run whose texts are used; without it the published one."),
    num_texts: int = typer.Option(200, min=1, help="Texts a side that are held back; at most a quarter of them."),
    max_pool_texts: int = typer.Option(20_000, min=10, help="Texts a side that pools are built from; sampled."),
    step_cost: Path | None = typer.Option(
        None,
        help="YAML or JSON with measured steps: {steps: [{batch_size, num_tokens, seconds}, ...]}; without it that of "
        "the configuration, or what the run measured, or else a computed one.",
    ),
    batch_size: list[int] = typer.Option([], min=1, help="Batch size to predict for; may be given several times."),
    out: Path | None = typer.Option(None, "--out", "-o", help="HTML file; simulation.html in the workspace if unset."),
    as_json: bool = typer.Option(False, "--json", help="Print every figure as JSON."),
) -> None:
    """Predict from a night's texts what drafting will gain: budgets, groups, pool sizes, options. Runs no model.

    Example: `laserbatch pools simulate --config laserbatch.yaml --step-cost h200.yaml --batch-size 64`
    """
    given = load_settings(config, {"workspace": workspace})
    night = open_run(given, run)
    settings = night.settings if config is None else given
    costs = Costs.of(step_cost, tuple(sorted(set(batch_size))), night, settings)
    simulation = simulate_night(night, settings, SimulationSize(num_texts, max_pool_texts), costs)
    path = out if out is not None else night.workspace.root / "simulation.html"
    write_text(render_page(simulation_page(simulation, f"laserbatch {version('laserbatch')}")), path)
    if as_json:
        summary({"report": str(path), **simulation.data()}, as_json=True)
    else:
        print_simulation(stdout, simulation)
        stdout.print(f"all figures: {path}", soft_wrap=True, markup=False)


def simulate_night(night: Night, settings: Settings, size: SimulationSize, costs: Costs) -> Simulation:
    """Simulate both sides of a finished run, and check the simulation on the latest night that can.

    Raises
    ------
    WorkspaceError
        Neither side has enough texts.
    PoolError
        The entities cannot be grouped as the configuration says.
    """
    divided = [divided_texts(night, side, size, settings.seed, settings.pools.calibration_texts) for side in SIDES]
    sides = [texts for texts in divided if texts is not None]
    require_something(sides, night)
    embeddings = trained_embeddings(night, settings)
    batch_size = costs.batch_size_of(settings)
    with tempfile.TemporaryDirectory(prefix="laserbatch-simulation-") as folder:
        simulators = [simulator_of(night, settings, part, embeddings, Path(folder, part.side)) for part in sides]
        choices = [
            BudgetChoice(simulator, calibrated_setting(night, settings, part.side), part, settings, costs)
            for part, simulator in zip(sides, simulators, strict=True)
        ]
        bases = [_studied_setting(choice, batch_size) for choice in choices]
        plans = [plan_trials(base, simulator) for base, simulator in zip(bases, simulators, strict=True)]
        simulated = [
            _simulate_side(*parts, settings.seed) for parts in zip(sides, simulators, plans, choices, strict=True)
        ]
        recommendation = recommend(
            simulators,
            plans,
            bases,
            [_chosen_setting(choice, base, batch_size) for choice, base in zip(choices, bases, strict=True)],
            settings.seed,
            lambda sums: costs.step_cost.tokens_per_s(batch_size, sums),
        )
    return Simulation(
        run_id=night.run.run_id,
        date=night.date.isoformat(),
        step_cost=costs.step_cost,
        batch_sizes=costs.batch_sizes,
        verifier=settings.decoding.verifier,
        sides=simulated,
        recommendation=recommendation,
        recommended_batch_size=batch_size,
        check=checked_nights(settings, night, size),
    )


def _studied_setting(choice: BudgetChoice, batch_size: int) -> DraftSetting:
    """What a night of these settings drafts; where that is nothing, what its pool is calibrated with is studied."""
    budget = choice.configured(batch_size)
    return choice.setting(budget) if budget.max_draft_tokens else choice.base


def _chosen_setting(choice: BudgetChoice, base: DraftSetting, batch_size: int) -> DraftSetting:
    """What a night drafts that is free to choose; the studied setting where this one is."""
    chosen = choice.chosen(batch_size)
    return base if chosen == choice.configured(batch_size) else choice.setting(chosen)


def _simulate_side(
    texts: SideTexts, simulator: Simulator, plan: list[Trial], choice: BudgetChoice, seed: int
) -> SideSimulation:
    with progress(f"simulate {texts.side}s", len(plan)) as bar:
        findings = Findings(simulator, plan, seed, lambda trial: bar.advance(1, f"{trial.study}: {trial.value}"))
    full_pool = {kind: found for kind in simulator.kinds if (found := findings.with_all_texts(kind, texts.num_texts))}
    return SideSimulation(
        texts.side,
        texts.num_texts,
        texts.num_written,
        texts.share_changed,
        len(texts.corpus),
        simulator.num_calibration_texts,
        findings.outcomes,
        choice.judged(),
        full_pool,
    )
