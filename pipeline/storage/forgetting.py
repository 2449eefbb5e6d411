"""Removing entities from a finished run: their rows in all Parquet files, and the counts and samples in JSON files.

Each file changes in one step, and counts are made anew from the files, so repeating it after a death in between gives
the same bytes. The entity of a row is in `user_id` or `item_id`, or in `entity_id` if the path names a side.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.atomic import paths_below, read_json, sha256_file, write_json
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.parquet import iter_parquet, read_parquet, write_parquet
from laserbatch.pipeline.storage.quarantine import count_reasons
from laserbatch.pipeline.storage.run_folder import RunFolder

Ids = Mapping[Side, frozenset[str]]  # as text, whatever their type in a file
RECEIPTS = "forgotten"  # folder of a workspace
OUT_OF_REACH = 1e3  # coordinates of an empty cluster's centroid, far from all vectors, which have length 1


def unfinished_receipts(root: Path) -> list[Path]:
    """Receipts in a workspace of commands that were killed and not repeated; damaged receipts are skipped."""
    paths = sorted((root / RECEIPTS).glob("*.json"))
    return [path for path in paths if not unless_damaged(partial(read_json, path), {}).get("is_done", True)]


def rows_of(root: Path, ids: Ids) -> tuple[dict[str, int], dict[Side, set[str]]]:
    """The number of rows of some entities, by file below a folder, and the ids that were found.

    Raises WorkspaceError, which names the file, if one cannot be read.
    """
    num_rows: dict[str, int] = {}
    seen: dict[Side, set[str]] = {side: set() for side in SIDES}
    for path in sorted(path for path in paths_below(root) if path.suffix == ".parquet"):
        for column, side in _owners(path, root):
            for batch in iter_parquet(path, [column]) if ids[side] else ():
                matched = batch[column].filter(is_of(batch[column], ids[side]))
                if len(matched):
                    name = path.relative_to(root).as_posix()
                    num_rows[name] = num_rows.get(name, 0) + len(matched)
                    seen[side].update(map(str, matched.unique().to_pylist()))
    return num_rows, seen


def is_of(column: pa.Array | pa.ChunkedArray, ids: frozenset[str]) -> pa.Array | pa.ChunkedArray:
    """Whether each id of a column is among `ids`."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return pc.is_in(column, value_set=_of_type(ids, column.type))


@lru_cache(maxsize=8)  # for many ids this takes longer than a batch
def _of_type(ids: frozenset[str], kind: pa.DataType) -> pa.Array:
    """The ids as values of a column's type, without those that it cannot have."""
    keys = sorted(ids)
    if pa.types.is_integer(kind):
        limits = np.iinfo(kind.to_pandas_dtype())
        keys = [int(key) for key in keys if key.removeprefix("-").isdecimal() and str(int(key)) == key]
        keys = [number for number in keys if limits.min <= number <= limits.max]
    return pa.array(keys, kind)


def forget_in_run(run: RunFolder, files: Mapping[str, int], ids: Ids) -> int:
    """Remove entities from a run's files; returns the number of the report's samples that were theirs.

    `files` are those that `rows_of` returned, now or in an attempt that died. The report must then be drawn anew.
    """
    for side in SIDES:
        for folder in (run, run.plain) if ids[side] else ():
            # A centroid whose code no other entity has may be made only of these entities' vectors. Centroids of unused
            # codes are moved too: a text may have left its cluster, and plain texts share these codes.
            if (read := _Codebook.read(folder, side)) is not None:
                read.move(~read.has_code(ids[side], of_others=True))
    for name in files:
        _take_rows_out(run.root / name, run.root, ids)
    manifest, num_samples = read_json(run.manifest_path), 0
    for folder, texts in ((run, "sides"), (run.plain, "plain")):
        is_plain = texts == "plain"
        names = [name.removeprefix("plain/") for name in files if name.startswith("plain/") == is_plain]
        sums = {name: (sha256_file(path := folder.root / name), pq.read_metadata(path).num_rows) for name in names}
        for path in [*folder.root.glob("shards/*/*.json"), *folder.root.glob("plan/*.json")]:
            described = read_json(path)
            _update(described, sums)
            if path.parent.name == "plan":
                _recount_plan(described, folder)
            _write_if_changed(described, path)
        for side, figures in manifest.get(texts, {}).items():
            shown = figures.get("samples", [])
            figures["samples"] = [sample for sample in shown if str(sample["entity_id"]) not in ids[side]]
            num_samples += len(shown) - len(figures["samples"])
            _recount_side(figures, folder, side)
        of_folder = [part for name, part in manifest.items() if (name in ("plain", "plain_features")) == is_plain]
        _update(of_folder, sums)
    for side, audited in ((manifest.get("audit") or {}).get("sides") or {}).items():
        shown = audited["cases"]
        audited["cases"] = [case for case in shown if str(case["entity_id"]) not in ids[side]]
        num_samples += len(shown) - len(audited["cases"])
    _write_if_changed(manifest, run.manifest_path)
    _sum_centroids(run, [side for side in SIDES if ids[side]])
    return num_samples


