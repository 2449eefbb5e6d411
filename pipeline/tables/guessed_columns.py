"""Guesses of the id, title, time, rating and event columns of a file: by name, unless the values contradict.

Each guess has a reason in words, for a person who reads the mapping.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.tables import schema as sc
from laserbatch.pipeline.tables.columns import no_date
from laserbatch.pipeline.tables.conversion import FLOAT_ID, ConversionFault, to_time, to_type

NUM_ROWS = 1000  # number of rows whose values are examined one by one
TITLE = r"tit(le|el|re|ulo)|name|nom(bre)?$|headline|label|bezeichnung"
WHOLE_TITLE = r"(item|prod|product|movie|book|article|track|song|job|artikel|produkt)?_?"
WHOLE_TITLE += r"(title|titel|titre|titulo|name|nom|nombre)"
TIME = r"time|date|(^|_)ts(_|$)|_at$|epoch|unix|when|wann|cuando|quand|zeit|datum|fecha|heure"
RATING = (
    r"rating|stars|score|^grade$|^overall$|click|like|^label$|^target$|purchased|bought|converted|wertung|sterne|^note$"
    r"|klick|gekauft"
)
EVENT = r"event|action|behaviou?r|^type$|aktion|ereignis"
NO_LABEL = r"(^|[_ -])(ids?|uuid|key|url|count|number|num|no|nr|time|timestamp|ts|date|at)$|(Id|Time|Date|Count)$"
MAX_SHARE_OF_KINDS = 0.6  # largest share of distinct values in a column of genres or categories
MAX_KIND_CHARS = 80  # largest average length of such a value
MAX_EVENTS = 50  # largest number of distinct values in an event column
MIN_ROWS = 20  # with fewer rows, all values may differ by chance
MIN_TITLED_SHARE = 0.5  # share of rows that have a title, and share of distinct titles among these
MIN_KNOWN_SHARE = 0.5  # share of times that must lie in these years; unknown times are often 0
EARLIEST_YEAR, LATEST_YEAR = 1980, 2100
DAYS = ("%m/%d/%Y", "%d/%m/%Y", "%d.%m.%Y", "%Y/%m/%d", "%Y.%m.%d", "%d-%m-%Y", "%m-%d-%Y", "%Y%m%d", "%m %d, %Y",
        "%d %b %Y", "%d-%b-%Y", "%d-%b-%y", "%b %d, %Y")  # fmt: skip
MAX_TIME_CHARS = 40  # largest length of a time as text
NUMBER_UNITS = (*sc.UNITS_PER_SECOND, "%Y%m%d", "%Y%m%d%H%M%S")
HOURS = ("", " %H:%M", " %H:%M:%S", "T%H:%M:%S", " %I:%M %p", " %I:%M:%S %p", ", %I:%M:%S %p", ", %H:%M:%S")
# Formats of e-mails, C, Twitter and Java, and the logs of web servers.
WHOLE_TIMES = ("%a, %d %b %Y %H:%M:%S %z", "%a %b %d %H:%M:%S %Y", "%a %b %d %H:%M:%S %z %Y", "%d/%b/%Y:%H:%M:%S %z")


def plain_name(name: str) -> str:
    """A column's name without accents and full stops: "Título" as "Titulo", "Film Nr." as "Film Nr"."""
    letters = unicodedata.normalize("NFKD", name)
    return "".join(each for each in letters if each != "." and not unicodedata.combining(each))


@dataclass(frozen=True)
class SourceTable:
    """A file of the user: its name, first rows, and the options for reading it (`SourceFiles`)."""

    name: str
    head: pa.Table
    options: dict[str, Any]
    is_whole: bool = False  # whether `head` has all of its rows
    _known_ids: dict[str, list[str]] = field(default_factory=dict, compare=False, repr=False)  # by column

    @property
    def stem(self) -> str:
        """The name up to its first dot or slash."""
        return re.split(r"[./]", self.name)[0]

    def named(self, pattern: str, used: Iterable[str | None] = ()) -> list[str]:
        """The columns with a name that matches a pattern and is not in `used`."""
        used = {*used}
        names = (name for name in self.head.column_names if name not in used)
        return [name for name in names if re.search(pattern, plain_name(name), re.IGNORECASE)]

    def values(self, column: str, num_rows: int | None = NUM_ROWS) -> list:
        """The values of a column in the first rows, without nulls and infinite times, which Python cannot hold."""
        values = sc.plain_column(self.head[column].slice(0, num_rows)).drop_null()
        return values.filter(pc.invert(pc.fill_null(no_date(values), False))).to_pylist()

    def is_text(self, column: str) -> bool:
        return sc.is_text(sc.plain_type(self.head[column].type))

    def is_id(self, column: str) -> bool:
        """Whether a column can be an id: text or whole numbers, with a different value in each row."""
        values, kind = self._ids(column), self.head[column].type
        is_id_type = sc.id_type(kind) is not None or pt.is_floating(sc.plain_type(kind)) or pt.is_decimal(kind)
        return is_id_type and 0 < len(values) == len(set(values)) and len(values) > 0.9 * self.head.num_rows

    def id_set(self, column: str) -> set[str]:
        """The distinct values of a column, as text to compare: 12.0 becomes 12, for text if all of it has that form."""
        return set(self._ids(column))

    def _ids(self, column: str) -> list[str]:
        if column not in self._known_ids:
            plain = self.values(column, None) if not pt.is_nested(self.head[column].type) else []
            whole = (int(value) if isinstance(value, float) and value.is_integer() else value for value in plain)
            texts = [text for value in whole if (text := str(value).strip())]
            if all(re.match(FLOAT_ID, text) for text in texts):
                texts = [text.partition(".")[0] for text in texts]
            self._known_ids[column] = texts
        return self._known_ids[column]


