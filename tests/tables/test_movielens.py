"""Import of MovieLens from files of the published forms, made up here."""

from pathlib import Path

import pyarrow as pa
import pytest

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.tables.check import check_tables
from laserbatch.pipeline.tables.movielens import import_movielens
from laserbatch.pipeline.tables.read import read_tables


def write(folder: Path, encoding: str, **files: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        (folder / name.replace("_", ".")).write_text("".join(f"{line}\n" for line in lines), encoding=encoding)
    return folder


def flags(*set_: int) -> str:
    return "|".join("1" if index in set_ else "0" for index in range(19))


@pytest.fixture
def ml_100k(tmp_path) -> Path:
    return write(
        tmp_path / "ml-100k",
        "latin-1",
        u_data=["2\t1\t5\t881250949", "1\t2\t3\t881250948"],
        u_item=[
            f"1|Café Story (1995)|01-Jan-1995||http://x|{flags(3, 5)}",
            f"2|unknown||||{flags(0)}",
        ],
        u_user=["1|24|M|technician|85711", "2|53|F|other|T8H1N"],
    )


def test_100k(tmp_path, ml_100k):
    import_movielens("movielens-100k", ml_100k, tmp_path / "out")
    assert check_tables(tmp_path / "out") == []
    tables = read_tables(tmp_path / "out")
    assert tables.items.to_pylist() == [
        {"item_id": 1, "title": "Café Story", "year": 1995, "genres": ["Animation", "Comedy"]},
        {"item_id": 2, "title": "unknown", "year": None, "genres": []},
    ]
    assert tables.users.to_pylist()[1] == {
        "user_id": 2, "age": 53, "gender": "F", "occupation": "other", "zip_code": "T8H1N"
    }  # fmt: skip
    assert tables.interactions["user_id"].to_pylist() == [1, 2]
    assert tables.interactions["rating"].to_pylist() == [3.0, 5.0]
    assert str(tables.interactions["timestamp"][1].as_py()) == "1997-12-04 15:55:49+00:00"


def test_1m(tmp_path):
    source = write(
        tmp_path / "unpacked" / "ml-1m",
        "latin-1",
        ratings_dat=["1::2::5::978300760", "1::3::3::978302109"],
        movies_dat=["2::Déjà: Vu (2 in 1) (1995)::Action|Film-Noir", "3::Seven::Drama"],
        users_dat=["1::F::1::10::48067"],
    )
    import_movielens("movielens-1m", source.parent, tmp_path / "out")
    assert check_tables(tmp_path / "out") == []
    tables = read_tables(tmp_path / "out")
    assert tables.items.to_pylist() == [
        {"item_id": 2, "title": "Déjà: Vu (2 in 1)", "year": 1995, "genres": ["Action", "Film-Noir"]},
        {"item_id": 3, "title": "Seven", "year": None, "genres": ["Drama"]},
    ]
    assert tables.users.to_pylist() == [
        {"user_id": 1, "age": "under 18", "gender": "F", "occupation": "K-12 student", "zip_code": "48067"}
    ]


def test_10m_has_half_stars_and_no_users_file(tmp_path):
    source = write(
        tmp_path / "ml-10m",
        "utf-8",
        ratings_dat=["7::122::4.5::838985046", "2::122::5::838985045"],
        movies_dat=["122::Būmerang (1992)::(no genres listed)"],
    )
    import_movielens("movielens-10m", source, tmp_path / "out")
    assert check_tables(tmp_path / "out") == []
    tables = read_tables(tmp_path / "out")
    assert tables.users.schema.equals(pa.schema({"user_id": pa.int64()}))
    assert tables.users["user_id"].to_pylist() == [2, 7]
    assert tables.interactions["rating"].to_pylist() == [5.0, 4.5]
    assert tables.items["genres"].to_pylist() == [[]]


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("u.item", "1|Heat", r"u\.item, line 1: found 2 fields, expected 24 separated by '\|'"),
        ("u.user", "one|24|M|technician|85711", r"u\.user, line 1: found 'one' in field 1, expected an integer"),
        (
            "u.data",
            "1\t2\tgood\t3",
            r"published: .*u\.data, column rating, row 0: found 'good'.*Check the version",
        ),
        ("u.data", "1\t2\t3", r"not as published: .*u\.data cannot be read: .*Expected 4 columns, got 3"),
    ],
)
def test_a_line_that_is_not_as_published_is_named(tmp_path, ml_100k, file, line, message):
    (ml_100k / file).write_text(line + "\n")
    with pytest.raises(TableError, match=message):
        import_movielens("movielens-100k", ml_100k, tmp_path / "out")


def test_missing_files_are_named(tmp_path, ml_100k):
    with pytest.raises(TableError, match=r"ratings\.dat is not there"):
        import_movielens("movielens-1m", ml_100k, tmp_path / "out")
    (ml_100k / "u.user").unlink()
    with pytest.raises(TableError, match=r"u\.user is not there; expected it beside u\.data"):
        import_movielens("movielens-100k", ml_100k, tmp_path / "out")
