"""The rows of `gpu_first.py`: one file, a JSON object per line, appended by several processes as they measure."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import jsonable

FATAL_STATUS = 70  # exit status of a process that met a CUDA error


@dataclass(frozen=True)
class Rows:
    """A file of rows.

    A row has `phase` and `item`, and `failed` if there is a reason instead of a result; other lines mark where an item
    began or ended.
    """

    path: Path

    def add(self, phase: str, item: str, **values: Any) -> None:
        """Append a row."""
        self._append({"phase": phase, "item": item, **values})

    def mark(self, event: str, item: str) -> None:
        """Append that an item began or ended."""
        self._append({"event": event, "item": item})

    def read(self) -> list[dict]:
        """All complete lines."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines[:-1] if line]

    def _append(self, row: dict) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(jsonable(row), ensure_ascii=False) + "\n")  # a single write of a short line


def items_begun(rows: list[dict]) -> list[str]:
    """The items that began, in order."""
    return [row["item"] for row in rows if row.get("event") == "begin"]


def items_ended(rows: list[dict]) -> set[str]:
    """The items that ended, whether they failed or not."""
    return {row["item"] for row in rows if row.get("event") == "end"}
