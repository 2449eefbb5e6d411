"""Guesses of a mapping for tables that are not in the input schema, from column names and first rows."""

import codecs
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import yaml

from laserbatch.pipeline.errors import TableError, first_line
from laserbatch.pipeline.tables import guessed_columns as guesses
from laserbatch.pipeline.tables import schema as sc
from laserbatch.pipeline.tables.columns import ATTRIBUTE
from laserbatch.pipeline.tables.csv_files import marked_encoding
from laserbatch.pipeline.tables.guessed_columns import Guess, Join, SourceTable, TimeGuess
from laserbatch.pipeline.tables.layout import is_parquet, is_parquet_or_csv, list_pattern, name_left_out
from laserbatch.pipeline.tables.personal import personal_columns
from laserbatch.pipeline.tables.settings import SourceFiles
from laserbatch.pipeline.tables.source import read_source

# Words in English and German, and some in French and Spanish.
_ID = r"([_ -]?(id|no|key|code|nr|nummer))?$"
USER_ID = r"^(user|member|customer|client|reader|viewer|reviewer|listener|applicant|candidate|subscriber|account|"
USER_ID += r"visitor|kunde|nutzer|benutzer|leser|mitglied|utilisateur|usuario|cliente|auditeur|lecteur)(s|n|er)?"
USER_ID += _ID + r"|^uid$"
ITEM_ID = r"^(item|product|movie|book|article|news|video|song|track|job|post|sku|asin|artikel|produkt|buch|film|ware|"
ITEM_ID += r"game|spiel|vacancy|recipe|restaurant|hotel|course|podcast|episode|artist|album|anime|venue|business|app|"
ITEM_ID += r"paper|listing|rezept|kurs|libro|pelicula|producto|livre|produit)"
ITEM_ID += r"(s|n|e)?" + _ID + r"|^iid$"
# Other names of ids, which are ids of items if a file with titles has them.
SOME_ID = r"[_ -](id|no|key|code|nr|nummer)$|(asin|sku|isbn|gtin|ean|uuid|guid)$"
# Other names of `created_at`, if the values are times.
CREATED = r"^(created|registered|signed_?up|angelegt|erstellt|registriert)([_ -](at|on|am))?$"
SNIFFED_BYTES = 1 << 16
# Marks that notes have, too: the parts of lists are short, and occur twice on average or more often.
FREE_MARKS = (";", "/", "、", "；", "؛", "،")
PATH_SEPARATORS = (" > ", ">", "|", *FREE_MARKS)
MAX_SHARE_OF_PARTS = 0.5  # largest share of distinct parts among all parts of the distinct texts
MAX_FREE_PART_CHARS = 20  # largest average length of these parts
MAX_PART_CHARS = 40  # the same for other marks; longer parts are sentences
NUMBER = r"-?\d+(\.\d+)?"
NO_LIST = re.compile(r"://|&#?\w+;|^\s*[\[{]|^\d+/\d+|</")  # a URL, an HTML entity, JSON, a date or fraction, markup


@dataclass(frozen=True)
class GuessedMapping:
    """A mapping for `data import`, for a person to review; a value is None if there is no guess.

    `reasons`: the reason for each value, by the path of its key. `left_out`: the reason why a column is no attribute,
    by table and column. `notes`: sentences on what a person should check.
    """

    mapping: dict
    reasons: dict[tuple[str, ...], str]
    left_out: dict[str, dict[str, str]]
    notes: list[str]

    def as_yaml(self) -> str:
        """The mapping as YAML, with a comment at each guess, and a line to uncomment for each column left out."""
        return "\n".join(self._lines(self.mapping, ())) + "\n"

    def _lines(self, part: dict, path: tuple[str, ...]) -> Iterator[str]:
        pad = "  " * len(path)
        for key, value in part.items():
            reason = self.reasons.get((*path, key))
            comment = f"  # {' '.join(reason.split())}" if reason else ""
            if isinstance(value, dict) and value:
                yield f"{pad}{yaml_line(key)}:{comment}"
                yield from self._lines(value, (*path, key))
            else:
                yield f"{pad}{yaml_line(key)}: {yaml_line(value)}{comment}"
            if key == "attributes" and len(path) == 1:
                for column, why in self.left_out.get(path[0], {}).items():
                    yield f"{pad}  # {yaml_line(column)}: {yaml_line(column)}  # left out: {' '.join(why.split())}"


def yaml_line(value: object) -> str:
    dumped = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return dumped.removesuffix("...\n").strip()


