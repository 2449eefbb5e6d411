"""`laserbatch try`: print the prompt, pool and text of one entity. It saves only the measured step cost."""

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import typer
from rich.panel import Panel
from rich.text import Text

from laserbatch.jobs.console import say, stdout, summary, visible
from laserbatch.jobs.formatting import ROUTE_LABELS, SOURCE_LABELS, counted, decimal, percent, rate, ratio
from laserbatch.jobs.settings import CONFIG, JSON, WORKSPACE, load_settings
from laserbatch.jobs.stages import inputs
from laserbatch.jobs.stages.night import Night, new_night, parse_date
from laserbatch.jobs.stages.spans import decoded, text_spans
from laserbatch.pipeline.budget.choice import budget_step_cost, by_step, side_budget
from laserbatch.pipeline.distributed.settings import usable_cores
from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.planning.plan import read_shard
from laserbatch.pipeline.planning.refresh import RefreshSettings
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.figures import SampleSpan
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.scratch import ScratchFolder
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.part_columns import read_table
from laserbatch.pipeline.tables.parts import tables_folder
from laserbatch.pipeline.tables.read import Tables, read_tables
from laserbatch.retrieval_pools.step_cost import StepCost

# Underlines differ too, so that spans differ without colours. The model's own tokens are not marked.
SOURCE_STYLES = {
    "pool": "#101820 on #f2c4dd", "previous": "#101820 on #a9d3f2 underline",
    "prompt": "#101820 on #f7d48a underline2", "output": "#101820 on #9edcc5 italic",
    "form": "#101820 on #d5dae0", "target": "",
}  # fmt: skip
OTHER_STYLE = "#101820 on #d9d2ee"  # for drafters that other packages add


@dataclass(frozen=True)
class TriedEntity:
    side: Side
    entity_id: object
    template: str  # name of the template in the configuration
    prompt: str
    num_prompt_tokens: int
    num_history: int
    num_history_dropped: int
    pool_version: str | None  # None if there is no pool
    group: str | None  # the pool group that the router chose
    scheme: str
    text: str
    spans: list[SampleSpan]
    stats: DecodingStats
    fields: Mapping[str, str] | None  # None if a night would not keep the text; `problem` then says why
    problem: str | None = None


def try_one(
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    user: str | None = typer.Option(None, "--user", show_default="the first user of the table", help="Id of a user."),
    item: str | None = typer.Option(None, "--item", help="Id of an item."),
    date: str | None = typer.Option(
        None, show_default="all interactions", help="Use what was known at the end of this day."
    ),
    as_json: bool = JSON,
) -> None:
    """Write the text of one entity: show prompt, pool, the source of each part, and whether a night would keep it.

    Example: `laserbatch try --config laserbatch.yaml --user u17`
    """
    if user is not None and item is not None:
        raise typer.BadParameter("give either --user or --item")
    settings = load_settings(config, {"workspace": workspace})
    side: Side = "item" if item is not None else "user"
    night_date = parse_date(date) if date else None
    path = settings.tables.required_path
    tables = read_tables(path, as_of=night_date, keep_duplicates=settings.tables.keep_duplicates)
    inputs.require_template_columns(path, settings, side)
    inputs.require_plain_words(settings)
    inputs.say_left_out(settings, tables)
    of_all_dates = None if night_date is None else read_table(tables_folder(path), f"{side}s", None)
    alone = with_only(tables, side, user if item is None else item, of_all_dates)
    if inputs.needs_a_model(settings):
        say(inputs.NEEDS_A_MODEL)
    changes: dict[str, Any] = {}
    if settings.decoding.engine == "vllm":  # vLLM needs a process in which nothing was planned
        say("laserbatch's engine writes this text; vLLM writes the same, except at near-ties")
        changes = {"engine": "laserbatch", "vllm": {}}
    if (server := settings.decoding.endpoint) is not None:  # batch mode may take a day for one text
        changes = {"endpoint": server.model_copy(update={"mode": "requests"})}
    decoding = settings.decoding.model_copy(update=changes)
    # The text is written even if a night would postpone it.
    settings = settings.model_copy(update={"decoding": decoding, "refresh": RefreshSettings()})
    exists = (settings.workspace / "workspace.json").exists()
    opened = Workspace.open(settings.workspace, create=False) if exists else Workspace(settings.workspace)
    night = new_night(settings, opened, night_date or datetime.datetime.now(datetime.UTC).date())
    night.manifest.origin.force, night.tables = True, alone
    tried = write_entity(night, side)
    if as_json:
        summary(asdict(tried), as_json=True)
    else:
        print_tried(tried, settings.decoding.model_key)


