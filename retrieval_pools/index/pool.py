"""A pool: the texts of one side, indexed, in files that every process of a machine shares."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from laserbatch.retrieval_pools.drafting.estimate import IDENTITY_CURVES
from laserbatch.retrieval_pools.drafting.state import NO_GROUP, UNKNOWN, Index, PoolHandle
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.arrays import make_resident, read_chunks
from laserbatch.retrieval_pools.index.calibration_record import BudgetCurve, Calibration
from laserbatch.retrieval_pools.index.manifest import (
    FORMAT_VERSION,
    OTHER_TOKENIZER,
    REBUILD,
    ArrayName,
    PoolManifest,
    array_names,
    array_path,
    group_code_dtype,
    read_array,
    read_manifest,
)
from laserbatch.retrieval_pools.index.texts import SEPARATOR
from laserbatch.retrieval_pools.settings import BUILT_SETTINGS, DraftSettings

DEFAULT_POOL_ESCAPE = 1.0  # Witten and Bell's
_VERIFIED: set[tuple] = set()  # `_lying` of the pools whose files this process has compared with their checksums


@dataclass(frozen=True, eq=False)
class Pool:
    """An open pool: immutable, safe to share between threads. Make one with `Pool.open` or `build.build_pool`.

    Parameters
    ----------
    folder : the pool's folder; None for a pool in memory.
    manifest : its manifest.
    index : its arrays, read-only; see `drafting.state.Index`.
    settings : the settings for drafting; those of the manifest unless `with_settings` changed them.
    curves : float32 `estimate.CURVES_SHAPE`, acceptance by source, kind of node and relative count.
    fitted_escape : the escape of the pool if the settings name none.
    budgets : the gain of each draft budget in the replays of its calibration, if known.
    num_sorted : the number of texts that its build sorted; the order of the others came from an older pool. None: the
        pool was opened, not built.
    """

    folder: Path | None
    manifest: PoolManifest
    index: Index
    settings: DraftSettings
    curves: np.ndarray = field(default_factory=lambda: IDENTITY_CURVES, repr=False)
    fitted_escape: float = DEFAULT_POOL_ESCAPE
    budgets: BudgetCurve | None = field(default=None, repr=False)
    num_sorted: int | None = field(default=None, repr=False)

    @classmethod
    def open(
        cls, folder: Path | str, tokenizer_hash: str | None = None, *, verify: bool = False, max_resident_bytes: int = 0
    ) -> "Pool":
        """Map a pool's files into memory.

        Parameters
        ----------
        folder : the pool's folder.
        tokenizer_hash : hash of the tokenizer that is going to be used; None: not compared.
        verify : read the files to compare their checksums and count texts. A process does this once while the files
            are unchanged; sizes and shapes are always compared.
        max_resident_bytes : the pages of a pool of at most this size are read before the first draft; see
            `arrays.make_resident`. Use it if many drafts follow: it reads the files, from the disk if need be.

        Raises
        ------
        PoolError
            The pool has another tokenizer or format, or a file is missing or damaged.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        if tokenizer_hash is not None and manifest.tokenizer_hash != tokenizer_hash:
            raise PoolError(
                f"{folder} was built with the tokenizer {manifest.tokenizer_hash[:12]} (model {manifest.model_id}); "
                f"expected {tokenizer_hash[:12]}, because its token ids mean other texts now. {OTHER_TOKENIZER}"
            )
        lying = _lying(folder)
        verify = verify and lying not in _VERIFIED
        arrays: dict[str, np.ndarray]
        arrays = {name: read_array(folder, name, manifest, verify) for name in array_names(manifest.settings)}
        index = Index.of(arrays, manifest.settings.index_depth)
        _check_arrays_fit(folder, manifest, index)
        if verify:
            _check_texts(folder, manifest, index)
            _VERIFIED.add(lying)
        if max_resident_bytes:
            make_resident(arrays.values(), max_resident_bytes)
        return cls.of_arrays(folder, manifest, index)

    @classmethod
    def of_arrays(cls, folder: Path | None, manifest: PoolManifest, index: Index) -> "Pool":
        """A pool made of arrays that are known to fit each other; they become read-only."""
        for array in index[:-1]:
            if array is not None:
                array.flags.writeable = False
        pool = cls(folder, manifest, index, manifest.settings)
        return pool if manifest.calibration is None else pool.with_calibration(manifest.calibration)

    def __getstate__(self) -> dict:
        """The fields without cached values: the addresses in `handle` would be wrong in a copy."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def is_calibrated(self) -> bool:
        """Whether estimates come from replays; otherwise relative counts are used as probabilities."""
        return self.curves is not IDENTITY_CURVES

    @property
    def text_starts(self) -> np.ndarray:
        """The position of the separator before each text, and of the last one, int32[num_texts + 1]."""
        last = np.array([len(self.index.tokens) - 1], np.int32)
        return np.append(np.sort(self.index.order[: self.index.starts[1]]), last)

    def length_of(self, share: float) -> int:
        """The number of tokens that a share of the texts, 0 to 1, does not exceed; 0 without texts."""
        lengths = np.diff(self.text_starts) - 1
        return int(np.quantile(lengths, share, method="inverted_cdf")) if len(lengths) else 0

    def with_settings(self, **changes) -> "Pool":
        """The same pool with other settings; those that its files depend on cannot be changed."""
        for name in BUILT_SETTINGS:
            if name in changes:
                raise PoolError(f"{name} is fixed when a pool is built; build another pool for another value.")
        settings = DraftSettings.model_validate(self.settings.model_dump() | changes)
        return replace(self, settings=settings)

    def with_calibration(self, calibration: Calibration | None) -> "Pool":
        """The same pool with the estimates of a calibration; None: as a pool without calibration."""
        if calibration is None:
            return replace(self, curves=IDENTITY_CURVES, fitted_escape=DEFAULT_POOL_ESCAPE, budgets=None)
        escape, budgets = calibration.pool_escape, calibration.budgets
        return replace(self, curves=calibration.curves, fitted_escape=escape, budgets=budgets)

    @cached_property
    def _group_codes(self) -> dict[str, int]:
        return {name: code for code, name in enumerate(self.manifest.groups)}

    def group_code(self, group: str | None) -> int:
        """A group's code in `drafting.tree`: `drafting.state.NO_GROUP` for None, UNKNOWN if it has no texts."""
        return NO_GROUP if group is None else self._group_codes.get(group, UNKNOWN)

    @cached_property
    def handle(self) -> PoolHandle:
        """The pool in the form that `drafting.tree` takes."""
        return PoolHandle.of(self.index, self.curves, self.settings, self.fitted_escape)


