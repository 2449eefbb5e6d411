"""`laserbatch try`: one entity's prompt, pool and text, drawn as text alone. Writes nothing to disk."""

import datetime
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import typer
from rich.panel import Panel
from rich.text import Text

from laserbatch.jobs.console import say, stdout, summary, visible
from laserbatch.jobs.formatting import ROUTE_LABELS, SOURCE_LABELS, counted, decimal, percent, rate, ratio
from laserbatch.jobs.settings import CONFIG, JSON, WORKSPACE, load_settings
from laserbatch.jobs.stages.budgets import budget_step_cost, side_budget
from laserbatch.jobs.stages.inputs import NEEDS_A_MODEL, needs_a_model, require_template_columns
from laserbatch.jobs.stages.night import Night, new_night, parse_date
from laserbatch.jobs.stages.spans import text_spans
from laserbatch.pipeline.budget.measuring import KeptCost, measure_step_cost
from laserbatch.pipeline.budget.step_cost import StepCost
from laserbatch.pipeline.decoding.drafters import drafter_from
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.folder import load_tokenizer, tokenizer_hash
from laserbatch.pipeline.decoding.sequence import GenerationFailure, GenerationRequest
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.errors import RowError, TableError
from laserbatch.pipeline.knowledge.entities import Entity, iter_entities
from laserbatch.pipeline.knowledge.parsers import parse_knowledge
from laserbatch.pipeline.knowledge.prompts import render_prompt
from laserbatch.pipeline.knowledge.records import PreviousKnowledge
from laserbatch.pipeline.knowledge.templates import load_template
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.manifest import SampleSpan
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.read import Tables, read_tables
from laserbatch.retrieval_pools.index.pool import Pool

# Underlines differ too, so that the spans can be told apart without colours. The model's own tokens stay unmarked.
SOURCE_STYLES = {
    "pool": "#101820 on #f2c4dd",
    "previous": "#101820 on #a9d3f2 underline",
    "prompt": "#101820 on #f7d48a underline2",
    "output": "#101820 on #9edcc5 italic",
    "target": "",
}


@dataclass(frozen=True)
class TriedEntity:
    """One entity, tried."""

    side: Side
    entity_id: object
    template: str  # name@version
    prompt: str
    num_prompt_tokens: int
    num_history: int
    num_history_dropped: int
    pool_version: str | None  # None where there is no pool
    group: str | None  # that the router chose
    scheme: str | None
    text: str
    spans: list[SampleSpan]
    num_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    wall_s: float
    finish_reason: str  # "end_of_text" or "length"
    fields: Mapping[str, str] | None  # None when the text could not be parsed, and `problem` says why
    problem: str | None = None


