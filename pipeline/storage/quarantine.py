"""Quarantine rows: entities for which no usable text could be written."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.sides import Side

UNKNOWN = "unknown"  # the reason of a message that does not begin with one


def quarantine_schema(entity_id_type: pa.DataType) -> pa.Schema:
    """The Arrow schema of quarantine files; `entity_id` keeps the type that it has in the input table."""
    return pa.schema(
        [
            pa.field("entity_id", entity_id_type, nullable=False),
            pa.field("side", pa.string(), nullable=False),
            pa.field("reason", pa.string(), nullable=False),
            pa.field("detail", pa.string(), nullable=False),
            pa.field("fingerprint", pa.string()),  # null: it failed before there was a prompt
            pa.field("text", pa.string()),  # the text that could not be used; null: none was written
        ],
        metadata={"laserbatch.record": "quarantine", "laserbatch.version": "2"},  # 1 had no text, and ids as text
    )


@dataclass(frozen=True)
class QuarantineRow:
    """One entity for which no usable text could be written."""

    entity_id: str | int
    side: Side
    reason: str  # a stable word: "too-long", "unparsable", "undecodable", ...
    detail: str = ""  # a sentence for people
    fingerprint: str | None = None  # of the rendered prompt; None if it could not be rendered
    text: str | None = None  # the text that could not be used; None if none was written

    @classmethod
    def of(
        cls, entity_id: str | int, side: Side, message: str, fingerprint: str | None = None, text: str | None = None
    ) -> "QuarantineRow":
        """Make a row from the message of a `RowError`, which begins with the reason and a colon."""
        reason = reason_of(message)
        detail = message if reason == UNKNOWN else message.partition(":")[2]
        return cls(entity_id, side, reason, detail.strip(), fingerprint, text)


def reason_of(message: str) -> str:
    """The word before a message's first colon, by which quarantined rows are counted; "unknown" if it is no word.

    A sentence, as a plugin's error may be, can have numbers or names in it, so each row would be counted apart.
    """
    word = message.partition(":")[0].strip()
    return word if re.fullmatch(r"[\w-]+", word) else UNKNOWN


def quarantine_table(rows: Iterable[QuarantineRow], entity_id_type: pa.DataType) -> pa.Table:
    # A lone surrogate cannot be stored as UTF-8, and may be the reason why the row is in quarantine.
    stored = [{name: _storable(value) for name, value in asdict(row).items()} for row in rows]
    return pa.Table.from_pylist(stored, schema=quarantine_schema(entity_id_type))


def count_reasons(table: pa.Table) -> dict[str, int]:
    """The number of rows by reason, the most frequent first: the manifest's `quarantine_reasons`."""
    counts = {entry["values"]: entry["counts"] for entry in pc.value_counts(table["reason"]).to_pylist()}
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _storable(value: str | int | None) -> str | int | None:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
