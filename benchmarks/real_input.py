"""The command line on real input: MovieLens 100K to the CTR table, and goodreads on two nights.

    python benchmarks/real_input.py --quick --json real_input.json

Runs `laserbatch` like a user, in separate processes, and reads the manifests of the runs. Settings and prompt templates
are in `settings/`. Texts and the order of reading are as published; times of day are invented.
"""

import datetime
import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from chaos_nights import CLI
from common import REPOSITORY, benchmark_parser, scale_of, write_json

SETTINGS = Path(__file__).resolve().parent / "settings"
SHARE_BEFORE_DATE = 0.8  # share of MovieLens' interactions before the night; the rest tests the CTR models
NIGHTS = (datetime.date(2025, 3, 1), datetime.date(2025, 3, 2))  # the dates of goodreads' nights
MIN_HISTORY = 2  # books a reader keeps on the first night


@dataclass(frozen=True)
class Scale:
    """The number of entities to take; None: all."""

    goodreads: int
    movielens_users: int | None
    movielens_items: int | None


FULL = Scale(goodreads=2000, movielens_users=None, movielens_items=None)
QUICK = Scale(goodreads=200, movielens_users=60, movielens_items=150)
SMOKE = Scale(goodreads=16, movielens_users=12, movielens_items=30)


def laserbatch(*words: object) -> None:
    """Run one command; its progress goes to standard error, and the benchmark ends if it fails."""
    done = subprocess.run([*CLI, *map(str, words)], stdout=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"laserbatch {words[0]} ended with {done.returncode}; its message is above")


def night(config: Path, workspace: Path, date: datetime.date) -> dict:
    """Run one night and return its record."""
    start_s = time.perf_counter()
    laserbatch("nightly", "--config", config, "--date", date)
    wall_s = time.perf_counter() - start_s
    run_id = json.loads((workspace / "published.json").read_text(encoding="utf-8"))["run_id"]
    manifest = json.loads((workspace / "runs" / run_id / "manifest.json").read_text(encoding="utf-8"))
    return {"date": str(date), "wall_s": wall_s, **record_of(manifest)}


def record_of(manifest: dict) -> dict:
    """The parts of a run's manifest that can be compared between runs."""
    return {
        "sides": {side: _side(part) for side, part in manifest["sides"].items()},
        "stages_s": manifest["stages"],
        "pools_built": manifest["pools_built"],
        "ctr": manifest.get("ctr"),
    }


def _side(part: dict) -> dict:
    stats = part["stats"]
    num_texts, num_steps, wall_s = stats["num_texts"], stats["num_steps"], stats["wall_s"]
    counts = ("num_entities", "num_generated", "num_carried_over", "num_quarantined", "quarantine_reasons", "routes")
    return {
        **{name: part[name] for name in counts},
        "num_texts": num_texts,
        "num_tokens": stats["num_tokens"],
        "tokens_per_text": stats["num_tokens"] / num_texts if num_texts else None,
        "tokens_per_step": stats["num_accepted"] / num_steps + 1 if num_steps else None,
        "tokens_per_s": stats["num_tokens"] / wall_s if wall_s else None,
        "accepted_by_source": stats["accepted_by_source"],
        "finish_reasons": stats["finish_reasons"],
    }


def write_config(name: str, work: Path, model: Path) -> Path:
    """Write a configuration: `settings/<name>.yaml` with this run's folders."""
    settings = yaml.safe_load((SETTINGS / f"{name}.yaml").read_text(encoding="utf-8"))
    settings["workspace"] = str(work / "workspace")
    settings.setdefault("tables", {})["path"] = str(work / "tables")
    settings["decoding"]["model"] = str(model.resolve())
    settings["knowledge"]["template_dir"] = str(SETTINGS / "prompts")
    path = work / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return path


def run_movielens(data: Path, model: Path, work: Path, scale: Scale) -> dict:
    """MovieLens 100K: import, one night within the data's time, CTR on the interactions after it."""
    work.mkdir(parents=True)
    mapping = REPOSITORY / "configs" / "import_movielens_parquet.yaml"
    laserbatch("data", "import", data / "ml-100k", work / "tables", "--mapping", mapping)
    if scale.movielens_users and scale.movielens_items:
        keep_part(work / "tables", num_users=scale.movielens_users, num_items=scale.movielens_items)
    date = date_after_share(work / "tables", SHARE_BEFORE_DATE)
    config = write_config("movielens", work, model)
    return {"input": "ml-100k", "nights": [night(config, work / "workspace", date)]}


def run_goodreads(data: Path, model: Path, work: Path, scale: Scale) -> dict:
    """Goodreads: a night with half of the books and histories without their last book, then one with everything."""
    work.mkdir(parents=True)
    write_goodreads(data, work / "tables", num_items=scale.goodreads, num_users=scale.goodreads)
    config = write_config("goodreads", work, model)
    return {"input": "goodreads", "nights": [night(config, work / "workspace", date) for date in NIGHTS]}


def date_after_share(tables: Path, share: float) -> datetime.date:
    """The day at whose end about `share` of the interactions have happened; later ones are for the CTR test."""
    times = pq.read_table(tables / "interactions.parquet")["timestamp"].cast(pa.timestamp("us", "UTC"))
    ordered = times.take(pc.sort_indices(times))
    return ordered[int(share * len(ordered))].as_py().date()


