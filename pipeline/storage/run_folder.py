"""One run on disk: the paths of its files, reading them, and checking that they are whole."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage import parquet
from laserbatch.pipeline.storage.atomic import require_sha256, write_text
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.figures import FeatureFigures, ShardRecord
from laserbatch.pipeline.storage.manifest import RunManifest, manifest_values
from laserbatch.pipeline.storage.quarantine import QuarantineRow, quarantine_schema, quarantine_table
from laserbatch.pipeline.storage.side_shards import SideShards

FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # names of runs and experiments
RUN_ID = re.compile(r"\d{4}-\d\d-\d\d-[0-9a-f]{8}(-\d+)?")  # as `make_run_id` makes it
POSTPONED = pa.schema(
    [
        pa.field("entity_id", pa.string(), nullable=False),  # or an integer, as in the input table
        pa.field("reason", pa.string(), nullable=False),  # "not-due", "budget", "evidence"
        pa.field("has_text", pa.bool_(), nullable=False),  # whether it keeps an earlier text
        pa.field("score", pa.float64()),  # the value of a new text; null for the reason "evidence"
        pa.field("since", pa.date32(), nullable=False),  # date of its text; without one, of the first night it waited
    ]
)


@dataclass(frozen=True)
class RunFolder:
    """The layout of one run. `plain` is a folder of the same layout for the texts of plain decoding."""

    root: Path

    @property
    def run_id(self) -> str:
        return self.root.name

    @property
    def workspace(self) -> Path:
        """The folder of the workspace that the run is in."""
        return self.root.parent.parent

    @property
    def date(self) -> str:
        """The date of the night, with which the run's id begins: YYYY-MM-DD, so that dates compare as text."""
        return self.run_id[:10]

    @property
    def settings_hash(self) -> str:
        """The part of the settings' hash that is in the run's id."""
        return self.run_id[11:19]

    @property
    def manifest_path(self) -> Path:
        return self.root / "manifest.json"

    @property
    def report_path(self) -> Path:
        return self.root / "report.html"

    @property
    def events_path(self) -> Path:
        """The file of the run's events, over all attempts, one JSON object per line; it grows while it is read."""
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
    def _owner(self) -> "RunFolder":
        """The run itself, also of its folder `plain`."""
        return RunFolder(self.root.parent) if self.root.name == "plain" else self

    @property
    def is_finished(self) -> bool:
        """Whether `_SUCCESS` is there: every other file is then final."""
        return self.success_path.exists()

    @property
    def is_held(self) -> bool:
        """Whether everything is written, but a gate blocks publication: `_HELD` is there in place of `_SUCCESS`."""
        return self.held_path.exists() and not self.is_finished

    @property
    def finished_ns(self) -> int:
        """When the run was finished or held, in nanoseconds since 1970; for earlier versions the file's own time."""
        marker = self.success_path if self.is_finished else self.held_path
        text = marker.read_text(encoding="utf-8").strip()
        return int(text) if text.isdecimal() else marker.stat().st_mtime_ns

    def knowledge_folder(self, side: Side) -> Path:
        """`knowledge/<side>`, a folder that holds only Parquet files, one per shard."""
        return self.root / "knowledge" / side

    def features_folder(self, side: Side) -> Path:
        """`features/<side>`, a folder that holds only Parquet files, in the order of ids."""
        return self.root / "features" / side

    def features_path(self, side: Side) -> Path:
        """The folder of a side's features, or the single file of a run by an earlier version."""
        file = self.root / "features" / f"{side}.parquet"
        return file if file.is_file() else self.features_folder(side)

    def require_features(self, features: Mapping[Side, FeatureFigures], compare_bytes: bool = False) -> None:
        """Raise WorkspaceError if files of features, their rows or, if compared, bytes differ from the manifest."""
        for side, figures in features.items():
            listed, files = {part.file for part in figures.parts}, parquet.parquet_files(self.features_path(side))
            actual = {path.relative_to(self.root).as_posix() for path in files}
            expected = f"expected the {len(listed)} files of {side} features that {self._owner.manifest_path} lists"
            again = "Restore it from a copy, or make features again: "
            again += f"`laserbatch nightly --date {self._owner.date} --force`."
            if missing := sorted(listed - actual):
                raise WorkspaceError(f"{self.root / missing[0]} is missing; {expected}. {again}")
            if added := sorted(actual - listed):
                raise WorkspaceError(f"{self.root / added[0]} is not a file of the run; {expected}. Move it away.")
            for part in figures.parts:
                if (num_rows := parquet.num_rows_of(path := self.root / part.file)) != part.num_rows:
                    rows = f"{path} has {num_rows} rows, not {part.num_rows}"
                    raise WorkspaceError(f"{rows}; {expected}. {again}")
                if compare_bytes:
                    self._require_sha256(path, part.sha256)

    def require_centroids(self, side: Side, figures: FeatureFigures) -> None:
        """Raise WorkspaceError if the file of centroids is missing or differs from what the run recorded, if it did."""
        if figures.centroids_sha256 is not None:
            self._require_sha256(self.centroids_path(side), figures.centroids_sha256)

    def require_whole(self, compare_bytes: bool = False) -> None:
        """Raise WorkspaceError if a file with its entities is missing or, if compared, differs from what it wrote."""
        manifest = self.load_manifest()
        for side in manifest.generation.sides:
            self.finished_quarantine(side)
            self.finished_postponed(side)
        for side in SIDES:
            for path, num_rows in self.shards(side).lost():
                raise WorkspaceError(
                    f"{path} is missing; expected the texts of {num_rows} {side}s. Restore it from a copy, or "
                    f"move {self.root} away and run {self.date} again (`laserbatch nightly`; for lists `recommend`)."
                )
            if compare_bytes:
                self.require_unchanged_texts(side)
        self.require_features(manifest.features, compare_bytes)
        for side, figures in manifest.features.items():
            self.require_centroids(side, figures)

    def require_unchanged_texts(self, side: Side) -> None:
        """Raise WorkspaceError if a file of texts differs from what the run wrote, or does not belong to the run."""
        checksums = self.shards(side).checksums()
        for path in parquet.parquet_files(self.knowledge_folder(side)):
            if path not in checksums:
                raise WorkspaceError(
                    f"{path} is not listed in {self.root / 'shards' / side}. Restore that folder from a copy, or move "
                    "the file away: its texts are then written again."
                )
            self._require_sha256(path, checksums[path])

    def _require_sha256(self, path: Path, sha256: str) -> None:
        require_sha256(path, sha256, f", or move {self._owner.root} away and run {self._owner.date} again")

    def centroids_path(self, side: Side) -> Path:
        """The file of the centroids of the clusters that a side's features name."""
        return self.root / "features" / f"{side}-centroids.parquet"

    def quarantine_path(self, side: Side) -> Path:
        """The file of a side's quarantine, merged from all shards."""
        return self.root / "quarantine" / f"{side}.parquet"

    def postponed_path(self, side: Side) -> Path:
        """The file of the side's entities that get no new text tonight, and why."""
        return self.root / "postponed" / f"{side}.parquet"

    def load_manifest(self) -> RunManifest:
        """The run's manifest. Raises WorkspaceError if it is missing, damaged or of another version."""
        return RunManifest.load(self.manifest_path)

    @property
    def previous_run_id(self) -> str | None:
        """The run that this one was built on; also None if the manifest is missing or damaged."""
        return next(iter(self.ancestor_run_ids), None)

    @property
    def ancestor_run_ids(self) -> list[str]:
        """The run that this one was built on, the run that that one was built on, and so on, also if they are removed.

        Empty if the manifest is missing or damaged; only the first if an earlier version wrote the manifest.
        """
        manifest = unless_damaged(lambda: manifest_values(self.manifest_path), {})
        return manifest.get("ancestor_run_ids") or list(filter(None, [manifest.get("previous_run_id")]))

    def iter_knowledge(self, side: Side, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield columns of all knowledge of a side, in shard order, one batch in memory at a time."""
        return parquet.iter_parquet(self.knowledge_folder(side), columns)

    def shards(self, side: Side) -> SideShards:
        return SideShards(self.root, side)

    def merge_quarantine(
        self,
        side: Side,
        finished: Iterable[ShardRecord],
        more: Iterable[QuarantineRow],
        entity_id_type: pa.DataType,
    ) -> parquet.WrittenFile:
        """Merge quarantine rows of finished shards, and `more` rows of no shard, into one file, sorted by entity."""
        failed = [self.shards(side).quarantine_path(record.name) for record in finished if record.num_quarantined]
        merged = pa.concat_tables([quarantine_table(more, entity_id_type), *map(parquet.read_parquet, failed)])
        merged = merged.sort_by("entity_id")
        return parquet.write_parquet(merged, self.quarantine_path(side), quarantine_schema(entity_id_type))

    def read_quarantine(self, side: Side, columns: Sequence[str] | None = None) -> pa.Table:
        """The merged quarantine of a side; no rows if it was not merged yet."""
        return parquet.read_parquet(self.quarantine_path(side), columns, schema=quarantine_schema(pa.string()))

    def read_postponed(self, side: Side) -> pa.Table:
        """The postponed entities of a side, as `POSTPONED`; no rows if there are none."""
        return parquet.read_parquet(self.postponed_path(side), schema=POSTPONED)

    def finished_quarantine(self, side: Side) -> pa.Table:
        """The quarantine of a finished run. Raises WorkspaceError if its number of rows is not that of the manifest."""
        return self._as_counted(side, self.read_quarantine(side), self.quarantine_path(side), "num_quarantined")

    def finished_postponed(self, side: Side) -> pa.Table:
        """The postponed entities of a finished run. Raises WorkspaceError if their number is not the manifest's."""
        counts = "num_waiting", "num_without_text"
        return self._as_counted(side, self.read_postponed(side), self.postponed_path(side), *counts)

    def _as_counted(self, side: Side, rows: pa.Table, path: Path, *counts: str) -> pa.Table:
        figures = self.load_manifest().generation.sides.get(side)
        if figures is not None and rows.num_rows != (num_rows := sum(getattr(figures, name) for name in counts)):
            there = f"has {rows.num_rows} rows" if path.exists() else "is missing"
            expected = f"expected {num_rows} rows, as {self.manifest_path} counts"
            raise WorkspaceError(f"{path} {there}; {expected}. Restore it from a copy.")
        return rows

    def finish(self, is_held: bool = False) -> None:
        """Write `_SUCCESS`, and remove `_HELD` if it is there. Call it last: nothing may change afterwards.

        A run that `is_held` gets `_HELD` instead: nothing builds on it until it is finished.
        """
        if not self.manifest_path.exists():
            raise WorkspaceError(f"{self.manifest_path} is missing; a run saves its manifest before it is finished.")
        others = map(RunFolder, self.root.parent.glob(f"{self.date}-*"))
        before = [other.finished_ns + 1 for other in others if other.is_finished or other.is_held]
        finished_ns = max([time.time_ns(), *before])  # the clock may have been set back, or be of another machine
        write_text(f"{finished_ns}\n", self.held_path if is_held else self.success_path)
        if not is_held:
            self.held_path.unlink(missing_ok=True)
