"""Semantic ids: each item is a few codes from coarse to fine, read from a table or made here.

Residual k-means or a residual-quantised autoencoder makes codes from item vectors: a level quantises the residuals of
those before. The last code distinguishes items that share the others (TIGER: Rajput et al., NeurIPS 2023, section 3.1).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.tables.columns import ID
from laserbatch.pipeline.tables.findings import FaultyTable, Findings
from laserbatch.pipeline.tables.schema import id_type, is_list, plain_column, plain_ids
from laserbatch.pipeline.tables.streamed import iter_rows
from laserbatch.research.recommending.settings import CodeMaker
from laserbatch.retrieval_pools.ids import rows_among

NUM_LEVELS = 4
CODEBOOK_SIZE = 256
SPARE_CODES = 4  # unused codes of the last level, for items that come later
MAX_PRODUCTS = 2**24  # products of vectors held in memory at once


@dataclass(frozen=True)
class ItemCodes:
    """Distinct `codes`, int32 (n, num_levels), of n items; `sizes` has the maximum number of codes of each level."""

    item_ids: pa.Array
    codes: np.ndarray
    sizes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.item_ids)

    def rows_of(self, item_ids: pa.Array) -> np.ndarray:
        """The row of each item, int64[n], -1 without codes. Raises TableError if ids have another type."""
        if item_ids.type != self.item_ids.type:
            raise TableError(
                f"items have ids of type {item_ids.type}, but the codes have ids of type {self.item_ids.type}: write "
                "both in one type"
            )
        return rows_among(item_ids, self.item_ids)

    def of_catalogue(self, item_ids: pa.Array) -> "ItemCodes":
        rows = self.rows_of(item_ids)
        has_codes = rows >= 0
        return ItemCodes(item_ids.filter(pa.array(has_codes)), self.codes[rows[has_codes]], self.sizes)


def read_codes(path: Path) -> ItemCodes:
    """Read a Parquet file with `item_id` and `codes`, a list of integers or texts of the same length for each item.

    If items share all codes, a level is added that distinguishes them. Raises TableError, which names file and item, if
    the file is missing or damaged, a column or a code is missing, or an item occurs twice.
    """
    table = pa.Table.from_batches(iter_rows(path, "codes", "item_id and codes"))
    if missing := {"item_id", "codes"} - set(table.column_names):
        raise TableError(f"{path} has no column {min(missing)}; item codes are the columns item_id and codes (a list)")
    lists = table["codes"].combine_chunks()
    is_of_codes = is_list(lists.type) and (lists.type.value_type == pa.null() or id_type(lists.type.value_type))
    if id_type(table["item_id"].type) is None or not is_of_codes:
        raise TableError(
            f"{path} has item_id of type {table['item_id'].type} and codes of type {lists.type}; expected ids that are "
            "texts or integers, and lists of texts or integers"
        )
    findings = Findings()
    for rule in ID.rules[:2]:
        rule.check("codes", "item_id", str(path), 0, plain_column(table["item_id"]).combine_chunks(), findings)
    for finding in findings.to_list():
        raise FaultyTable(finding)
    item_ids = plain_ids(table["item_id"]).combine_chunks()
    if item_ids.null_count:
        row = int(np.flatnonzero(item_ids.is_null().to_numpy(zero_copy_only=False))[0])
        raise TableError(f"{path}: row {row} (from 0) has no item_id; fill it in, or drop the row")
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    if lengths.max() == 0:
        raise TableError(f"{path}: the list of codes of every item is empty; expected one code or more")
    counts = np.bincount(lengths)
    num_levels = int(np.flatnonzero(counts == counts.max())[-1])  # the length of most lists
    values = plain_column(lists.flatten())
    wrong = item_ids.filter(pa.array(lengths != num_levels))
    if len(wrong):
        raise TableError(
            f"{path}: {len(wrong)} items do not have {num_levels} codes, as most items have (the first: {wrong[0]}); "
            "give each item as many"
        )
    if values.null_count:
        row = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0]) // num_levels
        raise TableError(f"{path}: item {item_ids[row]} has a null among its codes; fill it in, or drop the row")
    if pc.count_distinct(item_ids).as_py() < len(item_ids):
        twice = next(pair["values"] for pair in pc.value_counts(item_ids).to_pylist() if pair["counts"] > 1)
        raise TableError(f"{path}: item {twice} occurs more than once; keep one of its rows")
    # Codes are numbered by level in the order of their names, so that the same file gives the same numbers.
    columns = [pc.rank(values[level::num_levels], tiebreaker="dense").to_numpy() - 1 for level in range(num_levels)]
    codes = np.stack(columns, 1).astype(np.int32)
    if len(np.unique(codes, axis=0)) < len(codes):
        codes = np.column_stack((codes, _digits(codes)))
    return ItemCodes(item_ids, codes, tuple((codes.max(0) + 1).tolist()))


def made_codes(item_ids: pa.Array, vectors: np.ndarray, seed: int = 0, maker: CodeMaker = "kmeans") -> ItemCodes:
    """Make codes from vectors float32 (n, dim); the last level numbers items that share all codes of the others.

    The size of the last level leaves room for SPARE_CODES more.
    """
    coarse = _kmeans_codes
    if maker == "rqvae":
        from laserbatch.research.recommending.rqvae import rqvae_codes as coarse  # torch loads for seconds
    columns = coarse(vectors.astype(np.float32), NUM_LEVELS - 1, CODEBOOK_SIZE, seed).T
    codes = np.stack([np.unique(column, return_inverse=True)[1].ravel() for column in columns], 1)  # used codes
    codes = np.column_stack((codes, _digits(codes))).astype(np.int32)
    *sizes, last = (codes.max(0) + 1).tolist()
    return ItemCodes(item_ids, codes, (*sizes, last + SPARE_CODES))


def with_new_items(codes: ItemCodes, item_ids: pa.Array, vectors: np.ndarray) -> ItemCodes:
    """Add codes for new items: those of the most similar item with codes, except the last code, which is the first
    unused one.

    An item gets no codes if all last codes after the shared ones are used. `item_ids` and `vectors`, float32 (n, dim),
    include items with and without codes.
    """
    rows = codes.rows_of(item_ids)
    has, lacks = np.flatnonzero(rows >= 0), np.flatnonzero(rows < 0)
    if not len(has):
        return codes
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.maximum(lengths, 1e-12)
    used: dict[tuple[int, ...], set[int]] = {}
    for *above, last in codes.codes.tolist():
        used.setdefault(tuple(above), set()).add(last)
    new_rows, new_codes = [], []
    size = max(1, MAX_PRODUCTS // len(has))
    for start in range(0, len(lacks), size):
        part = lacks[start : start + size]
        alike = rows[has[(unit[part] @ unit[has].T).argmax(1)]]
        for row, above in zip(part.tolist(), map(tuple, codes.codes[alike, :-1].tolist()), strict=True):
            last = next((code for code in range(codes.sizes[-1]) if code not in used[above]), None)
            if last is not None:
                used[above].add(last)
                new_rows.append(row)
                new_codes.append((*above, last))
    new = np.array(new_codes, np.int32).reshape(-1, codes.codes.shape[1])
    new_ids = item_ids.take(pa.array(new_rows, pa.int64()))
    return ItemCodes(pa.concat_arrays([codes.item_ids, new_ids]), np.concatenate((codes.codes, new)), codes.sizes)


def _kmeans_codes(left: np.ndarray, num_levels: int, size: int, seed: int) -> np.ndarray:
    """Residual k-means: the codes of a level are the clusters of the residuals of the levels before."""
    from sklearn.cluster import KMeans

    columns = []
    for _ in range(num_levels):
        fit = KMeans(min(size, len(np.unique(left, axis=0))), n_init=1, random_state=seed).fit(left)
        columns.append(fit.labels_)
        left = left - fit.cluster_centers_[fit.labels_].astype(np.float32)
    return np.stack(columns, 1)


def _digits(codes: np.ndarray) -> np.ndarray:
    """Number the items that share all codes 0, 1, ... in their order: int32[n]."""
    _, groups = np.unique(codes, axis=0, return_inverse=True)
    order = np.argsort(groups.ravel(), kind="stable")
    starts = np.flatnonzero(np.diff(groups.ravel()[order], prepend=-1))
    digits = np.empty(len(order), np.int32)
    digits[order] = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
    return digits
