"""Tables at a URI: a command copies their files to this machine once, before it reads the first one.

All code then reads local files, with their speed and memory use. The copy lies in the machine's temporary folder
(TMPDIR) and is removed when the process ends; the next command removes the copy of a killed process.
"""

from pathlib import Path, PurePosixPath

from laserbatch.pipeline.errors import NotReached
from laserbatch.pipeline.storage.scratch import ScratchFolder
from laserbatch.pipeline.storage.uris import BLOCK_BYTES, filesystem_of, is_uri, naming_uri, without_credentials

_URIS: dict[Path, str] = {}  # folder of a copy -> what messages call it, such as its URI
_COPIES: dict[str, Path] = {}  # URI -> folder of its whole copy
_MADE: list[ScratchFolder] = []  # by this process, which removes them at its end


def local_tables(path: Path | str, names: tuple[str, ...]) -> Path:
    """The local folder that tables are read from: a path itself, or a copy of all files of the tables `names` at a URI.

    Raises NotReached if the files cannot be fetched, or change meanwhile, and ConfigError for an unknown kind of URI.
    """
    if not is_uri(path):
        return Path(path)
    uri = without_credentials(path)
    if uri not in _COPIES:
        _COPIES[uri] = _fetched(uri, names)
    return _COPIES[uri]


def copy_of(path: Path | str) -> Path | None:
    """This process's copy of the tables at a URI; None for a local folder, or if there is no copy."""
    return _COPIES.get(without_credentials(path)) if is_uri(path) else None


def use_copy(uri: str, folder: Path) -> None:
    """Read the tables at a URI from the copy of another process, which stays alive meanwhile and removes it."""
    uri = without_credentials(uri)
    _COPIES[uri], _URIS[folder] = folder, uri


def remove_copies() -> None:
    """Delete the copies that this process has made, if it ends by `os._exit`; may be called twice."""
    for scratch in _MADE:
        scratch.remove()


def scratch_for(folder: Path) -> Path:
    """A temporary folder for files made from those of a folder; messages show it under that folder's name."""
    _MADE.append(ScratchFolder("tables"))
    scratch = _MADE[-1].path / folder.name
    scratch.mkdir()
    _URIS[scratch] = shown_path(folder)
    return scratch


def shown_path(path: Path) -> str:
    """The name of a file or folder in messages: for a fetched one, its URI."""
    for folder, uri in reversed(list(_URIS.items())):  # a thread may add one meanwhile
        if path.is_relative_to(folder):
            within = path.relative_to(folder).as_posix()
            return uri if within == "." else f"{uri.partition('?')[0].rstrip('/')}/{within}"
    return str(path)


def _fetched(uri: str, names: tuple[str, ...]) -> Path:
    import pyarrow.fs as pafs

    filesystem, root = filesystem_of(uri)

    def listed() -> dict[str, tuple[int, int | None] | None]:
        """Path within the folder -> size in bytes and time of change of each file of a table; None for a folder."""
        files = {}
        for info in filesystem.get_file_info(pafs.FileSelector(root, recursive=True, allow_not_found=True)):
            within = PurePosixPath(info.path).relative_to(root)
            is_ours = within.parts[0].removesuffix(".parquet") in names
            if is_ours and (len(within.parts) > 1 or within.suffix == ".parquet") and ".." not in within.parts:
                files[str(within)] = (info.size, info.mtime_ns) if info.is_file else None
        return files

    with naming_uri(uri, NotReached):
        files = listed()
        _MADE.append(ScratchFolder("tables"))
        folder = _MADE[-1].path
        _URIS[folder] = uri
        bucket = root.partition("/")[0]
        places = ((bucket, f"the bucket or container {bucket} of {uri}"), (root, uri))
        for place, shown in places if not files else ():  # a key may be for a folder of the bucket alone
            if place and filesystem.get_file_info(place).type == pafs.FileType.NotFound:
                folder = folder / "missing"  # as a missing local folder
                _URIS[folder] = shown
                return folder
        for name, size_and_time in files.items():
            target = folder / name
            (target if size_and_time is None else target.parent).mkdir(parents=True, exist_ok=True)
            if size_and_time is None:
                continue
            pafs.copy_files(f"{root}/{name}", str(target), filesystem, pafs.LocalFileSystem(), chunk_size=BLOCK_BYTES)
            if target.stat().st_size != size_and_time[0]:
                raise NotReached(
                    f"{shown_path(target)}: {target.stat().st_size:,} of {size_and_time[0]:,} bytes arrived; give the "
                    "same command again"
                )
        if listed() != files:
            raise NotReached(f"the tables of {uri} changed while they were read; give the same command again")
    return folder
