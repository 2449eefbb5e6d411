"""Building a pool: texts are laid end to end, positions are sorted or merged, and a rename publishes the folder.

A pool holds only texts of earlier nights; what a sequence writes tonight is passed to each draft instead. The files
depend only on the texts and their sequence, not on an older pool whose order is reused, the memory limit or the number
of threads.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from laserbatch.retrieval_pools.atomic import naming, sync, temporary_beside
from laserbatch.retrieval_pools.drafting.state import Index
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.arrays import ArrayWriter, give_back, in_threads, map_array, read_chunks
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
from laserbatch.retrieval_pools.index.order import count_first_tokens, merge, sort_texts
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.index.support import supported_lengths
from laserbatch.retrieval_pools.index.texts import (
    MAX_POSITIONS,
    LaidTexts,
    PoolText,
    PoolTexts,
    TextOf,
    find_known_texts,
    lay_end_to_end,
)
from laserbatch.retrieval_pools.settings import DraftSettings, PoolSettings

__all__ = ["HeldBack", "PoolText", "PoolTexts", "build_pool", "sync_folder"]

SORT_BYTES_PER_POSITION = 16  # memory that sorting takes per position
# Memory for sorting, besides a hundred bytes per text, some megabytes, and mapped files, whose pages the kernel can
# reclaim. More positions than fit are sorted in turns, those of one first token together.
SORT_MEMORY_BYTES = 512 << 20
_NONE = np.empty(0, np.int64)
_GONE = np.iinfo(np.int32).min  # moves every position below 0


@dataclass(frozen=True)
class HeldBack:
    """Texts of the pool to be built that are held back to calibrate it."""

    numbers: Sequence[int]  # their numbers in the sequence of the pool's texts
    calibrate: Callable[[Pool], Calibration | None]  # gets a temporary pool of all other texts


def build_pool(
    texts: Iterable[PoolText] | Iterable[PoolTexts],
    out_dir: Path | str,
    *,
    side: Side,
    tokenizer_hash: str,
    model_id: str,
    settings: PoolSettings | None = None,
    previous: Pool | None = None,
    calibration: Calibration | HeldBack | None = None,
) -> Pool:
    """Build a pool and publish it at `out_dir`. The same texts in the same order give the same files.

    Parameters
    ----------
    texts : iterated once.
    out_dir : the folder to create; it appears when it is complete.
    tokenizer_hash : hash of the tokenizer that made the token ids; the pool cannot be opened with another.
    previous : an older pool that shares many texts with this one. Texts that both have in the same sequence are not
        sorted again, which saves time and changes nothing else. Its order is trusted, so open it with `verify`. A pool
        of another `index_depth` is ignored.
    calibration : the result of replays, or the texts to replay; None: relative counts are used as probabilities.

    Raises
    ------
    PoolError
        A text is not a row of token ids (the message has its number, from 0), there are more groups or tokens than the
        format holds, the disk is full, or `out_dir` exists already and is not an empty folder.
    """
    settings = DraftSettings.of(settings)
    out_dir = Path(out_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise PoolError(f"{out_dir} is there already; a pool is never changed. Give another folder or remove it.")
    with (
        staged_folder(out_dir) as folder,
        tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as in_folder,  # removed before the rename
    ):
        scratch = Path(in_folder)
        laid = lay_end_to_end(texts, array_path(folder, "tokens"), with_entities=settings.min_support > 1)
        order, num_sorted = _order(laid, settings.index_depth, previous)
        _write_arrays(order, laid, settings, folder, scratch)
        give_back(laid.tokens)
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
            calibration=None if isinstance(calibration, HeldBack) else calibration,
        )
        if isinstance(calibration, HeldBack):
            replayed = _replayed(calibration, laid, manifest, folder, scratch)
            manifest = manifest.model_copy(update={"calibration": replayed})
        write_manifest(manifest, folder)
        shutil.rmtree(scratch)  # NFS would refuse to if any of its files were still mapped
        sync_folder(folder)
        os.replace(folder, out_dir)
        sync(out_dir.parent)
    return replace(Pool.open(out_dir), num_sorted=num_sorted)


def _order(laid: LaidTexts, depth: int, previous: Pool | None) -> tuple[Iterator[np.ndarray], int]:
    """The order of all positions as a stream, with an older pool's order merged in, and the number of texts sorted."""
    starts = laid.starts
    is_new = np.ones(laid.num_texts, bool)
    older = None
    if previous is not None and previous.folder is not None and previous.index.depth == depth:
        old_starts = previous.text_starts
        new_numbers = find_known_texts(laid.tokens, starts, previous.index.tokens, old_starts)
        give_back(previous.index.tokens)
        is_new[new_numbers[new_numbers >= 0]] = False
        moved_by = np.where(new_numbers >= 0, starts[new_numbers] - old_starts[:-1], _GONE).astype(np.int32)
        old_text_of = TextOf(old_starts)

        def moved(chunk: np.ndarray) -> np.ndarray:
            places = chunk + old_text_of.values(moved_by, chunk)
            return places[places >= 0]

        older = in_threads(moved, read_chunks(array_path(previous.folder, "order")))
    texts = np.flatnonzero(is_new)
    first_tokens = count_first_tokens(laid.tokens, starts, texts, laid.vocab_size)
    max_positions = min(max(SORT_MEMORY_BYTES // SORT_BYTES_PER_POSITION, 1), MAX_POSITIONS)
    added = sort_texts(laid.tokens, starts, texts, first_tokens, depth, max_positions)
    return (merge(laid.tokens, older, added, depth) if older else added), len(texts)


def _write_arrays(
    order: Iterator[np.ndarray],
    laid: LaidTexts,
    settings: DraftSettings,
    folder: Path,
    scratch: Path,
    left_out: np.ndarray = _NONE,
) -> None:
    """Write `order`, `group_codes`, `starts` and, if needed, `support`. Texts in `left_out` are not in the order."""
    text_of = TextOf(laid.starts)
    files = {array_path(folder, "group_codes"): laid.group_codes}
    if laid.entity_codes is not None:
        files[scratch / "entities.npy"] = laid.entity_codes

    def with_values(chunk: np.ndarray) -> tuple[np.ndarray, ...]:
        return chunk, *(text_of.values(per_text, chunk) for per_text in files.values())

    with ExitStack() as opened:
        writers = [opened.enter_context(ArrayWriter(array_path(folder, "order"), np.int32))]
        writers += [opened.enter_context(ArrayWriter(path, per_text.dtype)) for path, per_text in files.items()]
        for columns in in_threads(with_values, order):
            for writer, column in zip(writers, columns, strict=True):
                writer.write(column)
    texts = np.delete(np.arange(laid.num_texts), left_out)
    starts = count_first_tokens(laid.tokens, laid.starts, texts, laid.vocab_size)
    with ArrayWriter(array_path(folder, "starts"), np.int32) as writer:
        writer.write(starts)
    if settings.min_support > 1:
        order_file, entities = map_array(array_path(folder, "order")), map_array(scratch / "entities.npy")
        lengths = supported_lengths(laid.tokens, order_file, entities, settings.min_support, settings.index_depth)
        with ArrayWriter(array_path(folder, "support"), np.uint8) as writer:
            writer.write(lengths)
        give_back(order_file, entities)


def _replayed(
    held_back: HeldBack, laid: LaidTexts, manifest: PoolManifest, folder: Path, scratch: Path
) -> Calibration | None:
    """The calibration by a temporary pool without the held-back texts: its order does not have their positions."""
    left_out = np.asarray(held_back.numbers, np.int64)
    is_included = np.ones(laid.num_texts, bool)
    is_included[left_out] = False
    text_of = TextOf(laid.starts)
    order = read_chunks(array_path(folder, "order"))
    remaining = in_threads(lambda chunk: chunk[text_of.values(is_included, chunk)], order)
    _write_arrays(remaining, laid, manifest.settings, scratch, scratch, left_out)
    arrays: dict[str, np.ndarray] = {"tokens": laid.tokens}
    for name in array_names(manifest.settings):
        if name != "tokens":
            arrays[name] = map_array(array_path(scratch, name))
    pool = Pool.of_arrays(None, manifest, Index.of(arrays, manifest.settings.index_depth))
    calibration = held_back.calibrate(pool)
    give_back(*pool.index[:4])
    return calibration


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `target`, which the block renames to it; it is removed if it is still there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = temporary_beside(target)
    try:
        with naming(target, staging):
            staging.mkdir()
            yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Wait until everything below a folder is on the disk."""
    walked = [(Path(root), names) for root, _, names in os.walk(folder)]
    for paths in ([root / name for root, names in walked for name in names], [root for root, _ in walked]):
        for _ in in_threads(sync, paths):
            pass