def _sum_centroids(run: RunFolder, sides: Iterable[Side]) -> None:
    """Update the recorded checksums of the files of centroids, unless the manifest is damaged."""
    manifest = unless_damaged(partial(read_json, run.manifest_path), {})
    for name, folder in (("features", run), ("plain_features", run.plain)):
        for side in sides:
            figures, path = manifest.get(name, {}).get(side, {}), folder.centroids_path(side)
            if figures.get("centroids_sha256") and path.exists():
                figures["centroids_sha256"] = sha256_file(path)
    if manifest:
        _write_if_changed(manifest, run.manifest_path)


def _owners(path: Path, root: Path) -> list[tuple[str, Side]]:
    """The columns of a file with the entity of each row, each with its side."""
    try:
        names = pq.read_schema(path).names
    except (pa.ArrowException, OSError) as error:
        raise WorkspaceError(
            f"{path} cannot be read ({error}), so it is unknown whose rows it has; restore it from a copy, or remove it"
        ) from None
    owners: list[tuple[str, Side]] = [(f"{side}_id", side) for side in SIDES if f"{side}_id" in names]
    parts = {*path.relative_to(root).parts, path.stem}
    return owners + [("entity_id", side) for side in SIDES if "entity_id" in names and side in parts]


def _take_rows_out(path: Path, root: Path, ids: Ids) -> None:
    owners = _owners(path, root)

    def remaining(batch: pa.RecordBatch) -> pa.RecordBatch:
        for column, side in owners:
            batch = batch.filter(pc.invert(pc.fill_null(is_of(batch[column], ids[side]), False)))
        return batch

    write_parquet((remaining(batch) for batch in iter_parquet(path)), path, pq.read_schema(path))


def leave_clusters(newest_first: Sequence[RunFolder], holders: Iterable[RunFolder], ids: Ids) -> None:
    """Move centroids that only these entities had in one of the `holders` out of reach, in the codebooks of all runs.

    Call it before their rows are removed. A later run takes over the codebook, and there other entities may have the
    same code. If this is killed, the earlier runs, which come last, still show which centroids these are.
    """
    vectors: dict[Side, set[bytes]] = {side: set() for side in SIDES if ids[side]}
    for run, side in product(holders, vectors):
        if (read := _Codebook.read(run, side)) is not None:
            is_their_own = read.has_code(ids[side]) & ~read.has_code(ids[side], of_others=True)
            vectors[side] |= {vector.tobytes() for vector in read.values[is_their_own]}
    for run in newest_first:
        for side, known in vectors.items():
            for folder in (run, run.plain) if known else ():
                if (read := _Codebook.read(folder, side)) is not None:
                    read.move(np.array([row.tobytes() in known for row in read.values]))
        _sum_centroids(run, [side for side, known in vectors.items() if known])


