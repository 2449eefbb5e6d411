"""`laserbatch try`: one entity's prompt, pool, and text as it is written. Writes nothing to disk."""

import datetime
import time
from pathlib import Path

import typer
from rich.live import Live

from laserbatch.jobs.budgets import budget_step_cost, side_budget
from laserbatch.jobs.console import say, stdout, summary
from laserbatch.jobs.inputs import NEEDS_A_MODEL, needs_a_model, require_template_columns
from laserbatch.jobs.night import current_pools, parse_date, previous_run
from laserbatch.jobs.pools_view import num_calibration_texts
from laserbatch.jobs.settings import CONFIG, WORKSPACE, Settings, load_settings
from laserbatch.jobs.spans import text_spans
from laserbatch.jobs.try_view import TriedEntity, print_tried, text_panel
from laserbatch.pipeline.budget.kept_costs import known_step_cost
from laserbatch.pipeline.budget.measuring import measure_step_cost
from laserbatch.pipeline.budget.step_cost import StepCost
from laserbatch.pipeline.decoding.drafters.from_settings import drafter_from
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.folder import tokenizer_hash
from laserbatch.pipeline.decoding.requests import GenerationFailure, GenerationRequest, StepEvent
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.errors import RowError, TableError
from laserbatch.pipeline.knowledge.entities import Entity, iter_entities
from laserbatch.pipeline.knowledge.parsers import parse_knowledge
from laserbatch.pipeline.knowledge.templates import load_template
from laserbatch.pipeline.planning.previous import PreviousKnowledge
from laserbatch.pipeline.planning.prompting import prompt_renderer
from laserbatch.pipeline.planning.routing import NO_ROUTE, entity_router
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.manifest import make_run_id
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.read import Tables, read_tables
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.index.store import PoolStore
from laserbatch.retrieval_pools.routing.router import Router


def try_one(
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    user: str | None = typer.Option(None, "--user", help="Id of a user. Default: the first of the table."),
    item: str | None = typer.Option(None, "--item", help="Id of an item."),
    date: str | None = typer.Option(None, help="As known at the end of this day; without it everything is known."),
    as_json: bool = typer.Option(False, "--json", help="Print what happened as JSON."),
) -> None:
    """Show one entity being written: its prompt, its pool, its text by source, and whether a night keeps it.

    Example: `laserbatch try --config laserbatch.yaml --user u17`
    """
    if user is not None and item is not None:
        raise typer.BadParameter("give either --user or --item")
    settings = load_settings(config, {"workspace": workspace})
    side: Side = "item" if item is not None else "user"
    night_date = parse_date(date) if date else None
    tables = read_tables(settings.tables.path, as_of=night_date)
    require_template_columns(settings.tables.path, settings, side)
    entity = find_entity(tables, side, user if item is None else item)
    if needs_a_model(settings, settings.tables.path):
        say(NEEDS_A_MODEL)
    today = datetime.datetime.now(datetime.UTC).date()
    tried = write_one(settings, tables, side, entity, night_date or today, live=not as_json and stdout.is_terminal)
    if as_json:
        data = {name: value for name, value in vars(tried).items() if name != "spans"}
        summary(data | {"text": "".join(s.text for s in tried.spans), "spans": [vars(s) for s in tried.spans]}, True)
        return
    print_tried(stdout, tried)


def find_entity(tables: Tables, side: Side, text: str | None) -> Entity:
    """The entity whose id, as text, is the given one; without one the table's first.

    Raises
    ------
    TableError
        There is none.
    """
    ids = tables.entities(side)[f"{side}_id"].to_pylist()
    entity_id = next((known for known in ids if text is None or str(known) == text), None)
    if entity_id is None:
        some = ", ".join(str(known) for known in ids[:5])
        raise TableError(f"the {side}s table has no {side}_id {text!r}; its first ids are: {some or 'none'}")
    return next(iter_entities(tables, side, [entity_id]))