def with_only(tables: Tables, side: Side, text: str | None, of_all_dates: pa.Table | None = None) -> Tables:
    """Tables with only one entity of a side: the entity whose id as text is `text`, or the first.

    Raises TableError if there is none; if the side's table `of_all_dates` has it, the error names its `created_at`.
    """
    name, id_column = f"{side}s", f"{side}_id"

    def row_of(entities: pa.Table) -> int | None:
        ids = entities[id_column].to_pylist()
        return next((row for row, key in enumerate(ids) if text is None or str(key) == text), None)

    known = tables.entities(side)
    if (row := row_of(known)) is not None:
        return replace(tables, **{name: known.slice(row, 1)})
    whole = known if of_all_dates is None else of_all_dates
    if (row := row_of(whole)) is None:
        first_ids = ", ".join(map(str, whole[id_column][:5].to_pylist()))
        raise TableError(f"the {name} table has no {id_column} {text!r}; its first ids are: {first_ids or 'none'}")
    entity = whole.slice(row, 1).to_pylist()[0]
    raise TableError(
        f"{side} {entity[id_column]} is not known yet at the end of that day: its created_at is "
        f"{entity['created_at']:%Y-%m-%d}; give a later --date, or correct created_at"
    )


def write_entity(night: Night, side: Side) -> TriedEntity:
    """Write the text of a side's only entity as the worker of a night does, in a temporary folder."""
    # Imported late: torch and Ray take half a minute to load, and a wrong id is reported before.
    from laserbatch.jobs.stages.generate import GenerationStage
    from laserbatch.jobs.stages.night_plans import NightPlanner
    from laserbatch.pipeline.budget.cost_cache import user_step_costs
    from laserbatch.pipeline.distributed.worker import ShardWorker

    decoding, version = night.settings.decoding, night.manifest.generation.pools.version
    (entity_id,) = night.tables.entities(side)[f"{side}_id"].to_pylist()
    with ScratchFolder("try") as scratch:
        folder = RunFolder(Path(scratch))
        stage = GenerationStage(NightPlanner(night, folder, decoding))
        plan, spec = stage.planner.plan(side)[0], stage.worker_spec()
        if not plan.shards:
            raise TableError(f"{side} {entity_id} cannot be written: it has no title")
        (shard,), ((scheme, _),) = plan.shards, plan.routes.items()
        (row,) = read_shard(folder.root / shard.path)
        worker = ShardWorker(replace(spec, num_threads=usable_cores(), step_cost_dir=user_step_costs()))

        def measure() -> StepCost:
            return worker.engine.cached_step_cost() or worker.engine.measured_step_cost()

        pool = None if version is None else night.pools.open(version, side)
        has_previous = float(row.previous_ids is not None)
        prompt, tokenizer = worker.rendered(side, row), worker.engine.tokenizer
        step_cost = budget_step_cost(decoding, measure)
        step_cost = step_cost and step_cost.at_context(len(prompt.token_ids))
        budget = by_step(decoding, side_budget(decoding, pool, step_cost, has_previous))
        record = worker.run(shard, budget.budget)
        written = read_parquet(folder.root / record.file).to_pylist()
        folder.merge_quarantine(side, [record], [], night.tables.entities(side)[f"{side}_id"].type)
        failed = folder.read_quarantine(side).to_pylist()
    if written:
        text, fields, problem = written[0]["text"], json.loads(written[0]["fields_json"]), None
        spans = text_spans(tokenizer, written[0]["token_ids"], written[0]["token_sources"])
    else:
        text, fields, problem = failed[0]["text"] or "", None, f"{failed[0]['reason']}: {failed[0]['detail']}"
        spans = [SampleSpan(text, "target")]
    return TriedEntity(
        side=side,
        entity_id=entity_id,
        template=night.settings.knowledge.template_of(side),
        prompt=decoded(tokenizer, prompt.token_ids.tolist(), skip_special_tokens=False),
        num_prompt_tokens=len(prompt.token_ids),
        num_history=prompt.num_history,
        num_history_dropped=prompt.num_history_dropped,
        pool_version=None if pool is None else version,
        group=row.group or None,
        scheme=scheme,
        text=text,
        spans=spans,
        stats=record.written_by.stats,
        fields=fields,
        problem=problem,
    )


