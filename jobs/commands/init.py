"""`laserbatch init TABLES`: write a short configuration for the user's own tables, filled with guesses.

Tables in the input schema need no mapping. For others a guessed mapping is written next to the configuration, for a
person to read and correct.
"""

import datetime
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import typer

from laserbatch.ctr.settings import CtrOptions
from laserbatch.jobs.console import say, summary
from laserbatch.jobs.settings import JSON, Settings, load_settings
from laserbatch.jobs.stages.inputs import NEEDS_A_MODEL, check_inputs, say_left_out
from laserbatch.pipeline.errors import ConfigError, TableError
from laserbatch.pipeline.knowledge.domains import Domain, domain_of, domains
from laserbatch.pipeline.knowledge.histories import EVENT_WORDS, event_text
from laserbatch.pipeline.knowledge.templates import Words
from laserbatch.pipeline.sample.world import is_sample_world
from laserbatch.pipeline.storage.atomic import write_text
from laserbatch.pipeline.storage.uris import is_uri
from laserbatch.pipeline.tables.findings import count_faults
from laserbatch.pipeline.tables.guess import guess_mapping, read_sources, yaml_line
from laserbatch.pipeline.tables.guessed_columns import SourceTable, kinds_of
from laserbatch.pipeline.tables.parts import table_parts
from laserbatch.pipeline.tables.schema import ID_COLUMNS, REQUIRED_COLUMNS, id_type
from laserbatch.pipeline.tables.streamed import open_tables

Guessed = tuple[Any, str]  # a value of an option, and the reason for it
MIN_SHARE_POSITIVE = 0.05  # a guessed label rule counts at least this share of the sampled ratings as positive
ROWS_SEEN = 65_536  # number of first rows that guesses are based on
MAX_EVENT_KINDS = 20  # `init` lists at most this many kinds of events in the configuration
HEAD = "# `laserbatch config` shows every option with its default; add here what you change."
MAPPING_HEAD = """# Guessed from names of files and columns and from first rows: read it, correct it, then run
#   {}
# configs/import_example.yaml explains every key.
"""
WORDS = tuple(f"knowledge.words.{key}" for key in Words.model_fields)
WRITTEN = ("tables.path", "knowledge.user_template", "knowledge.item_template", *WORDS, "knowledge.user_factors",
           "knowledge.item_factors", "knowledge.paths", "decoding.model", "ctr.label")  # fmt: skip
ALWAYS = ("tables.path", "knowledge.user_template", "knowledge.item_template", "knowledge.words.user",
          "knowledge.words.item", "knowledge.words.items", "decoding.model", "ctr.label")  # fmt: skip
COMMENTS = {
    "decoding.model": "folder of a model; sample: the bundled model, which knows only the sample tables",
    "ctr.label": "interactions that count as positive",
}
STRONG_EVENTS = ("bought", "ordered", "applied for", "put into the cart", "liked", "saved", "clicked", "played")