def write_one(
    settings: Settings, tables: Tables, side: Side, entity: Entity, date: datetime.date, live: bool
) -> TriedEntity:
    """Generate one entity's text as tonight would, showing it as it grows."""
    rendered, _ = prompt_renderer(side, settings.knowledge, settings.decoding, settings.model_dir)(entity)
    template = load_template(settings.knowledge.template_of(side), settings.knowledge.template_dir)
    engine = Engine.from_pretrained(settings.model_dir, settings.decoding)
    pool, version, route, previous_ids = _night_before(settings, tables, side, entity, date)
    request = GenerationRequest("try", rendered.token_ids, previous_ids, route.group, settings.decoding.max_new_tokens)
    budget = _budget(settings, engine, pool, previous_ids is not None)
    token_ids: list[int] = []
    sources: list[int] = []
    with Live(text_panel([]), console=stdout, refresh_per_second=20, transient=True, auto_refresh=live) as view:

        def on_event(event: StepEvent) -> None:
            token_ids.extend(event.token_ids.tolist())
            sources.extend(event.sources.tolist())
            if live:
                view.update(text_panel(text_spans(engine.tokenizer, token_ids, sources)))

        start_s = time.perf_counter()
        drafter = drafter_from(settings.decoding, pool, budget)
        outcome = next(engine.generate([request], drafter, on_event=on_event, budget=budget))
        wall_s = time.perf_counter() - start_s
    if isinstance(outcome, GenerationFailure):
        raise TableError(f"{side} {entity.entity_id} cannot be written: {outcome.reason}")
    fields, problem = None, None
    try:
        fields = parse_knowledge(template, outcome.text)
    except RowError as error:
        problem = error.reason
    return TriedEntity(
        side=side,
        entity_id=entity.entity_id,
        template=template.identity,
        prompt=engine.tokenizer.decode(rendered.token_ids.tolist(), skip_special_tokens=False),
        num_prompt_tokens=len(rendered.token_ids),
        num_history=rendered.num_history,
        num_history_dropped=rendered.num_history_dropped,
        pool_version=version,
        group=route.group or None,
        scheme=route.scheme,
        num_calibration_texts=0 if pool is None else num_calibration_texts(pool.manifest),
        spans=text_spans(engine.tokenizer, outcome.token_ids, outcome.sources),
        num_tokens=len(outcome.token_ids),
        num_steps=outcome.num_steps,
        num_drafted=outcome.num_drafted,
        num_accepted=outcome.num_accepted,
        wall_s=wall_s,
        finish_reason=outcome.finish_reason,
        fields=fields,
        problem=problem,
    )


def _budget(settings: Settings, engine: Engine, pool: Pool | None, is_changed: bool) -> Budget:
    """What tonight's run would draft of a side whose entities are all like this one."""
    decoding = settings.decoding
    folder = Workspace(settings.workspace).step_costs_folder

    def measure() -> StepCost:
        known = known_step_cost(folder, engine, 0 if pool is None else pool.manifest.num_tokens)
        return known or measure_step_cost(engine, pool, decoding.drafters, [decoding.batch_size])

    return side_budget(decoding, pool, budget_step_cost(decoding, measure), float(is_changed)).budget


def _night_before(settings: Settings, tables: Tables, side: Side, entity: Entity, date: datetime.date):
    """What the workspace has to draft from: pool, its version, the entity's route in it, and its own last text."""
    if not (settings.workspace / "workspace.json").exists():
        return None, None, NO_ROUTE, None
    workspace = Workspace.open(settings.workspace, create=False)
    last = previous_run(workspace, make_run_id(date, settings.of_output()))
    previous = PreviousKnowledge(None if last is None else last.knowledge_folder(side))
    row = previous.row_of(entity.entity_id)
    previous_ids = None if row is None else previous.token_ids([row])[row]
    store = PoolStore(workspace.pools_folder)
    current = current_pools(store, settings.pools.min_support, date, settings.routing)
    if current is None:
        return None, None, NO_ROUTE, previous_ids
    router = Router.load(current.folder / "router" / side, settings.routing)
    route = entity_router(router, tables, side, date)(entity)
    pool = store.open(current.version, side, tokenizer_hash(settings.model_dir))
    return pool, current.version, route, previous_ids
