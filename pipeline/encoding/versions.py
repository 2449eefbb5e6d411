"""Features as they were known at any moment: all versions from finished runs, to be joined to the rows of a log.

The texts of a night know all data up to the end of its date, so they are valid from the day after. A row of a log may
see the versions that are valid on its day, and gets the newest of them.
"""

import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laserbatch.pipeline.encoding.schema import LEVELS, MOMENT, days_valid, moments, vector_column, vectors_of
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.manifest import RunManifest
from laserbatch.pipeline.storage.parquet import iter_parquet, parquet_files
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.retrieval_pools.ids import rows_among

_NEVER = np.iinfo(np.int32).max  # a day after all others
_DAY_BITS = 20  # bits of a key for days since 1970: enough up to the year 4840


@dataclass(frozen=True)
class Versions:
    """All versions of a side's features, sorted by entity, then by time."""

    files: Mapping[str, Path]  # the feature tables that were read, by run id
    id_column: str
    ids: pa.Array  # ids of the entities, distinct and sorted
    entities: np.ndarray  # int64[n], places in `ids`
    valid_from: np.ndarray  # int32[n], days since 1970 (UTC)
    run_ids: pa.Array  # string[n], the run that wrote the text
    codes: np.ndarray  # int32 (n, num_levels), -1 if they cannot be compared with the newest run's
    rows: np.ndarray  # int64[n], rows of `vectors`
    vectors: np.ndarray  # float32 (num_read, dim), mapped from a file

    def of(self, ids: pa.Array, days: np.ndarray) -> np.ndarray:
        """The newest version of each entity that is valid on a day since 1970: int64[n]; -1 if there is none.

        Raises WorkspaceError if the ids have another type than those of the features.
        """
        if ids.type != self.ids.type:
            raise WorkspaceError(
                f"found ids of type {ids.type}, but the features have ids of type {self.ids.type}. Write them in the "
                "type that they had when the runs read them."
            )
        entities = rows_among(ids, self.ids)
        keys = _keys(self.entities, self.valid_from)
        newest = np.searchsorted(keys, _keys(entities, days), side="right") - 1
        exists = (newest >= 0) & (entities >= 0)
        exists[exists] = self.entities[newest[exists]] == entities[exists]
        return np.where(exists, newest, -1)

    def fields(self, prefix: str = "") -> list[pa.Field]:
        """The columns of a version, without the id of its entity."""
        codes = dict.fromkeys(LEVELS, pa.int32())
        vector = pa.list_(pa.float32(), self.vectors.shape[1])
        kinds = {"vector": vector, **codes, "run_id": pa.string(), "valid_from": MOMENT}
        return [pa.field(f"{prefix}{name}", kind) for name, kind in kinds.items()]

    def columns(self, versions: np.ndarray) -> list[pa.Array]:
        """The columns of `fields` for some versions, int64[n], as `of` returns them; -1 gives null."""
        is_null = versions < 0
        known = versions[~is_null]
        vectors = np.zeros((len(versions), self.vectors.shape[1]), np.float32)
        codes, days = np.full((len(versions), len(LEVELS)), -1, np.int32), np.full(len(versions), -1, np.int32)
        vectors[~is_null] = self.vectors[self.rows[known]]
        codes[~is_null], days[~is_null] = self.codes[known], self.valid_from[known]
        return [
            vector_column(vectors, is_null),
            *(pa.array(of_level, mask=of_level < 0) for of_level in codes.T),
            self.run_ids.take(pa.array(versions, mask=is_null)),
            moments(days),
        ]

    def valid_to(self) -> np.ndarray:
        """The day on which each version was replaced, or on which features lack its entity, which left the tables.

        Returns int32[n], days since 1970; -1 for those still valid. Reads the ids in all tables.
        """
        run_days = days_valid(pa.array(list(self.files)))
        days = np.append(np.unique(run_days), _NEVER)
        ends = np.full(len(self.entities), _NEVER)
        has_next = np.append(self.entities[1:] == self.entities[:-1], False)[: len(ends)]
        ends[has_next] = self.valid_from[1:][has_next[:-1]]
        keys, is_seen = _keys(self.entities, self.valid_from), np.zeros(len(ends), bool)
        for day, path in sorted(zip(run_days.tolist(), self.files.values(), strict=True), reverse=True):
            for batch in iter_parquet(path, [self.id_column, "run_id"]):
                held = _keys(rows_among(batch[self.id_column], self.ids), days_valid(batch["run_id"]))
                places = np.minimum(np.searchsorted(keys, held), len(keys) - 1)
                places = places[(keys[places] == held) & ~is_seen[places]]  # no later run has these versions
                ends[places] = np.minimum(ends[places], days[np.searchsorted(days, day, side="right")])
                is_seen[places] = True
        return np.where(ends == _NEVER, -1, ends).astype(np.int32)


