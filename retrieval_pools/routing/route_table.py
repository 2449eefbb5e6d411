"""Groups and previous texts by prompt, for engines that know a prompt's tokens but not its entity."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from laserbatch.retrieval_pools.errors import PoolError

SCHEMA = pa.schema([("prompt_hash", pa.binary(16)), ("group", pa.string()), ("previous_ids", pa.list_(pa.int32()))])


def prompt_hash(prompt_ids: np.ndarray) -> bytes:
    """A hash of 16 bytes of a prompt's token ids, int[n]: BLAKE2b of little-endian int32s."""
    return hashlib.blake2b(np.ascontiguousarray(prompt_ids, "<i4").data, digest_size=16).digest()


def write_routes(path: Path | str, routes: Iterable[tuple[np.ndarray, str | None, np.ndarray | None]]) -> None:
    """Write a table as a Parquet file. Each prompt has its ids, int[n], group, and previous text, int[m] or None."""
    rows = [
        {"prompt_hash": prompt_hash(prompt), "group": group, "previous_ids": previous}
        for prompt, group, previous in routes
    ]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path)


class RouteTable:
    """An open table. If it has a prompt several times, the last one counts.

    If a prompt is not found and the file has been replaced since, as nights do for every shard, it is read again.
    """

    def __init__(self, path: Path | str) -> None:
        """Raises PoolError if the file is missing or is not such a table."""
        self._path = Path(path)
        self._read()

    def _read(self) -> None:
        path = self._path
        try:
            self._version = _version_of(path)
            table = pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            raise PoolError(f"the route table {path} cannot be read: {str(error).splitlines()[0]}") from None
        if table.schema.remove_metadata() != SCHEMA:
            names = ", ".join(SCHEMA.names)
            raise PoolError(f"{path} is not a route table: expected the columns {names}, as `write_routes` writes them")
        self._rows = {key: row for row, key in enumerate(table["prompt_hash"].to_pylist())}
        self._groups = table["group"].combine_chunks()
        self._previous = table["previous_ids"].combine_chunks()

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, prompt_ids: np.ndarray) -> tuple[np.ndarray | None, str | None] | None:
        """The previous text, int32[m], and group of a prompt, as `OpenPool.start` takes them; None if not found."""
        key = prompt_hash(prompt_ids)
        if key not in self._rows and _version_of(self._path) != self._version:
            self._read()
        row = self._rows.get(key)
        if row is None:
            return None
        previous = self._previous[row]
        return previous.values.to_numpy() if previous.is_valid else None, self._groups[row].as_py()


def _version_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns
