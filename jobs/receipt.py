"""The receipt of `laserbatch forget`: what a command removes, and its progress. It holds neither ids nor texts."""

import datetime
import hashlib
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from laserbatch.jobs.console import say
from laserbatch.pipeline.errors import WorkspaceError, first_line
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.atomic import canonical_json, read_json, write_json
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.forgetting import RECEIPTS, Ids, unfinished_receipts
from laserbatch.pipeline.storage.workspace import Workspace


@dataclass
class Receipt:
    """The rows, runs and pools that one command removes, and its progress."""

    path: Path
    begun_at: str
    laserbatch_version: str
    ids: dict[Side, dict[str, bool]]  # digest of an id -> whether any row of it was found
    is_done: bool = False
    nowhere: dict[Side, list[str]] = field(default_factory=dict)  # digests of ids found in no run, table or receipt
    rows: dict[str, dict[str, int]] = field(default_factory=dict)  # run -> file -> number of rows removed
    removed_runs: list[str] = field(default_factory=list)  # unfinished runs; their nights begin anew
    removed_experiments: list[str] = field(default_factory=list)  # their samples or texts hold one of the ids
    pools: dict[str, str] = field(default_factory=dict)  # version -> "rebuild" or "drop", then "rebuilt" or "dropped"
    delivered: dict[str, str] = field(default_factory=dict)  # run -> "sent again", "as it was" or "removed"
    not_reached: list[str] = field(default_factory=list)  # places that hold runs, but that `deliver_to` does not name
    num_samples: int = 0  # number of removed samples of reports
    num_leftovers: int = 0  # number of removed leftovers of killed writers, in the workspace and temporary folders

    @classmethod
    def load(cls, path: Path) -> "Receipt":
        """Read a receipt. Raises WorkspaceError if it is damaged."""
        try:
            return _RECEIPT.validate_python(read_json(path) | {"path": path})
        except ValidationError as error:
            raise WorkspaceError(f"{path} is not a receipt of `laserbatch forget`: {first_line(error)}.") from None

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "path"}

    def save(self) -> None:
        write_json(self.as_json(), self.path)


_RECEIPT = TypeAdapter(Receipt)


def digest(side: Side, entity_id: str) -> str:
    """The digest of an id in a receipt: the id can be looked up by it, but not read from it."""
    return hashlib.sha256(f"{side}:{entity_id}".encode()).hexdigest()[:32]


def opened_receipt(workspace: Workspace, requested: Ids) -> Receipt:
    """The receipt of the same command if it was killed, otherwise a new one; nothing is written."""
    ids: dict[Side, dict[str, bool]] = {
        side: {digest(side, key): False for key in sorted(keys)} for side, keys in requested.items()
    }
    name = hashlib.sha256(canonical_json(ids).encode()).hexdigest()[:8]
    for receipt in unfinished(workspace):
        if receipt.path.stem.endswith(name):
            say(f"continuing with the receipt {receipt.path}")
            return receipt
    now = datetime.datetime.now(datetime.UTC)
    path = workspace.root / RECEIPTS / f"{now:%Y-%m-%dT%H-%M-%SZ}-{name}.json"
    return Receipt(path, now.isoformat(timespec="seconds"), version("laserbatch"), ids)


def unfinished(workspace: Workspace) -> list[Receipt]:
    """The receipts of killed commands; a damaged receipt is skipped with a warning."""
    receipts = [unless_damaged(partial(Receipt.load, path)) for path in unfinished_receipts(workspace.root)]
    return [receipt for receipt in receipts if receipt is not None]
