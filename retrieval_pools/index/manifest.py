"""The manifest of a pool, and the check that the pool's files match it."""

import hashlib
import json
from pathlib import Path
from typing import Literal, cast

import numpy as np
from pydantic import Field, ValidationError
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from laserbatch.retrieval_pools.atomic import sha256_file
from laserbatch.retrieval_pools.errors import OtherPoolFormat, PoolError
from laserbatch.retrieval_pools.index.arrays import map_array
from laserbatch.retrieval_pools.index.calibration_record import Calibration
from laserbatch.retrieval_pools.settings import DraftSettings, Frozen, PoolSettings

FORMAT_VERSION = 11
MANIFEST_NAME = "manifest.json"
REBUILD = "Run `laserbatch pools rebuild`, with `--run RUN` if they are not the published run's."
OTHER_TOKENIZER = "Use the pools of a run that this model wrote; `laserbatch nightly` builds them."

Side = Literal["user", "item"]
ArrayName = Literal["tokens", "order", "group_codes", "starts", "support"]
DType = Literal["<i4", "<u2", "|u1"]
ARRAY_NAMES: tuple[ArrayName, ...] = ("tokens", "order", "group_codes", "starts", "support")


class GroupCounts(TypedDict):
    """The amount of text of one group in a pool: a plain dict, since manifests of runs copy it."""

    num_texts: int
    num_tokens: int


class ArrayFile(Frozen):
    """One `<name>.npy` of a pool."""

    dtype: DType
    length: int = Field(ge=0)
    size_bytes: int = Field(ge=0)
    sha256: str


class PoolManifest(Frozen):
    """The `manifest.json` of a pool. `groups` are in the order of their codes; nothing depends on the clock.

    `num_tokens` counts the texts' own tokens, without separators. If `calibration` is None, relative counts are used as
    probabilities.
    """

    format_version: int
    side: Side
    tokenizer_hash: str
    model_id: str
    vocab_size: int = Field(ge=0)
    num_texts: int = Field(ge=0)
    num_tokens: int = Field(ge=0)
    groups: dict[str, GroupCounts]
    settings: DraftSettings
    arrays: dict[ArrayName, ArrayFile]
    calibration: Calibration | None = None

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.arrays.values())


def array_names(settings: PoolSettings) -> tuple[ArrayName, ...]:
    """The names of the arrays of a pool with these settings; it has `support` only if `min_support` is above 1."""
    return tuple(name for name in ARRAY_NAMES if name != "support" or settings.min_support > 1)


def array_path(folder: Path, name: ArrayName) -> Path:
    return folder / f"{name}.npy"


def write_manifest(manifest: PoolManifest, folder: Path) -> None:
    """Write `manifest.json`. The caller publishes the folder as a whole."""
    data = manifest.model_dump(mode="json")
    (folder / MANIFEST_NAME).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> PoolManifest:
    """Read `manifest.json`. Raises PoolError if it is missing, of another format, or not a pool's manifest."""
    path = folder / MANIFEST_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise PoolError(f"{folder} is not a pool: it has no {MANIFEST_NAME}. {REBUILD}") from None
    except ValueError as error:
        raise PoolError(f"{path} is damaged: {error}. {REBUILD}") from None
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        found = f"{folder} is a pool of format {version!r}; this version expects {FORMAT_VERSION}"
        raise OtherPoolFormat(f"{found}. {REBUILD}")
    try:
        return PoolManifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise PoolError(f"{path} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}. {REBUILD}") from None


def group_code_dtype(num_groups: int) -> np.dtype:
    """The dtype of a pool's `group_codes`: one byte for up to 256 groups."""
    return np.dtype(np.uint8 if num_groups <= 256 else np.uint16)


def describe_array(name: ArrayName, folder: Path) -> ArrayFile:
    """The manifest's entry for an array that was written to the pool's folder; its file is read once."""
    path = array_path(folder, name)
    return _described(path, map_array(path), sha256_file(path))


def read_array(folder: Path, name: ArrayName, manifest: PoolManifest, verify: bool) -> np.ndarray:
    """One array of a pool, memory-mapped and read-only; `verify` also compares its SHA-256, which reads all of it.

    Raises PoolError if the file is missing or does not match the manifest.
    """
    path, expected = array_path(folder, name), manifest.arrays.get(name)
    try:
        array = map_array(path)
        sha256 = sha256_file(path) if verify or expected is None else expected.sha256
        actual = _described(path, array, sha256)
    except FileNotFoundError:
        raise PoolError(f"{path} is missing. {REBUILD}") from None
    except (ValueError, EOFError) as error:
        raise PoolError(f"{path} is damaged: {error}. {REBUILD}") from None
    if actual != expected:
        raise PoolError(f"{path} is damaged: {actual}; the manifest says {expected}. {REBUILD}")
    return array


def _described(path: Path, array: np.ndarray, sha256: str) -> ArrayFile:
    dtype = cast(DType, array.dtype.str)
    return ArrayFile(dtype=dtype, length=len(array), size_bytes=path.stat().st_size, sha256=sha256)


def tokenizer_hash(folder: Path) -> str:
    """Hex SHA-256 of the files that define the meaning of token ids; a pool of another hash is refused."""
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    return digest.hexdigest()
