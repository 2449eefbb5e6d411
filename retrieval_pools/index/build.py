"""Building a pool from texts: laid end to end, sorted or merged, written, published by one rename.

Only permanent text belongs in a pool; what a sequence writes tonight is handed to each draft instead. The files depend
on the texts and their order alone: neither on an older pool whose order was taken over, nor on the memory that was
allowed, nor on the threads that share the work.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.arrays import ArrayWriter, in_threads, map_array, read_chunks
from laserbatch.retrieval_pools.index.calibration_record import Calibration
from laserbatch.retrieval_pools.index.manifest import (
    FORMAT_VERSION,
    PoolManifest,
    Side,
    array_names,
    array_path,
    describe_array,
    write_manifest,
)
from laserbatch.retrieval_pools.index.order import count_first_tokens, merge_runs, sort_texts
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.index.support import supported_lengths
from laserbatch.retrieval_pools.index.texts import (
    MAX_POSITIONS,
    LaidTexts,
    PoolText,
    PoolTexts,
    find_known_texts,
    lay_end_to_end,
    values_at,
    values_by_position,
)
from laserbatch.retrieval_pools.settings import PoolBuildSettings, PoolSettings

__all__ = ["BuildCounts", "PoolText", "PoolTexts", "build_pool", "sync_folder"]

SORT_BYTES_PER_POSITION = 40  # of memory, while a run of texts is sorted
TEMPORARY_SUFFIX = ".tmp"
_GONE = np.iinfo(np.int32).min  # moves every position below 0


@dataclass(frozen=True)
class BuildCounts:
    """What a build did.

    Parameters
    ----------
    num_texts_sorted : texts whose positions were sorted; those of the others were where an older pool had them.
    num_runs : runs that they were sorted in, each within the memory.
    num_texts_left_out : texts for which a full pool had no room.
    """

    num_texts_sorted: int
    num_runs: int
    num_texts_left_out: int


def build_pool(
    texts: Iterable[PoolText] | Iterable[PoolTexts],
    out_dir: Path | str,
    *,
    side: Side,
    tokenizer_hash: str,
    model_id: str,
    settings: PoolSettings | None = None,
    vocab_size: int | None = None,
    previous: Pool | None = None,
    building: PoolBuildSettings | None = None,
    on_counts: Callable[[BuildCounts], None] | None = None,
    calibration: Calibration | None = None,
) -> Pool:
    """Build a pool and publish it at `out_dir`. The same texts in the same order give the same files.

    Parameters
    ----------
    texts : read once.
    out_dir : the folder to create; it appears when it is complete.
    tokenizer_hash : of the tokenizer that made the token ids; a pool is refused under another.
    vocab_size : ids must be below it; None takes the largest id for the last.
    previous : an older pool whose texts are in great part these: what they have in common, in the same sequence, is not
        sorted again. It saves time and changes nothing else; open it with `verify`, for its order is believed. One of
        another `index_depth` is of no use and left alone.
    building : the largest size, and the memory that sorting may take, beyond a hundred bytes a text and the files,
        which are mapped: the kernel takes back their pages when it needs them. What does not fit is sorted in runs
        (of one text at least) that lie on the disk until they are merged.
    on_counts : called with what was done.
    calibration : what replays say of drafts from such a pool; None believes relative counts.

    Raises
    ------
    PoolError
        A text is not a row of token ids of the vocabulary (the message numbers it, from 0), there are more groups or
        tokens than the format holds, the disk is full, or something is at `out_dir` already.
    """
    settings = PoolSettings() if settings is None else settings
    building = PoolBuildSettings() if building is None else building
    out_dir = Path(out_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise PoolError(f"{out_dir} is there already; a pool is never changed. Give another folder or remove it.")
    with staged_folder(out_dir) as folder:
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as scratch:
            laid, num_left_out = _lay(texts, folder, Path(scratch), vocab_size, settings, building)
            order, num_sorted, num_runs = _order(
                laid, settings.index_depth, previous, building.memory_bytes, Path(scratch)
            )
            _write_arrays(order, laid, settings, folder, Path(scratch))
        names = array_names(settings)
        manifest = PoolManifest(
            format_version=FORMAT_VERSION,
            side=side,
            tokenizer_hash=tokenizer_hash,
            model_id=model_id,
            vocab_size=laid.vocab_size,
            num_texts=laid.num_texts,
            num_tokens=laid.num_tokens,
            groups=laid.groups,
            settings=settings,
            arrays=dict(zip(names, in_threads(partial(describe_array, folder=folder), names), strict=True)),
            calibration=calibration,
        )
        write_manifest(manifest, folder)
        sync_folder(folder)
        os.replace(folder, out_dir)
        sync(out_dir.parent)
    if on_counts is not None:
        on_counts(BuildCounts(num_sorted, num_runs, num_left_out))
    return Pool.open(out_dir)


def _lay(
    texts: Iterable[PoolText] | Iterable[PoolTexts], folder: Path, scratch: Path, vocab_size: int | None,
    settings: PoolSettings, building: PoolBuildSettings,
) -> tuple[LaidTexts, int]:  # fmt: skip
    """`tokens`, of all texts or of the youngest; and how many were left out."""
    path = array_path(folder, "tokens")
    lay = partial(lay_end_to_end, path=path, vocab_size=vocab_size, with_entities=settings.min_support > 1)
    laid = lay(texts)
    if building.max_tokens is None or laid.num_tokens <= building.max_tokens:
        return laid, 0
    kept = laid.youngest(building.max_tokens)
    os.replace(path, array_path(scratch, "tokens"))  # stays mapped
    return lay(laid.texts(kept)), laid.num_texts - len(kept)


def _order(
    laid: LaidTexts, depth: int, previous: Pool | None, memory_bytes: int | None, scratch: Path
) -> tuple[Iterator[np.ndarray], int, int]:
    """The order of all positions as a stream: what an older pool knows of it is one of the runs that are merged.

    And how many texts were sorted, in how many runs.
    """
    starts = laid.starts
    is_new = np.ones(laid.num_texts, bool)
    runs = []
    if previous is not None and previous.folder is not None and previous.index.depth == depth:
        old_starts = previous.text_starts
        known = find_known_texts(laid.tokens, starts, previous.index.tokens, old_starts)
        is_new[known[known >= 0]] = False
        moved_by = np.where(known >= 0, starts[known] - old_starts[:-1], _GONE).astype(np.int32)
        moved_by = values_by_position(moved_by, old_starts, scratch / "moved-by.npy")

        def moved(chunk: np.ndarray) -> np.ndarray:
            places = chunk + values_at(moved_by, chunk)
            return places[places >= 0]

        runs.append(in_threads(moved, read_chunks(array_path(previous.folder, "order"))))
    num_older = len(runs)
    for texts in _bounded(np.flatnonzero(is_new), starts, memory_bytes):
        order = sort_texts(laid.tokens, starts, texts, vocab_size=laid.vocab_size, depth=depth)
        file = scratch / f"{len(runs)}.npy"  # on the disk until it is merged
        with ArrayWriter(file, order.dtype) as writer:
            writer.write(order)
        runs.append(read_chunks(file))
    return merge_runs(laid.tokens, runs, depth), int(np.count_nonzero(is_new)), len(runs) - num_older


def _bounded(texts: np.ndarray, starts: np.ndarray, memory_bytes: int | None) -> Iterator[np.ndarray]:
    """Texts in runs that can be sorted in so much memory, each of one text at least."""
    max_positions = MAX_POSITIONS if memory_bytes is None else max(int(memory_bytes / SORT_BYTES_PER_POSITION), 1)
    ends = np.cumsum(starts[texts + 1].astype(np.int64) - starts[texts])
    first = 0
    while first < len(texts):
        before = ends[first - 1] if first else 0
        last = max(int(np.searchsorted(ends, before + max_positions, side="right")), first + 1)
        yield texts[first:last]
        first = last


def _write_arrays(
    order: Iterator[np.ndarray], laid: LaidTexts, settings: PoolSettings, folder: Path, scratch: Path
) -> None:
    """`order` and, place by place, `group_codes` and `support`; `starts`."""
    with (
        ArrayWriter(array_path(folder, "order"), np.int32) as places,
        ArrayWriter(array_path(folder, "group_codes"), laid.group_codes.dtype) as codes,
    ):
        code_at = values_by_position(laid.group_codes, laid.starts, scratch / "codes.npy")
        for chunk, codes_of_chunk in in_threads(lambda chunk: (chunk, values_at(code_at, chunk)), order):
            places.write(chunk)
            codes.write(codes_of_chunk)
    with ArrayWriter(array_path(folder, "starts"), np.int32) as writer:
        writer.write(count_first_tokens(laid.tokens, laid.vocab_size))
    if settings.min_support > 1:
        order_file = map_array(array_path(folder, "order"))
        entity_at = values_by_position(laid.entity_codes, laid.starts, scratch / "entities.npy")
        lengths = supported_lengths(laid.tokens, order_file, entity_at, settings.min_support, settings.index_depth)
        with ArrayWriter(array_path(folder, "support"), np.uint8) as writer:
            writer.write(lengths)


def temporary_beside(path: Path) -> Path:
    """A name that nobody else has, for what is going to be renamed to `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, to be renamed to it in the block; removed if it is still there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = temporary_beside(target)
    try:
        staging.mkdir()
        yield staging
    except OSError as error:
        error.filename = str(error.filename or staging).replace(str(staging), str(target))
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Wait until everything below a folder is on the disk."""
    walked = [(Path(root), names) for root, _, names in os.walk(folder)]
    for paths in ([root / name for root, names in walked for name in names], [root for root, _ in walked]):
        for _ in in_threads(sync, paths):
            pass


def sync(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