def read_sources(folder: Path, note: Callable[[str], object] = lambda text: None) -> list[SourceTable]:
    """The Parquet and CSV files of a folder, and its sub-folders of such files, each with its first rows.

    `note` is called with doubts about the quotes in these files, and with the files of other formats.
    """
    sources, visible = [], [path for path in sorted(folder.iterdir()) if not path.name.startswith((".", "_"))]
    others = [path for path in visible if path.is_file() and not is_parquet_or_csv(path)]
    others = [path for path in others if path.suffix not in (".yaml", ".yml")]  # written by init
    for sentence in name_left_out(dict.fromkeys(others, "is neither Parquet nor CSV")):
        note(sentence)
    for path in visible:
        if path.stat().st_size and (path.is_dir() or is_parquet_or_csv(path)):
            listed = list_pattern(folder, path.name, path.stem).files
            if not listed:
                continue
            options = {} if is_parquet(listed[0].path) else _csv_options(listed[0].path, note)
            files = SourceFiles.model_validate({"files": path.name, **options})
            with closing(read_source(files, folder, path.stem, note)) as batches:
                first, is_whole = next(batches, None), False
                try:
                    is_whole = next(batches, None) is None
                except TableError as error:  # the mapping may correct this
                    note(str(error))
            if first is not None:
                head = _without_doubled(pa.Table.from_batches([first.rows]), path, note)
                if first.is_csv and (columns := _with_decimal_commas(head)):
                    options |= {"csv": {"decimal": ","}}
                    for name in columns:
                        points = pc.replace_substring(head[name], ",", ".")
                        head = head.set_column(head.column_names.index(name), name, points)
                if first.is_csv and (numbers := _numeric_names(head)):
                    note(
                        f"{path}: its first line was read as names of columns, but {', '.join(map(repr, numbers))} "
                        "looks like a value. If the file has no header, set `column_names` in the mapping"
                    )
                sources.append(SourceTable(path.name, head, options, is_whole))
    if not sources:
        raise TableError(
            f"{folder} has no Parquet or CSV file with rows; expected users, items and interactions. Convert JSON "
            "lines as docs/tables-and-models.md says. For text files of other names, such as ratings.dat, write a "
            "mapping like configs/import_movielens_1m.yaml"
        )
    return sources


def _without_doubled(head: pa.Table, path: Path, note: Callable[[str], object]) -> pa.Table:
    """The columns with unique names; a mapping cannot name others."""
    doubled = [name for name, count in Counter(head.column_names).items() if count > 1]
    if doubled:
        note(f"{path}: columns are left out, because several have the same name: {', '.join(map(repr, doubled))}")
    return head.select([place for place, name in enumerate(head.column_names) if name not in doubled])


def _with_decimal_commas(head: pa.Table) -> list[str]:
    """The columns of numbers such as 4,5 or 12; none if any column has 4.5. 1,234 alone may mean a thousand."""
    names = []
    for name in head.column_names:
        texts = head[name].slice(0, guesses.NUM_ROWS).to_pylist()
        values = [text.strip() for text in texts if text and text.strip()]
        if any(re.fullmatch(r"[+-]?\d+\.\d+", value) for value in values):
            return []
        is_number = all(re.fullmatch(r"[+-]?\d+(,\d+)?", value) for value in values)
        if is_number and any(re.search(r",(\d{1,2}|\d{4,})$", value) for value in values):
            names.append(name)
    return names


def _numeric_names(head: pa.Table) -> list[str]:
    """Names of columns that are numbers, as the values below them are."""
    named = [name for name in head.column_names if re.fullmatch(NUMBER, name)]
    columns = head.select(named).slice(0, guesses.NUM_ROWS).to_pydict()
    return [name for name, values in columns.items() if all(re.fullmatch(NUMBER, value or "") for value in values)]


def _csv_options(path: Path, note: Callable[[str], object]) -> dict[str, Any]:
    """Delimiter and encoding of a CSV, from its first bytes; only those that are not the default."""
    try:
        with pa.input_stream(str(path)) as file:  # decompresses, too
            start = file.read(SNIFFED_BYTES)
    except OSError as error:
        raise TableError(f"{path} cannot be read: {first_line(error)}. Write it again.") from None
    options, usual = {}, "\t" if ".tsv" in path.suffixes else ","
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError as error:
        options["encoding"] = marked_encoding(start) or "cp1252"
        if options["encoding"] == "cp1252":
            excerpt = start[max(0, error.start - 20) : error.end + 20].decode("cp1252", "replace")
            note(
                f"{path} is not UTF-8; it is read as cp1252 (Western Europe), a guess that gives {excerpt!r}. If "
                "letters are wrong there, set `encoding` in the mapping to the file's encoding: cp1250 (Central "
                "Europe), cp1251 (Cyrillic), gb18030, ..."
            )
    header = start.split(b"\n", 1)[0].decode("latin-1")
    delimiter = max((usual, ",", ";", "\t", "|"), key=header.count)
    return options | ({"delimiter": delimiter} if delimiter != usual else {})