def keep_part(tables: Path, *, num_users: int, num_items: int) -> None:
    """Cut imported tables in place, for a quick run, to the most rated items and their most active users."""
    interactions = pq.read_table(tables / "interactions.parquet")
    for name, column, num in (("items", "item_id", num_items), ("users", "user_id", num_users)):
        frequent = pa.array(most_frequent(interactions[column].to_pylist(), num), interactions[column].type)
        interactions = interactions.filter(pc.is_in(interactions[column], value_set=frequent))
        entities = pq.read_table(tables / f"{name}.parquet")
        pq.write_table(entities.filter(pc.is_in(entities[column], value_set=frequent)), tables / f"{name}.parquet")
    pq.write_table(interactions, tables / "interactions.parquet")


def write_goodreads(data: Path, out: Path, *, num_items: int, num_users: int) -> None:
    """Write tables of goodreads in which half of the books and each reader's last book come on the second day.

    The first half are the books most often finished before a reader's last one. The second half are the most frequent
    other last books, so that nobody has read a book before it appears. Histories are cut to these books; readers are
    taken in the order of the file. The data has no times: a reader's books are a day apart, and the last one is on the
    second day.
    """
    readers = pq.read_table(data / "goodreads" / "users.parquet").to_pylist()
    titles = pq.read_table(data / "goodreads" / "items.parquet").to_pydict()
    titles = dict(zip(titles["item_id"], titles["title"], strict=True))
    first = most_frequent((book for row in readers for book in row["history"][:-1]), num_items // 2)
    known = set(first)
    second = most_frequent((row["history"][-1] for row in readers if row["history"][-1] not in known), num_items // 2)
    chosen = list(_readers(readers, known, {*first, *second}))[:num_users]
    if len(chosen) < num_users:
        raise SystemExit(f"goodreads: {len(chosen)} readers of {MIN_HISTORY} books among {num_items}, not {num_users}")
    day_1, day_2 = (datetime.datetime.combine(day, datetime.time(12), datetime.UTC) for day in NIGHTS)
    created_at = [day_1 - datetime.timedelta(days=365)] * len(first) + [day_2] * len(second)
    rows = [
        (reader, book, day_1 - datetime.timedelta(days=len(books) - 1 - position))
        for reader, books, _ in chosen
        for position, book in enumerate(books)
    ] + [(reader, last_book, day_2) for reader, _, last_book in chosen]
    tables = {
        "users": {"user_id": [reader for reader, _, _ in chosen]},
        "items": {"item_id": first + second, "title": [titles[book] for book in first + second]},
        "interactions": dict(zip(("user_id", "item_id", "timestamp"), map(list, zip(*rows, strict=True)), strict=True)),
    }
    tables["items"]["created_at"] = created_at
    out.mkdir(parents=True)
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), out / f"{name}.parquet")


def most_frequent(values: Iterable, num: int) -> list:
    """The `num` most frequent values, most frequent first; ties in sorted order."""
    counts = Counter(values)
    return sorted(counts, key=lambda value: (-counts[value], value))[:num]


def _readers(rows: list[dict], first: set[str], known: set[str]) -> Iterable[tuple[str, list[str], str]]:
    """Yield readers, their books of the first night, and the book that they finish on the second day."""
    for row in rows:
        *earlier, last = dict.fromkeys(row["history"])  # a book read twice counts once
        books = [book for book in earlier if book in first]
        if len(books) >= MIN_HISTORY and last in known:
            yield row["user_id"], books, last


def describe(run: dict) -> str:
    """The nights of one input as lines for a terminal."""
    lines = [run["input"]]
    for record in run["nights"]:
        stages = ", ".join(f"{name} {wall_s:.0f} s" for name, wall_s in record["stages_s"].items())
        lines.append(f"  {record['date']}: {record['wall_s']:.0f} s ({stages})")
        for side, part in record["sides"].items():
            speed = "nothing to write"
            if part["num_texts"]:
                speed = f"{part['tokens_per_s']:.0f} tokens/s, {part['tokens_per_step']:.2f} tokens/step"
            lines.append(
                f"    {side}: {part['num_generated']} written, {part['num_carried_over']} carried over, "
                f"{part['num_quarantined']} quarantined {part['quarantine_reasons'] or ''}; {speed}"
            )
        skipped = record["ctr"].get("skipped") if record["ctr"] else "not trained"
        for row in [] if skipped else record["ctr"]["rows"]:
            metrics = f"AUC {_spread(row, 'auc')}, LogLoss {_spread(row, 'logloss')}"
            lines.append(f"    CTR: {row['model']:7} {row['variant']:8} {metrics}")
        if skipped:
            lines.append(f"    CTR: {skipped}")
    return "\n".join(lines)


def _spread(row: dict, name: str) -> str:
    mean, std = row[name], row[f"{name}_std"]
    if mean is None:
        return "unknown"
    return f"{mean:.4f}" if std is None else f"{mean:.4f} +- {std:.4f}"


def main() -> None:
    """Run both inputs, print, and write the JSON."""
    arguments = benchmark_parser(__doc__, "model", "data").parse_args()
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    with tempfile.TemporaryDirectory() as work:
        runs = [
            run_movielens(arguments.data, arguments.model, Path(work, "movielens"), scale),
            run_goodreads(arguments.data, arguments.model, Path(work, "goodreads"), scale),
        ]
    print("\n".join(describe(run) for run in runs))
    if arguments.json:
        write_json(arguments.json, {"runs": runs})


if __name__ == "__main__":
    main()
