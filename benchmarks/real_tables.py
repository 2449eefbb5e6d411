"""The real data of `real_input.py` as input tables: two nights of goodreads, MovieLens with a date inside it.

Owns the choice of readers and books and the invented times of day; texts and order of reading are as published.
Nothing is copied into the repository: tables go to the folder they are asked into.
"""

import datetime
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

NIGHT_1 = datetime.date(2025, 3, 1)
NIGHT_2 = datetime.date(2025, 3, 2)
MIN_HISTORY = 2  # books a reader keeps on the first night


@dataclass(frozen=True)
class Reader:
    """A reader's books among those chosen: finished by the first night, and the one finished on the second day."""

    user_id: str
    books: tuple[str, ...]
    last_book: str


def write_goodreads(data: Path, out: Path, *, num_items: int, num_users: int) -> Path:
    """Tables of goodreads in which the second day brings half of the books and each reader's last book.

    The first half are the books most often finished before a reader's last one, the second half the most frequent
    other last books, so that nobody has read a book before it appears. Histories are cut to these books; readers are
    taken in the order of the file. The data has no times: a reader's books are a day apart, the last one on the
    second day.

    Raises
    ------
    SystemExit
        The data has too few readers for the numbers asked.
    """
    readers = pq.read_table(data / "goodreads" / "users.parquet").to_pylist()
    titles = pq.read_table(data / "goodreads" / "items.parquet").to_pydict()
    titles = dict(zip(titles["item_id"], titles["title"], strict=True))
    first = _most_frequent((book for row in readers for book in row["history"][:-1]), num_items // 2)
    known = set(first)
    second = _most_frequent((row["history"][-1] for row in readers if row["history"][-1] not in known), num_items // 2)
    chosen = _readers(readers, known, {*first, *second})[:num_users]
    if len(chosen) < num_users:
        raise SystemExit(f"goodreads: {len(chosen)} readers of {MIN_HISTORY} books among {num_items}, not {num_users}")
    day_1, day_2 = _noon(NIGHT_1), _noon(NIGHT_2)
    _write(out / "users.parquet", {"user_id": [reader.user_id for reader in chosen]})
    _write(
        out / "items.parquet",
        {
            "item_id": first + second,
            "title": [titles[book] for book in first + second],
            "created_at": [day_1 - datetime.timedelta(days=365)] * len(first) + [day_2] * len(second),
        },
    )
    rows = [
        (reader.user_id, book, day_1 - datetime.timedelta(days=len(reader.books) - 1 - position))
        for reader in chosen
        for position, book in enumerate(reader.books)
    ] + [(reader.user_id, reader.last_book, day_2) for reader in chosen]
    columns = zip(*rows, strict=True)
    _write(out / "interactions.parquet", dict(zip(("user_id", "item_id", "timestamp"), columns, strict=True)))
    return out


def _most_frequent(books, num: int) -> list[str]:
    counts = Counter(books)
    return sorted(sorted(counts), key=lambda book: -counts[book])[:num]


def _readers(rows: list[dict], first: set[str], known: set[str]) -> list[Reader]:
    readers = []
    for row in rows:
        *earlier, last = dict.fromkeys(row["history"])  # a book read twice counts once
        books = tuple(book for book in earlier if book in first)
        if len(books) >= MIN_HISTORY and last in known:
            readers.append(Reader(row["user_id"], books, last))
    return readers


def _noon(day: datetime.date) -> datetime.datetime:
    return datetime.datetime.combine(day, datetime.time(12), datetime.UTC)


def _write(path: Path, columns: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({name: list(values) for name, values in columns.items()})
    pq.write_table(table, path)


def date_after_share(tables: Path, share: float) -> datetime.date:
    """The day by whose end about `share` of the interactions have happened; later ones are left for the CTR test."""
    times = pq.read_table(tables / "interactions.parquet")["timestamp"].cast(pa.timestamp("us", "UTC"))
    ordered = times.take(pc.sort_indices(times))
    return ordered[int(share * len(ordered))].as_py().date()


def keep_part(tables: Path, *, num_users: int, num_items: int) -> None:
    """Cut imported tables to the most active users and their most rated items, in place: for a quick run."""
    interactions = pq.read_table(tables / "interactions.parquet")
    for name, column, num in (("items", "item_id", num_items), ("users", "user_id", num_users)):
        counts = Counter(interactions[column].to_pylist())
        kept = pa.array(sorted(counts, key=lambda key: (-counts[key], key))[:num], interactions[column].type)
        interactions = interactions.filter(pc.is_in(interactions[column], value_set=kept))
        entities = pq.read_table(tables / f"{name}.parquet")
        pq.write_table(entities.filter(pc.is_in(entities[column], value_set=kept)), tables / f"{name}.parquet")
    pq.write_table(interactions, tables / "interactions.parquet")
