"""Import of MovieLens from its published files: 100K (u.data, u.item, u.user) and 1M and 10M (`::` files).

Ids become int64, genres a list of strings, "Heat (1995)" a title and a year. 10M has no users file: its users are those
that rate.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.storage.parquet import write_parquet
from laserbatch.pipeline.tables.mapping import Import, Progress
from laserbatch.pipeline.tables.settings import IdTypes, InteractionMapping

MovieLensVersion = Literal["movielens-100k", "movielens-1m", "movielens-10m"]

GENRES_100K = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
AGES_1M = {
    "1": "under 18", "18": "18-24", "25": "25-34", "35": "35-44", "45": "45-49", "50": "50-55", "56": "56 or older",
}  # fmt: skip
OCCUPATIONS_1M = (
    "other", "academic/educator", "artist", "clerical/admin", "college/grad student", "customer service",
    "doctor/health care", "executive/managerial", "farmer", "homemaker", "K-12 student", "lawyer", "programmer",
    "retired", "sales/marketing", "scientist", "self-employed", "technician/engineer", "tradesman/craftsman",
    "unemployed", "writer",
)  # fmt: skip
_TITLE_YEAR = re.compile(r"^(.*?)\s*\((\d{4})\)\s*$")


@dataclass(frozen=True)
class _Format:
    ratings: str
    items: str
    users: str | None
    separator: str  # of items and users
    encoding: str
    num_item_fields: int


_FORMATS: dict[str, _Format] = {
    "movielens-100k": _Format("u.data", "u.item", "u.user", "|", "latin-1", 24),
    "movielens-1m": _Format("ratings.dat", "movies.dat", "users.dat", "::", "latin-1", 3),
    "movielens-10m": _Format("ratings.dat", "movies.dat", None, "::", "utf-8", 3),
}


def import_movielens(
    version: MovieLensVersion, source: Path | str, out: Path | str, progress: Progress | None = None
) -> None:
    """Make the three tables from the published files.

    Parameters
    ----------
    version : "movielens-100k", "movielens-1m" or "movielens-10m".
    source : the unpacked folder, or the one it was unpacked in.
    out : folder to write `users.parquet`, `items.parquet` and `interactions.parquet` to.
    progress : called with the number of ratings that were read.

    Raises
    ------
    TableError
        A file is missing or a line is not as published; the message names file, line and what was found.
    """
    known, out = _FORMATS[version], Path(out)
    folder = _folder_with(Path(source), known)
    items = [_item(line, version) for line in _lines(folder / known.items, known, known.num_item_fields)]
    write_parquet(pa.Table.from_pylist(items, _ITEM_SCHEMA), out / "items.parquet")
    ids = IdTypes(user_id="int64", item_id="int64")
    try:
        raters = Import(ids, folder, out, progress).write_interactions(_ratings(version), {})
    except TableError as error:
        raise TableError(f"not as published: {error} Check the version given.") from None
    if known.users is None:
        write_parquet(pa.table({"user_id": raters}), out / "users.parquet")
        return
    users = [_user(line, version) for line in _lines(folder / known.users, known, 5)]
    write_parquet(pa.Table.from_pylist(users), out / "users.parquet")


def _ratings(version: str) -> InteractionMapping:
    if version == "movielens-100k":
        delimiter, names = "\t", ["user_id", "item_id", "rating", "timestamp"]
    else:  # "1::2::5::978300760": between two colons lies an empty column
        delimiter, names = ":", ["user_id", "_1", "item_id", "_2", "rating", "_3", "timestamp"]
    return InteractionMapping(
        files=_FORMATS[version].ratings, delimiter=delimiter, column_names=names,
        user_id="user_id", item_id="item_id", rating="rating", timestamp="timestamp",
    )  # fmt: skip


_ITEM_SCHEMA = pa.schema(
    [("item_id", pa.int64()), ("title", pa.string()), ("year", pa.int64()), ("genres", pa.list_(pa.string()))]
)


def _folder_with(source: Path, known: _Format) -> Path:
    folders = (source, *sorted(path for path in source.glob("*") if path.is_dir()))
    folder = next((folder for folder in folders if (folder / known.ratings).is_file()), None)
    if folder is None:
        raise TableError(f"{source / known.ratings} is not there; expected the folder with the published files.")
    for name in (known.items, known.users):
        if name is not None and not (folder / name).is_file():
            raise TableError(
                f"{folder / name} is not there; expected it beside {known.ratings}. Unpack the archive again."
            )
    return folder


@dataclass(frozen=True)
class _Line:
    place: str
    fields: list[str]

    def integer(self, index: int) -> int:
        try:
            return int(self.fields[index])
        except ValueError:
            raise TableError(
                f"{self.place}: found {self.fields[index]!r} in field {index + 1}, expected an integer."
            ) from None


def _lines(path: Path, known: _Format, num_fields: int) -> Iterator[_Line]:
    try:
        with path.open(encoding=known.encoding, newline="\n") as file:
            for number, text in enumerate(file, start=1):
                fields = text.rstrip("\r\n").split(known.separator)
                if fields == [""]:
                    continue
                place = f"{path}, line {number}"
                if len(fields) != num_fields:
                    raise TableError(
                        f"{place}: found {len(fields)} fields, expected {num_fields} separated by {known.separator!r}. "
                        "Check that this is the published file, and the version given."
                    )
                yield _Line(place, fields)
    except UnicodeDecodeError as error:
        raise TableError(f"{path}: not {known.encoding} text ({error}). Check the version given.") from None


def _item(line: _Line, version: str) -> dict:
    found = _TITLE_YEAR.match(line.fields[1])
    title, year = (found[1], int(found[2])) if found else (line.fields[1], None)
    if version == "movielens-100k":
        genres = [genre for genre, flag in zip(GENRES_100K, line.fields[5:], strict=True) if flag == "1"]
    else:
        genres = [genre for genre in line.fields[2].split("|") if genre != "(no genres listed)"]
    return {"item_id": line.integer(0), "title": title, "year": year, "genres": [g for g in genres if g != "unknown"]}


def _user(line: _Line, version: str) -> dict:
    if version == "movielens-100k":
        age, gender, occupation, zip_code = line.integer(1), *line.fields[2:]
    else:
        gender, age_code, _, zip_code = line.fields[1:]
        code = line.integer(3)
        if age_code not in AGES_1M or not 0 <= code < len(OCCUPATIONS_1M):
            raise TableError(
                f"{line.place}: found age {age_code!r} and occupation {code}, expected codes of the 1M README."
            )
        age, occupation = AGES_1M[age_code], OCCUPATIONS_1M[code]
    return {"user_id": line.integer(0), "age": age, "gender": gender, "occupation": occupation, "zip_code": zip_code}
