"""Rows that could not be done: their schema, and the order in which they are kept.

Knows nothing of why a row fails; the reason comes with the row.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import pyarrow as pa

from pipeline.sides import Side

QUARANTINE_SCHEMA = pa.schema(
    [
        pa.field("entity_id", pa.string(), nullable=False),  # as text, whatever the type of the table's ids
        pa.field("side", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("fingerprint", pa.string()),  # null: it failed before there was a prompt
    ],
    metadata={"laserbatch.record": "quarantine", "laserbatch.version": "1"},
)


@dataclass(frozen=True)
class QuarantineRow:
    """One entity that could not be done.

    Attributes
    ----------
    entity_id : the id as text.
    side : "user" or "item".
    reason : a stable word: "too-long", "unparsable", "undecodable", ...
    detail : the sentence for a person.
    fingerprint : of the rendered prompt; None when it could not be rendered.
    """

    entity_id: str
    side: Side
    reason: str
    detail: str = ""
    fingerprint: str | None = None

    @classmethod
    def of(cls, entity_id: object, side: Side, message: str, fingerprint: str | None = None) -> "QuarantineRow":
        """From the message of a `RowError`, whose first word before a colon is the reason.

        >>> QuarantineRow.of(7, "item", "too-long: 900 tokens, 512 fit").reason
        'too-long'
        """
        reason, _, detail = message.partition(":")
        return cls(str(entity_id), side, reason.strip() or "unknown", detail.strip(), fingerprint)


def quarantine_table(rows: Iterable[QuarantineRow]) -> pa.Table:
    """The rows as a table of `QUARANTINE_SCHEMA`, in an order that does not depend on who failed first."""
    # A lone surrogate cannot be stored as UTF-8, and may be the very reason why the row is here.
    cleaned = [tuple(_storable(value) for value in astuple(row)) for row in rows]
    ordered = sorted(cleaned, key=lambda row: tuple(value or "" for value in row))
    columns = zip(*ordered, strict=True) if ordered else [[] for _ in QUARANTINE_SCHEMA]
    arrays = [pa.array(list(column), field.type) for column, field in zip(columns, QUARANTINE_SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=QUARANTINE_SCHEMA)


def quarantine_rows(table: pa.Table) -> list[QuarantineRow]:
    """The rows of a quarantine table."""
    return [QuarantineRow(**row) for row in table.to_pylist()]


def count_reasons(table: pa.Table) -> dict[str, int]:
    """Number of rows by reason, the most frequent first: the manifest's `quarantine_reasons`."""
    counts = Counter(table["reason"].to_pylist())
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _storable(value: str | None) -> str | None:
    return None if value is None else value.encode("utf-8", "backslashreplace").decode()