@dataclass(frozen=True)
class Guess:
    """A guessed value and the reason for it; without a value, the reason why there is none."""

    value: str | None
    reason: str

    @property
    def comment(self) -> str:
        return f"{'no guess' if self.value is None else 'guessed'}: {self.reason}"


@dataclass(frozen=True)
class Join:
    """An id column of the log, and the id column of the entity table that it refers to."""

    of_log: Guess
    id: Guess


def guess_join(log: SourceTable, log_columns: Sequence[str], entities: SourceTable, id_columns: Sequence[str]) -> Join:
    """The pair of a log column and an id column of its table that shares most values, or has the most likely names.

    `id_columns`: likely names of ids, the likeliest first; other columns are ids only if they have values of the log.
    """
    others = [name for name in entities.head.column_names if name not in id_columns]
    ids = [name for name in (*id_columns, *others) if entities.is_id(name)]
    pairs = [(_overlap(log, of_log, entities, of_id), of_log == of_id, -ids.index(of_id), -place, of_log, of_id)
             for place, of_log in enumerate(log_columns) for of_id in ids]  # fmt: skip
    pairs = [pair for pair in pairs if pair[0] > 0 or pair[-1] in id_columns]
    rows, file = f"{entities.head.num_rows:,} rows seen", entities.name
    if not pairs:
        counts = "; ".join(
            f"{name} has {len(entities.id_set(name)):,} different values" for name in (id_columns or others)[:3]
        )
        no_id = Guess(None, f"an id differs in each row, but no column of {file} does in the {rows} ({counts})")
        return Join(Guess(log_columns[0], "by its name"), no_id)
    overlap, *_, of_log, of_id = max(pairs)
    if overlap == 0 and entities.is_whole:
        no_column = Guess(None, f"none of the values of {', '.join(log_columns)} is a {of_id} of {file}")
        return Join(no_column, Guess(of_id, f"by its name; it differs in each of the {rows}"))
    shared = f"; {overlap:.0%} of the {of_log} of {log.name} are among them" if overlap else ""
    by = "by its name" if of_id in id_columns else "by its values"
    return Join(
        Guess(of_log, f"{overlap:.0%} of its values are in {of_id} of {file}" if overlap else "by its name"),
        Guess(of_id, f"{by}; it differs in each of the {rows}{shared}"),
    )


def _overlap(log: SourceTable, of_log: str, entities: SourceTable, of_id: str) -> float:
    values = log.id_set(of_log)
    return len(values & entities.id_set(of_id)) / len(values) if values else 0.0


def guess_title(items: SourceTable, used: Iterable[str | None]) -> Guess:
    """The title column of items: text that most rows have, and that differs between most of them."""
    candidates, contradicted = [], []
    for place, name in enumerate(items.named(TITLE, used)):
        values = items.values(name)
        num_rows = min(items.head.num_rows, NUM_ROWS)
        is_text = items.is_text(name) and not all(_is_number(value) for value in values)
        share = len(set(values)) / len(values) if is_text and values else 0.0
        if share > MIN_TITLED_SHARE and len(values) >= MIN_TITLED_SHARE * num_rows and not re.search(r"_?id$", name):
            is_whole = re.fullmatch(WHOLE_TITLE, plain_name(name), re.IGNORECASE) is not None
            reason = f"by its name; text, {len(set(values)):,} different ones in {num_rows:,} rows"
            candidates.append((is_whole, share, -place, name, reason))
        else:
            contradicted.append(name)
    if not candidates:
        return Guess(None, f"no column has a different text for each item, not even {', '.join(contradicted)}")
    *_, name, reason = max(candidates)
    return Guess(name, reason)


@dataclass(frozen=True)
class TimeGuess:
    """A column of times and its `unit`; `doubt` is another unit that fits as well."""

    column: Guess
    unit: str | None = None
    doubt: str | None = None


