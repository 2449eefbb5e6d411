"""Settings of the input tables: where they are, and the mapping by which foreign files become them.

The mapping is read from a YAML file; `configs/import_example.yaml` explains each key to its writer.
"""

import codecs
from pathlib import Path, PurePath
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from laserbatch.pipeline.storage.uris import is_uri, without_credentials
from laserbatch.pipeline.validation import Strict

IdType = Literal["keep", "string", "int64"]


class TablesSettings(Strict):
    """The tables a run reads."""

    path: Path | str | None = Field(
        None,
        description="Folder with users, items and interactions, or its URI (s3://bucket/prefix); needed but for the "
        "demo.",
    )

    @field_validator("path", mode="before")
    @classmethod
    def _of_its_kind(cls, path: object) -> object:
        if is_uri(path):
            return without_credentials(path)
        return Path(path) if isinstance(path, str) else path


class SourceColumn(Strict):
    """Where one attribute comes from."""

    column: str | None = None
    flags: dict[str, str] = Field({})  # instead of `column`: columns of 0 and 1, and the words that make a list
    type: Literal["string", "int64", "float64", "bool"] | None = None  # None keeps Parquet's type, and text in a CSV
    separator: str | None = Field(None, min_length=1)  # of a text that is split into a list of strings
    null_values: list[str] = Field([])  # texts that mean that nothing is known
    words: dict[str, str] = Field({})  # what codes stand for

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> "SourceColumn":
        if (self.column is None) != bool(self.flags):
            raise ValueError("expected the name of a `column`, or `flags`: columns of 0 and 1 with a word each")
        return self


class SourceTime(Strict):
    """Where a time comes from, and how it is written."""

    column: str
    unit: str = "s"  # s, ms, us or ns since 1970; iso; or a format like %d/%m/%Y

    @field_validator("unit")
    @classmethod
    def _is_known(cls, unit: str) -> str:
        if unit not in ("s", "ms", "us", "ns", "iso") and "%" not in unit:
            raise ValueError(
                f"{unit!r} is not a time unit; expected s, ms, us, ns, iso, or a format like %d/%m/%Y %H:%M"
            )
        return unit


def _by_name(value: object) -> object:
    return {"column": value} if isinstance(value, str) else value


# In YAML, a bare column name stands for a mapping with nothing else in it.
Column = Annotated[SourceColumn, BeforeValidator(_by_name)]
Time = Annotated[SourceTime, BeforeValidator(_by_name)]


class SourceFiles(Strict):
    """The files of one table: Parquet by their suffix, anything else is read as CSV."""

    files: str  # a name or a pattern inside the source folder
    delimiter: str | None = Field(None, min_length=1)  # of a CSV; None: tab for .tsv, else comma
    encoding: str = "utf-8"
    column_names: list[str] | None = None  # of a CSV without a header line
    drop_without: list[str] = Field([])  # rows in which one of these columns of the table is null or blank are left out

    @field_validator("files")
    @classmethod
    def _is_inside(cls, files: str) -> str:
        path = PurePath(files)
        if path.is_absolute() or not path.parts or ".." in path.parts:
            raise ValueError("expected a file name or a pattern inside the source folder, such as events/*.csv")
        return files

    @field_validator("encoding")
    @classmethod
    def _is_encoding(cls, encoding: str) -> str:
        try:
            return codecs.lookup(encoding).name
        except LookupError:
            raise ValueError("expected an encoding that Python knows, such as utf-8, latin-1 or cp1252") from None


class EntityMapping(SourceFiles):
    """How the users or the items table is made."""

    id: str
    attributes: dict[str, Column] | None = None  # None: all other columns
    created_at: Time | None = None


class ItemMapping(EntityMapping):
    """How the items table is made."""

    title: str


class InteractionMapping(SourceFiles):
    """How the interactions table is made."""

    user_id: str
    item_id: str
    timestamp: Time
    rating: str | None = None
    event: str | None = None
    drop_unknown: bool = False  # whether rows of users or items that are in no table are left out


class IdTypes(Strict):
    """What ids become; both tables that hold an id must agree on its type."""

    user_id: IdType = "keep"
    item_id: IdType = "keep"


class ImportMapping(Strict):
    """A whole import. Without `users`, the users are those that interact, with no attributes."""

    ids: IdTypes = IdTypes()
    users: EntityMapping | None = None
    items: ItemMapping
    interactions: InteractionMapping
