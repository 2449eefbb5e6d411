"""Settings of the input tables: their location, and the mapping that turns foreign files into them.

The mapping is read from a YAML file; `configs/import_example.yaml` explains each key.
"""

import codecs
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.storage.uris import has_credentials, is_uri, without_credentials
from laserbatch.pipeline.tables.database import is_server
from laserbatch.pipeline.tables.times import format_fault
from laserbatch.pipeline.validation import Strict

IdType = Literal["keep", "string", "int64"]


class TablesSettings(Strict):
    """The tables a run reads."""

    path: Path | str | None = Field(
        default=None,
        description="This folder, or URI (s3://bucket/prefix), holds the tables users, items and interactions. Every "
        "command except the demo needs it.",
    )
    keep_duplicates: bool = Field(
        default=False,
        description="Interactions that equal another one in user, item, time, event and rating are kept. Otherwise "
        "only the first of them is kept, and the others are counted.",
    )

    @field_validator("path", mode="before")
    @classmethod
    def _of_its_kind(cls, path: object) -> object:
        return without_credentials(path) if is_uri(path) else Path(path) if isinstance(path, str) else path

    @property
    def required_path(self) -> Path | str:
        """`path`. Raises ConfigError if it is not set."""
        if self.path is None:
            raise ConfigError(
                "no input tables: set tables.path in the configuration; `laserbatch init TABLES` writes one, and "
                "`laserbatch data sample` makes tables to try"
            )
        return self.path


class SourceColumn(Strict):
    column: str | None = None
    flags: dict[str, str] = Field(default={})  # instead of `column`: columns of 0 and 1, each with its word in the list
    type: Literal["string", "int64", "float64", "bool"] | None = None  # None: Parquet's type, or text for a CSV
    separator: str | None = Field(default=None, min_length=1)  # splits a text into a list of strings
    null_values: list[str] = Field(default=[])  # texts that mean null
    words: dict[str, str] = Field(default={})  # code -> word that replaces it

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> "SourceColumn":
        if (self.column is None) != bool(self.flags):
            raise ValueError("expected either a `column`, or `flags`: columns of 0 and 1, each with a word")
        return self


class SourceTime(Strict):
    column: str
    # s, ms, us or ns since 1970; iso; or a format like %d/%m/%Y. None: numbers, with a unit inferred from their values
    unit: str | None = None

    @field_validator("unit")
    @classmethod
    def _is_known(cls, unit: str | None) -> str | None:
        if unit is None:
            return None
        if unit not in ("s", "ms", "us", "ns", "iso") and "%" not in unit:
            raise ValueError(
                f"{unit!r} is not a time unit; expected s, ms, us, ns, iso, or a format like %d/%m/%Y %H:%M"
            )
        if "%" in unit and (fault := format_fault(unit)):
            raise ValueError(f"the format {unit!r} cannot be used: {fault}")
        return unit


def _by_name(value: object) -> object:
    return {"column": value} if isinstance(value, str) else value


# In YAML, a bare column name is short for a mapping with only this `column`.
Column = Annotated[SourceColumn, BeforeValidator(_by_name)]
Time = Annotated[SourceTime, BeforeValidator(_by_name)]


def _known_encoding(encoding: str) -> str:
    try:
        return codecs.lookup(encoding).name
    except LookupError:
        raise ValueError("expected an encoding that Python knows, such as utf-8, latin-1 or cp1252") from None


Encoding = Annotated[str, AfterValidator(_known_encoding)]


def _one_character(text: str | None) -> str | None:
    if text is not None and (len(text) != 1 or not text.isascii()):
        raise ValueError("expected one ASCII character, such as '\"' or \\, or null for none")
    return text


Character = Annotated[str | None, AfterValidator(_one_character)]


class CsvFormat(Strict):
    """Format of the CSV files of one table."""

    delimiter: str | None = Field(default=None, min_length=1)  # None: tab for .tsv, otherwise comma
    # Null or "": no field is quoted. Not set: double quotes, or none if the delimiter is a tab or several characters.
    quote: Annotated[Character, BeforeValidator(lambda quote: quote or None)] = None
    escape: Character = None  # precedes a character that is taken literally
    null_values: list[str] = Field(default=[])  # fields that mean null, besides the empty one
    encoding: Encoding | None = None  # None: utf-8
    decimal: Literal[".", ","] = "."  # decimal mark of numbers

    @model_validator(mode="after")
    def _can_be_read(self) -> "CsvFormat":
        for value in self.null_values:
            if self.escape and value.startswith(self.escape):
                raise ValueError(
                    f"the null value {value!r} begins with the `escape`, which is removed before null values are "
                    "compared; leave out `escape`, or export nulls as empty fields"
                )
        return self


@dataclass(frozen=True)
class FileFormat:
    """Format of one CSV file: a `CsvFormat` with the defaults for the file's name filled in."""

    delimiter: str
    quote: str | None
    escape: str | None
    null_values: list[str]
    encoding: str


