"""The command line on real input: MovieLens 100K to the CTR table, and goodreads on two nights.

    python benchmarks/real_input.py --quick --json real_input.json

Runs `laserbatch` as a user would, in its own processes, and reads what it says of itself: the manifests of the runs.
Owns the order of commands and the record of a night; tables are made in `real_tables.py`, settings and prompt
templates are in `settings/`.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from common import REPOSITORY, benchmark_parser, scale_of, write_json
from real_tables import NIGHT_1, NIGHT_2, date_after_share, keep_part, write_goodreads

SETTINGS = Path(__file__).resolve().parent / "settings"
SHARE_BEFORE_DATE = 0.8  # of MovieLens' interactions; the rest judges the CTR models


@dataclass(frozen=True)
class Scale:
    """How many entities are taken; None takes all."""

    goodreads: int
    movielens_users: int | None
    movielens_items: int | None


FULL = Scale(goodreads=2000, movielens_users=None, movielens_items=None)
QUICK = Scale(goodreads=200, movielens_users=60, movielens_items=150)
SMOKE = Scale(goodreads=16, movielens_users=12, movielens_items=30)


def laserbatch(*words: object) -> None:
    """Run one command; its progress goes to standard error.

    Raises
    ------
    SystemExit
        The command failed.
    """
    command = [str(Path(sys.executable).with_name("laserbatch")), *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"laserbatch {words[0]} ended with {done.returncode}; its message stands above")


def night(config: Path, workspace: Path, date: datetime.date) -> dict:
    """Run one night and return its record."""
    start_s = time.perf_counter()
    laserbatch("nightly", "--config", config, "--date", date)
    wall_s = time.perf_counter() - start_s
    run_id = json.loads((workspace / "published.json").read_text(encoding="utf-8"))["run_id"]
    manifest = json.loads((workspace / "runs" / run_id / "manifest.json").read_text(encoding="utf-8"))
    return {"date": str(date), "wall_s": wall_s, **record_of(manifest)}


def record_of(manifest: dict) -> dict:
    """What one run says of itself, as far as it compares with another."""
    return {
        "sides": {side: _side(part) for side, part in manifest["sides"].items()},
        "stages_s": {stage["name"]: stage["wall_s"] for stage in manifest["stages"]},
        "pools_built": manifest["pools_built"],
        "ctr": manifest.get("ctr"),
    }


def _side(part: dict) -> dict:
    stats = part["stats"]
    num_texts, num_steps, wall_s = stats["num_texts"], stats["num_steps"], stats["wall_s"]
    return {
        "num_entities": part["num_entities"],
        "num_generated": part["num_generated"],
        "num_carried_over": part["num_carried_over"],
        "num_quarantined": part["num_quarantined"],
        "quarantine_reasons": part["quarantine_reasons"],
        "routes": part["routes"],
        "num_texts": num_texts,
        "num_tokens": stats["num_tokens"],
        "tokens_per_text": stats["num_tokens"] / num_texts if num_texts else None,
        "tokens_per_step": stats["num_accepted"] / num_steps + 1 if num_steps else None,
        "tokens_per_s": stats["num_tokens"] / wall_s if wall_s else None,
        "accepted_by_source": stats["accepted_by_source"],
        "finish_reasons": stats["finish_reasons"],
    }


def write_config(name: str, work: Path, model: Path) -> Path:
    """The settings `settings/<name>.yaml` with this run's folders filled in."""
    settings = yaml.safe_load((SETTINGS / f"{name}.yaml").read_text(encoding="utf-8"))
    settings["workspace"] = str(work / "workspace")
    settings.setdefault("tables", {})["path"] = str(work / "tables")
    settings["decoding"]["model"] = str(model.resolve())
    settings["knowledge"]["template_dir"] = str(SETTINGS / "prompts")
    path = work / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return path


def run_movielens(data: Path, model: Path, work: Path, scale: Scale) -> dict:
    """MovieLens 100K: import, one night in the middle of the data, CTR on what comes after."""
    work.mkdir(parents=True)
    mapping = REPOSITORY / "configs" / "import_movielens_parquet.yaml"
    laserbatch("data", "import", "table", data / "ml-100k", work / "tables", "--mapping", mapping)
    if scale.movielens_users and scale.movielens_items:
        keep_part(work / "tables", num_users=scale.movielens_users, num_items=scale.movielens_items)
    date = date_after_share(work / "tables", SHARE_BEFORE_DATE)
    config = write_config("movielens", work, model)
    return {"input": "ml-100k", "nights": [night(config, work / "workspace", date)]}


def run_goodreads(data: Path, model: Path, work: Path, scale: Scale) -> dict:
    """Goodreads: half of the books and histories without their last book, then everything."""
    work.mkdir(parents=True)
    write_goodreads(data, work / "tables", num_items=scale.goodreads, num_users=scale.goodreads)
    config = write_config("goodreads", work, model)
    nights = [night(config, work / "workspace", date) for date in (NIGHT_1, NIGHT_2)]
    return {"input": "goodreads", "nights": nights}


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
        lines += _ctr_lines(record["ctr"])
    return "\n".join(lines)


def _ctr_lines(ctr: dict | None) -> list[str]:
    if not ctr or ctr.get("skipped"):
        return [f"    CTR: {ctr['skipped'] if ctr else 'not trained'}"]
    return [
        f"    CTR: {row['model']:7} {row['variant']:8} AUC {_spread(row, 'auc')}, LogLoss {_spread(row, 'logloss')}"
        for row in ctr["rows"]
    ]


def _spread(row: dict, name: str) -> str:
    mean, std = row[name], row[f"{name}_std"]
    if mean is None:
        return "unknown"
    return f"{mean:.4f}" if std is None else f"{mean:.4f} +- {std:.4f}"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__, "model", "data")
    parser.add_argument("--work", type=Path, help="keep tables and workspaces here; default: a temporary folder")
    return parser.parse_args()


def main() -> None:
    """Run both inputs, print, and write the JSON."""
    arguments = parse_arguments()
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        runs = [
            run_movielens(arguments.data, arguments.model, work / "movielens", scale),
            run_goodreads(arguments.data, arguments.model, work / "goodreads", scale),
        ]
    print("\n".join(describe(run) for run in runs))
    if arguments.json:
        write_json(arguments.json, {"runs": runs})


if __name__ == "__main__":
    main()