def try_one(
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    user: str | None = typer.Option(None, "--user", help="Id of a user. Default: the first of the table."),
    item: str | None = typer.Option(None, "--item", help="Id of an item."),
    date: str | None = typer.Option(None, help="As known at the end of this day; without it everything is known."),
    as_json: bool = JSON,
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
    if needs_a_model(settings):
        say(NEEDS_A_MODEL)
    workspace = Workspace(settings.workspace)
    if (settings.workspace / "workspace.json").exists():
        workspace = Workspace.open(settings.workspace, create=False)
    night = new_night(settings, workspace, night_date or datetime.datetime.now(datetime.UTC).date())
    night.tables = tables
    tried = write_one(night, side, entity)
    if as_json:
        summary(asdict(tried), as_json=True)
    else:
        print_tried(tried)


def find_entity(tables: Tables, side: Side, text: str | None) -> Entity:
    """The entity whose id, as text, is the given one; without one the table's first. Raises TableError if not there."""
    ids = tables.entities(side)[f"{side}_id"].to_pylist()
    entity_id = next((known for known in ids if text is None or str(known) == text), None)
    if entity_id is None:
        some = ", ".join(str(known) for known in ids[:5])
        raise TableError(f"the {side}s table has no {side}_id {text!r}; its first ids are: {some or 'none'}")
    return next(iter_entities(tables, side, [entity_id]))


def write_one(night: Night, side: Side, entity: Entity) -> TriedEntity:
    """Generate one entity's text as a night would."""
    settings, version = night.settings, night.manifest.pools.version
    template = load_template(settings.knowledge.template_of(side), settings.knowledge.template_dir)
    tokenizer = load_tokenizer(settings.model_dir)
    rendered = render_prompt(template, entity, tokenizer, settings.knowledge.max_prompt_tokens)
    engine = Engine.from_pretrained(settings.model_dir, settings.decoding)
    previous = PreviousKnowledge(None if night.previous is None else night.previous.knowledge_folder(side))
    ids = night.tables.entities(side)[f"{side}_id"]
    row = pc.index(ids, entity.entity_id).as_py()
    text = previous.token_ids(previous.rows_of(ids.slice(row, 1)))[0]
    previous_ids = np.asarray(text.values, np.int32) if text.is_valid else None
    pool = None if version is None else night.pools.open(version, side, tokenizer_hash(settings.model_dir))
    route = night.routes(side).of(row)
    request = GenerationRequest("try", rendered.token_ids, previous_ids, route.group, settings.decoding.max_new_tokens)
    budget = _budget(night, engine, pool, previous_ids is not None)
    start_s = time.perf_counter()
    outcome = next(engine.generate([request], drafter_from(settings.decoding, pool, budget), budget=budget))
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
        text=outcome.text,
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


def _budget(night: Night, engine: Engine, pool: Pool | None, is_changed: bool) -> Budget:
    """What a night would draft of a side whose entities are all like this one."""
    decoding, folder = night.settings.decoding, night.workspace.step_costs_folder

    def measure() -> StepCost:
        known = KeptCost(folder, engine, 0 if pool is None else pool.manifest.num_tokens).read()
        return known or measure_step_cost(engine, pool, decoding.drafters, [decoding.batch_size])

    return side_budget(decoding, pool, budget_step_cost(decoding, measure), float(is_changed)).budget


def print_tried(tried: TriedEntity) -> None:
    """Draw a tried entity on the terminal, from its prompt to whether a night would keep it."""
    cut = f", {counted(tried.num_history_dropped, 'older event')} cut" if tried.num_history_dropped else ""
    about = f"{tried.template}: {counted(tried.num_prompt_tokens, 'token')}, {tried.num_history} of history{cut}"
    pool = "No pool yet: drafts come from the prompt, the output and the entity's own earlier text."
    if tried.pool_version is not None:
        scheme = ROUTE_LABELS.get(tried.scheme or "none", tried.scheme)
        pool = f"Pool {tried.pool_version}, group {tried.group or 'none'} ({scheme})"
    text = Text.assemble(*((visible(span.text), SOURCE_STYLES[span.source]) for span in tried.spans))
    legend = Text("  ").join(Text(f" {SOURCE_LABELS[name]} ", style) for name, style in SOURCE_STYLES.items())
    per_step, accepted = ratio(tried.num_accepted, tried.num_steps), ratio(tried.num_accepted, tried.num_drafted)
    counts = (
        f"{counted(tried.num_tokens, 'token')} in {counted(tried.num_steps, 'step')}: "
        f"{decimal(None if per_step is None else per_step + 1)} tokens per step (accepted draft tokens + 1); "
        f"{percent(accepted)} of {counted(tried.num_drafted, 'draft token')} accepted; "
        f"{rate(ratio(tried.num_tokens, tried.wall_s))} tokens/s"
    )
    stdout.print(
        _panel(visible(tried.prompt), f"Prompt of {tried.side} {tried.entity_id}", about),
        Text(visible(pool)),
        _panel(Text("\n\n").join([text, legend]), "Text"),
        Text(counts),
    )
    if tried.fields is not None:
        fields = "\n".join(f"{name}: {value}" for name, value in tried.fields.items())
        stdout.print(_panel(visible(fields), "Record"))
    stdout.print(_verdict(tried))


def _verdict(tried: TriedEntity) -> Text:
    """Whether a night would keep the text, and what to do where something is wrong with it."""
    is_cut = tried.finish_reason == "length"
    if tried.fields is None:
        where = ", and it was cut at the token limit" if is_cut else ""
        return Text(
            f"A night would put {tried.side} {visible(str(tried.entity_id))} in quarantine: nothing could be parsed "
            f"of this text{where} ({visible(str(tried.problem))}). Try another decoding.model or "
            f"knowledge.{tried.side}_template.",
            "bold red",
        )
    if is_cut:
        return Text("It was parsed, but cut at the token limit: raise decoding.max_new_tokens.", "bold yellow")
    return Text("It was parsed and ended by itself: a night would keep it.", "bold green")


def _panel(content: str | Text, title: str, subtitle: str = "") -> Panel:
    text = Text(content) if isinstance(content, str) else content
    about = Text(visible(subtitle)) if subtitle else None
    return Panel(text, title=Text(visible(title)), subtitle=about, title_align="left", subtitle_align="left")