class SourceFiles(Strict):
    """The files of one table, Parquet or CSV; or a query to a database."""

    files: str | None = None  # a file, a folder (with all of its sub-folders) or a pattern, inside the source folder
    query: str | None = Field(default=None, min_length=1)  # instead of `files`: SQL
    # Target of `query`: a DuckDB or SQLite file (in the source folder or an absolute path), or a PostgreSQL server.
    database: str | None = None
    csv: CsvFormat = CsvFormat()
    delimiter: str | None = Field(default=None, min_length=1)  # short for `csv.delimiter`
    encoding: Encoding | None = None  # short for `csv.encoding`
    column_names: list[str] | None = None  # columns of a CSV without a header line
    # Rows with a null or blank value in one of these columns of the table are left out.
    drop_without: list[str] = Field(default=[])

    @field_validator("files")
    @classmethod
    def _is_inside(cls, files: str | None) -> str | None:
        path = PurePath(files or ".")
        if files is not None and (path.is_absolute() or not path.parts or ".." in path.parts):
            raise ValueError("expected a file name or a pattern inside the source folder, such as events/*.csv")
        return files

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "SourceFiles":
        if (self.files is None) == (self.query is None):
            raise ValueError("expected either `files`, or a `query` to the `database`; give one of them")
        if (self.query is None) != (self.database is None):
            raise ValueError("`query` and `database` belong together; give both, or `files` alone")
        database = self.database or ""  # no message shows it, as it may have a password
        if is_server(database) and has_credentials(database):
            raise ValueError(
                "the URI of the `database` has a password or key in it; remove it, and set PGPASSWORD or PGPASSFILE in "
                "the environment"
            )
        if not is_server(database) and (is_uri(database) or ".." in PurePath(database).parts):
            raise ValueError(
                "expected the `database` as a file in the source folder, as an absolute path, or as "
                "postgresql://user@host/name"
            )
        of_files = {"csv", "delimiter", "encoding", "column_names"} & self.model_fields_set
        if self.query is not None and of_files:
            raise ValueError(f"`{min(of_files)}` applies only to files, not to a `query`; leave it out")
        for key in ("delimiter", "encoding"):
            if len({getattr(self, key), getattr(self.csv, key)} - {None}) > 1:
                raise ValueError(f"`{key}` and `csv.{key}` differ; keep the one in `csv`")
        if len(self.csv.delimiter or self.delimiter or "") > 1 and (self.csv.quote or self.csv.escape):
            raise ValueError("`quote` and `escape` need a `delimiter` of one character; leave them out, or change it")
        return self

    def csv_format(self, path: PurePath) -> FileFormat:
        delimiter = self.csv.delimiter or self.delimiter or ("\t" if ".tsv" in path.suffixes else ",")
        is_quoted = delimiter != "\t" and len(delimiter) == 1
        quote = self.csv.quote if "quote" in self.csv.model_fields_set else '"' if is_quoted else None
        encoding = self.csv.encoding or self.encoding or "utf-8"
        return FileFormat(delimiter, quote, self.csv.escape, self.csv.null_values, encoding)


class EntityMapping(SourceFiles):
    id: str
    attributes: dict[str, Column] | None = None  # None: all other columns
    created_at: Time | None = None


class ItemMapping(EntityMapping):
    title: str


class InteractionMapping(SourceFiles):
    user_id: str
    item_id: str
    timestamp: Time
    rating: str | None = None
    event: str | None = None
    drop_unknown: bool = False  # whether rows of users or items that are in no table are left out
    max_unknown_share: float = Field(default=0.5, ge=0, le=1)  # largest share to leave out per column


class IdTypes(Strict):
    """Target types of ids; both tables that hold an id must agree on its type."""

    user_id: IdType = "keep"
    item_id: IdType = "keep"


class ImportMapping(Strict):
    """The mapping of a whole import. Without `users`, the users are those of the interactions, without attributes."""

    ids: IdTypes = IdTypes()
    database: str | None = None  # default `database` of tables with a `query`
    users: EntityMapping | None = None
    items: ItemMapping
    interactions: InteractionMapping

    @model_validator(mode="before")
    @classmethod
    def _share_database(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("database") is None:
            return data
        shared = {"database": data["database"]}
        return data | {key: shared | part for key, part in data.items() if isinstance(part, dict) and "query" in part}

    @model_validator(mode="after")
    def _asks_its_database(self) -> "ImportMapping":
        if self.database is not None and all(part.query is None for part in self.tables().values()):
            raise ValueError("`database` is set, but no table has a `query`; give one, or leave `database` out")
        return self

    def tables(self) -> dict[str, SourceFiles]:
        """The part of the mapping for each mapped table."""
        parts = {"users": self.users, "items": self.items, "interactions": self.interactions}
        return {table: part for table, part in parts.items() if part is not None}