def print_tried(tried: TriedEntity, model_key: str) -> None:
    cut = f", {counted(tried.num_history_dropped, 'older event')} cut" if tried.num_history_dropped else ""
    about = f"{tried.template}: {counted(tried.num_prompt_tokens, 'token')}, {tried.num_history} history events{cut}"
    pool = "No pool yet: drafts come from the prompt, the output and the entity's own earlier text."
    if tried.pool_version is not None:
        pool = f"Pool {tried.pool_version}, group {tried.group or 'none'} ({ROUTE_LABELS[tried.scheme]})"
    text = Text.assemble(*((visible(span.text), SOURCE_STYLES.get(span.source, OTHER_STYLE)) for span in tried.spans))
    used = {span.source for span in tried.spans}
    labels = {name: label for name, label in SOURCE_LABELS.items() if name in used}
    legend = Text("  ").join(Text(f" {label} ", SOURCE_STYLES.get(name, OTHER_STYLE)) for name, label in labels.items())
    stats = tried.stats
    pace = f"{decimal(stats.tokens_per_step)} tokens per step (accepted draft tokens + 1)"
    share = f"{percent(ratio(stats.num_accepted, stats.num_drafted))} of {counted(stats.num_drafted, 'draft token')}"
    steps = f" in {counted(stats.num_steps, 'step')}: {pace}; {share} accepted"
    steps = steps if stats.num_steps else ""  # a server reports neither steps nor drafts
    counts = f"{counted(stats.num_tokens, 'token')}{steps}; {rate(stats.tokens_per_s)} tokens/s"
    if stats.num_thought_tokens and tried.fields is not None:
        counts += f"; {counted(stats.num_thought_tokens, 'token')} of thoughts were cut"
    stdout.print(_panel(visible(tried.prompt), f"Prompt of {tried.side} {tried.entity_id}", about))
    if stats.num_steps:
        stdout.print(Text(visible(pool)))
    stdout.print(_panel(Text("\n\n").join([text, legend]), "Text"), Text(counts))
    if tried.fields is not None:
        fields = "\n".join(f"{name}: {value}" for name, value in tried.fields.items())
        stdout.print(_panel(visible(fields), "Record"))
    stdout.print(_verdict(tried, model_key))


def _verdict(tried: TriedEntity, model_key: str) -> Text:
    is_cut = "length" in tried.stats.finish_reasons
    if tried.fields is None:
        where = ", and it was cut at the token limit" if is_cut else ""
        return Text(
            f"A night would put {tried.side} {visible(str(tried.entity_id))} in quarantine: its text was not "
            f"accepted{where} ({visible(str(tried.problem))}). Try another {model_key} or "
            f"knowledge.{tried.side}_template.",
            "bold red",
        )
    if marks := tried.stats.role_marks:
        invented = f", and {counted(tried.stats.num_invented, 'token')} after it were cut"
        return Text(
            f"It was parsed. It was ended at {', '.join(map(visible, marks))}, a role mark or end token that the "
            f"model's configuration does not name{invented if tried.stats.num_invented else ''}: "
            "add the token that ends its turns to eos_token_id in its generation_config.json.",
            "bold yellow",
        )
    if is_cut:
        return Text("It was parsed, but cut at the token limit: raise decoding.max_new_tokens.", "bold yellow")
    return Text("It was parsed and ended by itself: a night would keep it.", "bold green")


def _panel(content: str | Text, title: str, subtitle: str = "") -> Panel:
    text = Text(content) if isinstance(content, str) else content
    about = Text(visible(subtitle)) if subtitle else None
    return Panel(text, title=Text(visible(title)), subtitle=about, title_align="left", subtitle_align="left")