def guess_time(log: SourceTable, used: Iterable[str | None]) -> TimeGuess:
    """The time column of interactions: its values are times of our days, and no numbers unless its name means a time.

    The first such column with hours is taken, since days do not tell the order within a day; otherwise the first.
    """
    named, contradicted, days = log.named(TIME, used), [], None
    for name in [*named, *log.named("", [*used, *named])]:
        if days is not None and days.column.value in named and name not in named:
            break
        units, has_hours = _units(log.head[name].slice(0, NUM_ROWS).combine_chunks())
        if name not in named and (not units or units[0][0] in NUMBER_UNITS):
            continue
        if not units:
            ends = sorted(map(str, log.values(name)))  # a 0000-00-00 or n/a among times is the first or the last
            contradicted.append(f"{name} ({', '.join(ends[:1] + ends[1:][-1:])})")
            continue
        (unit, first, last), *other = units
        reason = f"by its{' name and' * (name in named)} values, {first} to {last}"
        guess = TimeGuess(Guess(name, reason), unit, other[0][0] if other else None)
        if has_hours:
            return guess
        days = days or guess
    contradictions = "none by its name"
    if contradicted:
        contradictions = f"{', '.join(contradicted)}; name the column, and set `unit` to the format of its times"
    years = f"the Gregorian years {EARLIEST_YEAR} to {LATEST_YEAR}"
    return days or TimeGuess(Guess(None, f"no column is a time of {years}; there is {contradictions}"))


def _units(column: pa.Array) -> tuple[list[tuple[str, str, str]], bool]:
    """Units in which most values are times of our days, each with the first and the last day; several may fit text.

    Also returns whether a value has a time of day, in the first of these units.
    """
    column = sc.plain_column(column).drop_null()
    if not len(column) or pt.is_nested(column.type) or pt.is_boolean(column.type):
        return [], False
    if pt.is_timestamp(column.type) or pt.is_date(column.type):
        units = ["iso"]
    elif sc.is_number_type(column.type) or all(_is_number(value) for value in column.to_pylist()):
        units = [*NUMBER_UNITS]
    elif max(map(len, column.to_pylist())) > MAX_TIME_CHARS:
        return [], False
    else:
        units = ["iso", *(day + hour for hour in HOURS for day in DAYS), *WHOLE_TIMES]
    fitting, has_hours = [], False
    for unit in units:
        try:
            times = to_time(column, unit)
        except (ConversionFault, pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue
        years = pc.year(times)
        is_ours = pc.and_(pc.greater_equal(years, EARLIEST_YEAR), pc.less_equal(years, LATEST_YEAR))
        if is_ours.true_count > MIN_KNOWN_SHARE * len(times):
            ends = pc.min_max(times.filter(is_ours)).as_py()
            if not fitting:
                has_hours = pc.any(pc.not_equal(times, pc.floor_temporal(times, unit="day"))).as_py()
            fitting.append((unit, f"{ends['min']:%Y-%m-%d}", f"{ends['max']:%Y-%m-%d}"))
    return fitting[:1] if fitting and fitting[0][0] in sc.UNITS_PER_SECOND else fitting, has_hours


def guess_rating(log: SourceTable, used: Iterable[str | None]) -> Guess | None:
    """The rating column of interactions: numbers that repeat; None if there is none."""
    for name in log.named(RATING, used):
        column = log.head[name].combine_chunks()
        if re.search(NO_LABEL, name) or pt.is_nested(column.type) or pt.is_temporal(column.type):
            continue
        try:
            numbers = to_type(column, pa.float64()).drop_null()
        except (ConversionFault, pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue
        if len(numbers) and not (len(numbers) >= MIN_ROWS and len(pc.unique(numbers)) == len(numbers)):
            lowest, highest = pc.min_max(numbers).as_py().values()
            return Guess(name, f"by its name; numbers from {lowest:g} to {highest:g}")
    return None


def kinds_of(items: SourceTable, used: Iterable[str | None]) -> list[str]:
    """The values of text columns for each item, joined, if they repeat, as genres and categories do."""
    rows = items.head.slice(0, NUM_ROWS)
    columns = []
    for name in items.named("", used):
        kind = rows[name].type
        if not items.is_text(name) and not pt.is_list(kind) and not pt.is_large_list(kind):
            continue
        texts = [
            ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")
            for value in rows[name].to_pylist()
        ]
        is_each = len(texts) >= MIN_ROWS and len(set(texts)) > MAX_SHARE_OF_KINDS * len(texts)
        if not is_each and sum(map(len, texts)) <= MAX_KIND_CHARS * len(texts):
            columns.append(texts)
    return ["; ".join(row) for row in zip(*columns, strict=True)]


def guess_event(log: SourceTable, used: Iterable[str | None]) -> Guess | None:
    """The event column of interactions: a few values that repeat; None if there is none."""
    for name in log.named(EVENT, used):
        values, kind = log.values(name), sc.plain_type(log.head[name].type)
        different = sorted(set(values), key=str) if sc.is_text(kind) or pt.is_integer(kind) else []
        is_each = len(values) >= MIN_ROWS and len(different) == len(values)
        if 0 < len(different) <= MAX_EVENTS and not is_each and not re.search(NO_LABEL, name):
            examples = ", ".join(map(str, different[:3])) + (", ..." if len(different) > 3 else "")
            return Guess(name, f"by its name; {len(different)} different values: {examples}")
    return None


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
