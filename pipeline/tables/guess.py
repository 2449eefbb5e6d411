"""A mapping for tables that are not in the input schema, guessed from the names of files and columns."""

import codecs
import re
from collections.abc import Callable, Container
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.tables.columns import is_unnamed
from laserbatch.pipeline.tables.layout import is_parquet, is_parquet_or_csv, list_pattern
from laserbatch.pipeline.tables.settings import SourceFiles
from laserbatch.pipeline.tables.source import read_source
from laserbatch.pipeline.tables.time_units import other_reading, span_of

# English and German, and some of French and Spanish.
_ID = r"(_?(id|no|key|code|nr|nummer))?$"
USER_ID = r"^(user|member|customer|client|reader|viewer|listener|applicant|candidate|subscriber|account|visitor|kunde|"
USER_ID += r"nutzer|benutzer|leser|mitglied|utilisateur|usuario|cliente|auditeur|lecteur)(s|n|er)?" + _ID + r"|^uid$"
ITEM_ID = r"^(item|product|movie|book|article|news|video|song|track|job|post|sku|asin|artikel|produkt|buch|film|ware)"
ITEM_ID += r"(s|n|e)?" + _ID + r"|^iid$"
SOME_ID = r"_(id|no|key|code|nr|nummer)$"  # of an item of another name, where a file with titles has it, too
TITLE = r"tit(le|el|re|ulo)|name|nom(bre)?$|headline|label|bezeichnung"
TIME = r"time|date|^ts$|_at$|when|zeit|datum|fecha|heure"
RATING = r"rating|stars|score|^grade$|click|like|bewertung|sterne|^note$|klick"
EVENT = r"event|action|behaviou?r|^type$|aktion|ereignis"
SNIFFED_BYTES = 1 << 16
NUM_ROWS = 1000  # that a guess looks at
PATH_SEPARATORS = (" > ", ">", "|", ";", "/")


@dataclass(frozen=True)
class SourceTable:
    """One file of the user's: its name, columns, a few rows, and how it is to be read (`SourceFiles`)."""

    name: str
    head: pa.Table
    options: dict[str, str]

    @property
    def stem(self) -> str:
        """The name without suffix or parts."""
        return re.split(r"[./]", self.name)[0]

    def find(self, pattern: str, taken: Container[str] = ()) -> str | None:
        """The first column whose name matches and is not taken."""
        free = (column for column in self.head.column_names if column not in taken)
        return next((column for column in free if re.search(pattern, column, re.IGNORECASE)), None)


def read_sources(folder: Path, note: Callable[[str], object] = lambda text: None) -> list[SourceTable]:
    """Every Parquet or CSV file of a folder, and every folder of such in it as one, with its first rows.

    `note` is called with what the quotes of these leave in doubt.
    """
    sources = []
    for path in sorted(folder.iterdir()):
        is_hidden = path.name.startswith((".", "_"))
        if not is_hidden and path.stat().st_size and (path.is_dir() or is_parquet_or_csv(path)):
            listed = list_pattern(folder, path.name, path.stem).files
            if not listed:
                continue
            options = {} if is_parquet(listed[0].path) else _csv_options(listed[0].path)
            files = SourceFiles(files=path.name, **options)
            with closing(read_source(files, folder, path.stem, note)) as batches:
                first = next(batches, None)
            if first is not None:
                head = pa.Table.from_batches([first.rows]).slice(0, NUM_ROWS)
                sources.append(SourceTable(files.files, head, options))
    if not sources:
        raise TableError(f"{folder} holds no Parquet or CSV file with rows; expected users, items and interactions")
    return sources


def _csv_options(path: Path) -> dict[str, str]:
    """Delimiter and encoding of a CSV where they are not the usual ones, by its first bytes."""
    with pa.input_stream(str(path)) as file:  # which unpacks what is compressed
        start = file.read(SNIFFED_BYTES)
    options, usual = {}, "\t" if ".tsv" in path.suffixes else ","
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        options["encoding"] = "utf-16" if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "cp1252"
    header = start.split(b"\n", 1)[0].decode("latin-1")
    delimiter = max((usual, ",", ";", "\t", "|"), key=header.count)
    return options | ({"delimiter": delimiter} if delimiter != usual else {})


