"""Brings features of runs into the form that models take: vectors in one basis, and codes; if wanted, as of each row.

With `history: asof` a training row sees the newest features that are older than its day, not the run's features, whose
texts may have seen the row's label. Each version that a row sees becomes an additional entity, after the others, with
the fields of its original; so models need no change.
"""

import datetime
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Protocol

import numpy as np
import pyarrow as pa

from laserbatch.ctr.dataset import CtrData
from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.feature_set import SIDES, Basis, FeatureSet, Side, SideVectors, align, check_provenance, fit_basis
from laserbatch.ctr.log import BATCH_ROWS, EntityTables, ids_of
from laserbatch.ctr.settings import CtrSettings
from laserbatch.pipeline.encoding.schema import DAY_US

logger = logging.getLogger(__name__)


class FeatureVersions(Protocol):
    """Every version of a side's features, as `pipeline.encoding.versions` reads them."""

    @property
    def rows(self) -> np.ndarray: ...  # int64 (num_versions,), rows of `vectors`
    @property
    def vectors(self) -> np.ndarray: ...  # float32 (n, dim)
    @property
    def codes(self) -> np.ndarray: ...  # int32 (num_versions, num_levels), -1 if codes are not comparable

    def of(self, ids: pa.Array, days: np.ndarray) -> np.ndarray:
        """For each id, the newest version that is older than its day (days since 1970): int64 (n,), -1 without one."""
        ...


@dataclass(frozen=True)
class Knowledge:
    """One variant's features, in the order of the entity tables."""

    user: SideVectors
    item: SideVectors
    basis: Basis


def build_knowledge(
    tables: EntityTables, data: CtrData, variants: Mapping[str, FeatureSet], as_of: datetime.date, settings: CtrSettings
) -> dict[str, Knowledge]:
    """The features of each variant, aligned with the entities and reduced by one basis.

    Raises CtrError if features have a later date, another id type, only ids of no entity, an id twice, values that are
    not finite, or different widths.
    """
    if not variants:
        return {}
    for features in variants.values():
        check_provenance(features, as_of)
    of_sides = ("user", data.users, data.user_fields), ("item", data.items, data.item_fields)
    is_trained = {
        side: np.bincount(of[data.train], minlength=len(fields[0].codes)) > 0 for side, of, fields in of_sides
    }
    aligned = {name: align_sides(tables, features) for name, features in variants.items()}
    for name, side in product(variants, SIDES):
        of_side, num_entities = aligned[name][side], len(is_trained[side])
        if of_side.num_foreign and of_side.num_missing == num_entities:
            raise CtrError(
                f"features ({name}) have {of_side.num_foreign} {side} ids, but the {side}s table has none of them; "
                "give the tables that the run read, with unchanged ids"
            )
        if of_side.num_missing or of_side.num_foreign:
            logger.warning(
                "features (%s): %d of %d %ss have none and get a learned default; %d features of no %s are not used",
                name, of_side.num_missing, num_entities, side, of_side.num_foreign, side,
            )  # fmt: skip
    basis = fit_basis(aligned, is_trained, settings.vector_dim)
    return {name: Knowledge(**basis.reduce(sides), basis=basis) for name, sides in aligned.items()}


def align_sides(tables: EntityTables, features: FeatureSet) -> dict[str, SideVectors]:
    """The features of both sides in the order of the entity tables. Raises CtrError as `align` does."""
    return {side: align(features[side], side, ids) for side, ids in ids_of(tables).items()}


def join_as_of(
    tables: EntityTables, data: CtrData, knowledge: Knowledge, versions: Mapping[Side, FeatureVersions]
) -> tuple[CtrData, Knowledge]:
    """The same rows, but training rows see only features that are older than their day; histories keep the run's.

    Entities of the tables, with the run's features, come first in the result, then the versions; users and items of
    training rows are numbers of versions. A row without older features sees none. Raises CtrError if no row has any.
    """
    days = data.times_us[data.train] // DAY_US
    numbers, fields, extra, num_without = {}, {}, {}, {}
    for side in SIDES:
        of_data, of_side, ids = getattr(data, f"{side}s"), versions[side], ids_of(tables)[side]
        of_rows = of_data[data.train]
        version = np.empty(len(of_rows), np.int64)
        for start in range(0, len(of_rows), BATCH_ROWS):
            part = slice(start, start + BATCH_ROWS)
            version[part] = of_side.of(ids.take(pa.array(of_rows[part])), days[part])
        num_without[side] = int((version < 0).sum())
        keys = np.where(version < 0, -1 - of_rows.astype(np.int64), version)
        keys, first, places = np.unique(keys, return_index=True, return_inverse=True)
        entities, has_version = of_rows[first], keys >= 0
        vectors = np.zeros((len(keys), of_side.vectors.shape[1]), np.float32)
        vectors[has_version] = of_side.vectors[of_side.rows[keys[has_version]]]
        codes = np.zeros((len(keys), of_side.codes.shape[1]), np.int32)
        codes[has_version] = 1 + of_side.codes[keys[has_version]]
        extra[side] = SideVectors(vectors, codes, getattr(knowledge, side).num_codes)
        numbers[side] = of_data.copy()
        numbers[side][data.train] = len(ids) + places
        of_fields = getattr(data, f"{side}_fields")
        fields[side] = tuple(replace(of, codes=np.concatenate([of.codes, of.codes[entities]])) for of in of_fields)
    if all(number == len(data.train) for number in num_without.values()):
        raise CtrError(
            "ctr.history is asof, but no training row has features that are older than the row: this needs earlier "
            "runs with features (of plain texts, night.compare_with_plain). Set ctr.history to latest or split"
        )
    if max(num_without.values()) > len(data.train) / 2:
        logger.warning(
            "ctr.history is asof, and most training rows have no older text of their %s (%d rows for users and %d for "
            "items, of %d), so models learn little from texts: keep more nights, or set ctr.history to latest",
            max(num_without, key=lambda side: num_without[side]),
            num_without["user"], num_without["item"], len(data.train),
        )  # fmt: skip
    sides = {}
    for side, of_versions in knowledge.basis.reduce(extra).items():
        latest = getattr(knowledge, side)
        vectors = np.concatenate([latest.vectors, of_versions.vectors])
        sides[side] = replace(latest, vectors=vectors, codes=np.concatenate([latest.codes, of_versions.codes]))
    of_sides = {f"{side}s": numbers[side] for side in SIDES} | {f"{side}_fields": fields[side] for side in SIDES}
    return replace(data, **of_sides), replace(knowledge, **sides)
