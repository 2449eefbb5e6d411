"""The inputs of a run: checks before anything is written, and their description for the manifest."""

import datetime
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from laserbatch.ctr.labels import LabelRule
from laserbatch.jobs.console import say
from laserbatch.jobs.log_age import log_age
from laserbatch.jobs.settings import SAMPLE_MODEL, Settings
from laserbatch.jobs.stages.publishing import destination_of
from laserbatch.pipeline.budget.choice import read_step_cost
from laserbatch.pipeline.decoding.model.folder import (
    load_tokenizer,
    require_tokenizer,
    require_whole_files,
    tokenizer_folder,
)
from laserbatch.pipeline.encoding.identity import find_encoder
from laserbatch.pipeline.errors import ConfigError, TableError
from laserbatch.pipeline.knowledge.chat_format import LOOKS_LIKE_CONTROL, control_tokens
from laserbatch.pipeline.knowledge.forms import require_form
from laserbatch.pipeline.knowledge.parsers import load_parser
from laserbatch.pipeline.knowledge.templates import Columns, load_template, template_path
from laserbatch.pipeline.knowledge.values import num_longer
from laserbatch.pipeline.sample.world import is_sample_world
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.atomic import sha256_file
from laserbatch.pipeline.storage.manifest import CUT, LEFT_OUT
from laserbatch.pipeline.storage.uris import SERVICES
from laserbatch.pipeline.tables import schema as sc
from laserbatch.pipeline.tables.check import check_tables, require_sound
from laserbatch.pipeline.tables.findings import Finding
from laserbatch.pipeline.tables.log import only_chunk
from laserbatch.pipeline.tables.parts import table_parts
from laserbatch.pipeline.tables.personal import personal_data
from laserbatch.pipeline.tables.read import Tables, describe, read_tables
from laserbatch.pipeline.tables.streamed import OpenTables
from laserbatch.pipeline.validation import line_of, nearest
from laserbatch.retrieval_pools.routing.embeddings import id_column, read_embeddings

LoggedIds = Mapping[str, pa.ChunkedArray]
ROWS_AT_ONCE = 64 * 1024
NEEDS_A_MODEL = (
    "the bundled sample model knows only the sample world; its texts about other tables make no sense. Set "
    "decoding.model to the folder of a chat model with safetensors, for example from `hf download "
    "Qwen/Qwen2.5-1.5B-Instruct --local-dir qwen` (docs/tables-and-models.md says which sizes fit)"
)

PERSONAL = "personal-data"  # kind of the findings on columns that prompts leave out
NEEDS_A_TOKENIZER = (
    "decoding.model names no folder, but the server gets prompts as token ids of its model: set decoding.model to a "
    "folder with that model's tokenizer, or decoding.endpoint.api to chat"
)


def needs_a_model(settings: Settings) -> bool:
    """Whether the bundled model is to write about other tables than those of its sample world."""
    decoding = settings.decoding
    if decoding.model != SAMPLE_MODEL or decoding.borrows_tokenizer:
        return False
    return not is_sample_world(settings.tables.required_path)


def checked_inputs(settings: Settings, date: datetime.date) -> tuple[dict[str, dict[str, Any]], Tables]:
    """Check all that a run of this date reads; returns the manifest's `inputs`, and the tables as known on the date.

    `inputs` has an entry for each table and, if configured, for `user_embeddings` and `item_embeddings`: file name,
    number of rows and SHA-256. Tables add the SHA-256 of the rows known on the date (`known_sha256`), interactions also
    the number of exact copies left out (`num_copies`) and the age of the newest row (`age`, a `LogAge`), embeddings
    the number of ids without a known entity (`num_unknown_ids`). Raises ConfigError, ModelError, TableError or
    PoolError, which name all faults of the settings, the model's files, the tables, or a file of embeddings.
    """
    path = settings.tables.required_path
    require_files(settings)
    inputs, tables = sound_tables(settings, date, partial(check_inputs, path, settings))
    for finding in say_left_out(settings, tables):
        key = LEFT_OUT if finding.kind == PERSONAL else CUT
        inputs[finding.table].setdefault(key, {})[finding.column] = finding.found
    return inputs | _described_embeddings(settings, tables), tables


