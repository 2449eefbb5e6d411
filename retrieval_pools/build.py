"""Building a pool from texts: checked, laid end to end, sorted, written, published by one rename.

Only permanent text belongs in a pool; what a sequence writes tonight is handed to each draft instead. Knows neither
tables nor runs.
"""

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrieval_pools.drafting.state import Index
from retrieval_pools.errors import PoolError
from retrieval_pools.manifest import (
    FORMAT_VERSION,
    GroupCounts,
    PoolManifest,
    Side,
    array_names,
    write_array,
    write_manifest,
)
from retrieval_pools.pool import Pool
from retrieval_pools.settings import PoolSettings
from retrieval_pools.suffix_order import SEPARATOR, sort_suffixes
from retrieval_pools.support import supported_lengths

MAX_GROUPS = 1 << 16
MAX_POSITIONS = (1 << 31) - 1
TEMPORARY_SUFFIX = ".tmp"


@dataclass(frozen=True)
class PoolText:
    """One earlier text.

    Parameters
    ----------
    token_ids : int32[n], n >= 0, without the end token: where a text ends is known by itself.
    group : the group of the entity that it was written for.
    entity : that entity, for `min_support`: its texts count once. None: an entity with this one text.
    """

    token_ids: np.ndarray
    group: str = ""
    entity: str | int | None = None


def build_pool(
    texts: Iterable[PoolText],
    out_dir: Path | str,
    *,
    side: Side,
    tokenizer_hash: str,
    model_id: str,
    settings: PoolSettings | None = None,
    vocab_size: int | None = None,
) -> Pool:
    """Build a pool and publish it at `out_dir`. The same texts in the same order give the same files.

    Parameters
    ----------
    texts : read once.
    out_dir : the folder to create; it appears when it is complete.
    tokenizer_hash : of the tokenizer that made the token ids; a pool is refused under another.
    vocab_size : ids must be below it; None takes the largest id for the last.

    Raises
    ------
    PoolError
        A text is not a row of token ids of the vocabulary (the message numbers it, from 0), there are more groups or
        tokens than the format holds, or something is at `out_dir` already.
    """
    settings = PoolSettings() if settings is None else settings
    out_dir = Path(out_dir)
    laid_out = _lay_end_to_end(texts, vocab_size)
    suffixes = sort_suffixes(laid_out.tokens, laid_out.vocab_size, settings.index_depth)
    index = Index(
        laid_out.tokens,
        suffixes.order,
        laid_out.group_codes[suffixes.order],
        suffixes.starts,
        _support(laid_out, suffixes.order, settings),
        settings.index_depth,
    )
    with _published_folder(out_dir) as folder:
        arrays = {name: write_array(getattr(index, name), name, folder) for name in array_names(settings)}
        manifest = PoolManifest(
            format_version=FORMAT_VERSION,
            side=side,
            tokenizer_hash=tokenizer_hash,
            model_id=model_id,
            vocab_size=laid_out.vocab_size,
            num_texts=sum(counts["num_texts"] for counts in laid_out.groups.values()),
            num_tokens=sum(counts["num_tokens"] for counts in laid_out.groups.values()),
            groups=laid_out.groups,
            settings=settings,
            arrays=arrays,
        )
        write_manifest(manifest, folder)
    return Pool.open(out_dir)


@dataclass(frozen=True)
class _LaidOut:
    tokens: np.ndarray  # int32[n]: separator, text, separator, text, ..., separator
    group_codes: np.ndarray  # uint16[n], of the text that a token or the separator before it belongs to
    entity_codes: np.ndarray  # int32[n], likewise
    groups: dict[str, GroupCounts]  # in the order of their codes: as they came
    vocab_size: int


def _lay_end_to_end(texts: Iterable[PoolText], vocab_size: int | None) -> _LaidOut:
    separator = np.array([SEPARATOR], np.int32)
    pieces: list[np.ndarray] = []
    lengths: list[int] = []
    codes: list[int] = []
    code_of: dict[str, int] = {}
    entity_codes: list[int] = []
    code_of_entity: dict[str | int | tuple[int], int] = {}
    num_positions, largest = 1, -1
    for number, text in enumerate(texts):
        token_ids = _checked(text.token_ids, number, vocab_size)
        code = code_of.setdefault(text.group, len(code_of))
        if code >= MAX_GROUPS:
            raise PoolError(
                f"text {number} is of a new group, {text.group!r}; a pool holds {MAX_GROUPS:,}. Make fewer."
            )
        num_positions += len(token_ids) + 1
        if num_positions > MAX_POSITIONS:
            raise PoolError(f"text {number} is one too many: a pool holds {MAX_POSITIONS:,} tokens. Split the texts.")
        largest = max(largest, int(token_ids.max(initial=-1)))
        pieces += (separator, token_ids)
        lengths.append(len(token_ids))
        codes.append(code)
        entity = (number,) if text.entity is None else text.entity
        entity_codes.append(code_of_entity.setdefault(entity, len(code_of_entity)))
    num_places = np.array(lengths, np.int64) + 1
    num_texts = np.bincount(codes, minlength=len(code_of)) if codes else []
    num_tokens = np.bincount(codes, weights=lengths, minlength=len(code_of)) if codes else []
    groups = {
        name: GroupCounts(num_texts=int(num_texts[code]), num_tokens=int(num_tokens[code]))
        for name, code in code_of.items()
    }
    tokens = np.concatenate([*pieces, separator])
    return _LaidOut(
        tokens,
        np.repeat(np.array(codes, np.uint16), num_places),
        np.repeat(np.array(entity_codes, np.int32), num_places),
        groups,
        largest + 1 if vocab_size is None else vocab_size,
    )


def _support(laid_out: _LaidOut, order: np.ndarray, settings: PoolSettings) -> np.ndarray | None:
    if settings.min_support == 1:
        return None
    entity_codes = laid_out.entity_codes[order]
    return supported_lengths(laid_out.tokens, order, entity_codes, settings.min_support, settings.index_depth)


def _checked(token_ids: np.ndarray, number: int, vocab_size: int | None) -> np.ndarray:
    array = np.asarray(token_ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise PoolError(f"text {number} is not a row of token ids: shape {array.shape} of {array.dtype}.")
    if array.size:
        smallest, largest = int(array.min()), int(array.max())
        limit = MAX_POSITIONS - 2 if vocab_size is None else vocab_size
        if smallest < 0 or largest >= limit:
            wrong = smallest if smallest < 0 else largest
            raise PoolError(
                f"text {number} has the token id {wrong}; expected 0 to {limit - 1}. "
                "Build the pool from texts of the same tokenizer."
            )
    return array.astype(np.int32)


@contextmanager
def _published_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that is synced and renamed to it at the end, or removed."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise PoolError(f"{path} is there already; a pool is never changed. Give another folder or remove it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        temporary.mkdir()
        yield temporary
        sync_folder(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        raise PoolError(f"{path} could not be written: {error}. Nothing was published.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Wait until everything below a folder is on the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            _sync(Path(root, name))
        _sync(Path(root))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