def _lying(folder: Path) -> tuple:
    """Names, inodes, sizes and times of a folder's files; they differ once a file is rewritten, but for one clock tick.

    They are the same for a folder of hard links to these files, which a new version has for an unchanged pool.
    """
    files = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    return tuple((name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in files)


def _check_arrays_fit(folder: Path, manifest: PoolManifest, index: Index) -> None:
    """Raise PoolError unless lengths, dtypes, both end separators and `starts` fit the manifest; reads few bytes."""
    tokens, order, group_codes, starts, support, _ = index
    num_separators = manifest.num_texts + 1
    fits = (
        len(tokens) == manifest.num_tokens + num_separators
        and len(order) == len(group_codes) == len(tokens) - 1
        and (support is None or len(support) == len(order))
        and set(manifest.arrays) == set(array_names(manifest.settings))
        and len(starts) == manifest.vocab_size + 2
        and tokens[0] == tokens[-1] == SEPARATOR
        and starts[0] == 0
        and starts[-1] == len(order)
        and group_codes.dtype == group_code_dtype(len(manifest.groups))
        and sum(counts["num_texts"] for counts in manifest.groups.values()) == manifest.num_texts
        and sum(counts["num_tokens"] for counts in manifest.groups.values()) == manifest.num_tokens
    )
    if not fits:
        raise PoolError(f"{folder} is damaged: its arrays do not fit its manifest. {REBUILD}")


def _check_texts(folder: Path, manifest: PoolManifest, index: Index) -> None:
    """Read the files to check the number of texts and the ranges of token ids, positions and group codes.

    They are read in pieces, not mapped: the pages of a whole pool would count as this process's memory.
    """
    stops: dict[ArrayName, int]
    stops = {"tokens": manifest.vocab_size, "order": len(index.order), "group_codes": max(len(manifest.groups), 1)}
    num_separators, fits = 0, True
    for name, stop in stops.items():
        for part in read_chunks(array_path(folder, name)):
            num_separators += np.count_nonzero(part == SEPARATOR) if name == "tokens" else 0
            fits &= part.max() < stop and (name == "tokens" or part.min() >= 0)
    fits &= num_separators == manifest.num_texts + 1
    if not fits:
        raise PoolError(f"{folder} is damaged: its texts do not fit its manifest. {REBUILD}")


def _empty_pool() -> Pool:
    manifest = PoolManifest(
        format_version=FORMAT_VERSION, side="user", tokenizer_hash="", model_id="", vocab_size=0,
        num_texts=0, num_tokens=0, groups={}, settings=DraftSettings(), arrays={},
    )  # fmt: skip
    arrays = (np.array([SEPARATOR], np.int32), np.empty(0, np.int32), np.empty(0, np.uint8), np.zeros(2, np.int32))
    return Pool.of_arrays(None, manifest, Index(*arrays, None, manifest.settings.index_depth))


EMPTY_POOL = _empty_pool()  # used in place of a pool if there is none
