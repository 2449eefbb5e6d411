"""The shards of a run's side: each is finished, or not there.

The quarantine rows of a shard are written first, then its knowledge, then a record with the checksums of both. Only the
record makes it finished, so a killed run loses only the shards in progress, and none is half there. Records and failed
rows are in `shards/`, so that `knowledge/` and `quarantine/` hold only files for readers.
"""

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from laserbatch.pipeline.errors import WorkspaceError, first_line
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.atomic import link_file, read_json, remove, remove_leftovers, sha256_file, write_json
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.figures import ShardInfo, ShardRecord
from laserbatch.pipeline.storage.parquet import read_parquet, write_parquet
from laserbatch.pipeline.storage.quarantine import QuarantineRow, count_reasons, quarantine_table

logger = logging.getLogger("laserbatch.storage")

_SHARD_RECORD = TypeAdapter(ShardRecord)


@dataclass(frozen=True)
class SideShards:
    """The shards of one side; `root` is the run's folder."""

    root: Path
    side: Side

    def write(
        self,
        name: str,
        knowledge: pa.Table | pa.RecordBatchReader,
        quarantined: Iterable[QuarantineRow] = (),
        info: ShardInfo | None = None,
    ) -> ShardRecord:
        """Write one shard, so that it is finished or not there.

        Any process may call it, also an actor on another machine with a shared file system. Writing a shard again
        replaces it. If `knowledge` is a reader, only a part of it is in memory at a time.
        """
        self._record_path(name).unlink(missing_ok=True)  # not finished while its files change
        rows = quarantine_table(quarantined, knowledge.schema.field("entity_id").type)
        failed = write_parquet(rows, self.quarantine_path(name)) if rows.num_rows else None
        written = write_parquet(knowledge, self._knowledge / f"{name}.parquet")
        record = ShardRecord(
            name=name,
            file=written.path.relative_to(self.root).as_posix(),
            num_rows=written.num_rows,
            sha256=written.sha256,
            num_quarantined=rows.num_rows,
            quarantine_sha256=failed.sha256 if failed else None,
            info=info,
        )
        write_json(asdict(record), self._record_path(name))
        return record

    def share(self, name: str, earlier: "SideShards", of: str) -> ShardRecord | None:
        """Add the knowledge of an earlier run's shard as a shard `name`, by a hard link, or a copy if there are none.

        Returns None, and adds nothing, if the earlier shard `of` has no record or no file.
        """
        record = unless_damaged(partial(earlier._record, of))
        if record is None or not (earlier.root / record.file).exists():
            return None
        path = self._knowledge / f"{name}.parquet"
        link_file(earlier.root / record.file, path)
        file = path.relative_to(self.root).as_posix()
        record = replace(record, name=name, file=file, num_quarantined=0, quarantine_sha256=None, info=None)
        write_json(asdict(record), self._record_path(name))
        return record

    def finished(self) -> dict[str, ShardRecord]:
        """The shards that need not be done again, by name, in name order.

        A shard whose files are missing, damaged or changed is left out, with a warning.
        """
        finished = {}
        for path in sorted(self._folder.glob("*.json")):
            try:
                record = self._record(path.stem)
                files = {self.root / record.file: record.sha256}
                if record.quarantine_sha256:
                    files[self.quarantine_path(record.name)] = record.quarantine_sha256
                changed = [file for file, sha256 in files.items() if not file.exists() or sha256_file(file) != sha256]
            except WorkspaceError as error:
                logger.warning("shard record %s cannot be used, so its shard is written again: %s", path, error)
                continue
            if changed:
                logger.warning("%s is missing, or was changed, so its shard is written again", changed[0])
                continue
            finished[record.name] = record
        return finished

    def checksums(self) -> dict[Path, str]:
        """The recorded SHA-256 of each knowledge file. Raises WorkspaceError for a damaged record."""
        records = [self._record(path.stem) for path in sorted(self._folder.glob("*.json"))]
        return {self.root / record.file: record.sha256 for record in records}

    def lost(self) -> list[tuple[Path, int]]:
        """The knowledge files that are missing, with the number of their rows."""
        records = [unless_damaged(partial(self._record, path.stem)) for path in sorted(self._folder.glob("*.json"))]
        files = [(self.root / record.file, record.num_rows) for record in records if record is not None]
        return [(path, num_rows) for path, num_rows in files if num_rows and not path.exists()]

    def quarantine_reasons(self, record: ShardRecord) -> dict[str, int]:
        """The number of quarantined rows of a finished shard by reason."""
        path = self.quarantine_path(record.name)
        return count_reasons(read_parquet(path, ["reason"])) if record.num_quarantined else {}

    def drop_unfinished(self, keep: Iterable[str]) -> None:
        """Delete the files of every shard not named in `keep`, and temporary files of killed writers in the run.

        Call it under the workspace's lock before going on with a run, so that readers see no stray file.
        """
        keep = set(keep)
        remove_leftovers(self.root)
        for folder in (self._folder, self._knowledge):
            for path in sorted(folder.glob("*")):  # records first, so that a shard is not finished when files are gone
                if path.stem not in keep:
                    remove(path)

    def drop(self, name: str) -> None:
        for path in (self._record_path(name), self._knowledge / f"{name}.parquet", self.quarantine_path(name)):
            path.unlink(missing_ok=True)

    def quarantine_path(self, name: str) -> Path:
        """The file of a shard's failed rows, which exists if it has any."""
        return self._folder / f"{name}.parquet"

    @property
    def _folder(self) -> Path:
        return self.root / "shards" / self.side

    @property
    def _knowledge(self) -> Path:
        return self.root / "knowledge" / self.side

    def _record(self, name: str) -> ShardRecord:
        try:
            return _SHARD_RECORD.validate_python(read_json(self._record_path(name)))
        except ValidationError as error:
            raise WorkspaceError(f"{self._record_path(name)} is not a shard's record: {first_line(error)}.") from None

    def _record_path(self, name: str) -> Path:
        return self._folder / f"{name}.json"