def guess_mapping(sources: list[SourceTable]) -> GuessedMapping:
    """Guess a mapping. Raises TableError if no file looks like interactions or items."""
    item_ids = _names_of_item_ids(sources)
    log, items, users = _files(sources, item_ids)
    guessed = GuessedMapping({}, {}, {}, [])
    user_columns = log.named(USER_ID)
    of_user = Join(Guess(user_columns[0], "by its name"), Guess(None, ""))
    if users is not None:
        names = dict.fromkeys([*users.named(USER_ID), *users.named(r"id$")])
        of_user = guesses.guess_join(log, user_columns, users, list(names))
        _add_entities(guessed, "users", users, {"id": of_user.id})
    of_item = guesses.guess_join(log, log.named(item_ids, {of_user.of_log.value}), items, items.named(item_ids))
    title = guesses.guess_title(items, {of_item.id.value})
    _add_entities(guessed, "items", items, {"id": of_item.id, "title": title})
    _add_log(guessed, log, of_user, of_item)
    for side, join, entities in (("user", of_user, users), ("item", of_item, items)):
        of_log, of_id = join.of_log.value, join.id.value
        if entities is None or of_log is None or of_id is None:
            continue
        if log.is_text(of_log) != entities.is_text(of_id):
            guessed.mapping.setdefault("ids", {})[f"{side}_id"] = "string"
            guessed.reasons["ids", f"{side}_id"] = "guessed: numbers in one of the files, text in the other"
    guessed.notes.extend(f"{source.name} is not used" for source in sources if source not in (log, items, users))
    for path, reason in guessed.reasons.items():
        if reason.startswith("no guess"):
            guessed.notes.append(f"{'.'.join(path)} is empty in the mapping; fill it in ({reason})")
    return guessed


def _names_of_item_ids(sources: list[SourceTable]) -> str:
    """A pattern for names of item ids: the usual names, and the names of id columns in files with titles."""
    logged = {name for source in sources if source.named(USER_ID) for name in source.head.column_names}
    item_ids = set()
    for source in (source for source in sources if source.named(guesses.TITLE) and not source.named(USER_ID)):
        usual = [*filter(source.is_id, source.named(ITEM_ID))]  # not `videos` of Amazon, which is a list
        names = usual or [*source.named(SOME_ID), *logged.intersection(source.head.column_names)]
        item_ids.update(name for name in names if source.is_id(name) and name not in source.named(guesses.TITLE))
    return "|".join([ITEM_ID, *(f"^{re.escape(name)}$" for name in sorted(item_ids))])


def _files(sources: list[SourceTable], item_ids: str) -> tuple[SourceTable, SourceTable, SourceTable | None]:
    """The files of interactions, of items, and of users; the last is None if no file has users."""

    def has_time(source: SourceTable) -> bool:
        return guesses.guess_time(source, [*source.named(USER_ID), *source.named(item_ids)]).column.value is not None

    logs = [source for source in sources if source.named(USER_ID) and source.named(item_ids)]
    logs = [source for source in logs if source.named(guesses.TIME) or has_time(source)]
    # A table of users has each id once.
    log = max(logs, key=lambda source: (has_time(source), not source.is_id(source.named(USER_ID)[0])), default=None)
    rest = [source for source in sources if source is not log]
    titled = [source for source in rest if source.named(guesses.TITLE)]
    with_ids = [source for source in titled if source.named(item_ids)]
    items = next(iter([*with_ids, *(source for source in titled if not source.named(USER_ID))]), None)
    if log is None or items is None:
        columns_by_file = "; ".join(f"{source.name}: {', '.join(source.head.column_names)}" for source in sources)
        missing = "items (an id and a title)" if log else "interactions (a user id, an item id and a time)"
        raise TableError(
            f"no file looks like {missing}; write a mapping like configs/import_example.yaml, with `column_names` for "
            f"a file that has no header line. Found: {columns_by_file}"
        )
    others = [source for source in rest if source is not items]
    of_users = [source for source in others if any(map(source.is_id, source.named(USER_ID)))]
    by_stem = [source for source in others if re.search(USER_ID, source.stem, re.IGNORECASE)]
    return log, items, next(iter([*of_users, *by_stem]), None)


