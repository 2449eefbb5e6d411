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
from laserbatch.retrieval_pools.index.eviction import choose_texts
from laserbatch.retrieval_pools.index.layout import TextSpans, count_first_tokens, find_known_texts, values_by_place
from laserbatch.retrieval_pools.index.manifest import (
    FORMAT_VERSION,
    PoolManifest,
    Side,
    array_names,
    array_path,
    describe_array,
    write_manifest,
)
from laserbatch.retrieval_pools.index.merge import merge_into_older, merge_runs, move_order, sort_texts
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.index.support import supported_lengths
from laserbatch.retrieval_pools.index.texts import LaidTexts, PoolText, lay_end_to_end
from laserbatch.retrieval_pools.settings import PoolBuildSettings, PoolSettings

__all__ = ["BuildCounts", "PoolText", "build_pool", "sync_folder"]

SORT_BYTES_PER_POSITION = 36  # of memory, while a run of texts is sorted
TEMPORARY_SUFFIX = ".tmp"


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
    texts: Iterable[PoolText],
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
            _write_order(order, laid, folder)
        _write_rest(laid, settings, folder)
        names = array_names(settings)
        manifest = PoolManifest(
            format_version=FORMAT_VERSION,
            side=side,
            tokenizer_hash=tokenizer_hash,
            model_id=model_id,
            vocab_size=laid.vocab_size,
            num_texts=laid.spans.num_texts,
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
    texts: Iterable[PoolText],
    folder: Path,
    scratch: Path,
    vocab_size: int | None,
    settings: PoolSettings,
    building: PoolBuildSettings,
) -> tuple[LaidTexts, int]:
    """`tokens`, of all texts or of those that draft most; and how many were left out."""
    path = array_path(folder, "tokens")
    lay = partial(lay_end_to_end, path=path, vocab_size=vocab_size, with_entities=settings.min_support > 1)
    laid = lay(texts)
    if building.max_tokens is None or laid.num_tokens <= building.max_tokens:
        return laid, 0
    limits = (building.max_tokens, building.half_life_nights, building.memory_bytes)
    kept = choose_texts(laid.tokens, laid.spans, laid.ages_nights, *limits)
    os.replace(path, array_path(scratch, "tokens"))  # stays mapped
    return lay(laid.texts(kept)), laid.spans.num_texts - len(kept)


def _order(
    laid: LaidTexts, depth: int, previous: Pool | None, memory_bytes: int | None, scratch: Path
) -> tuple[Iterator[np.ndarray], int, int]:
    """The order of all positions as a stream: what an older pool knows of it, and the sorted rest.

    And how many texts were sorted, in how many runs.
    """
    starts = laid.spans.starts
    is_new = np.ones(laid.spans.num_texts, bool)
    older = None
    if previous is not None and previous.folder is not None and previous.index.depth == depth:
        old_spans = TextSpans.of_tokens(previous.index.tokens)
        known = find_known_texts(laid.tokens, starts, previous.index.tokens, old_spans)
        is_new[known[known >= 0]] = False
        new_starts = np.where(known >= 0, starts[known], -1).astype(np.int32)
        older = move_order(read_chunks(array_path(previous.folder, "order")), old_spans, new_starts)
    max_positions = None if memory_bytes is None else max(int(memory_bytes / SORT_BYTES_PER_POSITION), 1)
    runs = list(_runs(np.flatnonzero(is_new), starts, max_positions))
    sort = partial(sort_texts, laid.tokens, starts, vocab_size=laid.vocab_size, depth=depth)
    if len(runs) == 1:
        sorted_runs = [[sort(runs[0])]]
    else:
        sorted_runs = [_kept(sort(texts), scratch / f"{number}.npy") for number, texts in enumerate(runs)]
    order = merge_runs(laid.tokens, sorted_runs, depth)
    if older is not None:
        order = merge_into_older(laid.tokens, older, order, depth)
    return order, int(np.count_nonzero(is_new)), len(runs)


def _runs(texts: np.ndarray, starts: np.ndarray, max_positions: int | None) -> Iterator[np.ndarray]:
    """Texts in runs of at most so many positions, each of one text at least."""
    if max_positions is None:
        yield from [texts] if len(texts) else []
        return
    ends = np.cumsum(starts[texts + 1].astype(np.int64) - starts[texts])
    first = 0
    while first < len(texts):
        before = ends[first - 1] if first else 0
        last = max(int(np.searchsorted(ends, before + max_positions, side="right")), first + 1)
        yield texts[first:last]
        first = last


def _kept(order: np.ndarray, file: Path) -> Iterator[np.ndarray]:
    """A sorted run on the disk until it is merged."""
    with ArrayWriter(file, order.dtype) as writer:
        writer.write(order)
    return read_chunks(file)


def _write_order(order: Iterator[np.ndarray], laid: LaidTexts, folder: Path) -> None:
    """`order` and, place by place, `group_codes`."""
    with (
        ArrayWriter(array_path(folder, "order"), np.int32) as places,
        ArrayWriter(array_path(folder, "group_codes"), laid.group_codes.dtype) as codes,
    ):
        with_codes = in_threads(lambda chunk: (chunk, values_by_place(chunk, laid.spans, laid.group_codes)), order)
        for chunk, codes_of_chunk in with_codes:
            places.write(chunk)
            codes.write(codes_of_chunk)


def _write_rest(laid: LaidTexts, settings: PoolSettings, folder: Path) -> None:
    with ArrayWriter(array_path(folder, "starts"), np.int32) as writer:
        writer.write(count_first_tokens(laid.tokens, laid.vocab_size))
    if settings.min_support == 1:
        return
    order = map_array(array_path(folder, "order"))
    lengths = supported_lengths(
        laid.tokens, order, laid.spans, laid.entity_codes, settings.min_support, settings.index_depth
    )
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
