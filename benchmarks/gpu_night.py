"""Whole nights of a large model on one GPU: seconds by stage, and the share of the time in which the GPU computes.

    python benchmarks/gpu_night.py --out DIR --deadline 330

The sample world has as many users as items. The bundled model is widened to a large geometry (`widen.py`) on the device
and written to a folder in memory. Then each night runs as a process by the command line. `first` writes every text and
has no pools. `second` is ten days later, so that most users have changed; it drafts from the pools and from each
entity's previous text. `plain` is the second night without drafts, `ctr` the second night with CTR training. These
three begin with a copy of the workspace that the first night left. `second/3` has three workers that share the GPU;
with `second/auto` the program chooses their number. Rows are in `rows.jsonl` as they come; if the deadline ends a
night, its row has the finished stages. The GPU's share is the mean of `utilization.gpu` as nvidia-smi samples it: the
share of the time in which at least one kernel runs.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml
from chaos_nights import CLI
from common import SAMPLE_MODEL
from gpu_rows import Rows
from gpu_run import Deadline, kill_group, tail_of, wait_for
from widen import GEOMETRIES

from laserbatch.jobs.events import read_events
from laserbatch.pipeline.sample.world import LAST_DATE, write_sample_world
from laserbatch.pipeline.storage.manifest import RunManifest

FIRST_DATE = LAST_DATE - datetime.timedelta(days=10)
BENCHMARKS = Path(__file__).parent
SAMPLE_MS = 100  # interval of samples of the GPU's utilisation
NO_CTR = {"night": {"train_ctr": False}}
MAKE_MODEL = """
import sys, torch
from pathlib import Path
from widen import GEOMETRIES, widened_on, write_folder
source, out, geometry = Path(sys.argv[1]), Path(sys.argv[2]), GEOMETRIES[sys.argv[3]]
dtype, device = ("bfloat16", "cuda") if torch.cuda.is_available() else ("float32", "cpu")
write_folder(widened_on(source, geometry, dtype, device).state_dict(), source, out, geometry, dtype)
"""
NIGHTS = {  # name: date, what the configuration changes
    "first": (FIRST_DATE, NO_CTR),
    "second": (LAST_DATE, NO_CTR),
    "plain": (LAST_DATE, {**NO_CTR, "decoding": {"drafters": []}}),
    "ctr": (LAST_DATE, {}),
}


def night_and_workers(words: str) -> tuple[str, int | None]:
    """Parse NIGHT/WORKERS into a night's name and its number of workers; None: the program chooses it."""
    night, _, workers = words.partition("/")
    if night not in NIGHTS or not (workers in ("", "auto") or workers.isdigit()):
        raise argparse.ArgumentTypeError(f"{words}: expected NIGHT/WORKERS, NIGHT one of {', '.join(NIGHTS)}")
    return night, int(workers) if workers.isdigit() else None


def configuration(
    folder: Path, model: Path, options: argparse.Namespace, num_workers: int | None, changes: dict
) -> dict:
    """The configuration of a night: the sample world's tables, the large model, and the night's `changes`."""
    settings = {
        "workspace": str(folder / "workspace"),
        "tables": {"path": str(folder / "tables")},
        "decoding": {"model": str(model), "batch_size": options.batch},
        "encoding": {"encoder": options.encoder and str(options.encoder.resolve())},
        "cluster": {"num_workers": num_workers},
    }
    for group, values in changes.items():
        settings[group] = {**settings.get(group, {}), **values}
    return settings


class GpuWatch:
    """Samples the GPU's utilisation while a block runs; without a GPU there are no samples."""

    def __init__(self, path: Path) -> None:
        self._path, self._process = path, None

    def __enter__(self) -> "GpuWatch":
        query = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        with suppress(OSError), open(self._path, "wb") as file:
            self._start_s = time.time()
            self._process = subprocess.Popen([*query, f"-lms={SAMPLE_MS}"], stdout=file, start_new_session=True)
        return self

    def __exit__(self, *_) -> None:
        self._end_s = time.time()
        if self._process is not None:
            kill_group(self._process)

    def busy(self, spans: Sequence[tuple[float, float]]) -> float | None:
        """The mean utilisation within spans of time (seconds since the epoch); None without samples."""
        lines = self._path.read_text().splitlines()[:-1] if self._process is not None else []
        shares = [float(line.split(",")[0]) / 100 for line in lines if line.split(",")[0].strip().isdigit()]
        step_s = (self._end_s - self._start_s) / max(1, len(shares))  # samples are evenly spread
        times = [self._start_s + (number + 0.5) * step_s for number in range(len(shares))]
        inside = [share for when, share in zip(times, shares, strict=True) if any(a <= when <= b for a, b in spans)]
        return sum(inside) / len(inside) if inside else None


def writing_span(events: Path) -> tuple[float, float] | None:
    """The start of a run's first shard and the end of its last one, in seconds since the epoch; None without shards.

    Texts of the audit are not counted.
    """
    spans = []
    for event in read_events(events):
        if event["event"] == "stage_end" and event["stage"] == "generate":
            break
        if event["event"] == "shard_done":
            ended_s = datetime.datetime.fromisoformat(event["time"]).timestamp()
            spans.append((ended_s - event["seconds"], ended_s))
    return (min(begun_s for begun_s, _ in spans), max(ended_s for _, ended_s in spans)) if spans else None