def say_left_out(settings: Settings, tables: Tables | OpenTables) -> list[Finding]:
    """Print and return the warnings of `left_out_of_prompts`."""
    findings = left_out_of_prompts(settings, tables)
    for finding in findings:
        say(str(finding))
    return findings


def left_out_of_prompts(settings: Settings, tables: Tables | OpenTables) -> list[Finding]:
    """Warnings of what prompts leave out: attributes that look like personal data or secrets, and ends of long values.

    A value that two blocks of templates cut is counted by the block that cuts more.
    """
    personal = tables.personal if isinstance(tables, Tables) else personal_data(tables.users, tables.items)
    shown_without: dict[tuple[str, str], str] = {}
    cut: dict[tuple[str, str], tuple[int, int, str]] = {}
    for side in SIDES:
        template = settings.template(side)
        blocks: list[tuple[str, Columns, Side]] = [("attributes", template.attributes, side)]
        if template.history is not None:
            blocks.append(("history", template.history, "item"))
        for block, columns, of_side in blocks:
            table, looks = sc.ENTITY_TABLES[of_side], personal.get(of_side, {})
            entities = tables.users if of_side == "user" else tables.items
            titles = ["title"] if of_side == "item" else []  # histories always show them
            shown = columns.shown([*titles, *sc.attribute_columns(entities.schema, table)], looks)
            for name in {*shown, *(titles if block == "history" else ())}:
                if num := num_longer(entities[name], columns.max_value_chars):
                    found = num, columns.max_value_chars, f"{block}.max_value_chars of {template.name}"
                    cut[table, name] = max(cut.get((table, name), found), found)
            for name in set(columns.shown(dict.fromkeys(looks))) - set(columns.shown(dict.fromkeys(looks), looks)):
                shown_without[table, name] = looks[name]
    return [
        Finding(
            PERSONAL, table, f"the column looks like {looks_like}, so prompts leave it out",
            "no data that identifies a person", "to show it in prompts, add to `knowledge` in the configuration: "
            f"`personal_attributes: [{json.dumps(f'{table}.{name}', ensure_ascii=False)}]`", name, is_warning=True,
        )
        for (table, name), looks_like in sorted(shown_without.items())
    ] + [
        Finding(
            "long-values", table, f"prompts cut {num:,} of its values", f"at most {most} characters",
            f"to show more, raise {option} in a template of your own", name, is_warning=True,
        )
        for (table, name), (num, most, option) in sorted(cut.items())
    ]  # fmt: skip


def sound_tables(
    settings: Settings, date: datetime.date, check: Callable[[LoggedIds | None], list[Finding]]
) -> tuple[dict[str, dict[str, Any]], Tables]:
    """The tables as known on a date, and their description for a manifest; raises TableError, which names all faults.

    `check` returns the faults of the tables; its argument is the `logged_ids` of `check_tables`, or None if the tables
    cannot be read.
    """
    path = settings.tables.required_path
    try:
        tables = read_tables(path, date, writable_folder(settings.workspace), settings.tables.keep_duplicates)
    except (TableError, ValueError, pa.ArrowException):  # names one fault; the check names all
        require_sound(check(None), path)
        raise
    findings = check(tables.logged_ids)
    require_sound(findings, path)
    for warning in findings:
        say(str(warning))
    tables = replace(tables, logged_ids={})
    if not any(tables.entities(side).num_rows for side in SIDES):
        raise TableError(
            f"neither a user nor an item of {path} is known at the end of {date}: every created_at is "
            "later; give a later --date, or correct created_at"
        )
    inputs = describe(path)
    inputs["interactions"]["num_copies"] = tables.num_copies
    if (age := log_age(tables.interactions["timestamp"], date)) is not None:
        inputs["interactions"]["age"] = asdict(age)
        if age.is_stale:
            say(f"WARNING: {path}: {age}")
    for name in sc.TABLE_NAMES:
        inputs[name]["known_sha256"] = _content_sha256(getattr(tables, name))
    tables.scratch.release()
    return inputs, tables


