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
    variants: dict[str, dict[str, SideVectors]], is_trained: dict[str, np.ndarray], max_dim: int
) -> dict[str, dict[str, SideVectors]]:
    """Centre vectors, by variant and side, and keep their coordinates on the largest principal directions of them all.

    One basis for all variants and both sides, and one mean a side: so that equal vectors of two variants stay equal,
    and what a user's text and an item's text share stays comparable. Numbers of cluster codes become those of the
    variant that has most, so that networks of all variants have one shape, and from one seed the same weights.
    Entities of training rows alone (`is_trained`, bool (num_entities,) of each side) decide means and directions.
    Vectors become float32 (num_entities, min(max_dim, dim)), of mean square one; rows of zeros stay zeros.
    """
    dims = {aligned.vectors.shape[1] for sides in variants.values() for aligned in sides.values()}
    if len(dims) > 1:
        raise CtrError(f"vectors differ in length: {sorted(dims)}; encode users, items and plain texts by one encoder")
    has_vector, mean, num_codes = {}, {}, {}
    covariance = np.zeros((min(dims), min(dims)))
    for side in SIDES:
        aligned = {name: sides[side] for name, sides in variants.items()}
        has_vector |= {(name, side): (of_one.vectors != 0).any(axis=1) for name, of_one in aligned.items()}
        fitted = [of_one.vectors[has_vector[name, side] & is_trained[side]] for name, of_one in aligned.items()]
        num_fitted = max(sum(map(len, fitted)), 1)
        mean[side] = sum(rows.sum(axis=0) for rows in fitted) / np.float32(num_fitted)
        for rows in fitted:
            centred = (rows - mean[side]).astype(np.float64) / np.sqrt(num_fitted)
            covariance += centred.T @ centred / len(SIDES)
        num_codes[side] = max(of_one.num_cluster_codes for of_one in aligned.values())
    variances, directions = np.linalg.eigh(covariance)
    variances, directions = variances[::-1][:max_dim], directions[:, ::-1][:, :max_dim]  # largest first
    # The signs of eigenvectors are free; fixed here, so that the same vectors give the same coordinates.
    directions = directions * np.sign(directions[np.abs(directions).argmax(axis=0), np.arange(directions.shape[1])])
    basis = directions / np.sqrt(max(variances.mean(), 1e-12))

    def reduced(name: str, side: str, aligned: SideVectors) -> SideVectors:
        centred = np.where(has_vector[name, side][:, None], aligned.vectors - mean[side], 0)
        return dataclasses.replace(
            aligned, vectors=(centred @ basis).astype(np.float32), num_cluster_codes=num_codes[side]
        )

    return {name: {side: reduced(name, side, sides[side]) for side in SIDES} for name, sides in variants.items()}