def night_values(run_folder: Path, watch: GpuWatch) -> dict:
    """A row's values from a night's manifest and the GPU samples."""
    manifest = RunManifest.load(run_folder / "manifest.json")
    sides = {}
    for side, figures in manifest.generation.sides.items():
        stats = figures.stats
        sides[side] = {
            "num_entities": figures.num_entities,
            "num_generated": figures.num_generated,
            "num_quarantined": figures.num_quarantined,
            "num_tokens": stats.num_tokens,
            "tokens_per_step": stats.tokens_per_step,
            "tokens_per_s": stats.tokens_per_s,
            "wall_s": stats.wall_s,
            "graph_counts": stats.graph_counts,
        }
    written = writing_span(run_folder / "events.jsonl")
    return {
        "status": manifest.status,
        "writing_s": written and written[1] - written[0],
        "gpu_busy_while_writing": written and watch.busy([written]),
        "stages": manifest.stages,
        "sides": sides,
        "budgets": json.loads(json.dumps(manifest.as_json()["budgets"])),
    }


def run_night(
    night: str,
    num_workers: int | None,
    folder: Path,
    model: Path,
    options: argparse.Namespace,
    rows: Rows,
    deadline: Deadline,
) -> bool:
    """Run one night by the command line and write its row; return whether the night succeeded in time."""
    (date, changes), name = NIGHTS[night], f"{night}-{num_workers or 'auto'}"
    limit_s = deadline.limit(600)
    if not limit_s:
        rows.add("night", name, failed="no time is left")
        return False
    if night != "first":
        forked = folder / name
        shutil.copytree(folder / "first-workspace", forked / "workspace", symlinks=True)
        os.symlink(folder / "tables", forked / "tables")
        folder = forked
    config, log = options.out / f"{name}.yaml", options.out / f"{name}.log"
    config.write_text(yaml.safe_dump(configuration(folder, model, options, num_workers, changes)))
    before, start_s = set((folder / "workspace").glob("runs/*")), time.monotonic()
    with open(log, "wb") as file, GpuWatch(options.out / "gpu.csv") as watch:
        process = subprocess.Popen(
            [*CLI, "nightly", "--config", str(config), "--date", str(date)],
            stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        status = wait_for(process, limit_s)
    seconds = time.monotonic() - start_s
    values = {"seconds": seconds, "gpu_busy": watch.busy([(0.0, float("inf"))]), "batch": options.batch}
    values |= {"num_workers": num_workers}
    for run_folder in sorted(set((folder / "workspace").glob("runs/*")) - before)[-1:]:
        values |= night_values(run_folder, watch)
        with suppress(OSError):
            shutil.copyfile(run_folder / "report.html", options.out / f"{name}.html")
    if status != 0:
        values["failed"] = f"{'out of time' if status is None else f'status {status}'}: {tail_of(log, 0, 800)}"
    rows.add("night", name, **values)
    print(json.dumps({"night": name, **values})[:3000], flush=True)
    return status == 0


def main(words: Sequence[str] | None = None) -> int:
    """Make tables and model, and run the nights. The exit status is 1 if any of these failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of rows and logs")
    parser.add_argument("--folder", type=Path, help="folder for the model and the workspace; default: in memory")
    parser.add_argument("--entities", type=int, default=2000, help="users, and as many items; default: 2000")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="8b-gqa")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--encoder", type=Path, help="folder of the text encoder; default: the installed MiniLM")
    parser.add_argument(
        "--nights", nargs="+", type=night_and_workers, metavar="NIGHT/WORKERS",
        default=[(night, None) for night in ("first", "second", "plain")],
        help="nights in this order, `first` first; default: first/auto second/auto plain/auto",
    )  # fmt: skip
    parser.add_argument("--deadline", type=float, default=330.0, help="seconds for the whole run")
    options = parser.parse_args(words)
    if options.nights[0][0] != "first":
        parser.error("--nights: the first is the night `first`, which writes the workspace of the others")
    options.out.mkdir(parents=True, exist_ok=True)
    deadline, rows = Deadline(options.deadline), Rows(options.out / "rows.jsonl")
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=options.folder or (memory if memory.is_dir() else None)) as name:
        folder, start_s = Path(name), time.monotonic()
        model = folder / options.geometry
        write_sample_world(folder / "tables", options.entities, options.entities, seed=7, num_asked=40)
        made = subprocess.run(
            [sys.executable, "-c", MAKE_MODEL, str(SAMPLE_MODEL), str(model), options.geometry], cwd=BENCHMARKS
        )
        rows.add("night", "model", seconds=time.monotonic() - start_s, returncode=made.returncode)
        if made.returncode:
            return 1
        (night, num_workers), *others = options.nights
        if not run_night(night, num_workers, folder, model, options, rows, deadline):
            return 1
        shutil.move(folder / "workspace", folder / "first-workspace")
        return int(not all([run_night(night, num, folder, model, options, rows, deadline) for night, num in others]))


if __name__ == "__main__":
    sys.exit(main())
