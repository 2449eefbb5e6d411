"""Feature tables of a run, read, checked and aligned with the entities.

The check of provenance is here: a feature made from a text of a later date than the run's has seen the test period.
"""

import dataclasses
import datetime
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laserbatch.ctr.settings import CtrError
from laserbatch.pipeline.encoding.schema import check_feature_schema, run_date

SIDES = ("user", "item")
FeatureSet = dict[str, pa.Table]  # features of both sides, as `pipeline.encoding.schema` describes them


@dataclass(frozen=True)
class SideVectors:
    """Features of one side, one row an entity of the entity table."""

    vectors: np.ndarray  # float32 (num_entities, dim), zeros where there is none
    cluster_codes: np.ndarray  # int64 (num_entities,): 0 none, then 1 + cluster id
    num_cluster_codes: int  # codes are below this


def read_feature_set(folder: Path) -> FeatureSet:
    """Read `user.parquet` and `item.parquet`. Raises CtrError when one is not there, or of another version."""
    tables = {}
    for side in SIDES:
        path = folder / f"{side}.parquet"
        if not path.is_file():
            raise CtrError(f"{path} is not there; encode the run first with `laserbatch encode`")
        with pq.ParquetFile(path) as file:
            try:
                check_feature_schema(file.schema_arrow, side)
            except ValueError as error:
                raise CtrError(f"{path}: {error}") from None
            # In batches: vectors of one chunk could not hold more than 2^31 numbers.
            tables[side] = pa.Table.from_batches(file.iter_batches(), file.schema_arrow)
    return tables


def check_provenance(features: FeatureSet, as_of: datetime.date) -> None:
    """Refuse features whose text may have seen interactions after `as_of`: a row's run is of a later or no date."""
    for side, table in features.items():
        for run_id in pc.unique(table["run_id"]).to_pylist():
            try:
                made_on = run_date(run_id)
            except ValueError as error:
                raise CtrError(f"{side} features: {error}") from None
            if made_on > as_of:
                raise CtrError(
                    f"{side} features of run {run_id} were made from interactions up to {made_on}, later than the "
                    f"{as_of} on which training ends: the test period would leak into training; use the features of "
                    f"a run of {as_of} or earlier"
                )


def align(features: pa.Table, side: str, entity_ids: pa.Array) -> SideVectors:
    """A side's feature table in the order of the ids of the entity table, vectors as they are."""
    ids = features[f"{side}_id"].combine_chunks()
    if ids.type != entity_ids.type:
        raise CtrError(f"{side} features have ids of type {ids.type}, the table of {side}s {entity_ids.type}")
    positions = pc.index_in(entity_ids, ids)
    has_vector = pc.is_valid(positions).to_numpy(zero_copy_only=False)
    taken = positions.drop_null().to_numpy()
    column = features["vector"].combine_chunks()
    raw = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
    clusters = features["cluster_id"].to_numpy()
    vectors = np.zeros((len(entity_ids), raw.shape[1]), np.float32)
    vectors[has_vector] = raw[taken]
    cluster_codes = np.zeros(len(entity_ids), np.int64)
    cluster_codes[has_vector] = 1 + clusters[taken]
    return SideVectors(vectors, cluster_codes, 2 + int(clusters.max(initial=0)))


def reduce_vectors(
    sides: dict[str, SideVectors], is_trained: dict[str, np.ndarray], max_dim: int
) -> dict[str, SideVectors]:
    """Centre each side's vectors and keep their coordinates on the largest principal directions of both together.

    One basis for both sides, so that what a user's text and an item's text share stays comparable. Entities of training
    rows alone (`is_trained`, bool (num_entities,) of each side) decide means and directions. Vectors become float32
    (num_entities, min(max_dim, dim)), of mean square one; rows of zeros stay zeros.
    """
    centred, fitted = {}, []
    for side, aligned in sides.items():
        has_vector = (aligned.vectors != 0).any(axis=1)
        of_training = aligned.vectors[has_vector & is_trained[side]]
        mean = of_training.mean(axis=0) if len(of_training) else np.zeros(aligned.vectors.shape[1], np.float32)
        centred[side] = np.where(has_vector[:, None], aligned.vectors - mean, 0)
        fitted.append((of_training - mean).astype(np.float64) / np.sqrt(max(len(of_training), 1)))
    if len({rows.shape[1] for rows in fitted}) > 1:
        raise CtrError(
            f"vectors of users and items differ in length: {[rows.shape[1] for rows in fitted]}; encode both again"
        )
    variances, directions = np.linalg.eigh(sum(rows.T @ rows for rows in fitted) / len(fitted))
    variances, directions = variances[::-1][:max_dim], directions[:, ::-1][:, :max_dim]  # largest first
    # The signs of eigenvectors are free; fixed here, so that the same vectors give the same coordinates.
    directions = directions * np.sign(directions[np.abs(directions).argmax(axis=0), np.arange(directions.shape[1])])
    basis = directions / np.sqrt(max(variances.mean(), 1e-12))
    return {
        side: dataclasses.replace(sides[side], vectors=(rows @ basis).astype(np.float32))
        for side, rows in centred.items()
    }
