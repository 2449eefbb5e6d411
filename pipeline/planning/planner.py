"""Of each entity: what it is asked, its pool group, whether its text is carried over, and its shard where it is not.

Shards follow the order of pool groups: a worker's consecutive texts share drafts.
"""

import datetime
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.decoding.model.folder import load_tokenizer, model_identity, tokenizer_hash
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge.chat_format import chat_skeleton
from laserbatch.pipeline.knowledge.entities import Entity
from laserbatch.pipeline.knowledge.prompts import (
    LAYOUT_VERSION,
    PARTS,
    RenderedPrompt,
    digest,
    fingerprint,
    render_prompt,
)
from laserbatch.pipeline.knowledge.records import PreviousKnowledge
from laserbatch.pipeline.knowledge.templates import KnowledgeSettings, load_template
from laserbatch.pipeline.planning.plan import CARRIED_SHARD, PlannedRow, SidePlan, write_shard_plan
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.quarantine import QuarantineRow
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.tables.read import Tables
from laserbatch.retrieval_pools.routing.router import Route, Router

SHARDS_A_SIDE = 16  # by default at least, of a side that is not small: so that several workers all have some
FIRST_TEXTS = 32  # of a side, that are judged before the others are written
LEAST_BATCHES, MOST_BATCHES = 4, 32  # of a shard by default: at its end the batch empties
DAY_US = 24 * 3600 * 1_000_000
NO_ROUTE = Route("", "none")

Prompt = tuple[str, Callable[[], RenderedPrompt]]  # its fingerprint, and what renders it where that is a new one


def prompt_renderer(
    side: Side, knowledge: KnowledgeSettings, decoding: DecodingSettings, model_dir: Path
) -> Callable[[Entity], Prompt]:
    """A function from an entity to its prompt; it, and what it returns, raise `RowError` where there can be none."""
    tokenizer = load_tokenizer(model_dir)
    template = load_template(knowledge.template_of(side), knowledge.template_dir)
    skeleton = chat_skeleton(tokenizer, template.system is not None, template.chat_options)
    names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    tokens = [(model_dir / name).read_text("utf-8") for name in names if (model_dir / name).is_file()]
    chat = [skeleton.pieces, skeleton.merges_system, tokenizer_hash(model_dir), tokens, knowledge.max_prompt_tokens]
    shared = {
        "template": [LAYOUT_VERSION, template.model_dump(mode="json")],
        "prompt": chat,
        "model": model_identity(model_dir, decoding.adapter),
        "decoding": decoding_provenance(decoding),
    }
    joined = "-".join(digest(shared[name]) for name in PARTS[: len(shared)])

    def prompt_of(entity: Entity) -> Prompt:
        return (
            fingerprint(template, entity, joined),
            lambda: render_prompt(template, entity, tokenizer, knowledge.max_prompt_tokens),
        )

    return prompt_of


def decoding_provenance(decoding: DecodingSettings) -> dict[str, Any]:
    """The decoding settings that decide a text: part of its fingerprint and of its record.

    Batch size, threads and the draft budget are left out: they change how fast a text comes, not which text may come.
    """
    names = {"verifier", "top_k", "min_probability", "max_new_tokens", "stop_strings", "dtype"}
    return decoding.model_dump(mode="json", include=names)


def no_route(entity: Entity) -> Route:
    """No group: there are no pools, or none are used."""
    return NO_ROUTE


def entity_router(router: Router, tables: Tables, side: Side, date: datetime.date) -> Callable[[Entity], Route]:
    """A function from an entity to its pool group, by what the tables, cut at the end of `date`, say of it then."""
    counted = pc.value_counts(tables.interactions[f"{side}_id"].combine_chunks())
    counts = dict(zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True))
    ages = ages_days(tables.entities(side), side, date)

    def route(entity: Entity) -> Route:
        entity_id = entity.entity_id
        return router.route(entity_id, entity.attributes, counts.get(entity_id, 0), ages.get(entity_id))

    return route


def ages_days(entities: pa.Table, side: Side, date: datetime.date) -> dict[object, float]:
    """Days from `created_at` to the end of the date (UTC), by entity; those with no `created_at` are left out."""
    if "created_at" not in entities.column_names:
        return {}
    known = entities.filter(pc.is_valid(entities["created_at"]))
    end = datetime.datetime.combine(date, datetime.time(), datetime.UTC) + datetime.timedelta(days=1)
    created_us = known["created_at"].cast(pa.int64()).to_numpy()
    days = (int(end.timestamp()) * 1_000_000 - created_us) / DAY_US
    return dict(zip(known[f"{side}_id"].to_pylist(), days.tolist(), strict=True))


