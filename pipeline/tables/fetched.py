"""Tables that lie at a URI: their files are brought here once a command, before the first is read.

Everything then reads local files, with the memory and the speed that it has there. The copy lies in the temporary
folder of the machine (TMPDIR) and goes when the process ends; that of a killed process goes with the next command.
"""

from pathlib import Path, PurePosixPath

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.storage.scratch import ScratchFolder
from laserbatch.pipeline.storage.uris import BLOCK_BYTES, filesystem_of, is_uri, naming_uri, without_credentials

_URIS: dict[Path, str] = {}  # folder of a copy -> where it is from
_COPIES: dict[str, Path] = {}  # URI -> folder of its whole copy
_MADE: list[ScratchFolder] = []  # by this process, which removes them when it ends


def local_tables(path: Path | str, names: tuple[str, ...]) -> Path:
    """The folder that tables are read from: of a path itself, of a URI a copy of all files of tables of these names.

    Raises TableError where the files cannot be fetched, or changed meanwhile.
    """
    if not is_uri(path):
        return Path(path)
    uri = without_credentials(path)
    if uri not in _COPIES:
        _COPIES[uri] = _fetched(uri, names)
    return _COPIES[uri]


def copy_of(path: Path | str) -> Path | None:
    """The folder of the copy that this process has of the tables at a URI; None for a local folder or no copy."""
    return _COPIES.get(without_credentials(path)) if is_uri(path) else None


def use_copy(uri: str, folder: Path) -> None:
    """Read the tables at a URI from the copy of another process, which goes on living meanwhile and removes it."""
    uri = without_credentials(uri)
    _COPIES[uri], _URIS[folder] = folder, uri


def remove_copies() -> None:
    """Delete the copies that this process has made, for a process that ends by `os._exit`; may be called again."""
    for scratch in _MADE:
        scratch.remove()


def scratch_for(folder: Path) -> Path:
    """A temporary folder for what is made of the files of a folder, whose name it has in messages."""
    _MADE.append(ScratchFolder("tables"))
    scratch = _MADE[-1].path / folder.name
    scratch.mkdir()
    _URIS[scratch] = shown_path(folder)
    return scratch


def shown_path(path: Path) -> str:
    """What a message calls a file or folder: of a fetched one its URI."""
    for folder, uri in list(_URIS.items()):  # a thread may add one meanwhile
        if path.is_relative_to(folder):
            within = path.relative_to(folder).as_posix()
            return uri if within == "." else f"{uri.partition('?')[0].rstrip('/')}/{within}"
    return str(path)


def _fetched(uri: str, names: tuple[str, ...]) -> Path:
    import pyarrow.fs as pafs

    filesystem, root = filesystem_of(uri)

    def listed() -> dict[str, tuple[int, int | None] | None]:
        """Path within the folder -> bytes and time of change, of each file of a table; None of a folder."""
        files = {}
        for info in filesystem.get_file_info(pafs.FileSelector(root, recursive=True, allow_not_found=True)):
            within = PurePosixPath(info.path).relative_to(root)
            is_ours = within.parts[0].removesuffix(".parquet") in names
            if is_ours and (len(within.parts) > 1 or within.suffix == ".parquet") and ".." not in within.parts:
                files[str(within)] = (info.size, info.mtime_ns) if info.is_file else None
        return files

    with naming_uri(uri, TableError):
        files = listed()
        _MADE.append(ScratchFolder("tables"))
        folder = _MADE[-1].path
        _URIS[folder] = uri
        for name, size_and_time in files.items():
            target = folder / name
            (target if size_and_time is None else target.parent).mkdir(parents=True, exist_ok=True)
            if size_and_time is None:
                continue
            pafs.copy_files(f"{root}/{name}", str(target), filesystem, pafs.LocalFileSystem(), chunk_size=BLOCK_BYTES)
            if target.stat().st_size != size_and_time[0]:
                raise TableError(
                    f"{shown_path(target)} came with {target.stat().st_size:,} of {size_and_time[0]:,} bytes"
                )
        if listed() != files:
            raise TableError(f"the tables of {uri} changed while they were read; give the same command again")
    return folder
