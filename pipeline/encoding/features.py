"""Making feature rows from knowledge records: each entity's id with a vector and cluster ids ("ID features").

Only the generated text is encoded. A history in front of it would push the knowledge beyond the encoder's limit, and
would bring the history itself into the features.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laserbatch.pipeline.encoding.codebook_file import (
    CLUSTER_SEED,
    CodebookTask,
    Coding,
    KnownCodesTask,
    read_codebook,
)
from laserbatch.pipeline.encoding.feature_parts import PartTask, WrittenPart, part_bounds
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.encoding.text_parts import PartsEncoder, text_parts
from laserbatch.pipeline.encoding.vector_files import NewVectors, VectorFiles, all_rows, rows_between
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage import parquet
from laserbatch.pipeline.storage.atomic import atomic_folder, link_file, sha256_file
from laserbatch.pipeline.storage.figures import FeatureFigures
from laserbatch.pipeline.storage.mapped import mapped_columns
from laserbatch.pipeline.storage.parquet import ROW_GROUP_ROWS
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.retrieval_pools.ids import rows_among

VECTORS_FOLDER = Path("features/.vectors")  # in a run: new vectors, until all features are written
PROVENANCE = ("run_id", "fingerprint")  # these and the entity's id identify the text of a row


@dataclass(frozen=True)
class EarlierFeatures:
    """The features of one side of an earlier run."""

    run: RunFolder
    side: Side
    figures: FeatureFigures

    @property
    def checksums(self) -> dict[Path, str]:
        """The checksum of each file, in the order of ids."""
        return {self.run.root / part.file: part.sha256 for part in self.figures.parts}


@dataclass(frozen=True)
class FeatureWriter:
    """Writes the features of one side of a run's texts, `feature_schema` in the order of ids, and their codebook.

    A few numbers per text are in memory. Ids and provenance are in scratch files. Vectors are in files, which the
    encoder (`PartsEncoder`) reads and writes.
    """

    run: RunFolder
    side: Side
    load_encoder: Callable[[int], PartsEncoder]  # called with the number of texts whose vectors are not known
    encoder_id: str
    settings: EncodingSettings
    fields: Sequence[str] = ()  # as in `TextPart`
    on_batch: Callable[[int], None] = lambda num_texts: None  # called with the number of texts that a batch encoded

    def write(self, earlier: EarlierFeatures | None = None, codes_of: RunFolder | None = None) -> FeatureFigures:
        """Write all files.

        `earlier` are features of the same encoder. Texts that are in them keep their vectors, which encoding again
        would reproduce bit for bit, and their codes, and their codebook is continued. A file with the same texts is
        carried over as it is. Raises WorkspaceError if a file is missing or damaged. `codes_of` is the run whose plain
        texts these are: its codes and codebook are used unchanged.
        """
        side, with_codes = self.side, codes_of or (None if earlier is None else earlier.run)
        if earlier is not None:
            earlier.run.require_features({side: earlier.figures})
            earlier.run.require_centroids(side, earlier.figures)
        scratch = self.run.root / VECTORS_FOLDER
        scratch.mkdir(parents=True, exist_ok=True)
        known = None if earlier is None else earlier.run.features_path(side)
        texts = _Texts.read(self.run.knowledge_folder(side), known, f"{side}_id", scratch)
        if with_codes is not None and codes_of is None:
            codebook = read_codebook(with_codes.centroids_path(side))
            with_codes = with_codes if codebook.is_for(self.settings.num_clusters, CLUSTER_SEED) else None
        encoder = self.load_encoder(texts.num_new)
        vectors, rows = self._encode(texts, earlier, encoder)
        checksums = {} if earlier is None else earlier.checksums
        coding = self._code(rows, vectors, with_codes, checksums, codes_of is not None or not texts.num_new, encoder)
        link_file(coding.codebook, self.run.centroids_path(side))
        with atomic_folder(self.run.features_folder(side), overwrite=True) as parts_folder:
            tasks = self._part_tasks(texts, checksums, rows, vectors, coding, parts_folder)
            written: list[WrittenPart] = encoder.run_tasks(tasks)
        return FeatureFigures(
            parts=tuple(replace(part.file, file=f"features/{side}/{part.file.file}") for part in written),
            dim=vectors.new.dim,
            centroids=self.run.centroids_path(side).relative_to(self.run.root).as_posix(),
            num_clusters=len({code for part in written for code in part.clusters}),
            num_encoded=texts.num_new,
            num_truncated=vectors.new.num_truncated(),
            encoder=self.encoder_id,
            codebook=read_codebook(coding.codebook).key,
            fields=tuple(self.fields),
            centroids_sha256=sha256_file(self.run.centroids_path(side)),
        )

    def _encode(
        self, texts: "_Texts", earlier: EarlierFeatures | None, encoder: PartsEncoder
    ) -> tuple[VectorFiles, Path]:
        """Encode new texts. Returns the vectors of all texts, and the file with their entities (`PartTask.rows`)."""
        part_size = encoder.part_size(texts.num_new) if texts.num_new else 1
        text_rows, places = texts.placed(part_size)
        files = parquet.parquet_files(self.run.knowledge_folder(self.side))
        folder = self.run.root / VECTORS_FOLDER / self._digest(files, text_rows, part_size)
        if earlier is None or texts.num_new:
            dim = encoder.dim
        else:
            dim = pq.read_schema(next(iter(earlier.checksums))).field("vector").type.list_size
        new = NewVectors(folder, part_size, texts.num_new, dim)
        encoder.encode_parts(text_parts(files, text_rows, self.fields, new), self.on_batch)
        rows = folder / "rows.parquet"
        kinds = {"run_id": pa.string(), "fingerprint": pa.string(), "place": pa.int64()}
        schema = pa.schema({f"{self.side}_id": texts.id_type, **kinds})
        parquet.write_parquet(texts.groups(places, schema.names), rows, schema)
        return VectorFiles(new, () if earlier is None else tuple(all_rows(list(earlier.checksums)))), rows

    def _digest(self, files: Sequence[Path], text_rows: np.ndarray, part_size: int) -> str:
        """A digest to name vectors by: of the encoder, the contents of knowledge files, and the texts' rows in them."""
        digest = hashlib.sha256(json.dumps([self.side, self.encoder_id, self.fields, part_size]).encode())
        shards = self.run.shards(self.side).finished()
        for path in files:
            known = shards.get(path.stem)
            digest.update(f"{path.name} {sha256_file(path) if known is None else known.sha256}".encode())
        digest.update(text_rows.tobytes())
        return digest.hexdigest()[:32]

    def _code(
        self,
        rows: Path,
        vectors: VectorFiles,
        with_codes: RunFolder | None,
        checksums: Mapping[Path, str],
        is_final: bool,
        encoder: PartsEncoder,
    ) -> Coding:
        """Make the codebook, from that of the run `with_codes` (None: a new one), unchanged if that one `is_final`.

        `checksums` are those of an earlier run's feature files.
        """
        side, num_clusters, folder = self.side, self.settings.num_clusters, vectors.new.folder
        if with_codes is None:
            coding, task_vectors, before, known = Coding(folder / "codebook.parquet", None), vectors, None, []
        else:
            before = with_codes.centroids_path(side)
            coding = Coding(before if is_final else folder / "codebook.parquet", folder / "codes.npy")
            task_vectors = replace(vectors, earlier=())
            files = parquet.parquet_files(with_codes.features_path(side)) if vectors.new.num_rows else []
            known = [KnownCodesTask(vectors.new, path, checksums.get(path), folder / f"known-{number:05}.parquet")
                     for number, path in enumerate(files)]  # fmt: skip
            encoder.run_tasks(known)
        paths = tuple(task.path for task in known)
        encoder.run_tasks([CodebookTask(side, rows, task_vectors, num_clusters, before, paths, coding)])
        return coding

    def _part_tasks(
        self, texts: "_Texts", sums: Mapping[Path, str], rows: Path, vectors: VectorFiles, coding: Coding, folder: Path
    ) -> Iterator[PartTask]:
        """The tasks that write the files; `sums` are the checksums of an earlier run's files."""
        batches = (next(parquet.iter_range(path, 0, 1, [f"{self.side}_id"]), None) for path in sums)
        ids = [batch[0] for batch in batches if batch is not None]
        first_ids = [of_file[0].as_py() for of_file in ids if of_file.type == texts.id_type]
        bounds = part_bounds(len(texts.order), texts.id_at, first_ids)
        for number, (start, stop) in enumerate(pairwise(bounds)):
            earlier_rows = texts.earlier_rows[start:stop]
            known = earlier_rows[earlier_rows >= 0]
            held = rows_between(vectors.earlier, int(known[0]), int(known[-1]) + 1) if len(known) else ()
            is_whole = len(held) == 1 and held[0] in vectors.earlier and held[0].stop == len(known) == len(earlier_rows)
            is_unchanged = coding.codes is not None and is_whole  # an earlier file has exactly these rows
            of_part, path = VectorFiles(vectors.new, held), folder / f"{number:05}.parquet"
            of_held = {rows_of.path: sums[rows_of.path] for rows_of in held}
            yield PartTask(self.side, rows, start, stop, of_part, coding, of_held, is_unchanged, path)