def require_same_tables(tables: Tables, inputs: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise TableError if tables, as known on the run's date, differ from those that a manifest's `inputs` describe."""
    for name in sc.TABLE_NAMES:
        if _content_sha256(getattr(tables, name)) != inputs[name]["known_sha256"]:
            raise TableError(f"the table {name} has changed since the night began")


def writable_folder(workspace: Path) -> Path | None:
    """The folder for unnamed temporary files: the workspace, or its nearest existing parent.

    None if that folder is not writable.
    """
    folder = next(folder for folder in (workspace, *workspace.parents) if folder.is_dir())
    return folder if os.access(folder, os.W_OK) else None


def require_files(settings: Settings) -> None:
    """Raise an error if a file or option that a night needs only hours later, such as the encoder, is unusable."""
    if settings.decoding.engine == "endpoint":
        require_tokenizer(settings.model_dir)
        if needs_a_model(settings):
            raise ConfigError(NEEDS_A_TOKENIZER)
    else:
        require_whole_files(settings.model_dir)
    require_engine(settings)
    require_plain_words(settings)
    find_encoder(settings.encoding)
    if settings.decoding.step_cost is not None:
        read_step_cost(settings.decoding.step_cost)
    require_delivery(settings)


def require_delivery(settings: Settings) -> None:
    """Raise ConfigError if `deliver_to` cannot be a destination; URIs of a service are not checked."""
    if settings.deliver_to is not None and settings.deliver_to.partition("://")[0] not in SERVICES:
        destination_of(settings.workspace, settings.deliver_to)


def require_engine(settings: Settings) -> None:
    """Raise ConfigError if the configured engine is not installed."""
    if settings.decoding.engine == "endpoint" and find_spec("openai") is None:
        raise ConfigError(
            "decoding.engine is endpoint, but its client is not installed: `pip install 'laserbatch[endpoint]'`"
        )
    if settings.decoding.engine == "vllm" and find_spec("vllm") is None:
        raise ConfigError("decoding.engine is vllm, but vLLM is not installed here; docs/vllm.md says how to do it")


def check_inputs(path: Path | str, settings: Settings, logged_ids: LoggedIds | None = None) -> list[Finding]:
    """The faults of the tables in a folder, for runs of these settings; `check_tables` describes `logged_ids`.

    If there are none but warnings, templates are checked too, with the errors of `require_template_columns`.
    """
    positive_rating = LabelRule.parse(settings.ctr.label).least_rating if settings.night.train_ctr else None
    findings = check_tables(path, positive_rating, settings.gates.max_failed_share, logged_ids)
    if all(finding.is_warning for finding in findings):
        for side in SIDES:
            require_template_columns(path, settings, side)
    return findings


def _attributes_of(path: Path | str, table: str) -> list[str]:
    return sc.attribute_columns(table_parts(path, table)[0].schema, table)


def require_template_columns(path: Path | str, settings: Settings, side: Side) -> None:
    """Raise ConfigError if a template is for the other side, or if a configured column is not in the tables."""
    for named in settings.knowledge.personal_attributes:
        table, _, column = named.partition(".")
        attributes = _attributes_of(path, table)
        if column not in attributes:
            raise ConfigError(
                f"knowledge.personal_attributes names {named}, but the {table} table has no attribute {column!r}; "
                f"{nearest(column, attributes)}"
            )
    name = settings.knowledge.template_of(side)
    template = settings.template(side)
    if template.side != side:
        raise ConfigError(
            f"the prompt template {template.identity} is for {template.side}s; name one for {side}s as "
            f"knowledge.{side}_template"
        )
    if template.parser_path is not None:
        load_parser(template.parser_path)
    if settings.decoding.guided == "auto":
        require_form(template, template_path(name, settings.knowledge.template_dir))
    attributes = [name for table in sc.ENTITY_TABLES.values() for name in _attributes_of(path, table)]
    for column in settings.knowledge.paths:
        if column not in attributes:
            raise ConfigError(
                f"knowledge.paths: neither users nor items have an attribute {column!r}; {nearest(column, attributes)}"
            )
    blocks: tuple[tuple[str, Columns | None, Side], ...]
    blocks = ("attributes", template.attributes, side), ("history", template.history, "item")
    for block, columns, of_side in blocks:
        table = sc.ENTITY_TABLES[of_side]
        attributes = _attributes_of(path, table)
        attributes += ["title"] if block == "attributes" and side == "item" else []
        for column in columns.missing(attributes) if columns is not None else ():
            raise ConfigError(
                f"prompt template {name}, {block}: the {table} table has no attribute {column!r}. Correct it, or list "
                f"it under {block}.optional if a table may lack it; {nearest(column, attributes)}"
            )


def require_plain_words(settings: Settings) -> None:
    """Raise ConfigError if a template, or a configured word that fills it, contains a control token of the model.

    Table values may contain one: prompts encode them as plain text.
    """
    tokens, knowledge = _control_texts(settings), settings.knowledge
    for side in SIDES:
        path = template_path(knowledge.template_of(side), knowledge.template_dir)
        template = load_template(knowledge.template_of(side), knowledge.template_dir).model_dump(mode="json")
        for place, text in _texts(template):
            for token in (token for token in tokens if token in text):
                line, lines = line_of(path, place), path.read_text(encoding="utf-8").splitlines()
                line = next((n for n, written in enumerate(lines[line - 1 :], line) if token in written), line)
                raise ConfigError(f"prompt template {path}, line {line}: {'.'.join(place)} has {_CONTROL % token}")
    for place, text in _texts(knowledge.model_dump(include={"words", "user_factors", "item_factors"})):
        for token in (token for token in tokens if token in text):
            raise ConfigError(f"knowledge.{'.'.join(place)} has {_CONTROL % token}")


_CONTROL = "%s, a control token of the model. Remove it: the chat template adds control tokens"


def _control_texts(settings: Settings) -> set[str]:
    """The control tokens of the tokenizer, read from `tokenizer.json` if possible, since loading it takes seconds."""
    try:
        folder = tokenizer_folder(settings.model_dir, settings.decoding.adapter)
        added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
        contents = {of["content"] for of in added if of["special"] or LOOKS_LIKE_CONTROL.match(of["content"])}
    except (OSError, ValueError, KeyError, TypeError):  # a tokenizer of another kind, or a damaged one
        contents = set(control_tokens(load_tokenizer(settings.model_dir, settings.decoding.adapter)).values())
    return contents - {""}


def _texts(value: Any, *place: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each string in nested mappings and lists, keys included, with the path of keys that leads to it."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for key, of_key in value.items():
            yield from ((place, key), *_texts(of_key, *place, str(key))) if place else _texts(of_key, key)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part, *place)


def changed_inputs(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of the inputs whose content as known on the date changed; rows of later dates do not count."""

    def is_same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
        return any(key in new and old.get(key) == new[key] for key in ("sha256", "known_sha256"))

    return [name for name, new in now.items() if not is_same(before.get(name, {}), new)]


def _content_sha256(table: pa.Table) -> str:
    """A digest of columns and values that does not depend on files, chunks or the order of columns."""
    table = table.select(sorted(table.column_names))
    digest, codes = hashlib.sha256(str(table.schema.remove_metadata()).encode()), {}
    for place, (name, kind) in enumerate(zip(table.column_names, table.schema.types, strict=True)):
        if pt.is_dictionary(kind):  # ids: hash the ids that occur, then each row's index among them
            ids = only_chunk(table[name])
            occurs = np.zeros(len(ids.dictionary), bool)
            for start in range(0, len(ids), ROWS_AT_ONCE):
                occurs[ids.indices.slice(start, ROWS_AT_ONCE).drop_null().to_numpy()] = True
            digest.update(pa.record_batch([ids.dictionary.filter(pa.array(occurs))], [name]).serialize())
            codes[name] = pa.array(np.cumsum(occurs, dtype=np.int32))
            table = table.set_column(place, name, ids.indices)
    for start in range(0, table.num_rows, ROWS_AT_ONCE):
        part = table.slice(start, ROWS_AT_ONCE).combine_chunks()
        for name, of_ids in codes.items():
            part = part.set_column(part.column_names.index(name), name, of_ids.take(part[name]))
        for batch in part.to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()


def _described_embeddings(settings: Settings, tables: Tables) -> dict[str, dict[str, Any]]:
    described = {}
    for side in SIDES:
        if (path := settings.routing.embeddings_of(side)) is None:
            continue
        embeddings = read_embeddings(path, side, id_column(tables.entities(side), f"{side}_id", f"{side}s"))
        num_rows = pq.read_metadata(path).num_rows
        facts = {"path": path.name, "num_rows": num_rows, "sha256": sha256_file(path)}
        described[f"{side}_embeddings"] = facts | {"num_unknown_ids": num_rows - len(embeddings.ids)}
    return described
