"""Settings of the input tables: where they are, and the mapping by which foreign files become them.

The mapping is read from a YAML file; `configs/import_example.yaml` explains each key.
"""

import codecs
from pathlib import Path, PurePath
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from laserbatch.pipeline.validation import Strict

ColumnType = Literal["string", "int64", "float64", "bool"]
IdType = Literal["keep", "string", "int64"]


class TablesSettings(Strict):
    """The tables a run reads."""

    path: Path | None = Field(None, description="Folder with users, items and interactions; needed but for the demo.")


class SourceColumn(Strict):
    """Where one attribute comes from."""

    column: str = Field(description="Column of the source file.")
    type: ColumnType | None = Field(None, description="Convert to this; null keeps Parquet's type, and text in a CSV.")
    separator: str | None = Field(None, min_length=1, description="Split text into a list of strings, broad to narrow.")
    null_values: list[str] = Field([], description="Texts that mean that nothing is known.")


class SourceTime(Strict):
    """Where a time comes from, and how it is written."""

    column: str = Field(description="Column of the source file.")
    unit: str = Field(
        "s", description="s, ms, us or ns since 1970; iso (2024-05-31T23:59:00Z); or a format like %d/%m/%Y."
    )

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

    files: str = Field(description="A file name or a pattern such as part-*.parquet, inside the source folder.")
    delimiter: str | None = Field(
        None, min_length=1, max_length=1, description="Of a CSV; null: tab for .tsv, else comma."
    )
    encoding: str = Field("utf-8", description="Of a CSV.")
    column_names: list[str] | None = Field(None, description="Of a CSV without a header line.")
    drop_without: list[str] = Field(
        [], description="Leave out rows in which one of these columns of the table is null or blank; they are counted."
    )

    @field_validator("files")
    @classmethod
    def _is_inside(cls, files: str) -> str:
        if PurePath(files).is_absolute() or not PurePath(files).parts:
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

    id: str = Field(description="Column that becomes user_id or item_id.")
    attributes: dict[str, Column] | None = Field(None, description="Name: source column; null: all other columns.")
    created_at: Time | None = Field(None, description="When the user or item appeared.")


class ItemMapping(EntityMapping):
    """How the items table is made."""

    title: str = Field(description="Column that becomes title.")


class InteractionMapping(SourceFiles):
    """How the interactions table is made."""

    user_id: str = Field(description="Column that becomes user_id.")
    item_id: str = Field(description="Column that becomes item_id.")
    timestamp: Time = Field(description="When it happened; a bare column name means unix seconds.")
    rating: str | None = Field(None, description="Column that becomes rating.")
    drop_unknown: bool = Field(
        False, description="Leave out rows of users or items that are in no table; they are counted."
    )


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