def plan_side(
    side: Side,
    entities: Iterable[Entity],
    entity_id_type: pa.DataType,
    *,
    prompt_of: Callable[[Entity], Prompt],
    previous: PreviousKnowledge,
    batch_size: int,
    run_dir: Path,
    route: Callable[[Entity], Route] = no_route,
    force: bool = False,
    shard_size: int | None = None,
    on_entity: Callable[[], None] = lambda: None,
    apart: Container[object] = (),
) -> SidePlan:
    """Decide about every entity of a side and write its shards' inputs.

    Parameters
    ----------
    entities : the side's entities, in the order of the input table.
    prompt_of : as `prompt_renderer` makes it; the prompt of an entity whose fingerprint is as before is not rendered.
    previous : the last published records.
    batch_size : texts that a worker writes side by side.
    run_dir : the run's folder; `plan/<side>/` and the carried-over records are written below it.
    route : entity -> its pool group (empty: none) and the scheme that chose it.
    force : generate unchanged entities too.
    shard_size : rows a shard; None: `default_shard_size`.
    apart : ids of entities that share no shard with others and come first, so that their time is known.
    """
    rows: list[PlannedRow] = []
    refused: list[QuarantineRow] = []
    carried: list[int] = []
    changed: dict[int, int] = {}  # row of the earlier record -> its place in `rows`
    routes: Counter[str] = Counter()
    for entity in entities:
        on_entity()
        routed = route(entity)
        routes[routed.scheme] += 1
        row = previous.row_of(entity.entity_id)
        try:
            known_by, render = prompt_of(entity)
            if row is not None and not force and previous.fingerprint(row) == known_by:
                carried.append(row)
                continue
            rendered = render()
        except RowError as error:
            refused.append(QuarantineRow.of(entity.entity_id, side, error.reason))
            continue
        if row is not None:
            changed[row] = len(rows)
        rows.append(
            PlannedRow(
                entity_id=entity.entity_id,
                prompt_ids=rendered.token_ids,
                num_history=rendered.num_history,
                num_history_dropped=rendered.num_history_dropped,
                fingerprint=known_by,
                previous_ids=None,
                group=routed.group or None,
            )
        )
    for row, token_ids in previous.token_ids(changed).items():
        rows[changed[row]] = replace(rows[changed[row]], previous_ids=token_ids)
    records = previous.records(sorted(carried), entity_id_type, is_stale=False)
    RunFolder(run_dir).write_shard(side, CARRIED_SHARD, records, refused)  # of none too: a side then has its schema
    shard_size = shard_size or default_shard_size(len(rows), batch_size)
    shards = tuple(
        write_shard_plan(side, number, some, entity_id_type, run_dir, is_apart)
        for number, (some, is_apart) in enumerate(_cut(rows, apart, shard_size))
    )
    return SidePlan(side, routes.total(), len(carried), len(refused), dict(routes), shards)


def default_shard_size(num_rows: int, batch_size: int) -> int:
    """Rows a shard of a side that has so many to generate.

    A shard's texts are written together and with no others, so that its forwards, and with them how sums are rounded,
    are the same whatever came before it and on which worker. So the batch empties at its end, which costs the less the
    longer a shard is; but a killed run loses what is in unfinished ones.
    """
    return min(max(-(-num_rows // SHARDS_A_SIDE), LEAST_BATCHES * batch_size), MOST_BATCHES * batch_size)


def _cut(rows: list[PlannedRow], apart: Container[object], shard_size: int) -> Iterator[tuple[list[PlannedRow], bool]]:
    """The rows of each shard, by group and else in the input's order, and whether they are those to keep apart.

    Where none are kept apart and shards are long, a few rows of all groups come first: a night of which most cannot be
    kept is stopped after them.
    """
    by_group = sorted(rows, key=lambda row: row.group or "")
    if not apart and len(rows) > shard_size > FIRST_TEXTS:
        stride = len(rows) // FIRST_TEXTS
        yield by_group[: stride * FIRST_TEXTS : stride], False
        by_group = [row for place, row in enumerate(by_group) if place % stride or place >= stride * FIRST_TEXTS]
    for is_apart in (True, False):
        part = [row for row in by_group if (row.entity_id in apart) == is_apart]
        for start in range(0, len(part), shard_size):
            yield part[start : start + shard_size], is_apart
