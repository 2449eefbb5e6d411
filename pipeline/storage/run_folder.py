"""One run on disk: where its files lie, and which of its shards are finished.

A shard is written as its quarantine rows, then its knowledge, then a record with the checksums of both. Only that last
file makes it finished, so a killed run loses no more than the shards in flight, and none is half there. Records and
failed rows of shards lie in `shards/`, so that `knowledge/` and `quarantine/` hold what readers want and nothing else.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.atomic import read_json, remove, remove_leftovers, sha256_file, write_json, write_text
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.manifest import RunManifest, ShardInfo, ShardRecord
from laserbatch.pipeline.storage.parquet import WrittenFile, iter_parquet, link_parquet, read_parquet, write_parquet
from laserbatch.pipeline.storage.quarantine import QuarantineRow, quarantine_schema, quarantine_table

logger = logging.getLogger("laserbatch.storage")

NUM_NAMED = 5  # of the ids that a message tells
POSTPONED = pa.schema(
    [
        pa.field("entity_id", pa.string(), nullable=False),  # or an integer, as in the input table
        pa.field("reason", pa.string(), nullable=False),  # "not-due", "budget", "evidence"
        pa.field("has_text", pa.bool_(), nullable=False),  # an earlier one, that it keeps
        pa.field("score", pa.float64()),  # what a new text is worth; null where there is no question of it
        pa.field("since", pa.date32(), nullable=False),  # the date of its text; without one, of its first night
    ]
)
_SHARD_RECORD = TypeAdapter(ShardRecord)


@dataclass(frozen=True)
class RunFolder:
    """The layout of one run. `plain` is the same layout again, for the texts of plain decoding."""

    root: Path

    @property
    def run_id(self) -> str:
        return self.root.name

    @property
    def date(self) -> str:
        """The night, as the run's id begins with it: YYYY-MM-DD, so that dates compare as text."""
        return self.run_id[:10]

    @property
    def settings_hash(self) -> str:
        """What the run's id holds of the hash of its settings."""
        return self.run_id[11:19]

    @property
    def manifest_path(self) -> Path:
        return self.root / "manifest.json"

    @property
    def report_path(self) -> Path:
        return self.root / "report.html"

    @property
    def events_path(self) -> Path:
        """What happened in the run, over all attempts, a JSON object a line; it grows while readers read."""
        return self.root / "events.jsonl"

    @property
    def success_path(self) -> Path:
        return self.root / "_SUCCESS"

    @property
    def held_path(self) -> Path:
        return self.root / "_HELD"

    @property
    def plain(self) -> "RunFolder":
        return RunFolder(self.root / "plain")

    @property
    def is_finished(self) -> bool:
        """Whether `_SUCCESS` is there: every other file is then final."""
        return self.success_path.exists()

    @property
    def is_held(self) -> bool:
        """Whether everything is written, but a gate keeps it from being published: `_HELD` stands for `_SUCCESS`."""
        return self.held_path.exists() and not self.is_finished

    def knowledge_folder(self, side: Side) -> Path:
        """`knowledge/<side>`, a folder of Parquet files and nothing else, one a shard."""
        return self.root / "knowledge" / side

    def features_path(self, side: Side) -> Path:
        return self.root / "features" / f"{side}.parquet"

    def centroids_path(self, side: Side) -> Path:
        """Centroids of the clusters that a side's features name."""
        return self.root / "features" / f"{side}-centroids.parquet"

    def quarantine_path(self, side: Side) -> Path:
        """The quarantine of a side, all shards' together."""
        return self.root / "quarantine" / f"{side}.parquet"

    def postponed_path(self, side: Side) -> Path:
        """Entities of a side that get no new text tonight, and why."""
        return self.root / "postponed" / f"{side}.parquet"

    def load_manifest(self) -> RunManifest:
        """The run's manifest. Raises WorkspaceError when it is missing, damaged or of another version."""
        return RunManifest.load(self.manifest_path)

    @property
    def previous_run_id(self) -> str | None:
        """The run that this one was built on; None also where its manifest is missing or damaged."""
        return unless_damaged(lambda: read_json(self.manifest_path), {}).get("previous_run_id")

    def write_shard(
        self,
        side: Side,
        name: str,
        knowledge: pa.Table | pa.RecordBatchReader | Path,
        quarantined: Iterable[QuarantineRow] = (),
        info: ShardInfo | None = None,
    ) -> ShardRecord:
        """Write one shard, so that it is finished or not there.

        Any process may call it (an actor on another machine too, on a shared file system). Writing a shard again
        replaces it. Of a reader a little knowledge at a time is in memory; a file of another run is shared with it. In
        the order of names, shards are in order.
        """
        self._shard_record_path(side, name).unlink(missing_ok=True)  # not finished while its files change
        schema = pq.read_schema(knowledge) if isinstance(knowledge, Path) else knowledge.schema
        rows = quarantine_table(quarantined, schema.field("entity_id").type)
        failed = write_parquet(rows, self._shard_quarantine_path(side, name)) if rows.num_rows else None
        write = link_parquet if isinstance(knowledge, Path) else write_parquet
        written = write(knowledge, self.knowledge_folder(side) / f"{name}.parquet")
        record = ShardRecord(
            name=name,
            file=written.path.relative_to(self.root).as_posix(),
            num_rows=written.num_rows,
            sha256=written.sha256,
            num_quarantined=rows.num_rows,
            quarantine_sha256=failed.sha256 if failed else None,
            info=info,
        )
        write_json(asdict(record), self._shard_record_path(side, name))
        return record

    def finished_shards(self, side: Side) -> dict[str, ShardRecord]:
        """The shards of a side that need not be done again, by name in name order.

        A shard whose files are missing, damaged or changed since is left out, with a warning.
        """
        finished = {}
        for path in sorted(self._shards_folder(side).glob("*.json")):
            try:
                record = _SHARD_RECORD.validate_python(read_json(path))
                files = {self.root / record.file: record.sha256}
                if record.quarantine_sha256:
                    files[self._shard_quarantine_path(side, record.name)] = record.quarantine_sha256
                changed = [file for file, sha256 in files.items() if not file.exists() or sha256_file(file) != sha256]
            except (WorkspaceError, ValidationError) as error:
                logger.warning("shard record %s cannot be used and its shard is done again: %s", path, error)
                continue
            if changed:
                logger.warning("%s is missing or changed since it was written; its shard is done again", changed[0])
                continue
            finished[record.name] = record
        return finished

    def drop_unfinished(self, side: Side, keep: Iterable[str]) -> None:
        """Delete the files of every shard not named in `keep`, and what killed writers left.

        Call it under the workspace's lock before going on with a run, so that no reader sees a stray file.
        """
        keep = set(keep)
        remove_leftovers(self.root)
        for folder in (self._shards_folder(side), self.knowledge_folder(side)):
            for path in sorted(folder.glob("*")):  # records first: a shard is then unfinished before it is incomplete
                if path.stem not in keep:
                    remove(path)

    def drop_shard(self, side: Side, name: str) -> None:
        """Delete what there is of a shard."""
        folder = self.knowledge_folder(side)
        for path in (self._shard_record_path(side, name), folder / f"{name}.parquet"):
            path.unlink(missing_ok=True)
        self._shard_quarantine_path(side, name).unlink(missing_ok=True)

    def iter_knowledge(self, side: Side, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Some columns of all knowledge of a side, in shard order, a batch in memory at a time."""
        return iter_parquet(self.knowledge_folder(side), columns)

    def merge_quarantine(
        self,
        side: Side,
        finished: Iterable[ShardRecord],
        more: Iterable[QuarantineRow],
        entity_id_type: pa.DataType,
    ) -> WrittenFile:
        """Merge the quarantine rows of finished shards, and `more` that belong to none, into one file by entity."""
        parts = [quarantine_table(more, entity_id_type)]
        for record in finished:
            if record.num_quarantined:
                parts.append(read_parquet(self._shard_quarantine_path(side, record.name)))
        merged = pa.concat_tables(parts).sort_by("entity_id")
        return write_parquet(merged, self.quarantine_path(side), quarantine_schema(entity_id_type))

    def read_quarantine(self, side: Side, columns: Sequence[str] | None = None) -> pa.Table:
        """The merged quarantine of a side; no rows when nothing was merged yet."""
        return read_parquet(self.quarantine_path(side), columns, schema=quarantine_schema(pa.string()))

    def read_postponed(self, side: Side) -> pa.Table:
        """The postponed entities of a side, as `POSTPONED`; no rows where nobody is."""
        return read_parquet(self.postponed_path(side), schema=POSTPONED)

    def require_every_entity(self, side: Side, entity_ids: pa.ChunkedArray) -> None:
        """Each entity has a record that is not stale, or else a row in quarantine or in postponed, once.

        Who has a stale record is in one of these too; of the postponed those have one who are said to have a text.

        `entity_ids` are those of the side's table as the run sees it, each once. Raises WorkspaceError, which names
        the first ids, where it is not so.
        """
        parts: dict[str, list[pa.Array]] = {"fresh": [], "stale": []}
        for batch in self.iter_knowledge(side, ("entity_id", "is_stale")):
            parts["fresh"].append(batch["entity_id"].filter(pc.invert(batch["is_stale"])))
            parts["stale"].append(batch["entity_id"].filter(batch["is_stale"]))
        ids = {name: pa.chunked_array(chunks, entity_ids.type) for name, chunks in parts.items()}
        ids["quarantined"] = self.read_quarantine(side, ["entity_id"])["entity_id"]
        postponed = self.read_postponed(side)
        ids["waiting"] = postponed.filter(postponed["has_text"])["entity_id"]
        ids["unasked"] = postponed.filter(pc.invert(postponed["has_text"]))["entity_id"]
        ids = {name: part.cast(entity_ids.type) if not len(part) else part for name, part in ids.items()}
        rows = {name: pc.index_in(part, value_set=entity_ids) for name, part in ids.items()}
        num_fresh, num_stale, num_quarantined, num_waiting, num_without_text = (
            np.bincount(part.drop_null().to_numpy(), minlength=len(entity_ids)) for part in rows.values()
        )
        num_places = num_fresh + num_quarantined + num_waiting + num_without_text
        faults = {
            "neither in its knowledge nor in quarantine": (num_places == 0) | (num_waiting > num_stale),
            "there more than once": (num_places > 1) | (num_stale > 1),
            "there with an old text but neither in quarantine nor postponed": num_stale > num_quarantined + num_waiting,
        }
        found = [(fault, entity_ids.filter(pa.array(is_so))) for fault, is_so in faults.items()]
        found += [("not in the table", ids[name].filter(part.is_null())) for name, part in rows.items()]
        problems = []
        for fault, some in found:
            if len(some):
                named = ", ".join(map(str, some[:NUM_NAMED])) + (", ..." if len(some) > NUM_NAMED else "")
                problems.append(f"{len(some)} are {fault} ({named})")
        if problems:
            raise WorkspaceError(
                f"{self.root}: of {len(entity_ids)} {side}s {'; '.join(problems)}. Nothing is published. Run the same "
                "command again: what is lost is planned and written again, the rest stays. If this comes back, delete "
                "the folder."
            )

    def finish(self, is_held: bool = False) -> None:
        """Write `_SUCCESS`, in place of `_HELD` if that was there. Call it last: nothing may change afterwards.

        A run that `is_held` gets `_HELD` instead: nothing builds on it until it is finished after all.
        """
        if not self.manifest_path.exists():
            raise WorkspaceError(f"{self.manifest_path} is missing; a run saves its manifest before it is finished.")
        write_text("", self.held_path if is_held else self.success_path)
        if not is_held:
            self.held_path.unlink(missing_ok=True)

    def _shards_folder(self, side: Side) -> Path:
        return self.root / "shards" / side

    def _shard_record_path(self, side: Side, name: str) -> Path:
        return self._shards_folder(side) / f"{name}.json"

    def _shard_quarantine_path(self, side: Side, name: str) -> Path:
        return self._shards_folder(side) / f"{name}.parquet"