def init(
    tables: str = typer.Argument(
        ..., help="Folder with your tables, Parquet or CSV; or a URI of tables in the input schema."
    ),
    out: Path = typer.Option(Path("laserbatch.yaml"), help="Configuration to write."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace OUT if it is there."),
    as_json: bool = JSON,
) -> None:
    """Write a short configuration for your own tables, and a guessed mapping for you to correct.

    Example: `laserbatch init exports/ --out laserbatch.yaml`
    """
    if out.exists() and not overwrite:
        raise ConfigError(f"{out} exists already; pass --overwrite to replace it")
    source = Path(tables)
    if not is_uri(tables) and not source.is_dir():
        raise TableError(f"{tables} is not a folder; expected one with your tables")
    if _is_in_schema(tables):
        _init_in_schema(tables, out, as_json)
        return
    if is_uri(tables):
        raise TableError(
            f"tables of {tables} are missing or not in the input schema; copy your files to this machine and give "
            "their folder: a mapping is guessed from it"
        )
    mapping_path = out.with_name("mapping.yaml")
    if mapping_path.exists() and not overwrite:
        raise ConfigError(f"{mapping_path} exists already; pass --overwrite to replace it")
    notes: list[str] = []

    def note(message: str) -> None:  # printed at once: it may say why nothing can be guessed
        notes.append(message)
        say(message)

    sources = read_sources(source, note)
    guess = guess_mapping(sources)
    mapping = guess.mapping
    events, items = (mapping[name] for name in ("interactions", "items"))
    (head,) = (table.head for table in sources if table.name == events["files"])
    (of_items,) = (table for table in sources if table.name == items["files"])
    item_id = items["id"] or of_items.stem
    guessed = _guessed(_domain((of_items.stem, item_id), of_items.head, items["title"]), head, events)
    if "knowledge.words.item" not in guessed:
        guessed |= _nouns(item_id, of_items.stem)
    guessed |= {"knowledge.paths": (paths, "the mapping splits them at >")} if (paths := _paths(mapping)) else {}
    command = f"laserbatch data import {tables} {out.with_name('tables')} --mapping {mapping_path}"
    write_text(f"{MAPPING_HEAD.format(command)}{guess.as_yaml()}", mapping_path)
    origin = f"# Made from {tables} by: {command}\n"
    write_text(_configuration(out.resolve().with_name("tables"), origin, guessed), out)
    for message in guess.notes:
        note(message)
    say(f"the mapping is a guess; each line says what it is based on. Read {mapping_path} before you import")
    outcome = {"configuration": str(out), "mapping": str(mapping_path), "model": NEEDS_A_MODEL}
    outcome |= {"notes": notes} if as_json and notes else {}
    _finish(outcome, command, out, as_json)


def _init_in_schema(tables: str, out: Path, as_json: bool) -> None:
    first = _first_rows(tables, "interactions")
    domain = domains()["sample"] if is_sample_world(tables) else _domain((), _first_rows(tables, "items"), "title")
    guessed = _guessed(domain, first, {})
    write_text(_configuration(tables if is_uri(tables) else Path(tables).resolve(), "", guessed), out)
    settings = load_settings(out)
    num_faults, last_day = count_faults(check_inputs(tables, settings)), None
    if not num_faults:
        opened = open_tables(tables, keep_duplicates=True)
        newest = (pc.max(batch["timestamp"]).as_py() for batch in opened.interactions.to_batches(["timestamp"]))
        last_day = max((moment.date() for moment in newest if moment is not None), default=None)
        say_left_out(settings, opened)
    outcome = {"configuration": str(out), "tables": "in the input schema already", "num_faults": num_faults}
    if not is_sample_world(tables):
        outcome["model"] = NEEDS_A_MODEL
    first_command = f"laserbatch data check {tables}{_named(out)}" if num_faults else f"laserbatch doctor{_named(out)}"
    _finish(outcome, first_command, out, as_json, last_day)


def _finish(
    outcome: dict[str, Any], first_command: str, out: Path, as_json: bool, last_day: datetime.date | None = None
) -> None:
    """Print what was written and guessed, and the three commands that come next.

    `last_day` is the day of the newest interaction, if it is known; the night is of that day, but not of a later one
    than yesterday, the last day that is over.
    """
    yesterday = datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=1)
    date = yesterday if last_day is None else min(yesterday, last_day)
    commands = [first_command, f"laserbatch try{_named(out)}", f"laserbatch nightly --date {date}{_named(out)}"]
    summary(outcome | ({"next": commands} if as_json else {}), as_json)
    if not as_json:
        print("next:", *commands, sep="\n  ")


def _named(out: Path) -> str:
    """The `--config` option that names a configuration; empty for the default name, which commands find themselves."""
    return "" if out == Path("laserbatch.yaml") else f" --config {out}"


def _first_rows(tables: str, name: str) -> pa.Table | None:
    first = next(table_parts(tables, name)[0].batches(batch_size=ROWS_SEEN), None)
    return None if first is None else pa.Table.from_batches([first])


def _domain(names: tuple[str, ...], items: pa.Table | None, title: str | None) -> Domain | None:
    """Guess the domain of the items from the names of their file and id, and from their columns and values."""
    if items is None:
        return domain_of(names)
    source = SourceTable("items", items, {})
    titles = source.values(title) if title is not None else []
    return domain_of(names, items.column_names, kinds_of(source, [title]), [str(value) for value in titles])


def _guessed(domain: Domain | None, rows: pa.Table | None, named: Mapping[str, Any]) -> dict[str, Guessed]:
    """Guess options from a domain and the first interactions; `named` maps columns to other names in these rows."""
    guessed: dict[str, Guessed] = {}
    if domain is not None:
        usual, why = dict(Words()), "by names and values of the tables"
        guessed = {f"knowledge.words.{key}": (word, why) for key, word in domain.words if word != usual[key]}
        guessed |= {f"knowledge.{key}": (list(getattr(domain, key)), why) for key in ("user_factors", "item_factors")}
        guessed |= {"knowledge.paths": (list(domain.paths), why)} if domain.paths else {}
    if rows is None:
        return guessed
    labels: dict[str, pa.ChunkedArray] = {}
    for column, kind in (("event", pa.string()), ("rating", pa.float64())):
        name = named.get(column, None if named else column)
        with suppress(pa.ArrowException):  # no such label
            if name in rows.column_names:
                labels[column] = pc.cast(rows[name], kind)
    events = _events(labels)
    if 0 < len(events) <= MAX_EVENT_KINDS:
        texts = {event: event_text(event, {}) for event in events}
        why = f"from the events of the first {rows.num_rows:,} interactions"
        if unknown := [event for event, text in texts.items() if text not in EVENT_WORDS.values()]:
            why += f"; not known, so replace what is not a verb in the past: {', '.join(unknown)}"
        guessed["knowledge.words.events"] = texts, why
    return guessed | {"ctr.label": _label(labels)}