@dataclass(frozen=True)
class _Codebook:
    """The centroids of a run's features, and the codes of its entities."""

    path: Path
    centroids: pa.Table
    values: np.ndarray  # float32 (num_centroids, dim)
    features: pa.Table  # the ids of its entities and their codes by level

    @classmethod
    def read(cls, run: RunFolder, side: Side) -> "_Codebook | None":
        features, path = run.features_path(side), run.centroids_path(side)
        if not path.exists() or not features.exists():
            return None
        centroids = read_parquet(path)
        vectors = centroids["vector"].combine_chunks()
        values = vectors.flatten().to_numpy().reshape(-1, vectors.type.list_size).copy()
        columns = [f"{side}_id", *pc.unique(centroids["level"]).to_pylist()]
        return cls(path, centroids, values, read_parquet(features, columns))

    def has_code(self, ids: frozenset[str], of_others: bool = False) -> np.ndarray:
        """Whether any of these entities, or of all others, has each centroid's code: bool[num_centroids]."""
        theirs = is_of(self.features[0], ids)
        table = self.features.filter(pc.invert(theirs) if of_others else theirs)
        is_had = np.zeros(len(self.values), bool)
        for level in table.column_names[1:]:
            is_code = pc.is_in(self.centroids["code"], value_set=table[level].combine_chunks())
            is_had |= pc.and_(pc.equal(self.centroids["level"], level), is_code).to_numpy().astype(bool)
        return is_had

    def move(self, is_moved: np.ndarray) -> None:
        """Write the codebook with some centroids out of reach."""
        if not is_moved.any():
            return
        values = np.where(is_moved[:, None], np.float32(OUT_OF_REACH), self.values)
        column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        place = self.centroids.schema.get_field_index("vector")
        moved = self.centroids.set_column(place, self.centroids.schema.field(place), column)
        write_parquet(moved, self.path, self.centroids.schema)


def _update(described: Any, sums: Mapping[str, tuple[str, int]]) -> None:
    """Update the checksum and number of rows of each file that is described anywhere in a JSON value."""
    if isinstance(described, list):
        for part in described:
            _update(part, sums)
    if not isinstance(described, dict):
        return
    name = described.get("file") or described.get("path") or ""
    if name in sums and "sha256" in described:
        described["sha256"], described["num_rows"] = sums[name]
    if "quarantine_sha256" in described:  # the record of a shard, whose quarantine and plan are files of the same name
        _, side, file = name.split("/")
        failed, planned = f"shards/{side}/{file}", f"plan/{side}/{file}"
        if failed in sums:
            described["quarantine_sha256"], described["num_quarantined"] = sums[failed]
        if planned in sums and described.get("info"):
            described["info"]["planned_sha256"] = sums[planned][0]
    for part in described.values():
        _update(part, sums)


def _recount_plan(plan: dict[str, Any], folder: RunFolder) -> None:
    records = [read_json(path) for path in (folder.root / "shards" / plan["side"]).glob("carried*.json")]
    if records:
        plan["num_carried_over"] = sum(record["num_rows"] for record in records)
        plan["num_unpromptable"] = sum(record["num_quarantined"] for record in records)
    postponed = _recount_postponed(plan, folder, plan["side"])
    written = sum(shard["num_rows"] for shard in plan["shards"])
    plan["num_entities"] = plan["num_carried_over"] + plan["num_unpromptable"] + postponed + written


def _recount_postponed(described: dict[str, Any], folder: RunFolder, side: Side) -> int:
    """Count postponed entities again in a plan or a manifest; returns their number."""
    postponed = folder.read_postponed(side)
    described["postponed"] = count_reasons(postponed)
    described["num_waiting"] = pc.sum(postponed["has_text"]).as_py() or 0
    described["num_without_text"] = len(postponed) - described["num_waiting"]
    return len(postponed)


def _recount_side(figures: dict[str, Any], folder: RunFolder, side: Side) -> None:
    """Update a side's numbers of rows in the manifest from its files; counts of the writing itself stay."""

    def num_rows(path: Path) -> int:
        return pq.read_metadata(path).num_rows if path.exists() else 0

    knowledge, written = folder.knowledge_folder(side), {shard["file"] for shard in figures["shards"]}
    figures["num_generated"] = sum(num_rows(folder.root / name) for name in written)
    figures["num_carried_over"] = sum(map(num_rows, knowledge.glob("carried*.parquet")))
    figures["num_stale"] = num_rows(knowledge / "stale.parquet")
    figures["quarantine_reasons"] = count_reasons(folder.read_quarantine(side, ["reason"]))
    figures["num_quarantined"] = sum(figures["quarantine_reasons"].values())
    counted = ("num_generated", "num_carried_over", "num_quarantined")
    figures["num_entities"] = sum(figures[name] for name in counted) + _recount_postponed(figures, folder, side)


def _write_if_changed(described: dict[str, Any], path: Path) -> None:
    if described != json.loads(path.read_bytes()):
        write_json(described, path)