def _add_entities(guessed: GuessedMapping, table: str, source: SourceTable, columns: dict[str, Guess]) -> None:
    part = _add_part(guessed, table, source, columns)
    used = {guess.value for guess in columns.values()}
    names = [name for name in source.head.column_names if name not in used]
    created = [sc.CREATED_AT] * (sc.CREATED_AT in names) or [name for name in source.named(CREATED) if name in names]
    for name in created[:1]:
        time = guesses.guess_time(replace(source, head=source.head.select([name])), ())
        if name == sc.CREATED_AT or time.column.value is not None:
            _add_time(guessed, (table, sc.CREATED_AT), time)
            names.remove(name)
    left_out = {
        name: f"of type {source.head[name].type}, not {ATTRIBUTE.expected}"
        for name in names if not ATTRIBUTE.accepts(source.head[name].type)
    }  # fmt: skip
    left_out |= dict.fromkeys(filter(sc.is_unnamed, names), "it has no name, like row numbers that pandas writes")
    usable = [name for name in names if name not in left_out]
    personal = personal_columns(source.head, "user" if table == "users" else "item", usable)
    left_out |= {name: f"looks like {looks_like}" for name, looks_like in personal.items()}
    guessed.left_out[table] = left_out
    part["attributes"] = {}
    own = {sc.ID_COLUMNS[table], *(["title"] if table == "items" else [])}  # names that an attribute cannot have
    for name in (name for name in names if name not in left_out):
        key = f"source_{name}" if name in own else name
        part["attributes"][key] = name
        if separator_and_share := _separator(source.values(name)):
            separator, share = separator_and_share
            part["attributes"][key] = {"column": name, "separator": separator}
            whole = f"{yaml_line(key)}: {yaml_line(name)}"
            reason = f"guessed: in {share:.0%} of the values; if they are no lists, write `{whole}` instead"
            guessed.reasons[table, "attributes", key, "separator"] = reason
    shown = {f"{table}.{name}" if name else f"a column of {table}": why for name, why in left_out.items()}
    guessed.notes.extend(f"{name} is left out of the mapping: {why}" for name, why in shown.items())


def _add_log(guessed: GuessedMapping, log: SourceTable, of_user: Join, of_item: Join) -> None:
    part = _add_part(guessed, "interactions", log, {"user_id": of_user.of_log, "item_id": of_item.of_log})
    used = [of_user.of_log.value, of_item.of_log.value]
    time = guesses.guess_time(log, used)
    _add_time(guessed, ("interactions", "timestamp"), time)
    part["drop_unknown"] = True
    guessed.reasons["interactions", "drop_unknown"] = "rows of users or items in no table are left out and counted"
    used.append(time.column.value)
    for name, guess_label in (("rating", guesses.guess_rating), ("event", guesses.guess_event)):
        guess = guess_label(log, used)
        if guess is not None:
            part[name] = guess.value
            guessed.reasons["interactions", name] = guess.comment
            used.append(guess.value)
    if unused := [name for name in log.head.column_names if name not in used]:
        guessed.notes.append(
            f"columns of interactions that are not used: {', '.join(unused)}; if one of them is the label of CTR "
            "models, map it as rating (a number) or event (a text)"
        )


def _add_time(guessed: GuessedMapping, path: tuple[str, str], time: TimeGuess) -> None:
    table, key = path
    guessed.mapping[table][key] = {"column": time.column.value, "unit": time.unit}
    guessed.reasons[table, key, "column"] = time.column.comment
    if time.doubt is not None:
        both = f"{time.unit} and {time.doubt} fit all {time.column.value} in the rows seen"
        guessed.reasons[table, key, "unit"] = f"guessed: {both}"
        guessed.notes.append(f"{table}.{key}.unit: {both}; check which one is right")
    elif time.unit is not None:
        guessed.reasons[table, key, "unit"] = "guessed: by the values"


def _add_part(guessed: GuessedMapping, table: str, source: SourceTable, columns: dict[str, Guess]) -> dict:
    part = {"files": source.name, **source.options, **{key: guess.value for key, guess in columns.items()}}
    guessed.mapping[table] = part
    guessed.reasons.update({(table, key): guess.comment for key, guess in columns.items()})
    by = {"csv": "guessed: numbers such as 4,5"}
    guessed.reasons.update({(table, key): by.get(key, "guessed: by the first bytes") for key in source.options})
    return part


def _separator(values: list) -> tuple[str, float] | None:
    """The separator in the texts of a column, and the share of texts with it; None if they are not lists of words."""
    texts = [value for value in values if isinstance(value, str) and value]
    for mark in PATH_SEPARATORS:
        num = sum(mark in text for text in texts)
        if num <= len(texts) / 2:
            continue
        parts = [part for text in {*texts} for part in map(str.strip, text.split(mark)) if part]
        is_free = mark in FREE_MARKS
        if is_free and len(set(parts)) > MAX_SHARE_OF_PARTS * len(parts):
            return None
        lengths = [len(part) for text in texts for part in text.split(mark)]
        max_chars = MAX_FREE_PART_CHARS if is_free else MAX_PART_CHARS
        if sum(lengths) > max_chars * len(lengths) or any(map(NO_LIST.search, texts)):
            return None
        return mark, num / len(texts)
    return None
