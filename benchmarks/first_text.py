"""Seconds from a night's command to its first text, in the sample world's second night with some dozens of texts.

    python benchmarks/first_text.py --quick --json first_text.json

Each repetition is a new process that is stopped at its first text. One row is the first night of a machine, which must
measure the cost of steps. The row `floor`, in turns with the others, is a Ray with the same number of workers that load
torch and transformers' model classes, and none of our code.
"""

import datetime
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from chaos_nights import FIRST_DATE, SECOND_DATE, night_command
from common import Figure, Spread, benchmark_parser, finish, scale_of, turns

from laserbatch.pipeline.sample.world import write_sample_world

TIMEOUT_S = 300.0
FLOOR = """
import logging, os, ray
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
@ray.remote(num_cpus=1)
class Worker:
    def load(self):
        from transformers import AutoModelForCausalLM
workers = [Worker.remote() for _ in range(int(ray.cluster_resources()["CPU"]))]
ray.wait([worker.load.remote() for worker in workers])
os._exit(0)
"""


def prepare(folder: Path) -> None:
    """Write a sample world, run its first night, and measure the step costs of its second."""
    write_sample_world(folder / "tables", num_users=60, num_items=40)
    settings = {
        "workspace": "workspace",
        "tables": {"path": "tables"},
        "decoding": {"max_new_tokens": 256},
        "night": {"train_ctr": False},
    }
    (folder / "laserbatch.yaml").write_text(yaml.safe_dump(settings))
    done(folder, FIRST_DATE)
    shutil.copytree(folder / "workspace", folder / "first")
    done(folder, SECOND_DATE)  # measures the cost of steps that draft from a pool
    shutil.copytree(folder / "workspace" / "step-costs", folder / "first" / "step-costs", dirs_exist_ok=True)


def done(folder: Path, date: str) -> None:
    """Run a night to its end."""
    night = subprocess.run(night_command(date), cwd=folder, capture_output=True, text=True)
    if night.returncode:
        sys.exit(f"the night of {date} ended with {night.returncode}: {night.stderr}")


def second_night(folder: Path, measures: bool) -> dict[str, float]:
    """Seconds from the command to each milestone in the second night's events, up to its first text."""
    shutil.rmtree(folder / "workspace")
    shutil.copytree(folder / "first", folder / "workspace")
    if measures:
        shutil.rmtree(folder / "workspace" / "step-costs", ignore_errors=True)
    begun = time.time()
    command = subprocess.Popen(
        night_command(SECOND_DATE), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    seconds_to: dict[str, float] = {}
    while "first text" not in seconds_to and command.poll() is None and time.time() - begun < TIMEOUT_S:
        time.sleep(0.05)
        for path in (folder / "workspace" / "runs").glob(f"{SECOND_DATE}-*/events.jsonl"):
            for event in map(json.loads, path.read_text().splitlines()):
                if (name := name_of(event)) and name not in seconds_to:
                    seconds_to[name] = datetime.datetime.fromisoformat(event["time"]).timestamp() - begun
    command.send_signal(signal.SIGTERM)
    command.wait(TIMEOUT_S)
    return seconds_to


def name_of(event: dict) -> str | None:
    """The milestone on the way to the first text that an event marks, or None."""
    line = event.get("line", "")
    if event["event"] == "said":
        return "planned" if line.startswith("generate: ") else "budgets chosen" if "draft" in line else None
    return {"run_begin": "inputs checked", "first_text": "first text"}.get(event["event"])


def floor(folder: Path) -> dict[str, float]:
    """Seconds until one of a local Ray's workers has loaded the model classes."""
    begun = time.time()
    subprocess.run([sys.executable, "-c", FLOOR], cwd=folder, check=True, timeout=TIMEOUT_S, capture_output=True)
    return {"first text": time.time() - begun}


def main() -> None:
    """Measure, print, and write the JSON."""
    arguments = benchmark_parser(__doc__).parse_args()
    rows: dict[str, list[dict[str, float]]] = {"a night": [], "a machine's first night": [], "floor": []}
    with tempfile.TemporaryDirectory(prefix="first-text-") as name:
        folder = Path(name)
        prepare(folder)
        for _, order in zip(range(scale_of(arguments, 5, 3, 1)), turns(list(rows)), strict=False):
            for row in order:
                seconds_to = floor(folder) if row == "floor" else second_night(folder, row != "a night")
                rows[row].append(seconds_to)
                rounded = {part: round(seconds, 1) for part, seconds in seconds_to.items()}
                print(row, rounded, file=sys.stderr, flush=True)
    parts = {
        row: {part: Spread.of([night[part] for night in nights if part in night]) for part in nights[0]}
        for row, nights in rows.items()
    }
    to_text = {row: spreads["first text"].median for row, spreads in parts.items()}
    figures = [Figure.under("seconds from command to first text", to_text["a night"], 10.0)]
    lines = [f"{row:26}{part:18}{spread}" for row, spreads in parts.items() for part, spread in spreads.items()]
    finish(arguments.json, figures, ["\n".join(lines)], {"rows": parts})


if __name__ == "__main__":
    main()
