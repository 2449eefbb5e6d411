"""A tiny world without faults, and functions that write tables."""

import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

DAY_1 = datetime.datetime(2025, 3, 1, tzinfo=datetime.UTC)
DAY_1_S = int(DAY_1.timestamp())


def sound_world() -> dict[str, pa.Table]:
    return {
        "users": pa.table({"user_id": ["u1", "u2", "u3"], "age": [30, None, 50], "mood": ["calm", "keen", None]}),
        "items": pa.table(
            {
                "item_id": [1, 2],
                "title": ["Heat", "Ünïcode 书 <|end|>"],
                "category": [["Film", "Crime"], []],
                "price": [1.5, float("nan")],
            }
        ),
        "interactions": pa.table(
            {
                "user_id": ["u2", "u1", "u1"],
                "item_id": [2, 2, 1],
                "timestamp": [DAY_1_S + 5, DAY_1_S + 5, DAY_1_S - 5],
                "rating": [4, 5, 1],
            }
        ),
    }


def write_world(folder: Path, **changed: pa.Table | None) -> Path:
    """Write the sound world with some tables replaced; None leaves a table out."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in {**sound_world(), **changed}.items():
        if table is not None:
            pq.write_table(table, folder / f"{name}.parquet")
    return folder


def replaced(name: str, **columns: object) -> pa.Table:
    """A table of the sound world with columns replaced or added; None drops one."""
    table = sound_world()[name]
    for column, values in columns.items():
        if column in table.column_names:
            table = table.drop_columns(column)
        if values is not None:
            table = table.append_column(column, values if isinstance(values, pa.Array) else pa.array(values))
    return table
