"""Tables that lie at a URI: their files are brought here once a process, before the first is read.

Everything then reads local files, with the memory and the speed that it has there. The copy lies in the temporary
folder of the machine (TMPDIR) and goes when the process ends.
"""

import tempfile
from functools import cache
from pathlib import Path, PurePosixPath

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.storage.uris import BLOCK_BYTES, filesystem_of, is_uri, naming_uri, without_credentials

_URIS: dict[Path, str] = {}  # folder of a copy -> where it is from
_KEPT: list[tempfile.TemporaryDirectory] = []  # until the process ends


def local_tables(path: Path | str, names: tuple[str, ...]) -> Path:
    """The folder that tables are read from: of a path itself, of a URI a copy of the files of tables of these names.

    Raises TableError where the files cannot be fetched, or changed meanwhile.
    """
    return _fetched(without_credentials(path), names) if is_uri(path) else Path(path)


def shown_path(path: Path) -> str:
    """What a message calls a file or folder: of a fetched one its URI."""
    for folder, uri in _URIS.items():
        if path.is_relative_to(folder):
            within = path.relative_to(folder).as_posix()
            return uri if within == "." else f"{uri.partition('?')[0].rstrip('/')}/{within}"
    return str(path)


@cache
def _fetched(uri: str, names: tuple[str, ...]) -> Path:
    import pyarrow.fs as pafs

    filesystem, root = filesystem_of(uri)

    def listed() -> dict[str, tuple[int, int | None]]:
        """Path within the folder -> bytes and time of change, of each file of a table."""
        found = {}
        for info in filesystem.get_file_info(pafs.FileSelector(root, recursive=True, allow_not_found=True)):
            within = PurePosixPath(info.path).relative_to(root)
            is_ours = len(within.parts) <= 2 and within.parts[0].removesuffix(".parquet") in names
            if info.is_file and is_ours and within.suffix == ".parquet":
                found[str(within)] = (info.size, info.mtime_ns)
        return found

    with naming_uri(uri, TableError):
        files = listed()
        _KEPT.append(tempfile.TemporaryDirectory(prefix="laserbatch-tables-"))
        folder = Path(_KEPT[-1].name)
        _URIS[folder] = uri
        for name, (num_bytes, _) in files.items():
            target = folder / name
            target.parent.mkdir(exist_ok=True)
            pafs.copy_files(f"{root}/{name}", str(target), filesystem, pafs.LocalFileSystem(), chunk_size=BLOCK_BYTES)
            if target.stat().st_size != num_bytes:
                raise TableError(f"{shown_path(target)} came with {target.stat().st_size:,} of {num_bytes:,} bytes")
        if listed() != files:
            raise TableError(f"the tables of {uri} changed while they were read; give the same command again")
    return folder
