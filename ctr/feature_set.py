"""Reads and checks the feature tables of a run, and aligns them with the entities.

It also checks provenance: a feature from a text of a later date than the run's has seen the test period.
"""

import dataclasses
import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from scipy.sparse.linalg import eigsh

from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.fields import plain
from laserbatch.pipeline.encoding.schema import LEVELS, check_feature_schema, run_date, vectors_of

Side = Literal["user", "item"]
SIDES: tuple[Side, ...] = ("user", "item")
MAX_FULL_DIM = 1024  # of wider vectors, not all principal directions are computed
FeatureSet = dict[str, pa.Table]  # features of both sides, as `pipeline.encoding.schema` describes them


@dataclass(frozen=True)
class SideVectors:
    """Features of one side, one row for each entity of the entity table."""

    vectors: np.ndarray  # float32 (num_entities, dim), zeros without features
    codes: np.ndarray  # int32 (num_entities, num_levels): 1 + the cluster id of each level; 0 without features
    num_codes: np.ndarray  # int64 (num_levels,): the codes of a level are below this
    num_missing: int = 0  # number of entities without features
    num_foreign: int = 0  # number of features whose id is not in the entity table


def read_feature_set(folder: Path) -> FeatureSet:
    """Read the files of `user/` and `item/`, or the single files `user.parquet` and `item.parquet` of earlier versions.

    Raises CtrError if a side has no files, or files of another version.
    """
    tables = {}
    for side in SIDES:
        single = folder / f"{side}.parquet"
        paths = [single] if single.is_file() else sorted((folder / side).glob("*.parquet"))
        if not paths:
            raise CtrError(f"{folder / side} has no files; `laserbatch nightly --date D --force` makes features")
        parts = [_read_part(path, side) for path in paths]
        other = [path for path, part in zip(paths, parts, strict=True) if not part.schema.equals(parts[0].schema)]
        if other:
            raise CtrError(
                f"{other[0]} has other columns than {paths[0].name} in the same folder; expected features of one run. "
                "Make features again: `laserbatch nightly --date D --force`"
            )
        tables[side] = pa.concat_tables(parts)
    return tables


def _read_part(path: Path, side: str) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            check_feature_schema(file.schema_arrow, side)
            # In batches: vectors of one chunk could not hold more than 2^31 numbers.
            return pa.Table.from_batches(file.iter_batches(), file.schema_arrow)
    except (OSError, ValueError) as error:  # Arrow raises one of them for a damaged file
        raise CtrError(f"{path}: {error}. Make features again: `laserbatch nightly --date D --force`") from None


def check_provenance(features: FeatureSet, as_of: datetime.date) -> None:
    """Raise CtrError if a feature's text may have seen interactions after `as_of`: its run has a later or no date."""
    for side, table in features.items():
        for run_id in pc.unique(table["run_id"]).to_pylist():
            try:
                made_on = run_date(run_id)
            except ValueError as error:
                raise CtrError(f"{side} features: {error}") from None
            if made_on > as_of:
                raise CtrError(
                    f"{side} features of run {run_id} were made from interactions up to {made_on}, but training ends "
                    f"on {as_of}, so the test period would leak into training; use the features of a run of {as_of} or "
                    "earlier"
                )


def align(features: pa.Table, side: str, entity_ids: pa.Array) -> SideVectors:
    """A side's feature table in the order of the entity table's ids, with unchanged vectors.

    Raises CtrError if ids have another type or occur twice, or a vector has a value that is not finite.
    """
    ids = features[f"{side}_id"]
    if plain(ids.type) != plain(entity_ids.type):
        raise CtrError(
            f"{side} features have ids of type {ids.type}, but the {side}s table has ids of type {entity_ids.type}; "
            "write them as they were when the run read them, or run its night again"
        )
    ids = ids.cast(entity_ids.type).combine_chunks()
    if pc.count_distinct(ids).as_py() != len(ids):
        twice = pc.value_counts(ids)
        twice = twice.filter(pc.greater(pc.struct_field(twice, "counts"), 1))[0]["values"].as_py()
        runs = features.filter(pc.equal(features[f"{side}_id"], pa.scalar(twice, ids.type)))["run_id"].to_pylist()
        raise CtrError(
            f"{side} features have {twice!r} {len(runs)} times (runs {', '.join(runs)}): features of several runs are "
            "mixed; give the features of one run"
        )
    positions = pc.index_in(entity_ids, ids)
    has_vector = pc.is_valid(positions).to_numpy(zero_copy_only=False)
    feature_rows = positions.drop_null().to_numpy()
    raw = vectors_of(features)
    if not np.isfinite(raw).all():
        row = int(np.flatnonzero(~np.isfinite(raw).all(axis=1))[0])
        raise CtrError(
            f"the vector of {side} {ids[row].as_py()!r} has a value that is not finite. Make features again: "
            "`laserbatch nightly --date D --force`"
        )
    of_levels = np.column_stack([features[name].to_numpy() for name in LEVELS])
    vectors = np.zeros((len(entity_ids), raw.shape[1]), np.float32)
    vectors[has_vector] = raw[feature_rows]
    codes = np.zeros((len(entity_ids), len(LEVELS)), np.int32)
    codes[has_vector] = 1 + of_levels[feature_rows]
    num_codes, num_foreign = 2 + of_levels.max(axis=0, initial=0).astype(np.int64), len(ids) - len(feature_rows)
    return SideVectors(vectors, codes, num_codes, int((~has_vector).sum()), num_foreign)


