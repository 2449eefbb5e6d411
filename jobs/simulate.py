"""`laserbatch pools simulate`: what drafting will gain, from texts that a night wrote, before a GPU hour is spent.

Reads a finished run and writes one HTML page; no model runs. What is tried is in `retrieval_pools/studies.py`, which
texts are held back in `simulate_world.py`; the page is `report/simulation.py`.
"""

import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import typer

from jobs.console import progress, stdout, summary
from jobs.night import Night, open_run
from jobs.report.page import render_page
from jobs.report.simulation import simulation_page
from jobs.settings import Settings, load_settings
from jobs.simulate_check import checked_nights
from jobs.simulate_result import SideSimulation, Simulation
from jobs.simulate_view import print_simulation
from jobs.simulate_world import (
    SideTexts,
    SimulationSize,
    configured_setting,
    divided_texts,
    require_something,
    simulator_of,
    trained_embeddings,
)
from pipeline.knowledge.records import SIDES
from pipeline.storage.atomic import write_text
from retrieval_pools.recommendation import recommend
from retrieval_pools.simulate import Simulator
from retrieval_pools.step_cost import StepCost, computed_step_cost, read_step_cost
from retrieval_pools.studies import CONFIGURED, Findings, Trial, plan_trials

BATCH_SIZES = (1, 16, 64, 256)


@dataclass(frozen=True)
class Costs:
    """A step cost, and the batch sizes that are asked about."""

    step_cost: StepCost
    batch_sizes: tuple[int, ...]

    @classmethod
    def of(cls, path: Path | None, batch_sizes: tuple[int, ...]) -> "Costs":
        """From the command line: without a file a computed cost, without batch sizes those of the file."""
        if path is None:
            chosen = batch_sizes or BATCH_SIZES
            return cls(computed_step_cost(chosen), chosen)
        step_cost = read_step_cost(path)
        for batch_size in batch_sizes:
            step_cost.plain_tokens_per_s(batch_size)  # refuses one that was not measured
        return cls(step_cost, batch_sizes or step_cost.batch_sizes)

    def batch_size_of(self, settings: Settings) -> int:
        """The one that settings are recommended for: the configured one if it is asked about, else the middle one."""
        configured = settings.decoding.batch_size
        return configured if configured in self.batch_sizes else self.batch_sizes[len(self.batch_sizes) // 2]


def simulate(
    config: Path | None = typer.Option(
        None, help="Configuration to simulate; without it that of the run, in the workspace of the defaults."
    ),
    workspace: Path | None = typer.Option(None, help="Workspace folder; without it the configuration's."),
    run: str | None = typer.Option(None, "--run", help="Run whose texts are used; without it the published one."),
    num_texts: int = typer.Option(200, min=1, help="Texts a side that are held back; at most a quarter of them."),
    max_pool_texts: int = typer.Option(20_000, min=10, help="Texts a side that pools are built from; sampled."),
    step_cost: Path | None = typer.Option(
        None, help="YAML or JSON with measured steps: {steps: [{batch_size, num_tokens, seconds}, ...]}."
    ),
    batch_size: list[int] = typer.Option([], min=1, help="Batch size to predict for; may be given several times."),
    out: Path | None = typer.Option(None, "--out", "-o", help="HTML file; simulation.html in the workspace if unset."),
    as_json: bool = typer.Option(False, "--json", help="Print every figure as JSON."),
) -> None:
    """Predict from a night's texts what drafting will gain: budgets, groups, pool sizes, options. Runs no model.

    Example: `laserbatch pools simulate --config laserbatch.yaml --step-cost h200.yaml --batch-size 64`
    """
    costs = Costs.of(step_cost, tuple(sorted(set(batch_size))))
    given = load_settings(config, {"workspace": str(workspace) if workspace is not None else None})
    night = open_run(given, run)
    settings = night.settings if config is None else given
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
    with tempfile.TemporaryDirectory(prefix="laserbatch-simulation-") as folder:
        base = configured_setting(settings)
        simulators = [simulator_of(night, settings, part, embeddings, Path(folder, part.side)) for part in sides]
        plans = [plan_trials(base, simulator) for simulator in simulators]
        simulated = [
            _simulate_side(part, simulator, plan, costs, settings.seed)
            for part, simulator, plan in zip(sides, simulators, plans, strict=True)
        ]
        batch_size = costs.batch_size_of(settings)
        recommendation = recommend(
            simulators, plans, base, settings.seed, lambda sums: costs.step_cost.tokens_per_s(batch_size, sums)
        )
    return Simulation(
        run_id=night.run.run_id,
        date=night.date.isoformat(),
        step_cost=costs.step_cost.name,
        batch_sizes=costs.batch_sizes,
        verifier=settings.decoding.verifier,
        sides=simulated,
        recommendation=recommendation,
        recommended_batch_size=batch_size,
        check=checked_nights(settings, night, size),
    )


def _simulate_side(
    texts: SideTexts, simulator: Simulator, plan: list[Trial], costs: Costs, seed: int
) -> SideSimulation:
    with progress(f"simulate {texts.side}s", len(plan)) as bar:
        findings = Findings(simulator, plan, seed, lambda trial: bar.advance(1, f"{trial.study}: {trial.value}"))
    kinds = [trial.with_previous for trial in plan if trial.study == CONFIGURED]
    full_pool = {kind: estimate for kind in kinds if (estimate := findings.with_all_texts(kind, texts.num_texts))}
    speeds = findings.speeds(costs.step_cost, costs.batch_sizes)
    return SideSimulation(
        texts.side,
        texts.num_texts,
        len(texts.corpus),
        simulator.num_calibration_texts,
        findings.outcomes,
        speeds,
        full_pool,
    )