def guess_mapping(sources: list[SourceTable]) -> dict:
    """A mapping for `data import`, guessed from names; TableError where no file looks like interactions or items."""
    named = {s.find(ITEM_ID) or s.find(SOME_ID) for s in sources if s.find(TITLE) and not s.find(USER_ID)} - {None}
    item_ids = rf"{ITEM_ID}|^({'|'.join(map(re.escape, named))})$" if named else ITEM_ID
    interactions = next((s for s in sources if s.find(USER_ID) and s.find(item_ids) and s.find(TIME)), None)
    rest = [source for source in sources if source is not interactions]
    items = next((s for s in rest if s.find(item_ids) and s.find(TITLE)), None) or next(
        (s for s in rest if s.find(TITLE) and not s.find(USER_ID)), None
    )
    users = next((s for s in rest if s is not items and (s.find(USER_ID) or re.search(USER_ID, s.stem))), None)
    if interactions is None or items is None:
        seen = "; ".join(f"{source.name}: {', '.join(source.head.column_names)}" for source in sources)
        wanted = "items (an id and a title)" if interactions else "interactions (a user id, an item id and a time)"
        raise TableError(f"no file looks like {wanted}; see configs/import_example.yaml. Found: {seen}")
    mapping: dict = {}
    if users is not None:
        user_id = users.find(USER_ID) or users.find(r"id$") or users.head.column_names[0]
        mapping["users"] = {
            "files": users.name,
            **users.options,
            "id": user_id,
            "attributes": _attributes(users, {user_id}),
        }
    title = items.find(TITLE)
    item_id = items.find(item_ids) or items.find(r"id$") or items.head.column_names[0]
    mapping["items"] = {"files": items.name, **items.options, "id": item_id, "title": title}
    mapping["items"]["attributes"] = _attributes(items, {item_id, title})
    mapping["interactions"] = {
        "files": interactions.name,
        **interactions.options,
        "user_id": interactions.find(USER_ID),
        "item_id": interactions.find(item_ids),
        "timestamp": {"column": interactions.find(TIME), "unit": _time_unit(interactions, interactions.find(TIME))},
        "drop_unknown": True,
    }
    taken = (mapping["interactions"]["user_id"], mapping["interactions"]["item_id"], interactions.find(TIME))
    for name, pattern in (("rating", RATING), ("event", EVENT)):
        found = interactions.find(pattern, taken)
        if found is not None:
            mapping["interactions"][name] = found
            taken = (*taken, found)
    return mapping


def _attributes(source: SourceTable, used: set[str]) -> dict:
    attributes: dict = {}
    for column in source.head.column_names:
        if column in used or is_unnamed(column):
            continue
        values = [value for value in source.head[column].to_pylist() if isinstance(value, str) and value]
        in_most = (mark for mark in PATH_SEPARATORS if sum(mark in value for value in values) > len(values) / 2)
        separator = next(in_most, None)
        attributes[column] = {"column": column, "separator": separator} if separator else column
    return attributes


def _time_unit(source: SourceTable, column: str) -> str:
    values = [value for value in source.head[column].to_pylist() if value is not None]
    value = values[0] if values else 0
    try:
        number = max(map(float, values), default=0)  # the first may be 0, where a time is not known
    except (TypeError, ValueError):
        parts = re.fullmatch(r"\d{1,2}\.\d{1,2}\.\d{4}( \d{1,2}:\d{2})?(:\d{2})?", str(value).strip())
        return "iso" if parts is None else "%d.%m.%Y" + " %H:%M" * bool(parts[1]) + ":%S" * bool(parts[2])
    span = span_of(source.head[column])
    if span is not None and (other_reading(*span) or "").startswith("dates"):
        return "%Y%m%d"
    return next((unit for unit, bound in (("s", 1e11), ("ms", 1e14), ("us", 1e17)) if number < bound), "ns")