@dataclass(frozen=True)
class Basis:
    """Reduces vectors: each side's mean, and the largest principal directions of both sides together.

    Both sides share the directions, so that vectors of users and items stay comparable.
    """

    user_mean: np.ndarray  # float32 (dim,)
    item_mean: np.ndarray
    directions: np.ndarray  # float64 (dim, reduced_dim), scaled so that coordinates have mean square one
    num_user_codes: np.ndarray  # int64 (num_levels,): higher codes become 0
    num_item_codes: np.ndarray

    def reduce(self, sides: dict[str, SideVectors]) -> dict[str, SideVectors]:
        """Reduce vectors to float32 (num_entities, reduced_dim); zeros stay zeros. Raises CtrError on another width."""
        reduced = {}
        for side, of_side in sides.items():
            mean, num_codes = getattr(self, f"{side}_mean"), getattr(self, f"num_{side}_codes")
            if (width := of_side.vectors.shape[1]) != len(mean):
                raise CtrError(
                    f"{side} features have vectors of width {width}; expected {len(mean)}, as in training: they come "
                    "from another encoder. Use features that were made with the same encoding.encoder"
                )
            has_vector = (of_side.vectors != 0).any(axis=1)
            vectors = np.zeros((len(has_vector), self.directions.shape[1]), np.float32)
            vectors[has_vector] = (of_side.vectors[has_vector] - mean) @ self.directions
            codes = np.where(of_side.codes < num_codes, of_side.codes, 0)
            reduced[side] = dataclasses.replace(of_side, vectors=vectors, codes=codes, num_codes=num_codes)
        return reduced


def fit_basis(variants: dict[str, dict[str, SideVectors]], is_trained: dict[str, np.ndarray], max_dim: int) -> Basis:
    """Fit a basis of at most `max_dim` directions to the vectors of several variants, given by variant and side.

    All variants share it, so that equal vectors of two variants stay equal. The number of cluster codes is the maximum
    over variants, so that the networks of all variants have the same shape and, from one seed, the same weights. Only
    entities of training rows (`is_trained`, bool (num_entities,) by side) count. Raises CtrError if widths differ.
    """
    dims = {of_side.vectors.shape[1] for sides in variants.values() for of_side in sides.values()}
    if len(dims) > 1:
        raise CtrError(f"vectors have the lengths {sorted(dims)}; encode users, items and plain texts with one encoder")
    mean, num_codes, covariance, square = {}, {}, np.zeros((min(dims), min(dims))), 0.0
    for side in SIDES:
        aligned = [sides[side] for sides in variants.values()]
        fitted = [of_side.vectors[(of_side.vectors != 0).any(axis=1) & is_trained[side]] for of_side in aligned]
        num_fitted = max(sum(map(len, fitted)), 1)
        sums = [rows.sum(axis=0, dtype=np.float64) for rows in fitted]
        mean[side] = (np.sum(sums, axis=0) / num_fitted).astype(np.float32)
        for rows in fitted:
            centred = (rows - mean[side]).astype(np.float64) / np.sqrt(num_fitted)
            covariance += centred.T @ centred / len(SIDES)
            square += float(np.square(rows, dtype=np.float64).mean()) if len(rows) else 0.0
        num_codes[side] = np.max([of_side.num_codes for of_side in aligned], axis=0)
    if len(covariance) > MAX_FULL_DIM and covariance.any():  # the largest alone: for 4,096, 3 s, not 47
        variances, directions = eigsh(covariance, max_dim, v0=np.random.default_rng(0).normal(size=len(covariance)))
    else:
        variances, directions = np.linalg.eigh(covariance)
    variances, directions = variances[::-1][:max_dim], directions[:, ::-1][:, :max_dim]  # largest first
    # The signs of eigenvectors are arbitrary; they are fixed so that the same vectors give the same coordinates.
    directions = directions * np.sign(directions[np.abs(directions).argmax(axis=0), np.arange(directions.shape[1])])
    rounding = 1e-12 * square or 1.0  # of equal vectors, whatever their length
    directions = np.ascontiguousarray(directions / np.sqrt(max(variances.mean(), rounding)))
    return Basis(mean["user"], mean["item"], directions, num_codes["user"], num_codes["item"])