@contextmanager
def feature_versions(runs: Sequence[RunFolder], of_plain: bool = False) -> Iterator[dict[Side, Versions]]:
    """Yield the versions of both sides in the features of `runs` (the newest last) with the newest run's encoder.

    Versions have no codes if their run has another codebook than the newest run, or if the newest run does not build on
    theirs, since its codebook may have grown differently. `of_plain`: read the features of plain texts. Runs whose
    manifest is damaged are left out. Raises WorkspaceError if no run has features.
    """
    manifests = {run: manifest for run in runs if (manifest := unless_damaged(run.load_manifest)) is not None}
    with tempfile.TemporaryFile() as user_file, tempfile.TemporaryFile() as item_file:
        versions = {}
        for side, scratch in zip(SIDES, (user_file, item_file), strict=True):
            files = {run.run_id: (run.plain if of_plain else run).features_path(side) for run in manifests}
            features = {
                run.run_id: figures
                for run, manifest in manifests.items()
                if (figures := manifest.features.get(side))
                and (not of_plain or files[run.run_id].exists())  # not every run has plain texts
            }
            if not features:
                kind, first = (" of plain texts", ", with night.compare_with_plain,") if of_plain else ("", "")
                raise WorkspaceError(f"no run has features{kind} of {side}s. Run `laserbatch nightly`{first} first.")
            newest = list(features.values())[-1]
            features = {run_id: figures for run_id, figures in features.items() if figures.encoder == newest.encoder}
            compared = _built_on(list(features)[-1], manifests.values())
            other_codes = {run_id for run_id, figures in features.items() if figures.codebook != newest.codebook}
            other_codes |= features.keys() - compared
            for run, manifest in manifests.items():
                if run.run_id in features:
                    folder, recorded = (run.plain, manifest.plain_features) if of_plain else (run, manifest.features)
                    folder.require_features({side: recorded[side]} if side in recorded else {}, compare_bytes=True)
            versions[side] = read_versions({run_id: files[run_id] for run_id in features}, side, scratch, other_codes)
        yield versions


def _built_on(run_id: str, manifests: Iterable[RunManifest]) -> set[str]:
    """The ids of a run and of all runs that it builds on, directly or indirectly."""
    previous = {manifest.run_id: manifest.origin.previous_run_id for manifest in manifests}
    chain: set[str] = set()
    current: str | None = run_id
    while current is not None and current not in chain:
        chain.add(current)
        current = previous.get(current)
    return chain


def read_versions(
    files: Mapping[str, Path], side: str, scratch: BinaryIO, other_codes: Collection[str] = ()
) -> Versions:
    """Read all versions in the feature tables of runs, whose vectors are of one encoder.

    `files` has the feature table of the side by run id, a file or a folder. Of two versions of a day the later table's
    counts. Codes of `other_codes` cannot be compared with those of the other runs, or are missing. Vectors are written
    to the file `scratch`; ids and a few numbers per version are in memory.
    """
    parts: list[tuple[pa.Array, pa.Array, np.ndarray]] = []
    # Key 0: runs whose codes can be compared; key 1: all runs.
    runs_read = {key: pa.array([run for run in files if (run in other_codes) <= key], pa.string()) for key in (0, 1)}
    dim = 0
    for run_id, path in files.items():
        has_codes = run_id not in other_codes
        no_rows = pa.RecordBatch.from_pylist([], pq.read_schema(parquet_files(path)[0]))  # types, if no run has rows
        columns = [f"{side}_id", "run_id", *(LEVELS if has_codes else ()), "vector"]
        for batch in chain([no_rows], iter_parquet(path, columns)):
            # Versions of an earlier run are read from its own table if that is there and its codes can be compared.
            run_ids = batch["run_id"]
            is_new = pc.or_(pc.equal(run_ids, run_id), pc.invert(pc.is_in(run_ids, value_set=runs_read[not has_codes])))
            batch = batch.filter(is_new)
            vectors = vectors_of(batch)
            dim = vectors.shape[1]
            scratch.write(vectors.data)
            codes = np.full((len(batch), len(LEVELS)), -1, np.int32)
            if has_codes:
                codes = np.column_stack([batch[name].to_numpy() for name in LEVELS])
            parts.append((batch[f"{side}_id"], batch["run_id"], codes))
    scratch.flush()
    all_ids = pa.chunked_array([ids for ids, _, _ in parts]).combine_chunks()
    all_runs = pa.chunked_array([runs for _, runs, _ in parts]).combine_chunks()
    ids = pc.unique(all_ids)
    ids = ids.take(pc.sort_indices(ids))
    entities = rows_among(all_ids, ids)
    days = days_valid(all_runs)
    keys = _keys(entities, days)
    order = np.argsort(keys, kind="stable")
    order = order[np.append(keys[order][1:] != keys[order][:-1], True)[: len(order)]]
    shape = (len(keys), dim)
    return Versions(
        files=files,
        id_column=f"{side}_id",
        ids=ids,
        entities=entities[order],
        valid_from=days[order],
        run_ids=all_runs.take(pa.array(order)),
        codes=np.concatenate([codes for _, _, codes in parts])[order],
        rows=order,
        vectors=np.memmap(scratch, np.float32, "r", shape=shape) if len(keys) else np.empty(shape, np.float32),
    )


def _keys(entities: np.ndarray, days: np.ndarray) -> np.ndarray:
    """Numbers that sort by entity, then by day: int64[n]."""
    return (entities << _DAY_BITS) | np.clip(days, 0, 2**_DAY_BITS - 1)