@dataclass(frozen=True)
class _Texts:
    """The texts of a side: ids and provenance in the order of files, mapped, and the order of ids.

    `earlier_rows`, int64[n], in the order of ids, has each text's row in the earlier features; -1 for new texts.
    Otherwise it ascends.
    """

    rows: pa.Table
    id_type: pa.DataType
    order: np.ndarray
    earlier_rows: np.ndarray

    @classmethod
    def read(cls, knowledge: Path, earlier: Path | None, id_column: str, scratch: Path) -> "_Texts":
        names = ("entity_id", *PROVENANCE)
        batches = ([batch[name] for name in names] for batch in parquet.iter_parquet(knowledge, names))
        rows = pa.table(mapped_columns(batches, scratch, [None] * len(names)), names)
        id_type = pq.read_schema(parquet.parquet_files(knowledge)[0]).field("entity_id").type
        order = pc.sort_indices(rows["entity_id"].chunk(0)).to_numpy().view(np.int64)
        earlier_rows = np.full(len(order), -1) if earlier is None else _known_rows(rows, order, earlier, id_column)
        return cls(rows, id_type, order, earlier_rows)

    @property
    def num_new(self) -> int:
        return int((self.earlier_rows < 0).sum())

    def id_at(self, place: int) -> int | str:
        return self.rows["entity_id"][int(self.order[place])].as_py()

    def placed(self, part_size: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of new texts in the order of encoding, int64[num_new], and the places of all vectors, int64[n].

        The texts of a part are near each other in the files, and sorted by id within the part: so a file of features,
        which is a range of ids, reads one piece of each part. Places, as in `VectorFiles`, are in the order of ids.
        """
        is_new = self.earlier_rows < 0
        rows = self.order[is_new]
        by_file = np.argsort(rows)
        listed = by_file[np.lexsort((by_file, np.arange(len(rows)) // part_size))]
        new_rows = np.empty(len(rows), np.int64)
        new_rows[listed] = np.arange(len(rows))
        places = self.earlier_rows.copy()
        places[is_new] = -1 - new_rows
        return rows[listed], places

    def groups(self, places: np.ndarray, names: list[str]) -> Iterator[pa.Table]:
        """Yield ids, provenance and places of vectors in the order of ids."""
        for start in range(0, len(places), ROW_GROUP_ROWS):
            group = slice(start, start + ROW_GROUP_ROWS)
            columns = self.rows.take(pa.array(self.order[group])).columns
            yield pa.table([*columns, pa.array(places[group])], names)


def changed_rows(table: Path, earlier: Path, id_column: str) -> tuple[np.ndarray, pa.Array]:
    """Compare a feature table with an earlier one: whether each row has a new text, bool[n], and the ids that went."""
    rows = parquet.as_large(parquet.read_parquet(table, [id_column, *PROVENANCE]))
    rows = rows.rename_columns({id_column: "entity_id"})
    before = parquet.as_large(parquet.read_parquet(earlier, [id_column]))[id_column].combine_chunks()
    gone = before.filter(pc.invert(pc.is_in(before, value_set=rows["entity_id"].combine_chunks())))
    return _known_rows(rows, np.arange(rows.num_rows), earlier, id_column) < 0, gone


def _known_rows(rows: pa.Table, order: np.ndarray, earlier: Path, id_column: str) -> np.ndarray:
    """The row of each entity's text in earlier features, in the order of ids: int64[n]; -1 if it is not there.

    A text is identified by its entity, the run that generated it and its prompt. Both tables are sorted by id, so they
    are compared batch by batch.
    """
    known, place, start = np.full(len(order), -1), 0, 0

    def id_at(place: int) -> int | str:
        return rows["entity_id"][int(order[place])].as_py()

    for batch in parquet.iter_parquet(earlier, [id_column, *PROVENANCE]):
        theirs = parquet.as_large(pa.Table.from_batches([batch]))
        if theirs[id_column].type != rows["entity_id"].type:
            break
        end = bisect_right(range(len(order)), theirs[id_column][-1].as_py(), place, key=id_at)
        for first in range(place, end, ROW_GROUP_ROWS):
            ours = pa.array(order[first : min(first + ROW_GROUP_ROWS, end)])
            there = rows_among(rows["entity_id"].take(ours), theirs[id_column])
            matched = np.flatnonzero(there >= 0)
            ours, there = ours.take(pa.array(matched)), there[matched]
            are_same = (pc.equal(rows[name].take(ours), theirs[name].take(pa.array(there))) for name in PROVENANCE)
            is_same = np.logical_and.reduce([same.to_numpy() for same in are_same])
            known[first + matched[is_same]] = start + there[is_same]
        place, start = end, start + batch.num_rows
    return known