def _label(labels: Mapping[str, pa.ChunkedArray]) -> Guessed:
    if "rating" in labels:
        return _rated_label(labels["rating"].drop_null())
    events = _events(labels)
    if len(events) > 1:
        for strong_event in STRONG_EVENTS:
            for event in events:
                if event_text(event, {}) == strong_event and "'" not in event:
                    return f"event == '{event}'", f"the strongest of the events {', '.join(events[:MAX_EVENT_KINDS])}"
        return "all", f"none of the events {', '.join(events[:MAX_EVENT_KINDS])} is known to be stronger than others"
    return "all", "the interactions are all alike"


def _rated_label(ratings: pa.ChunkedArray) -> Guessed:
    """The label rule that ratings in the top quarter of the scale are positives: from 4 on a scale from 1 to 5."""
    least, most = pc.min_max(ratings).as_py().values()
    if least is None or least == most:
        return "all", "the ratings are all alike"
    seen = f"the ratings seen are from {least:g} to {most:g}"
    if (least, most) == (0, 1):
        return "rating >= 1", seen
    if least >= 0 and 4 <= most <= 5:
        return CtrOptions().label, seen
    start = math.ceil(least + 0.75 * (most - least))
    start = start if least < start <= most else most
    share = pc.sum(pc.greater_equal(ratings, start)).as_py() / len(ratings)
    if share < MIN_SHARE_POSITIVE:  # counts, such as numbers of plays, not a scale
        return "all", f"{seen}, and few are high, as with counts"
    return f"rating >= {start:g}", f"three quarters of the scale: {seen}"


def _events(labels: Mapping[str, pa.ChunkedArray]) -> list[str]:
    events = pc.unique(labels["event"]).drop_null().to_pylist() if "event" in labels else []
    return sorted(filter(str.strip, events))


def _nouns(id_column: str, stem: str) -> dict[str, Guessed]:
    """Guess the words for an item and for items from the names of the id column and of the file."""
    noun = re.sub(r"[_ ]*(id|no|key|code|nr|nummer)$", "", id_column, flags=re.IGNORECASE).lower()
    if not noun or noun == "item" or not noun.isalpha():
        return {}
    plural = stem.lower() if stem.lower() != noun and stem.lower().startswith(noun[:-1]) else f"{noun}s"
    why = "from the names of the id and of the file"
    return {"knowledge.words.item": (noun, why), "knowledge.words.items": (plural, why)}


def _paths(mapping: Mapping[str, Any]) -> list[str]:
    """The attributes that the mapping splits at `>`, which separates the levels of a path."""
    attributes = {**mapping.get("users", {}).get("attributes", {}), **mapping["items"]["attributes"]}
    split = {name: source.get("separator", "") for name, source in attributes.items() if isinstance(source, dict)}
    return [name for name, separator in split.items() if ">" in separator]


def _is_in_schema(folder: str) -> bool:
    """Whether the tables have their required columns, and ids have the same type in both tables that hold them."""
    try:
        schemas = {name: table_parts(folder, name)[0].schema for name in REQUIRED_COLUMNS}
    except TableError:
        return False
    if not all(set(columns) <= set(schemas[name].names) for name, columns in REQUIRED_COLUMNS.items()):
        return False
    kinds = [[id_type(schemas[table].field(column).type) for table in (name, "interactions")]
             for name, column in ID_COLUMNS.items()]  # fmt: skip
    return all(of_entities == of_log for of_entities, of_log in kinds)


def _configuration(tables: Path | str, note: str, guessed: Mapping[str, Guessed]) -> str:
    """YAML of the options that a new user decides: guessed values with their reasons, otherwise the defaults."""
    lines, within = [HEAD, *note.splitlines()], ()
    for option in WRITTEN:
        if option not in guessed and option not in ALWAYS:
            continue
        *sections, key = path = option.split(".")
        value, why = guessed.get(option, (reduce(getattr, path, Settings()), COMMENTS.get(option)))
        for depth, section in enumerate(sections):
            if (*within[: depth + 1],) != (*sections[: depth + 1],):
                lines.append(f"{'  ' * depth}{section}:")
        within = tuple(sections)
        text = json.dumps(str(tables), ensure_ascii=False) if option == "tables.path" else yaml_line(value)
        comment = f"  # {'guessed: ' if option in guessed else ''}{' '.join(why.split())}" if why else ""
        lines.append(f"{'  ' * len(sections)}{key}: {text}{comment}")
    return "\n".join(lines) + "\n"
